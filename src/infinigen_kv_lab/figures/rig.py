"""What measures the figures of a set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

import torch

from infinigen_kv_lab.figures.figure import Figure, MeasurementT, ResultT, SettingT
from infinigen_kv_lab.figures.worklist import ShareDone, unheeded


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What all numbers of a page depend on.

    Parameters
    ----------
    facts
        Go into each figure's file of values.
    settings
        For the page, in words.
    warnings
        What must be known before a number is read.
    """

    facts: Mapping[str, Any]
    settings: Mapping[str, str]
    warnings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Basis:
    """What one figure's numbers rest on: for the picture's lower edge, and for the page."""

    footer: str
    remarks: Sequence[str] = ()


class MeasurementRig(ABC, Generic[SettingT, MeasurementT, ResultT]):
    """Measures what the figures of one set are made of, and keeps it: models, texts, a store."""

    figure_set: ClassVar[str]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model is."""

    @abstractmethod
    def missing(self, measurement: MeasurementT) -> float:
        """Share of a measurement that no earlier run left, 0 to 1.

        Raises
        ------
        InfiniGenError
            It cannot be measured, as can be told beforehand: its data is not there.
        """

    @abstractmethod
    def measure(
        self, measurement: MeasurementT, done: ShareDone = unheeded, *, again: bool = False
    ) -> ResultT:
        """Measure what is missing, and keep it.

        Parameters
        ----------
        done
            Told the share that is done, where it takes long.
        again
            Measure what there is, too.

        Raises
        ------
        InfiniGenError
            The model cannot run it, e.g. has too few positions, or memory does not suffice.
        """

    def partial(self, measurement: MeasurementT) -> ResultT | None:
        """What an interruption left of a measurement; None where that is of no use."""
        return None

    @abstractmethod
    def cost(self, measurement: MeasurementT) -> float:
        """A measurement's time, up to a factor that all of a model share."""

    @abstractmethod
    def describe(self, setting: SettingT) -> Description:
        """What all figures of the set depend on."""

    @abstractmethod
    def basis(
        self,
        setting: SettingT,
        figure: Figure[SettingT, MeasurementT, ResultT],
        results: Mapping[MeasurementT, ResultT],
    ) -> Basis:
        """What a figure rests on; ``results`` are those of its measurements."""
