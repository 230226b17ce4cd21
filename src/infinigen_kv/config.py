"""Settings of the selection, validated at construction."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal, get_args

from infinigen_kv.errors import InputError

RehearsalName = Literal["calibrated", "paper"]

PROMPT_CHUNK = 2048
"""Tokens of a prompt that one forward reads, unless said otherwise."""

OWN_DEFAULTS: dict[str, dict[str, Any]] = {
    "calibrated": {
        "alpha": 4.25,
        "partial_ratio": 0.375,
        "recent_tokens": 32,
        "sink_tokens": 1,
        "tail": True,
        "refit_every": 256,
    },
    "paper": {
        "alpha": 5.0,
        "partial_ratio": 0.3,
        "recent_tokens": 0,
        "sink_tokens": 0,
        "tail": False,
        "refit_every": 0,
    },
}
"""What each rehearsal uses for settings that are None; ``paper`` as published for Llama models."""

INDEX_BITS = (
    "bits x dimensions, bits of 4, 3 or 2 and fewer and fewer, such as '3x16+2x32', or None"
)


@dataclass(frozen=True, slots=True)
class InfiniGenConfig:
    """Which entries of the KV cache a decode step moves.

    Parameters
    ----------
    rehearsal
        ``calibrated``: fitted query predictor and the best rank-R score; ``paper``: skewed partial
        weights (OSDI 2024, section 4.3). Each has its own defaults for the next four settings,
        ``tail`` and ``refit_every`` (`OWN_DEFAULTS`), which None stands for.
    alpha
        A token is wanted when its predicted score is within ``alpha`` of the head's highest one
        (section 4.3; natural-log units, since scores are exponents of the softmax). One number for
        all layers, or one for each layer of the model.
    partial_ratio
        Rank R of the rehearsal's score as a share of the head dimension D, in (0, 1]. None where
        ``index_bits`` says R.
    index_bits
        Partial keys as codes of few bits (`rehearsal.codes`): how many dimensions have how many
        bits, the first ones the most, e.g. ``"3x16+2x32"`` for 16 of 3 bits and 32 of 2. None for
        the model's own numbers. Only for the calibrated rehearsal.
    recent_tokens, sink_tokens
        The newest and the oldest cached tokens that every step attends to. A home with a capacity
        never evicts the latter, up to two tokens below it.
    max_fetch
        Largest share of a row's cached tokens that a step may attend to, in (0, 1]. The always-kept
        tokens count, and stay even where they alone exceed it.
    first_layer
        Layers below this index are attended to in full; at least 1, since layer 0 has no
        predecessor to rehearse from.
    min_context
        Rows with fewer cached tokens than this are attended to in full.
    tail
        Whether what a step leaves behind is estimated from the partial keys (`rehearsal.tail`); if
        not, it has no weight, as in the paper. Only the calibrated rehearsal knows how.
    refit_every
        Tokens after which a row's partial dimensions, and the values that stand for what a step
        leaves behind, are fitted anew to all tokens so far; sooner where the last fit knew fewer
        tokens than that. 0 keeps those of the prompt, as the paper does. Only for the calibrated
        rehearsal.

    Raises
    ------
    InputError
        If a value is outside its range; names the field, the value and the range.
    """

    # None until construction has put the rehearsal's own value there, hence the declared types.
    rehearsal: RehearsalName = "calibrated"
    alpha: float | tuple[float, ...] = None  # type: ignore[assignment]
    partial_ratio: float = None  # type: ignore[assignment]
    recent_tokens: int = None  # type: ignore[assignment]
    sink_tokens: int = None  # type: ignore[assignment]
    max_fetch: float = 0.2
    first_layer: int = 1
    min_context: int = 256
    tail: bool = None  # type: ignore[assignment]
    refit_every: int = None  # type: ignore[assignment]
    index_bits: str | None = None

    def __post_init__(self) -> None:
        if self.rehearsal not in get_args(RehearsalName):
            raise _invalid("rehearsal", self.rehearsal, "one of 'calibrated', 'paper'")
        coded = self.index_bits is not None
        for name, own in OWN_DEFAULTS[self.rehearsal].items():
            if getattr(self, name) is None and not (coded and name == "partial_ratio"):
                object.__setattr__(self, name, own)
        self._check_alpha()
        if coded:
            self._check_index_bits()
        else:
            self._check_real("partial_ratio", lambda v: 0 < v <= 1, "a number in (0, 1]")
        self._check_real("max_fetch", lambda v: 0 < v <= 1, "a number in (0, 1]")
        self._check_integer("first_layer", 1)
        self._check_integer("recent_tokens", 0)
        self._check_integer("sink_tokens", 0)
        self._check_integer("min_context", 1)
        self._check_integer("refit_every", 0)
        if self.refit_every and self.rehearsal == "paper":
            raise InputError(
                f"refit_every={self.refit_every} is not valid with rehearsal='paper', which keeps "
                "the prompt's columns; leave refit_every out, or use rehearsal='calibrated'"
            )
        if not isinstance(self.tail, bool):
            raise _invalid("tail", self.tail, "True or False")
        if self.tail and self.rehearsal == "paper":
            raise InputError(
                "tail=True is not valid with rehearsal='paper': the scores of its skewed columns "
                "have no absolute height; leave tail out, or use rehearsal='calibrated'"
            )

    def _check_alpha(self) -> None:
        given: Any = self.alpha
        if isinstance(given, list):  # as JSON has it
            object.__setattr__(self, "alpha", tuple(given))
        by_layer = isinstance(given, (tuple, list))
        values = given if by_layer else (given,)
        if not values or not all(is_finite(each) and each >= 0 for each in values):
            allowed = (
                "finite numbers >= 0, one for each layer" if by_layer else "a finite number >= 0"
            )
            raise _invalid("alpha", given, allowed)

    def _check_index_bits(self) -> None:
        if not isinstance(self.index_bits, str) or not _is_falling(self.index_bits):
            raise _invalid("index_bits", self.index_bits, INDEX_BITS)
        if self.rehearsal == "paper":
            raise InputError(
                f"index_bits={self.index_bits!r} is not valid with rehearsal='paper', whose "
                "columns come in no order; leave index_bits out, or use rehearsal='calibrated'"
            )
        if self.partial_ratio is not None:
            raise InputError(
                f"index_bits={self.index_bits!r} says how many partial dimensions there are, and "
                f"so does partial_ratio={self.partial_ratio!r}: leave one of them out"
            )

    def _check_real(self, name: str, accept: Any, allowed: str) -> None:
        value = getattr(self, name)
        if not is_finite(value) or not accept(value):
            raise _invalid(name, value, allowed)

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _invalid(name, value, f"an integer >= {least}")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> InfiniGenConfig:
        """Build a config from plain values, e.g. read from JSON; unknown names are errors."""
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise InputError(f"unknown setting {unknown[0]!r}; known settings: {', '.join(known)}")
        return cls(**values)

    def alpha_of(self, layer: int) -> float:
        """Alpha of one layer of the model.

        Raises
        ------
        InputError
            If alpha is given by layer, for a model with fewer layers.
        """
        if not isinstance(self.alpha, tuple):
            return self.alpha
        if layer >= len(self.alpha):
            raise InputError(
                f"alpha has {len(self.alpha)} values, and the model has a layer {layer}: give one "
                "number for all layers, or one for each layer"
            )
        return self.alpha[layer]

    def partial_dim(self, head_dim: int) -> int:
        """Rank R of the rehearsal's score for a head dimension D.

        Raises
        ------
        InputError
            If ``index_bits`` has more dimensions than that.
        """
        if self.index_bits is None:
            return max(1, round(self.partial_ratio * head_dim))
        rank = sum(dims for _, dims in self.index_widths)
        if rank > head_dim:
            raise InputError(
                f"index_bits={self.index_bits!r} is not valid for this model: it has {rank} "
                f"dimensions, and the model's heads have {head_dim}"
            )
        return rank

    @property
    def index_widths(self) -> tuple[tuple[int, int], ...]:
        """Pairs of bits and dimensions of ``index_bits``, in its order; () for None."""
        return () if self.index_bits is None else _widths(self.index_bits)


def _widths(index_bits: str) -> tuple[tuple[int, int], ...]:
    pairs = (each.split("x") for each in index_bits.split("+"))
    return tuple((int(bits), int(dims)) for bits, dims in pairs)


def _is_falling(index_bits: str) -> bool:
    """Whether these are dimensions with fewer and fewer of 4, 3 or 2 bits."""
    if not re.fullmatch(r"[234]x[1-9]\d{0,4}(\+[234]x[1-9]\d{0,4})*", index_bits, re.ASCII):
        return False
    bits = [each for each, _ in _widths(index_bits)]
    return all(first > second for first, second in pairwise(bits))


def is_finite(value: object) -> bool:
    """Whether a setting is a number, and neither infinite nor NaN."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _invalid(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"{name}={value!r} is not valid: it must be {allowed}")
