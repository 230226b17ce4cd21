"""Pictures: one look for all figures, on matplotlib.

A picture is 8 inches wide at 200 dots per inch, drawn for being shown 800 pixels wide.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from infinigen_kv_lab.figures.plots import require_matplotlib

WIDTH = 8.0  # inches
DPI = 200
FOOTER_LETTERS = 118
TITLE_LETTERS = 78

Style = Mapping[str, Any]


def _style(
    color: str, marker: str, line: str = "-", width: float = 1.5, *, hollow: bool = False
) -> Style:
    return MappingProxyType(
        {
            "color": color,
            "marker": marker,
            "markerfacecolor": "white" if hollow else color,
            "linestyle": line,
            "linewidth": width,
        }
    )


# Okabe and Ito's colours, distinct to every kind of colour vision. Where two systems of a kind
# share one, marker and dashes tell them apart, in grey too.
STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "infinigen": _style("#0072B2", "o", "-", 2.2),
        "infinigen, no resident set": _style("#0072B2", "s", "--"),
        "infinigen-paper": _style("#56B4E9", "o", "--"),
        "oracle": _style("#009E73", "*", ":"),
        "oracle, no resident set": _style("#009E73", "*", ":"),
        "ideal": _style("#000000", "x", "--", 1.2),
        "stream": _style("#000000", "s", "-"),
        "stream-int8": _style("#777777", "s", "--"),
        "stream-int4": _style("#777777", "D", ":"),
        "h2o": _style("#D55E00", "^", "-"),
        "scissorhands": _style("#E69F00", "v", "--"),
        "streaming-llm": _style("#CC79A7", "D", "-."),
        "quest": _style("#009E73", "P", "-"),
        "paging": _style("#777777", "X", "-."),
        "paging-h2o": _style("#D55E00", "X", "-."),
        "DynamicCache": _style("#E69F00", "h", "-."),
        "StaticCache": _style("#CC79A7", "p", "--"),
        "QuantizedCache": _style("#56B4E9", "d", ":"),
    }
)
_SPARE = (
    _style("#D55E00", "<", ":", hollow=True),
    _style("#CC79A7", ">", ":", hollow=True),
    _style("#E69F00", "s", ":", hollow=True),
    _style("#56B4E9", "^", ":", hollow=True),
    _style("#000000", "o", ":", hollow=True),
    _style("#009E73", "D", ":", hollow=True),
    _style("#0072B2", "v", ":", hollow=True),
)
PARTS: Mapping[str, str] = MappingProxyType(
    {
        "transfer": "#D55E00",
        "attention": "#0072B2",
        "feed_forward": "#56B4E9",
        "prediction": "#E69F00",
    }
)
PAPER = "#B22222"


class Canvas:
    """One picture: panels, title, a legend for all of them, and a footer.

    Parameters
    ----------
    title
        Wrapped where it is long.
    footer
        What the numbers depend on: model, machine, link.
    """

    def __init__(self, title: str, footer: str) -> None:
        require_matplotlib()
        # A figure of its own, without pyplot: no display, no global state.
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.figure = Figure(dpi=DPI, layout="constrained")
        FigureCanvasAgg(self.figure)
        self._title = title
        self._footer = footer
        self._spare: dict[str, Style] = {}
        self._titled = False

    def panels(
        self, rows: int = 1, columns: int = 1, *, height: float = 4.6, **options: Any
    ) -> Any:
        """Axes in a grid, as ``Figure.subplots`` returns them; ``height`` in inches."""
        self.figure.set_size_inches(WIDTH, height)
        layout: Any = self.figure.get_layout_engine()
        layout.set(w_pad=0.08, h_pad=0.08, wspace=0.04, hspace=0.06)
        axes = self.figure.subplots(rows, columns, squeeze=False, **options)
        for each in axes.flat:
            each.grid(alpha=0.25, linewidth=0.6)
            each.set_axisbelow(True)
            each.spines[["top", "right"]].set_visible(False)
            each.tick_params(labelsize=9)
        return axes

    def style(self, system: str) -> Style:
        """The look of a system, the same in every picture; guests get what is left."""
        if system in STYLES:
            return STYLES[system]
        if system not in self._spare:
            self._spare[system] = _SPARE[len(self._spare) % len(_SPARE)]
        return self._spare[system]

    def line(
        self, axes: Any, system: str, x: Sequence[float], y: Sequence[float], label: str | None = ""
    ) -> None:
        """One system's line with markers; ``label`` None keeps it out of the legend."""
        shown = "_nolegend_" if label is None else label or system
        axes.plot(x, y, label=shown, markersize=6, **self.style(system))

    def legend(self, *axes: Any, columns: int = 4, order: Sequence[str] = ()) -> None:
        """One legend above all panels, each label once, with the title over it."""
        found: dict[str, Any] = {}
        for each in axes:
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
                found.setdefault(label, handle)
        labels = [*(name for name in order if name in found)]
        labels += [label for label in found if label not in labels]
        # the layout keeps a legend and a title of the whole figure in the same place: the title
        # has to be the legend's
        self.figure.legend(
            [found[label] for label in labels],
            labels,
            loc="outside upper left",
            ncols=columns,
            frameon=False,
            fontsize=9,
            handlelength=2.8,
            borderaxespad=0.1,
            borderpad=0.2,
            title=textwrap.fill(self._title, TITLE_LETTERS),
            title_fontproperties={"size": 12, "weight": "bold"},
            alignment="left",
        )
        self._titled = True

    def png(self) -> bytes:
        """The finished picture."""
        self.finish()
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png")
        return buffer.getvalue()

    def finish(self) -> None:
        """Put title and footer in."""
        if not self._titled:
            title = textwrap.fill(self._title, TITLE_LETTERS)
            self.figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
        footer = textwrap.fill(self._footer, FOOTER_LETTERS)
        self.figure.supxlabel(footer, fontsize=8, color="#444444", x=0.01, ha="left")


def name_axes(axes: Any, x: str, y: str, *, title: str = "") -> None:
    """Labels with their units."""
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    if title:
        axes.set_title(title, fontsize=10, loc="left")


def level(axes: Any, value: float, label: str, *, below: bool = False, right: bool = False) -> None:
    """The paper's own number as a dashed horizontal line, with its label at the line."""
    axes.axhline(value, color=PAPER, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate(
        label,
        xy=(0.99 if right else 0.01, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, -3 if below else 3),
        textcoords="offset points",
        va="top" if below else "bottom",
        ha="right" if right else "left",
        fontsize=8.5,
        color=PAPER,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
    )


def upright(axes: Any, value: float, label: str) -> None:
    """The paper's own choice as a dashed vertical line, with its label above the panel."""
    axes.axvline(value, color=PAPER, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate(
        label,
        xy=(value, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 2),
        textcoords="offset points",
        va="bottom",
        ha="center",
        fontsize=8.5,
        color=PAPER,
    )


def marks(axes: Any, places: Sequence[tuple[float, float]], label: str) -> None:
    """The paper's own numbers ``(x, y)`` beside bars or dots, as short dashed lines."""
    from matplotlib.patheffects import withStroke

    for number, (x, y) in enumerate(places):
        axes.plot(
            [x, x],
            [y - 0.4, y + 0.4],
            color=PAPER,
            linestyle=(0, (2, 1)),
            linewidth=1.8,
            path_effects=[withStroke(linewidth=3.4, foreground="white")],
            label="_nolegend_" if number else label,
        )


def log_ticks(axis: Any, values: Iterable[float]) -> None:
    """Plain numbers at the given places of a logarithmic axis."""
    from matplotlib.ticker import NullLocator

    places = sorted(set(values))
    axis.set_ticks(places, [f"{value:g}" for value in places])
    axis.set_minor_locator(NullLocator())


def plain_log(axis: Any) -> None:
    """A logarithmic axis whose numbers are written out: 0.1, 1, 10, with 2 and 5 where it is short.

    To be called once the limits are known.
    """
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    steps: tuple[float, ...] = (1,)
    if decades < 3.5:
        steps = (1, 3)
    if decades < 2:
        steps = (1, 2, 5)
    if decades < 0.8:
        steps = (1, 1.5, 2, 3, 4, 5, 6, 8)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    places = [
        value
        for power in range(first, last + 1)
        for step in steps
        if low <= (value := step * 10.0**power) <= high
    ]
    if len(places) < 3:  # a range within few steps
        places = [value for value in MaxNLocator(4).tick_values(low, high) if value > 0]
    axis.set_major_locator(FixedLocator(places))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def brief(value: float) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 123, 1230."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}"
