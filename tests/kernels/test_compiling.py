"""Where compiled code is kept, in processes of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import infinigen_kv
from waiting import PATIENCE

# Appends one partial key, the quickest of the kernels to compile, and says what came out.
WORK = """
import sys, warnings
warnings.simplefilter("error")
import torch
from infinigen_kv.kernels.base import find_kernels
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.statistics import Projection
dtype = getattr(torch, sys.argv[1])
kernels = find_kernels("auto", torch.device("cpu"), dtype)
square = 2 * torch.eye(2).view(1, 1, 2, 2)
partial = PartialKeys(torch.ones(1, 1, 1, 2, dtype=dtype), Projection(square, square, None))
kernels.append(partial, torch.tensor([3, 5], dtype=dtype).view(1, 1, 1, 2))
print(kernels.name, partial.view().flatten().tolist())
"""
EXPECTED = "native [2.0, 2.0, 6.0, 10.0]\n"


def start(dtype: str, sources: Path, home: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NUMBA_", "XDG_", "PYTHON"))
    }
    environment |= {"PYTHONPATH": str(sources), "HOME": home, **variables}
    return subprocess.Popen(
        [sys.executable, "-B", "-c", WORK, dtype],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> None:
    try:
        output, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert (output, errors) == (EXPECTED, "")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the package; what it compiles cannot be kept beside it, whoever runs this."""
    package = Path(infinigen_kv.__file__).parent
    shutil.copytree(
        package, tmp_path / "src" / package.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    (tmp_path / "src" / package.name / "native" / "__pycache__").write_text("not a folder")
    return tmp_path / "src"


def test_compiled_code_that_can_be_kept_nowhere_works_all_the_same(
    sources: Path, tmp_path: Path
) -> None:
    """The package cannot be written to, and there is no home folder."""
    finish(start("bfloat16", sources, os.devnull))
    assert not list(tmp_path.rglob("*.nbi"))


def test_two_processes_compile_at_once(sources: Path, tmp_path: Path) -> None:
    """And use what they kept afterwards."""
    keep = tmp_path / "kept"
    for _ in range(2):
        both = [start("bfloat16", sources, os.devnull, NUMBA_CACHE_DIR=str(keep)) for _ in range(2)]
        for each in both:
            finish(each)
    assert len(list(keep.rglob("partial_keys.append_partial_*.nbi"))) == 1
    assert len(list(keep.rglob("partial_keys.append_partial_*.nbc"))) == 1
    finish(start("float32", sources, os.devnull, NUMBA_CACHE_DIR=str(keep)))
    assert len(list(keep.rglob("partial_keys.append_partial_*.nbc"))) == 2


def test_a_change_of_what_is_inlined_is_noticed(sources: Path, tmp_path: Path) -> None:
    """The file that holds a kernel stays as it was, as it may from one release to the next."""
    variables = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")}
    finish(start("bfloat16", sources, os.devnull, **variables))
    module = sources / "infinigen_kv" / "native" / "numbers.py"
    text = module.read_text()
    assert text.count("target[place] = np.uint16((bits") == 1
    module.write_text(
        text.replace("target[place] = np.uint16((bits", "target[place] = np.uint16(0 * (bits")
    )
    output, _ = start("bfloat16", sources, os.devnull, **variables).communicate(timeout=PATIENCE)
    assert output == "native [2.0, 2.0, 0.0, 0.0]\n"
