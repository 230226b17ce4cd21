"""The name of our attention in a model's configuration, such that copies of the model are plain."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTENTION = "infinigen_kv"


class AttachedAttention(str):
    """The name of our attention in a configuration, with what it stands for there.

    A copy of the configuration gets that instead, so that the copy of a model is a plain one.
    Models that share a configuration share this: it stays until the last of them is detached.

    Attributes
    ----------
    config
        The configuration.
    before
        The attention that it named.
    decoders
        Those of its models that are attached.
    """

    config: Any
    before: Any
    decoders: list[nn.Module]

    @classmethod
    def of(cls, config: Any) -> AttachedAttention:
        """That of a configuration, a new one where no model of its is attached."""
        before = config._attn_implementation
        if isinstance(before, cls):
            if before.config is config:
                return before
            before = before.before  # a shallow copy of an attached model's
        made = cls(ATTENTION)
        made.config, made.before, made.decoders = config, before, []
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return copy, (self.before,)


def is_attached(model: PreTrainedModel, decoder: nn.Module) -> bool:
    """Whether a session uses the model now."""
    name = model.config._attn_implementation
    return isinstance(name, AttachedAttention) and any(each is decoder for each in name.decoders)
