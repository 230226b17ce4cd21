"""Names of figures."""

from __future__ import annotations

import pytest

from infinigen_kv import InputError
from infinigen_kv_lab.figures.catalogue import choose_figures, figures_of


def chosen(text: str | None) -> list[str]:
    return [figure.name for figure in choose_figures("speed", text)]


def test_all_by_default() -> None:
    paper = ["14", "15", "16a", "16b", "17", "18"]
    assert (
        chosen(None)
        == list(figures_of("speed"))
        == [*paper, "link", "resident", "pareto", "memory"]
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("14", ["14"]),
        ("link, 15 ,14,15", ["14", "15", "link"]),
        ("16", ["16a", "16b"]),
        ("16B,Pareto", ["16b", "pareto"]),
    ],
)
def test_some(text: str, expected: list[str]) -> None:
    assert chosen(text) == expected


@pytest.mark.parametrize(("text", "hint"), [("19", "there are 14, 15"), ("paretto", "pareto?")])
def test_unknown_ones(text: str, hint: str) -> None:
    with pytest.raises(InputError, match=r"there are 14, 15, 16a, 16b, 17, 18, link") as caught:
        choose_figures("speed", f"14,{text}")
    assert hint in str(caught.value)


def test_none() -> None:
    with pytest.raises(InputError, match="names none"):
        choose_figures("speed", " , ")
