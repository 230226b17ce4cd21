"""The page: everything on it, nothing from elsewhere, no text taken for markup."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

from infinigen_kv_lab.figures.page import DrawnFigure, render_page

PNG = b"\x89PNG made up"
NASTY = '<script>alert(1)</script> & "it\'s"'


class Reader(HTMLParser):
    """Tags, what they refer to, and the text between them."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.anchors: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        values = dict(attrs)
        self.references += [
            values[name] or "" for name in ("src", "href", "srcset") if name in values
        ]
        self.anchors += [values["id"] or ""] if "id" in values else []

    def handle_data(self, data: str) -> None:
        self.text += data


def read(**changes: str) -> tuple[str, Reader]:
    word = changes.get("word", "plain")
    drawn = DrawnFigure(
        name="16a",
        title=f"a title {word}",
        about=f"about {word}",
        remarks=(f"remark {word}",),
        rows=(
            {"system": word, "ms": 1.23456789, "hits": None},
            {"system": "b", "ms": 2, "hits": 0},
        ),
        png=PNG,
    )
    html = render_page(
        title=f"page {word}",
        command=f"infinigen-kv {word}",
        warnings=[f"EMULATED {word}"],
        groups={"Machine": {"processor": f"chip {word}"}, "Settings": {"link": f"emulated {word}"}},
        figures=[drawn],
        missing={"Figure 17": f"too short {word}"},
    )
    reader = Reader()
    reader.feed(html)
    return html, reader


def test_nothing_comes_from_elsewhere() -> None:
    html, reader = read()
    outside = [each for each in reader.references if not each.startswith(("data:image/png", "#"))]
    assert outside == []
    assert "script" not in reader.tags and "link" not in reader.tags and "iframe" not in reader.tags
    assert "http" not in html and "url(" not in html and "@import" not in html


def test_everything_is_on_it() -> None:
    _, reader = read()
    for part in (
        *("page plain", "infinigen-kv plain", "EMULATED plain", "chip plain", "emulated plain"),
        *("Figure 16a: a title plain", "about plain", "remark plain", "too short plain", "1.235"),
    ):
        assert part in reader.text
    picture = next(each for each in reader.references if each.startswith("data:"))
    assert base64.b64decode(picture.partition(",")[2]) == PNG
    assert "#figure-16a" in reader.references and "figure-16a" in reader.anchors


def test_text_is_no_markup() -> None:
    html, reader = read(word=NASTY)
    assert NASTY not in html and "script" not in reader.tags
    assert reader.text.count(NASTY) == 11  # the title stands in the head, too
