"""Texts read by one policy: a prompt in full, then tokens that select as decode steps do."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor

from infinigen_kv.cache.cache import InfiniGenCache
from infinigen_kv.cache.forward import decode, forward, prefill
from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.models.soundness import check_logits
from infinigen_kv.policies.registry import check_policy
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.policies.step import Recorder
from infinigen_kv.session.attach import Session
from infinigen_kv_lab.evals.misses import Misses, MissRecorder
from infinigen_kv_lab.evals.traffic import held_bytes, token_bytes

FULL = "ideal"
"""The policy that others are compared with."""

BLOCK = 128
"""Decode positions evaluated in one forward, where that is the same as one at a time."""


class Reader:
    """Starts texts under one policy, and counts what all of them together fetched.

    Parameters
    ----------
    session
        An attached model; its storage says codec and capacity.
    policy
        One of `policies.registry.POLICIES`.
    budget
        What the policies with a fixed budget may use, as in `Session.new_cache`.
    calibration
        The session's.
    """

    def __init__(
        self,
        session: Session,
        policy: str,
        *,
        budget: float = BUDGET,
        calibration: Calibration | None = None,
    ) -> None:
        self.session = session
        self.calibration = calibration
        self.policy = check_policy(policy)
        self._budget = budget
        self.recorder = FetchRecorder()
        self.misses: Misses | None = None
        """What a limited home had evicted; None where there is no limit."""
        self.held_bytes = 0, 0
        """The most that a text's cache held, as `traffic.held_bytes` says."""
        self._selecting: list[int] = []
        self._token_bytes: dict[int, int] = {}

    @torch.no_grad()
    def start(self, prompt: Tensor, *, room: int) -> Reading:
        """Read ``prompt`` ``(P,)`` with full attention; ``room`` more tokens are to follow.

        Raises
        ------
        InputError
            If the prompt is empty or the model has too few positions.
        InfiniGenError
            If the model computes NaN or infinity; so do the readings' methods.
        """
        tokens = prompt.numel() + room
        self.session.check_length(tokens)
        cache = self.session.new_cache(tokens=tokens, policy=self.policy, budget=self._budget)
        self._selecting = cache.speculated_layers
        recorder = self._recorder(cache, tokens)
        cache.recorder = recorder if recorder.needs_keys else None  # others see no prompt
        prompt = prompt.to(self.session.model.device)
        last = prefill(self.session, cache, prompt[None])[0, -1].float()
        check_logits(last)
        self._token_bytes = token_bytes(cache, self.session.model.dtype)
        return Reading(self, cache, last, recorder)

    def note(self, cache: InfiniGenCache) -> None:
        """Take note of what a cache of this reader holds by now."""
        home, device = held_bytes(cache)
        self.held_bytes = max(self.held_bytes[0], home), max(self.held_bytes[1], device)

    @property
    def fetched_share(self) -> float:
        """Share of the cached tokens that decode steps attended to, mean over the layers that
        select; 1 where none does, NaN where no step could.
        """
        by_layer = self.recorder.fetched_by_layer
        shares = [by_layer[layer] for layer in self._selecting or by_layer if layer in by_layer]
        return sum(shares) / len(shares) if shares else float("nan")

    @property
    def fetched_share_all_layers(self) -> float:
        """As `fetched_share`, over all layers; those attended to in full count as 1."""
        return self.recorder.fetched_share()

    @property
    def fetched_bytes(self) -> float:
        """Bytes of the entries that a decode step attended to, as they are packed at home.

        Those that a resident set would have held are among them. NaN where no step could select.
        """
        tokens = self.recorder.tokens_by_layer
        if not tokens:
            return float("nan")
        return sum(self._token_bytes.get(layer, 0) * count for layer, count in tokens.items())

    def _recorder(self, cache: InfiniGenCache, tokens: int) -> Recorder:
        config = cache.storage.config
        self.recorder.limit = config.limit(tokens)
        if config.capacity is None:
            return self.recorder
        self.misses = self.misses or Misses()
        return MissRecorder(self.misses, self.recorder)


class Reading:
    """A text that a policy has read so far.

    Attributes
    ----------
    last
        ``(V,)`` float32 logits after the newest token.
    """

    def __init__(
        self, reader: Reader, cache: InfiniGenCache, last: Tensor, recorder: Recorder
    ) -> None:
        self.last = last
        self._stepwise = _is_stepwise(cache)
        self._reader = reader
        self._cache = cache
        self._recorder = recorder
        cache.recorder = recorder

    @torch.no_grad()
    def blocks(self, tokens: Tensor) -> Iterator[Tensor]:
        """Feed ``tokens`` ``(n,)`` as decode steps; float32 logits ``(at most BLOCK, V)`` after
        each of them, block by block.
        """
        model = self._reader.session.model
        if tokens.numel() == 0:
            return
        for block in tokens.to(model.device).split(BLOCK):
            pieces = block.split(1 if self._stepwise else BLOCK)
            fed = [decode(model, piece[None], self._cache)[0] for piece in pieces]
            logits = torch.cat(fed).float()
            check_logits(logits)
            self.last = logits[-1]
            self._reader.note(self._cache)
            yield logits

    def feed(self, tokens: Tensor) -> Tensor:
        """`blocks`, joined: ``(n, V)``."""
        return torch.cat([self._nothing(), *self.blocks(tokens)])

    @torch.no_grad()
    def feed_prompt(self, tokens: Tensor) -> Tensor:
        """Feed ``tokens`` ``(n,)`` as more of the prompt, in full; logits ``(n, V)``."""
        if tokens.numel() == 0:
            return self._nothing()
        model = self._reader.session.model
        self._cache.expect_prompt(self._cache.get_seq_length() + tokens.numel())
        logits = forward(model, tokens[None].to(model.device), self._cache)[0].float()
        check_logits(logits)
        self.last = logits[-1]
        return logits

    def fork(self) -> Reading:
        """The same text, to go on with in another way."""
        recorder = self._recorder
        if isinstance(recorder, MissRecorder):
            recorder = recorder.fork()
        return Reading(self._reader, copy.deepcopy(self._cache), self.last, recorder)

    def _nothing(self) -> Tensor:
        return self.last.new_zeros(0, self.last.numel())


def _is_stepwise(cache: InfiniGenCache) -> bool:
    """Whether tokens must be fed one at a time: what one step adds is no longer there, or no longer
    exact, in the next.
    """
    storage = cache.storage.config
    return storage.capacity is not None or storage.codec != "none"
