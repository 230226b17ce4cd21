"""What all speed figures of a run have in common, and how much of it they measure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from infinigen_kv.errors import InputError
from infinigen_kv_lab.bench.run import EXTRA_STEPS, IDEAL
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.peer_results import PeerResults

COMPARED = ("stream", "stream-int4", "h2o", "infinigen")
"""What the paper's figures compare, where they vary something else."""
SHORTEST = 32  # tokens of a prompt, below which a figure would show nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedScale:
    """How much is measured: all of it, or what two cores do in some minutes.

    Parameters
    ----------
    prompt_tokens, decode_tokens
        P and T of what the headline figures rest on.
    sweep_prompt, sweep_tokens
        P and T of what sweeps are made of.
    text_tokens
        Positions of a text that a perplexity is measured on.
    lengths
        Prompt lengths of Figure 16a.
    batches
        Of Figure 15.
    depths
        Shares of the layers that Figure 16b keeps where there is only one model.
    alphas, ratios
        Of Figure 17.
    rates
        Of the sweep over the link, GB/s.
    residents
        Of the sweep over the resident set, shares of the context.
    budgets, pareto_alphas
        Of the plot of accuracy against bytes.
    contexts
        Of the plot in one memory.
    """

    prompt_tokens: int
    decode_tokens: int
    sweep_prompt: int
    sweep_tokens: int
    text_tokens: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    depths: tuple[float, ...]
    alphas: tuple[float, ...]
    ratios: tuple[float, ...]
    rates: tuple[float, ...]
    residents: tuple[float, ...]
    budgets: tuple[float, ...]
    pareto_alphas: tuple[float, ...]
    contexts: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, least in (("prompt_tokens", SHORTEST), ("decode_tokens", 1)):
            value = getattr(self, name)
            if value < least:
                raise InputError(f"{name}={value} is not valid: it must be an integer >= {least}")

    def resized(self, prompt_tokens: int | None, decode_tokens: int | None) -> SpeedScale:
        """With another P or T for the headline figures; then no prompt is longer than P."""
        decode = self.decode_tokens if decode_tokens is None else decode_tokens
        scale = replace(self, decode_tokens=decode)
        if prompt_tokens is None:
            return scale
        return self._bounded(replace(scale, prompt_tokens=prompt_tokens), prompt_tokens)

    def within(self, positions: int | None) -> SpeedScale:
        """What a model with so many positions can run.

        Raises
        ------
        InputError
            If nothing of use fits.
        """
        if positions is None:
            return self
        new = max(self.decode_tokens, self.sweep_tokens) + EXTRA_STEPS
        longest = positions - new
        if longest < SHORTEST:
            raise InputError(
                f"the model's {positions} positions leave {max(0, longest)} tokens for a prompt "
                f"beside {new} new ones: at least {SHORTEST} are needed, so decode fewer tokens"
            )
        text = min(self.text_tokens, positions - min(self.sweep_prompt, longest))
        return self._bounded(replace(self, text_tokens=text), longest)

    @staticmethod
    def _bounded(scale: SpeedScale, longest: int) -> SpeedScale:
        """No prompt longer than ``longest``; the longest of each list becomes that instead."""

        def cut(lengths: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(sorted({min(each, longest) for each in lengths}))

        return replace(
            scale,
            prompt_tokens=min(scale.prompt_tokens, longest),
            sweep_prompt=min(scale.sweep_prompt, longest),
            lengths=cut(scale.lengths),
            contexts=cut(scale.contexts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedSetting:
    """What all speed figures of a run have in common.

    Parameters
    ----------
    scale
        How much is measured, already cut to what the model can run.
    link
        Where time counts, the rate of ``emulated:paper`` put in.
    counting_link
        Where only bytes and KL count: one that keeps nobody waiting.
    policies, peers
        What Figure 14 compares.
    layers
        Of the main model.
    model
        The main model's name.
    models
        Names of further models, or none.
    peer_results
        What other programs wrote.
    prompt_digest
        Of the headline prompt, for programs that read it too.
    """

    scale: SpeedScale
    link: str
    counting_link: str
    policies: tuple[str, ...]
    peers: tuple[str, ...]
    layers: int
    model: str
    models: tuple[str, ...] = ()
    peer_results: tuple[PeerResults, ...] = ()
    prompt_digest: str = ""

    def headline(self) -> SpeedMeasurement:
        """All systems on the headline prompt; the oracle is a bound and none."""
        return SpeedMeasurement(
            policies=tuple(name for name in self.policies if name not in (IDEAL, "oracle")),
            peers=self.peers,
            prompt_tokens=self.scale.prompt_tokens,
            decode_tokens=self.scale.decode_tokens,
            link=self.link,
        )

    def sweep(self, **changes: Any) -> SpeedMeasurement:
        """One of many: a short prompt, few steps."""
        own = {
            "policies": COMPARED,
            "prompt_tokens": self.scale.sweep_prompt,
            "decode_tokens": self.scale.sweep_tokens,
            "link": self.link,
        }
        return SpeedMeasurement(**{**own, **changes})


FULL_SCALE = SpeedScale(
    prompt_tokens=4096,
    decode_tokens=64,
    sweep_prompt=2048,
    sweep_tokens=24,
    text_tokens=512,
    lengths=(512, 1024, 1536, 2048, 4096),
    batches=(1, 2, 4, 8),
    depths=(0.25, 0.5, 1.0),
    alphas=(1.0, 2.0, 3.0, 4.25, 5.0, 6.0, 8.0),
    ratios=(0.1, 0.2, 0.3, 0.375, 0.5, 0.75, 1.0),
    rates=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0),
    residents=(0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    budgets=(0.02, 0.05, 0.1, 0.2, 0.3, 0.5),
    pareto_alphas=(1.5, 3.0, 4.25, 6.0, 8.0, 11.0),
    contexts=(16, 4096, 8000),
)
QUICK_SCALE = SpeedScale(
    prompt_tokens=1024,
    decode_tokens=6,
    sweep_prompt=512,
    sweep_tokens=4,
    text_tokens=128,
    lengths=(256, 512, 1024),
    batches=(1, 2),
    depths=(0.5, 1.0),
    alphas=(2.0, 4.25, 7.0),
    ratios=(0.2, 0.375, 0.75),
    rates=(0.25, 2.0, 64.0),
    residents=(0.0, 0.1, 0.3),
    budgets=(0.05, 0.2),
    pareto_alphas=(2.0, 4.25, 8.0),
    contexts=(16, 1024),
)
