"""The contract between a task, the policies that it measures, and the files that keep points."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from infinigen_kv.checks import check_integer
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.files import plain
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.kit.intervals import Estimate, share

Sample = dict[str, Any]
"""What one window, prompt or document gave under one policy: values that JSON holds, no NaN."""


@dataclass(frozen=True)
class Result:
    """What all samples of one task under one policy come to."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is undefined is None."""
        return plain(asdict(self))

    def headline(self) -> dict[str, str]:
        """The figures that matter most, by name, to read; the same names for all of a task."""
        return {}


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Settings of the tasks; each uses those that concern it.

    Parameters
    ----------
    window, prompt_tokens
        Texts are read in windows of ``window`` tokens, of which the first ``prompt_tokens`` in
        full; None for 3072 (fewer where the model has fewer positions) and two thirds of it.
    text
        A UTF-8 text file: what ``text`` and ``speculation`` read and ``needles`` hides in.
    lengths
        Context lengths of ``needles`` and ``extraction``, in tokens.
    repeats
        Contexts of each of these lengths.
    asked_later
        Whether a passkey's question comes after the cache was built, in decode steps, instead of
        at the end of the prompt.
    shots
        Solved examples before each question of a harness task; None for the harness's own number.
    exact_prefix
        Tokens at the start of a harness task's prompt that are read in full.
    seed
        For needles, forms and shots.

    Raises
    ------
    InputError
        If a number is out of range.
    """

    window: int | None = None
    prompt_tokens: int | None = None
    text: Path | None = None
    lengths: tuple[int, ...] = (1024, 2048, 4096)
    repeats: int = 5
    asked_later: bool = False
    shots: int | None = 5
    exact_prefix: int = 128
    seed: int = 1234

    def __post_init__(self) -> None:
        _at_least("window", self.window, 2)
        _at_least("prompt_tokens", self.prompt_tokens, 1)
        _at_least("repeats", self.repeats, 1)
        _at_least("shots", self.shots, 0)
        _at_least("exact_prefix", self.exact_prefix, 1)
        if not self.lengths:
            raise InputError("lengths=() is not valid: it must name at least one")
        for length in self.lengths:
            _at_least("lengths", length, 128)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a task is made from: the model's tokenizer and positions, the data, the options."""

    tokenizer: PreTrainedTokenizerBase
    max_positions: int | None
    data: Path | None
    options: TaskOptions


class Task(ABC):
    """Something to measure policies on, sample by sample; the runner keeps what is finished.

    Samples are numbered from 0 and always the same for equal `settings`, so that a later run may
    go on where an earlier one stopped, or measure more of them.
    """

    name: str

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that the samples depend on, but model, policy and the selection's settings."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples there are."""

    def config(self, base: InfiniGenConfig) -> InfiniGenConfig:
        """The selection's settings for this task, made from those that were asked for."""
        return base

    def suits(self, policy: str) -> bool:
        """Whether the policy can be measured here."""
        return True

    def prepare(self, session: Session, index: int) -> Any:
        """What all policies share on sample ``index``; computed once, passed to `measure`."""
        return None

    @abstractmethod
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        """Sample ``index`` under the reader's policy; the reader has read nothing else."""

    @abstractmethod
    def summarise(self, samples: Sequence[Sample], full: Sequence[Sample] | None = None) -> Result:
        """The figures of the first ``len(samples)`` samples.

        ``full`` are the same samples with the full cache, where those were measured too.
        """


@dataclass(frozen=True, slots=True)
class Costs:
    """What a policy needed to get its figures, over all samples.

    ``missed_share`` is the share of the wanted tokens that a limited home had evicted by then, with
    an interval by bootstrap over samples: a decode step wants the tokens with the highest true
    scores, as many as it attends to (see `misses.Misses`). ``missed_mass`` is the attention mass
    that full attention would have put on evicted tokens. Both are None without a capacity.

    ``fetched_bytes`` are those of the entries that a decode step attends to, as they are packed at
    home; a resident set would spare the link a part of them. ``home_bytes`` and ``device_bytes``
    are the most that the cache of a sample held at home and on the device (`traffic.held_bytes`).
    """

    missed_share: Estimate | None
    missed_mass: Estimate | None
    fetched_bytes: float
    home_bytes: int
    device_bytes: int

    def headline(self) -> dict[str, str]:
        """The miss rate, where there is one."""
        return {} if self.missed_share is None else {"missed": percent(self.missed_share.value)}


def fetched_of(reader: Reader) -> Sample:
    """What a sample that the reader has read says of what its policy fetched, missed and held."""
    home, device = reader.held_bytes
    return {
        "fetched": reader.fetched_share,
        "fetched_all_layers": reader.fetched_share_all_layers,
        "fetched_bytes": reader.fetched_bytes,
        "home_bytes": home,
        "device_bytes": device,
        "misses": None if reader.misses is None else asdict(reader.misses),
    }


def fetched(samples: Sequence[Sample]) -> tuple[float, float]:
    """``fetched_share`` and ``fetched_share_all_layers``: means over samples where steps selected.

    The samples weigh equally, whatever their number of decode steps.
    """
    return _mean(samples, "fetched"), _mean(samples, "fetched_all_layers")


def costs(samples: Sequence[Sample]) -> Costs:
    """From samples with what `fetched_of` gives; what older ones lack counts as unknown or 0."""
    missed = [each["misses"] for each in samples if each.get("misses")]
    return Costs(
        missed_share=_sums(missed, "missed", "wanted"),
        missed_mass=_sums(missed, "mass", "queries"),
        fetched_bytes=_mean(samples, "fetched_bytes"),
        home_bytes=max(each.get("home_bytes", 0) for each in samples),
        device_bytes=max(each.get("device_bytes", 0) for each in samples),
    )


def _sums(misses: Sequence[dict[str, float]], part: str, whole: str) -> Estimate | None:
    if not misses:
        return None
    return share([each[part] for each in misses], [each[whole] for each in misses])


def percent(share: float) -> str:
    """A share as per cent; a dash for NaN."""
    return "-" if math.isnan(share) else f"{share:.1%}".replace("%", " %")


def _mean(samples: Sequence[Sample], name: str) -> float:
    values = [each[name] for each in samples if each.get(name) is not None]
    return sum(values) / len(values) if values else float("nan")


def _at_least(name: str, value: object, least: int) -> None:
    if value is not None:
        check_integer(name, value, least)
