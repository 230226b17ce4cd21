"""What is to be tuned for, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from infinigen_kv.checks import check_integer
from infinigen_kv.config import InfiniGenConfig, is_finite
from infinigen_kv.errors import InputError
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.tuning.trial import COUNTING_LINK

PROMPT_TOKENS = 2048
DECODE_TOKENS = 144
WINDOWS = 4
MAX_FETCH = 0.3
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What is wanted, and on how much text.

    What is given stays as it is. What is None starts at its default, and other values at equal
    device memory are tried unless ``alpha_only``.

    Parameters
    ----------
    target_kl
        KL(full || selected) of the next token, in nats, that the settings must stay within.
    max_fetch
        Largest share of the cached tokens that a step may attend to, in (0, 1]. None for 0.3, or
        the resident set's share if that is less: a step that wants more than the set holds moves
        all that it wants.
    partial_ratio
        As in `InfiniGenConfig`.
    resident, resident_layers
        Of the storage that is tuned for, as in `StorageConfig`. Since the resident set's share pays
        for partial keys and whole layers, a given one keeps both as they are.
    codec
        Of the home that is tuned for, as in `StorageConfig`.
    alpha_only
        Leave everything but alpha at what is given, or its default.
    prompt_tokens, decode_tokens, windows
        Windows of ``prompt_tokens`` + ``decode_tokens`` tokens: so many to tune on, and as many
        others to check with.

    Raises
    ------
    InputError
        If a value is outside its range.
    """

    target_kl: float = 0.02
    max_fetch: float | None = None
    partial_ratio: float | None = None
    resident: float | int | None = None
    resident_layers: Literal["auto"] | tuple[int, ...] | None = None
    codec: str = "none"
    alpha_only: bool = False
    prompt_tokens: int = PROMPT_TOKENS
    decode_tokens: int = DECODE_TOKENS
    windows: int = WINDOWS

    def __post_init__(self) -> None:
        if not is_finite(self.target_kl) or self.target_kl <= 0:
            raise InputError(
                f"target_kl={self.target_kl!r} is not valid: it must be a number of nats above 0, "
                "e.g. 0.02"
            )
        for name, least in (("prompt_tokens", 32), ("decode_tokens", 2), ("windows", 1)):
            check_integer(name, getattr(self, name), least)

    def config(self, alpha: float | tuple[float, ...] | None = None) -> InfiniGenConfig:
        """Settings of the selection with this alpha."""
        fitting = min(MAX_FETCH, self.resident_share or MAX_FETCH)
        fetch = fitting if self.max_fetch is None else self.max_fetch
        given: dict[str, Any] = {"max_fetch": fetch, "min_context": 1}
        given |= {} if alpha is None else {"alpha": alpha}
        given |= {} if self.partial_ratio is None else {"partial_ratio": self.partial_ratio}
        return InfiniGenConfig(**given)

    @property
    def resident_share(self) -> float | None:
        """Share of the context in the resident set; None where it is given in bytes."""
        budget = self.storage.resident_budget_on(CPU)  # the link moves entries on any device
        return budget if isinstance(budget, float) else None

    @property
    def storage(self) -> StorageConfig:
        """A home apart, over a link that only counts."""
        return StorageConfig(
            home="ram",
            link=COUNTING_LINK,
            codec=self.codec,
            resident=self.resident,
            resident_layers="auto" if self.resident_layers is None else self.resident_layers,
        )
