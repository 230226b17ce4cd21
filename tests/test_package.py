"""What ``import infinigen_kv`` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import infinigen_kv
from waiting import PATIENCE


def python(code: str) -> str:
    """Output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    return done.stdout.strip()


def test_every_public_name_is_there() -> None:
    for name in infinigen_kv.__all__:
        assert getattr(infinigen_kv, name).__name__ == name
    assert set(infinigen_kv.__all__) <= set(dir(infinigen_kv))


def test_no_submodule_hides_a_public_name() -> None:
    """A submodule becomes an attribute of the package once it is imported, whatever its name."""
    code = (
        "import pkgutil, infinigen_kv\n"
        "modules = {module.name for module in pkgutil.iter_modules(infinigen_kv.__path__)}\n"
        "print(modules & set(infinigen_kv.__all__))"
    )
    assert python(code) == "set()"


def test_the_import_alone_loads_no_heavy_library() -> None:
    code = "import sys, infinigen_kv; print({'torch', 'transformers'} & set(sys.modules))"
    assert python(code) == "set()"
