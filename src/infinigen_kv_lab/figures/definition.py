"""What a figure is, and what its points are made from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from infinigen_kv.files import Result
from infinigen_kv_lab.bench.run import IDEAL
from infinigen_kv_lab.figures.guests import Guest
from infinigen_kv_lab.figures.point import Point
from infinigen_kv_lab.figures.scale import Scale

if TYPE_CHECKING:
    from infinigen_kv_lab.figures.drawing import Canvas

Found = Mapping[Point, Result]
"""Results of the points that there are."""

Row = dict[str, Any]
"""One line of a figure's table; all rows of a figure have the same columns."""

COMPARED = ("stream", "stream-int4", "h2o", "infinigen")
"""What the paper's figures compare, where they vary something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all points of a run have in common.

    Parameters
    ----------
    scale
        How much is measured, already cut to what the model can run.
    link
        Of the points whose time counts, the rate of ``emulated:paper`` put in.
    counting_link
        Of the points of which only bytes and KL count: one that keeps nobody waiting.
    policies, peers
        What Figure 14 compares.
    layers
        Of the main model.
    models
        Names of further models, or none.
    model
        The main model's name.
    guests
        Results that other programs wrote.
    prompt_digest
        Of the headline prompt, for guests that read it too.
    """

    scale: Scale
    link: str
    counting_link: str
    policies: tuple[str, ...]
    peers: tuple[str, ...]
    layers: int
    model: str
    models: tuple[str, ...] = ()
    guests: tuple[Guest, ...] = ()
    prompt_digest: str = ""

    def base(self) -> Point:
        """All systems on the headline prompt; the oracle is a bound and none."""
        return Point(
            policies=tuple(name for name in self.policies if name not in (IDEAL, "oracle")),
            peers=self.peers,
            prompt_tokens=self.scale.prompt_tokens,
            decode_tokens=self.scale.decode_tokens,
            link=self.link,
        )

    def sweep(self, **changes: Any) -> Point:
        """One of many points: a short prompt, few steps."""
        own = {
            "policies": COMPARED,
            "prompt_tokens": self.scale.sweep_prompt,
            "decode_tokens": self.scale.sweep_tokens,
            "link": self.link,
        }
        return Point(**{**own, **changes})


class Figure(ABC):
    """One figure: its points, its table, its picture.

    ``name`` is what ``--figures`` takes, ``title`` stands above the picture, ``about`` below it
    on the page. Where the figure ``shows_peers``, the page says which of them were left out.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    shows_peers: ClassVar[bool] = False

    @abstractmethod
    def points(self, setting: Setting) -> list[Point]:
        """What must be measured; points of other figures are shared."""

    @abstractmethod
    def rows(self, setting: Setting, found: Found) -> list[Row]:
        """The table, of those points that there are; empty where they do not make a figure."""

    @abstractmethod
    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        """Draw the table."""

    def remarks(self, setting: Setting, rows: Sequence[Row]) -> list[str]:
        """Sentences for the page that the table gives rise to."""
        return []


def systems(result: Result) -> list[Row]:
    """Policies and peers of a bench result, all with the same columns."""
    return [
        {
            "system": each.get("policy") or each["name"],
            "step_ms": each["step_ms_median"],
            "step_ms_p90": each["step_ms_p90"],
            "tokens_per_s": each["tokens_per_s"],
            "prompt_s": each["prompt_seconds"],
            "link_mb_per_step": _scaled(each.get("link_bytes_per_step"), 1e-6),
            "link_wait_ms": each.get("link_wait_ms_per_step"),
            "fetched_share": each.get("fetched_share"),
            "resident_hit_rate": each.get("resident_hit_rate"),
            "kl_to_ideal": each["kl_to_ideal"],
        }
        for each in [*result["policies"], *result.get("peers", ())]
    ]


def one_system(result: Result, name: str) -> Row | None:
    """One row of `systems`; None where it was not measured."""
    return next((row for row in systems(result) if row["system"] == name), None)


def series(rows: Sequence[Row], name: str, x: str, y: str) -> tuple[list[float], list[float]]:
    """Columns ``x`` and ``y`` of one system's rows, ordered by ``x``; gaps left out."""
    pairs = sorted(
        (row[x], row[y])
        for row in rows
        if row["system"] == name and row[x] is not None and row[y] is not None
    )
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def names(rows: Sequence[Row]) -> list[str]:
    """Systems in the order of their first rows."""
    return list(dict.fromkeys(row["system"] for row in rows))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
