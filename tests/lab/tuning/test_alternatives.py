"""Other settings at equal device memory."""

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from calibrating import RandomTokenizer, calibrate_tiny
from infinigen_kv.progress import no_progress
from infinigen_kv_lab.tuning import alternatives, tune
from infinigen_kv_lab.tuning.allocate import Curves, allocate
from infinigen_kv_lab.tuning.alternatives import Alternatives, bytes_at, probe
from infinigen_kv_lab.tuning.device_share import DeviceShare
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.search import Search
from infinigen_kv_lab.tuning.trial import Trial, Trials
from infinigen_kv_lab.tuning.windows import Window, split_windows
from tiny import llama

TEXT = ["x" * 800]
LENGTHS: dict[str, Any] = {"prompt_tokens": 150, "decode_tokens": 20}
SMALL = TuneOptions(target_kl=0.3, windows=2, **LENGTHS)
MODEL = llama(num_hidden_layers=6)
CALIBRATION = calibrate_tiny(MODEL)
ALL_SELECT = replace(
    CALIBRATION,
    report={layer: {**fit, "unexplained": 0.1} for layer, fit in CALIBRATION.report.items()},
)


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    return split_windows(RandomTokenizer(), TEXT, count=2, device=MODEL.device, **LENGTHS)[0]


@pytest.fixture(scope="module")
def search(windows: list[Window]) -> Search:
    made = Search(Trials(MODEL, ALL_SELECT, windows), SMALL)
    for task in made.tasks:
        task()
    return made


def test_all_that_is_tried_fits_the_same_memory(search: Search) -> None:
    tried = Alternatives(search, SMALL, no_progress)
    tried.explore()
    found = [each.options for each in tried.tried]
    ratios = {each.config().partial_ratio for each in found}
    assert ratios >= {0.25, 0.375, 0.5}
    before = DeviceShare((0,), apart=5, selecting=5, head_dim=16).size(0.375, 0.2)
    for each in found:
        share = each.storage.resident_budget_on(MODEL.device)
        kept = set() if each.resident_layers is None else set(each.resident_layers) - {0}
        left = 5 - len(kept)
        rank = round(16 * each.config().partial_ratio)
        size = len(kept) + left * (share + rank / 32)
        assert before - 0.001 < size <= before + 1e-9


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ({"partial_ratio": 0.375}, {"layers", "fetch"}),
        ({"max_fetch": 0.3}, {"layers", "ratio"}),
        ({"resident_layers": (0,)}, {"ratio", "fetch"}),
        ({"resident": 0.2}, {"fetch"}),
        ({"resident": 1_000_000}, set()),
        ({"alpha_only": True}, set()),
    ],
)
def test_what_is_given_stays(
    search: Search, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], free: set[str]
) -> None:
    monkeypatch.setattr(alternatives, "probe", lambda *_: 0.0)
    options = replace(SMALL, **given)  # type: ignore[arg-type]
    fixed = Search(search.trials, options)
    fixed.attempts, fixed.singles, fixed._curves = search.attempts, search.singles, search.curves
    tried = Alternatives(fixed, options, no_progress)
    tried.explore()
    found = [each.options for each in tried.tried]
    varied = set()
    varied |= {"ratio"} if any(e.config().partial_ratio != 0.375 for e in found) else set()
    varied |= {"fetch"} if any(e.max_fetch != options.max_fetch for e in found) else set()
    varied |= (
        {"layers"} if any(e.resident_layers != options.resident_layers for e in found) else set()
    )
    assert varied == free


def test_settings_that_save_nothing_are_not_taken(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "probe", lambda *_: 0.049)
    tried = Alternatives(search, SMALL, no_progress)
    tried.explore()
    assert tried.search is search and not any(each.adopted for each in tried.tried)


def test_a_promise_that_a_search_does_not_confirm_is_not_taken(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    # all the memory goes into partial keys, so that much more has to move
    monkeypatch.setattr(alternatives, "probe", lambda _, options: options.config().partial_ratio)
    monkeypatch.setattr(alternatives, "MARGIN", 0.45)
    tried = Alternatives(search, SMALL, no_progress)
    tried.explore()
    assert tried.search is search and not any(each.adopted for each in tried.tried)


def test_what_pays_is_stored_with_the_alphas_found_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alternatives, "MARGIN", -10.0)  # whatever is tried last is taken
    wanted = replace(SMALL, max_fetch=0.6, partial_ratio=0.375)
    tuned = tune(MODEL, RandomTokenizer(), ALL_SELECT, wanted, TEXT).tuned
    assert tuned is not None and tuned.resident_layers is not None
    adopted = [each for each in tuned.measured["alternatives"] if each["adopted"]]
    assert [each["resident_layers"] for each in adopted] == [list(tuned.resident_layers)]
    assert adopted[0]["resident"] == tuned.resident
    assert set(tuned.measured["layers"]) == set(range(6)) - set(tuned.resident_layers)
    _, held_back = split_windows(RandomTokenizer(), TEXT, count=2, device=MODEL.device, **LENGTHS)
    made = replace(ALL_SELECT, tuned=tuned)
    storage = made.storage(SMALL.storage)
    trial = Trials(MODEL, ALL_SELECT, held_back).measure(made.config(min_context=1), storage)
    assert trial.kl == pytest.approx(tuned.measured["kl"])
    assert trial.link_bytes == pytest.approx(tuned.measured["link_bytes"])


def test_the_settings_of_a_search_save_nothing_against_themselves(search: Search) -> None:
    assert probe(search, search.options) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("kl", [0.02, 0.014, 0.01, 0.0085])
def test_bytes_near_trials_follow_a_power_law(kl: float) -> None:
    def trial(at: float) -> Trial:
        return Trial(at, {}, 1e5 * at**-0.8, 0.1)

    assert bytes_at(kl, [trial(0.017), trial(0.01)], 0.8) == pytest.approx(trial(kl).link_bytes)
    # far away: more bytes than needed, or not known
    assert bytes_at(0.1, [trial(0.02), trial(0.01)], 0.8) == trial(0.02).link_bytes
    assert np.isnan(bytes_at(0.001, [trial(0.02), trial(0.01)], 0.8))


def test_the_exchange_rate_is_that_of_the_single_alphas(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = [Trial(kl, {}, 3e4 * kl**-0.7, 0.1) for kl in np.geomspace(0.5, 0.001, 8)]
    monkeypatch.setattr(search, "singles", law)
    assert alternatives._rate(search, 0.02) == pytest.approx(0.7)


def test_layers_to_keep_whole_are_those_that_relieve_the_others_most(search: Search) -> None:
    first, second, *_ = alternatives._relieving(search)
    curves, aim = search.curves, search.best.aim

    def left(gone: tuple[int, ...]) -> float:
        rows = [row for row, layer in enumerate(search.layers) if layer not in gone]
        return allocate(Curves(curves.alphas, curves.harm[rows], curves.entries[rows]), aim).entries

    assert left(first) == min(left((layer,)) for layer in search.layers)
    with_first = [each for each in combinations(search.layers, 2) if first[0] in each]
    assert left(second) == pytest.approx(min(map(left, with_first)))


def test_alphas_around_those_found() -> None:
    assert alternatives._around((3.0, 5.5)) == (2.5, 4.0, 5.0, 6.0)
    assert alternatives._around((4.0, 4.0)) == (2.5, 4.0, 5.0)
    assert alternatives._around((1.0, 11.0)) == (1.0, 2.5, 4.0, 5.0, 6.0, 7.0, 8.5, 11.0)
