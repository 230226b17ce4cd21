"""What a figure is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from infinigen_kv_lab.figures.drawing import Canvas
from infinigen_kv_lab.figures.rows import Row


class Measurement(Protocol):
    """What figures are made of; can be hashed."""

    @property
    def label(self) -> str:
        """All that tells it from others, for a line of progress."""

    @property
    def kind(self) -> str:
        """What is measured, in a word."""


SettingT = TypeVar("SettingT")
MeasurementT = TypeVar("MeasurementT", bound=Measurement)
ResultT = TypeVar("ResultT")


class Figure(ABC, Generic[SettingT, MeasurementT, ResultT]):
    """One figure: its measurements, its table, its picture.

    ``name`` is what ``--figures`` takes, ``title`` stands above the picture, ``about`` below it on
    the page. ``figure_set`` names the figures that share its page and its setting.
    """

    figure_set: ClassVar[str]
    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]

    @abstractmethod
    def cases(self, setting: SettingT) -> list[tuple[Row, MeasurementT]]:
        """What is measured, each with the columns that tell its rows from those of the others."""

    def measurements(self, setting: SettingT) -> list[MeasurementT]:
        """What must be measured, each once; other figures' measurements are shared."""
        return list(dict.fromkeys(measurement for _, measurement in self.cases(setting)))

    def rows(self, setting: SettingT, results: Mapping[MeasurementT, ResultT]) -> list[Row]:
        """The table, of those results that there are; empty where they do not make a figure."""
        return [
            {**columns, **row}
            for columns, measurement in self.cases(setting)
            if measurement in results
            for row in self.rows_of(results[measurement])
        ]

    def rows_of(self, result: ResultT) -> list[Row]:
        """One measurement's rows, without the columns of its case."""
        raise NotImplementedError(f"{type(self).__name__} defines neither rows nor rows_of")

    @abstractmethod
    def draw(self, canvas: Canvas, rows: Sequence[Row]) -> None:
        """Draw the table."""

    def remarks(self, setting: SettingT, rows: Sequence[Row]) -> list[str]:
        """Sentences for the page that the table gives rise to."""
        return []


AnyFigure = Figure[Any, Any, Any]
