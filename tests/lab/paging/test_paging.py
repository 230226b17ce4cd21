"""A paged pool: the same entries as in memory, no more pages in memory than its budget, and every
page that moves on the link's account.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import re
import sys
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from infinigen_kv.errors import CacheStateError, HomeError, InputError
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.storage.homes.disk import scratch
from infinigen_kv.storage.link import Link, Pace
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv.storage.pools.pool import Pool
from infinigen_kv_lab.paging import mapped
from infinigen_kv_lab.paging.mapped import PAGE, WINDOW, PagedMemory
from infinigen_kv_lab.paging.pool import PagingPool
from linking import open_files

ROWS, HEADS, DIM = 2, 2, 64
LINES = ROWS * HEADS
ENTRY = 2 * DIM * 4
PER_PAGE = PAGE // ENTRY


def random(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, HEADS, tokens, DIM, generator=generator).to(dtype)


def pool(
    folder: Path, budget: float, *, link: Link | None = None, tokens: int = 0, like: int = 1
) -> PagingPool:
    keys = random(like)
    return PagingPool(keys, keys, link or Link(), directory=folder, budget=budget, tokens=tokens)


def filled(made: PagingPool, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    keys, values = random(tokens, seed), random(tokens, seed + 100)
    made.append(keys, values)
    return keys, values


def chosen(tokens: int, count: int, seed: int) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(ROWS, HEADS, tokens, generator=generator)
    return Selection(noise.topk(count, dim=2).indices.unsqueeze(2), None)


# The same entries.


@settings(max_examples=25, deadline=None)
@given(
    budget=st.sampled_from([0.01, 0.3, 1.0]),
    deeds=st.lists(
        st.tuples(
            st.sampled_from(["append", "extend", "select", "all", "truncate", "rows", "discard"]),
            st.integers(1, 60),
        ),
        min_size=2,
        max_size=12,
    ),
)
def test_a_paged_pool_holds_what_one_in_memory_holds(
    tmp_path_factory: pytest.TempPathFactory, budget: float, deeds: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("paged")
    keys = random(1)
    ours, theirs = pool(folder, budget), LocalPool(keys, keys)
    for each in (ours, theirs):
        each.append(random(70), random(70, 1))
    for seed, (deed, number) in enumerate(deeds):
        mine, other = (_do(each, deed, number, seed) for each in (ours, theirs))
        for a, b in zip(mine, other, strict=True):
            assert torch.equal(a, b)
        assert (ours.length, ours.rows) == (theirs.length, theirs.rows)
    ours.close()
    assert not list(folder.iterdir())


def _do(each: Pool, deed: str, number: int, seed: int) -> list[Tensor]:
    """Change a pool; what it returned, and what it holds then."""
    rows, found = each.rows, list[Tensor]()
    new = [random(number, seed + part)[:1].repeat(rows, 1, 1, 1) for part in (0, 50)]
    if deed == "append":
        assert each.append(*new) is None
    elif deed == "extend":
        found += each.extend(*new)[:2]
    elif deed in ("select", "discard") and each.length:
        index = chosen(each.length, min(number, each.length), seed).index[:1]
        each.prefetch(Selection(index.repeat(rows, 1, 1, 1), None))
        if deed == "select":
            found += each.collect()
        else:
            each.discard()
    elif deed == "truncate":
        each.truncate(max(0, each.length - number))
    elif deed == "rows":
        each.take_rows(torch.tensor([number % rows, rows - 1]))
    return [*found, *each.all()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    keys, values = random(90, 0, dtype), random(90, 1, dtype)[..., :24]
    made = PagingPool(keys, values, Link(), directory=tmp_path, budget=0.1)
    made.append(keys, values)
    found = made.all()
    assert found[0].dtype == dtype
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    made.close()


def test_a_selection_is_right_also_where_it_is_cut_and_changes(tmp_path: Path) -> None:
    """The compact copy keeps the columns that stay, reads the others, and forgets what is cut."""
    made = pool(tmp_path, 0.5)
    keys, values = filled(made, 300)
    index = chosen(300, 40, 1).index
    for change in range(6):
        index = index.clone()
        index[..., change] = 299 - change  # not among them, or twice: it is right all the same
        made.prefetch(Selection(index, None))
        found = made.collect()
        flat = index.squeeze(2).unsqueeze(3).expand(-1, -1, -1, DIM)
        assert torch.equal(found[0], keys.gather(2, flat))
        assert torch.equal(found[1], values.gather(2, flat))
    made.truncate(200)
    new_keys, _ = random(100, 7), made.append(random(100, 7), random(100, 8))
    index = torch.full((ROWS, HEADS, 1, 40), 250)
    made.prefetch(Selection(index, None))
    assert torch.equal(made.collect()[0], new_keys[:, :, 50:51].expand(-1, -1, 40, -1))
    made.close()


# No more in memory than the budget.


def allowed(budget: float, tokens: int) -> int:
    return LINES * (math.ceil(math.ceil(budget * tokens) * ENTRY / PAGE) + 1)


@pytest.mark.parametrize("budget", [0.05, 0.25, 1.0])
def test_pages_in_memory_are_bounded(tmp_path: Path, budget: float) -> None:
    made, tokens = pool(tmp_path, budget), 40 * PER_PAGE
    filled(made, tokens)
    limit = allowed(budget, tokens)
    assert made.device_bytes <= limit * PAGE
    for _ in range(2):
        made.all()
        assert made.device_bytes <= limit * PAGE
    made.prefetch(chosen(tokens, tokens // 10, 1))
    made.collect()
    assert made.device_bytes <= limit * PAGE
    assert made.home_bytes >= LINES * tokens * ENTRY
    made.close()
    assert made.device_bytes == made.home_bytes == 0


def mapped_bytes() -> int:
    """Memory that the process's mappings of scratch files take, as the kernel tells."""
    content = Path("/proc/self/smaps").read_text()
    entries = re.findall(rf"{scratch.PREFIX}\S*{scratch.SUFFIX}.*?\nRss: +(\d+) kB", content, re.S)
    return 1024 * sum(map(int, entries))


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel through /proc")
@pytest.mark.parametrize("emulated", [False, True])
def test_the_kernel_has_no_more_mapped_than_that(tmp_path: Path, emulated: bool) -> None:
    link = Link(Pace(1e12)) if emulated else Link()
    made, tokens = pool(tmp_path, 0.1, link=link), 400 * PER_PAGE
    filled(made, tokens)
    # the kernel may map a whole window around a page, at most one window for each line is cut off
    slack = LINES * 2 * WINDOW * PAGE
    for _ in range(3):
        made.all()
        assert 0 < mapped_bytes() <= allowed(0.1, tokens) * PAGE + slack
    assert allowed(0.1, tokens) * PAGE + slack < 0.3 * LINES * tokens * ENTRY
    made.close()
    assert mapped_bytes() == 0


def cached_pages(area: mapped.MappedArea) -> int:
    """Pages of an area's file in the system's page cache."""
    assert area._map is not None
    libc = ctypes.CDLL(None, use_errno=True)
    pages = area.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.addressof(ctypes.c_char.from_buffer(area._map))
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert libc.mincore(address, area.nbytes, found) == 0, os.strerror(ctypes.get_errno())
    return sum(each & 1 for each in found)


def in_memory(folder: Path) -> bool:
    """Whether a folder's files are in memory, or their pages cannot be dropped from it."""
    memory = PagedMemory(folder, cold=True)
    area = memory.area(1, 64, PAGE)
    memory.table.limit = 1
    content = torch.ones(64, PAGE, dtype=torch.uint8).numpy()
    for part in area.ranges(0, 64):
        area.write(0, part, content[part], fresh=0)
    memory.settle()
    kept = cached_pages(area)
    memory.close()
    return kept > 8


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel with mincore")
def test_without_an_emulated_link_pages_leave_the_page_cache_too(tmp_path: Path) -> None:
    if in_memory(tmp_path):
        pytest.skip("the temporary folder is in memory, or its files stay there")
    made, tokens = pool(tmp_path, 0.1), 400 * PER_PAGE
    keys, _ = filled(made, tokens)
    for _ in range(3):
        assert torch.equal(made.all()[0], keys)
        made.append(random(1), random(1))  # the first one makes the file grow
        keys = torch.cat([keys, random(1)], dim=2)
        home = made._home
        slack = LINES * WINDOW  # pages that are being written to the disk
        assert cached_pages(home) <= allowed(0.1, tokens) + slack < 0.2 * home.nbytes // PAGE
    made.close()


# The link's account.


def test_a_scan_of_more_than_fits_moves_everything_each_time(tmp_path: Path) -> None:
    link = Link()
    made, tokens = pool(tmp_path, 0.5, link=link), 10 * PER_PAGE
    filled(made, tokens)
    made.all()
    link.statistics.reset()
    for _ in range(3):
        made.all()
    assert link.statistics.bytes_down == 3 * LINES * 10 * PAGE
    assert link.statistics.transfers == 3 * LINES * 10
    assert link.statistics.bytes_up == 0, "nothing was written"
    assert 0 < link.statistics.wait_seconds <= link.statistics.transfer_seconds
    made.close()


def test_what_fits_does_not_move(tmp_path: Path) -> None:
    link = Link()
    made = pool(tmp_path, 1.0, link=link)
    filled(made, 10 * PER_PAGE)
    made.all()
    assert link.statistics.bytes_down == link.statistics.transfers == 0
    made.close()


def test_written_pages_go_back_when_they_leave(tmp_path: Path) -> None:
    link = Link()
    made, tokens = pool(tmp_path, 0.5, link=link), 10 * PER_PAGE
    filled(made, tokens)
    stay = allowed(0.5, tokens)
    assert link.statistics.bytes_up == (LINES * 10 - stay) * PAGE
    made.all()
    assert link.statistics.bytes_up == LINES * 10 * PAGE
    made.close()


def test_survivors_that_fit_stay(tmp_path: Path) -> None:
    """As under H2O: one entry of each head changes at a step."""
    link = Link()
    made, tokens = pool(tmp_path, 0.25, link=link), 40 * PER_PAGE
    filled(made, tokens)
    index = chosen(tokens, tokens // 5, 1).index
    made.prefetch(Selection(index, None))
    made.collect()
    link.statistics.reset()
    for step in range(5):
        made.append(random(1, step), random(1, step))
        index = index.clone()
        index[..., step] = tokens + step
        made.prefetch(Selection(index, None))
        made.collect()
    assert link.statistics.bytes_down == 0
    made.close()


def test_faults_take_their_time_one_by_one(tmp_path: Path) -> None:
    now = [0.0]

    class Clock(Pace):
        def wait_until(self, moment: float) -> None:
            now[0] = max(now[0], moment)

    rate, latency = 1e6, 1e-3
    link = Link(Clock(rate, latency, clock=lambda: now[0]))
    made = pool(tmp_path, 0.01, link=link)
    filled(made, 10 * PER_PAGE)
    made.all()
    started = now[0]
    made.all()
    assert now[0] - started == pytest.approx(LINES * 10 * (latency + PAGE / rate))
    made.close()


def test_nothing_is_fetched_ahead(tmp_path: Path) -> None:
    link = Link()
    made = pool(tmp_path, 0.01, link=link)
    filled(made, 10 * PER_PAGE)
    link.statistics.reset()
    made.prefetch_all()
    made.prefetch(chosen(10 * PER_PAGE, 20, 0))
    assert link.statistics.transfers == 0
    made.discard()
    made.close()


# Files.


def test_files_are_private_nameless_and_given_back(tmp_path: Path) -> None:
    before = open_files()
    made = pool(tmp_path, 0.5)
    filled(made, 600)  # grows
    made.prefetch(chosen(600, 10, 0))
    made.collect()
    assert not list(tmp_path.iterdir())
    assert open_files() - before
    made.close()
    made.close()
    assert open_files() <= before


def test_a_dropped_pool_leaves_nothing(tmp_path: Path) -> None:
    before = open_files()
    made = pool(tmp_path, 0.5)
    filled(made, 50)
    del made
    assert open_files() <= before


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="home_dir"):
        pool(tmp_path / "missing", 0.5)


def test_a_full_disk_shows_when_the_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    before = open_files()
    monkeypatch.setattr(scratch, "lengthen", full)
    with pytest.raises(HomeError, match=r"No space left on device.*shorter prompt"):
        pool(tmp_path, 0.5)
    assert open_files() <= before


def test_a_copy_is_refused(tmp_path: Path) -> None:
    made = pool(tmp_path, 0.5)
    with pytest.raises(CacheStateError, match="cannot be copied"):
        deepcopy(made)
    made.close()
