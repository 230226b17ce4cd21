"""What is to be tuned for, validated at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.storage_config import StorageConfig
from infinigen_kv.tuning.trial import COUNTING_LINK

PROMPT_TOKENS = 2048
DECODE_TOKENS = 144
WINDOWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What is wanted, and on how much text.

    Parameters
    ----------
    target_kl
        KL(full || selected) of the next token, in nats, that the settings must stay within.
    max_fetch
        Largest share of the cached tokens that a step may attend to, in (0, 1].
    partial_ratio
        As in `InfiniGenConfig`; None for its default.
    resident
        Of the storage that is tuned for, as in `StorageConfig`.
    codec
        Of the home that is tuned for, as in `StorageConfig`.
    prompt_tokens, decode_tokens, windows
        Windows of ``prompt_tokens`` + ``decode_tokens`` tokens: so many to tune on, and as many
        others to check with.

    Raises
    ------
    InputError
        If a value is outside its range.
    """

    target_kl: float = 0.02
    max_fetch: float = 0.3
    partial_ratio: float | None = None
    resident: float | int | None = None
    codec: str = "none"
    prompt_tokens: int = PROMPT_TOKENS
    decode_tokens: int = DECODE_TOKENS
    windows: int = WINDOWS

    def __post_init__(self) -> None:
        target = self.target_kl
        number = isinstance(target, (int, float)) and not isinstance(target, bool)
        if not number or not 0 < target < float("inf"):
            raise InputError(
                f"target_kl={target!r} is not valid: it must be a number of nats above 0, e.g. 0.02"
            )
        for name, least in (("prompt_tokens", 32), ("decode_tokens", 2), ("windows", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise InputError(f"{name}={value!r} is not valid: it must be an integer >= {least}")

    def config(self, alpha: float | tuple[float, ...] | None = None) -> InfiniGenConfig:
        """Settings of the selection with this alpha."""
        given: dict[str, Any] = {"max_fetch": self.max_fetch, "min_context": 1}
        given |= {} if alpha is None else {"alpha": alpha}
        given |= {} if self.partial_ratio is None else {"partial_ratio": self.partial_ratio}
        return InfiniGenConfig(**given)

    @property
    def storage(self) -> StorageConfig:
        """A home apart, over a link that only counts."""
        return StorageConfig(
            home="ram", link=COUNTING_LINK, codec=self.codec, resident=self.resident
        )
