"""The tree of the sources: what lies where can be found by its name, and nothing grows too long."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinigen_kv
import infinigen_kv_lab

ENGINE = Path(infinigen_kv.__file__).parent
LABORATORY = Path(infinigen_kv_lab.__file__).parent
MOST_ROOT_MODULES = 8
MOST_LINES = 350
MOST_COLUMNS = 120  # of the documentation


def modules(folder: Path) -> list[Path]:
    """Of the folder itself."""
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def folders(package: Path) -> list[Path]:
    """Packages below a package."""
    return sorted(path.parent for path in package.rglob("__init__.py") if path.parent != package)


def test_few_modules_lie_at_the_root_of_the_engine() -> None:
    names = [path.name for path in modules(ENGINE)]
    assert 0 < len(names) <= MOST_ROOT_MODULES, names


@pytest.mark.parametrize("package", [ENGINE, LABORATORY], ids=lambda package: package.name)
def test_no_module_is_too_long(package: Path) -> None:
    lines = {path: len(path.read_text().splitlines()) for path in package.rglob("*.py")}
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}


@pytest.mark.parametrize("package", [ENGINE, LABORATORY], ids=lambda package: package.name)
def test_no_folder_holds_a_single_module(package: Path) -> None:
    crowds = {folder: modules(folder) + folders(folder) for folder in folders(package)}
    assert crowds
    assert {folder for folder, inside in crowds.items() if len(inside) == 1} == set()


@pytest.mark.parametrize("package", [ENGINE, LABORATORY], ids=lambda package: package.name)
def test_each_folder_of_modules_is_a_package(package: Path) -> None:
    """What hatchling puts into the wheel is then found by every tool."""
    held = {path.parent for path in package.rglob("*.py")}
    assert {folder for folder in held if not (folder / "__init__.py").is_file()} == set()


def test_the_documentation_fits_a_terminal() -> None:
    root = Path(__file__).parents[1]
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    lines = [(page.name, line) for page in pages for line in page.read_text("utf-8").splitlines()]
    assert lines and [line for line in lines if len(line[1]) > MOST_COLUMNS] == []
