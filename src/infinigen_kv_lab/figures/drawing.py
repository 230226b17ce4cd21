"""Pictures: one look for all figures, on matplotlib.

A picture is 8 inches wide at 200 dots per inch, drawn for being shown 800 pixels wide.
"""

from __future__ import annotations

import importlib.util
import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.figures.rows import Row, is_number, names, points
from infinigen_kv_lab.figures.styles import HEAT, PAPER, PAPER_DASHES, SPARE, STYLES, Style

WIDTH = 8.0  # inches
DPI = 200
FOOTER_LETTERS = 118  # in a line
TITLE_LETTERS = 78
LOG_STEPS: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0.25, (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9)),
    (0.8, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (2.0, (1, 2, 5)),
    (3.5, (1, 3)),
    (math.inf, (1,)),
)
"""Ticks within a decade of an axis that is shorter than so many of them."""


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
            self._spare[system] = SPARE[len(self._spare) % len(SPARE)]
        return self._spare[system]

    def line(
        self, axes: Any, look: str, x: Sequence[float], y: Sequence[float], **options: Any
    ) -> None:
        """A line with markers that looks like a system's, by whose name it goes.

        ``options`` are those of ``Axes.plot``, which win.
        """
        axes.plot(x, y, **{"label": look, "markersize": 6, **self.style(look), **options})

    def curve(
        self, axes: Any, rows: Sequence[Row], x: str, y: str, *, look: str, **options: Any
    ) -> None:
        """A line through column ``y``, with intervals where there are ``y_low`` and ``y_high``.

        ``look`` and ``options`` are as in `line`; rows without numbers are left out.
        """
        known = points(rows, x, y)
        if not known:
            return
        places = [row[x] for row in known]
        self.line(axes, look, places, [row[y] for row in known], **options)
        ends = [
            [math.nan if row[column] is None else row[column] for row in known]
            for column in (f"{y}_low", f"{y}_high")
            if column in known[0]
        ]
        if ends:
            axes.vlines(places, *ends, color=self.style(look)["color"], linewidth=1.1, zorder=1.9)

    def curves(
        self,
        axes: Any,
        rows: Sequence[Row],
        x: str,
        y: str,
        *,
        looks: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        """A `curve` for each system.

        ``looks`` are labels and looks by system, where they are not the system's own.
        """
        for name in names(rows):
            label, look = looks.get(name, (name, name))
            mine = [row for row in rows if row["system"] == name]
            self.curve(axes, mine, x, y, look=look, **{"label": label, **options})

    def across(self, axes: Any, row: Row, y: str, *, look: str, label: str) -> None:
        """Column ``y`` as a line over the whole width, with its interval as a band."""
        color = self.style(look)["color"]
        axes.axhline(row[y], color=color, linestyle="--", linewidth=1.2, label=label)
        ends = [row[f"{y}_low"], row[f"{y}_high"]]
        if all(is_number(each) for each in ends):
            axes.axhspan(*ends, color=color, alpha=0.08, linewidth=0)

    def legend(self, *axes: Any, columns: int = 4) -> None:
        """One legend above all panels, each label once, with the title over it."""
        handles: dict[str, Any] = {}
        for each in axes:
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        # the layout keeps a legend and a title of the whole figure in the same place: the title
        # has to be the legend's
        self.figure.legend(
            handles.values(),
            handles.keys(),
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

    def colour_bar(self, image: Any, axes: Any, label: str) -> None:
        """The scale of a `heat_map`, beside ``axes``."""
        bar = self.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02)
        bar.ax.tick_params(labelsize=8)
        bar.set_label(label, fontsize=9)


def require_matplotlib() -> None:
    """Raise `InputError` where matplotlib is missing, before work is done for a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("the plot needs matplotlib: pip install 'infinigen-kv[plot]'")


def name_axes(axes: Any, x: str, y: str, *, title: str = "") -> None:
    """Labels with their units."""
    axes.set_xlabel(x, fontsize=10)
    axes.set_ylabel(y, fontsize=10)
    if title:
        axes.set_title(title, fontsize=10, loc="left")


def level(axes: Any, value: float, label: str) -> None:
    """The paper's own number as a dashed horizontal line, with its label at the line."""
    axes.axhline(value, color=PAPER, linestyle=PAPER_DASHES, linewidth=1.2)
    axes.annotate(
        label,
        xy=(0.01, value),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        color=PAPER,
        bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.6},
    )


def upright(axes: Any, value: float, above: str = "", *, label: str = "_nolegend_") -> None:
    """The paper's own choice as a dashed vertical line, with ``above`` over the panel."""
    axes.axvline(value, color=PAPER, linestyle=PAPER_DASHES, linewidth=1.2, label=label)
    axes.annotate(
        above,
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

    axes.vlines(
        [x for x, _ in places],
        [y - 0.4 for _, y in places],
        [y + 0.4 for _, y in places],
        color=PAPER,
        linestyle=(0, (2, 1)),
        linewidth=1.8,
        path_effects=[withStroke(linewidth=3.4, foreground="white")],
        label=label,
    )


def whole_numbers(*axes: Any) -> None:
    """Ticks at whole numbers across, as of layers."""
    for each in axes:
        each.xaxis.get_major_locator().set_params(integer=True)


def log_axes(
    axes: Any, which: str, *, places: Sequence[float] = (), margin: float | None = None
) -> None:
    """Logarithmic axes whose numbers are written out: 0.1, 1, 10, with others where it is short.

    To be called once everything is drawn.

    Parameters
    ----------
    which
        ``x``, ``y`` or ``xy``.
    places
        Ticks of the x axis, each once; else chosen.
    margin
        Left free at both ends of these axes, as a share of their length.
    """
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axes.set(**{f"{letter}scale": "log" for letter in which})
    if margin is not None:
        axes.margins(**dict.fromkeys(which, margin))
    for letter in which:
        axis = axes.xaxis if letter == "x" else axes.yaxis
        low, high = axis.get_view_interval()
        decades = math.log10(high / low)
        steps = next(steps for longest, steps in LOG_STEPS if decades < longest)
        at = FixedLocator(sorted(set(places))) if places and letter == "x" else None
        axis.set_major_locator(at or LogLocator(subs=steps, numticks=99))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())


def heat_map(
    axes: Any,
    values: Sequence[Sequence[float | None]],
    x: Sequence[str],
    y: Sequence[str],
    *,
    cells: Sequence[Sequence[str]] = (),
) -> Any:
    """Rows of values between 0 and 1 as a map, the first row on top; gaps stay white.

    Returns its image.

    Parameters
    ----------
    x, y
        Labels of the columns and rows; an empty one is not written.
    cells
        What to write into each field.
    """
    numbers = [[math.nan if value is None else value for value in row] for row in values]
    axes.grid(visible=False)
    image = axes.imshow(numbers, cmap=HEAT, vmin=0, vmax=1, aspect="auto")
    for axis, labels in ((axes.xaxis, x), (axes.yaxis, y)):
        places = [place for place, label in enumerate(labels) if label]
        axis.set_ticks(places, [labels[place] for place in places])
    for row, texts in enumerate(cells):
        for column, text in enumerate(texts):
            color = "white" if numbers[row][column] < 0.5 else "black"
            axes.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
    return image


def brief(value: float) -> str:
    """Three digits: 0.0123, 1.23, 12.3, 123, 1230."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
