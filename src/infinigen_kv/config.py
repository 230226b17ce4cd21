"""Settings of the selection, validated at construction."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
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
        Rank R of the rehearsal's score as a share of the head dimension D, in (0, 1].
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

    def __post_init__(self) -> None:
        if self.rehearsal not in get_args(RehearsalName):
            raise _invalid("rehearsal", self.rehearsal, "one of 'calibrated', 'paper'")
        for name, own in OWN_DEFAULTS[self.rehearsal].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, own)
        self._check_alpha()
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
        """Rank R of the rehearsal's score for a head dimension D."""
        return max(1, round(self.partial_ratio * head_dim))


def is_finite(value: object) -> bool:
    """Whether a setting is a number, and neither infinite nor NaN."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _invalid(name: str, value: object, allowed: str) -> InputError:
    return InputError(f"{name}={value!r} is not valid: it must be {allowed}")
