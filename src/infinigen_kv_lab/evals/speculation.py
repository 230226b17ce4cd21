"""The speculation itself, by layer and head: what the rehearsal's scores say against the true ones.

All other layers attend in full, so that each layer's own error is measured and none that it
inherits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InputError
from infinigen_kv.models.soundness import read_window
from infinigen_kv.policies.registry import cache_plan
from infinigen_kv.policies.step import Step
from infinigen_kv_lab.evals.agreement import MEASURES, VARIANTS, compare
from infinigen_kv_lab.evals.observing import read_ids
from infinigen_kv_lab.evals.probe import LayerProbe, watching
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import Inputs, Result, Sample, Task
from infinigen_kv_lab.evals.windows import split_window
from infinigen_kv_lab.kit.intervals import Estimate, share

PLACES, QUERIES = 4, 16  # decode positions of a window that are measured: places times queries
REHEARSING = frozenset({"infinigen", "infinigen-paper"})


@dataclass(frozen=True, slots=True)
class ByHead:
    """The mean over layers and heads, with its interval, and the values by layer and head."""

    mean: Estimate
    values: list[list[float]]


@dataclass(frozen=True, slots=True)
class VariantFigures:
    """One way to score, against the true scores.

    ``recall``: of the tokens chosen beyond the always-kept ones, the share that the true scores
    would have chosen, at the engine's count (by KV head). ``coverage``: attention mass on the
    chosen, the always-kept and the query's own token. ``rank_correlation``: Spearman's, over all
    tokens before the query. ``divergence``: Jensen-Shannon divergence of the attention that the
    scores stand for, in nats, at most ln 2 (the last three by query head).
    """

    recall: ByHead
    coverage: ByHead
    rank_correlation: ByHead
    divergence: ByHead


@dataclass(frozen=True, slots=True)
class Speculation(Result):
    """Figures of the rehearsal, its two sources of error apart; intervals over windows.

    ``engine`` predicts the query and scores in partial dimensions. ``true_query`` has only the
    error of the dimensions, ``all_dimensions`` only that of the prediction. ``best_coverage`` is
    the mass on as many tokens chosen by the true scores. ``chosen`` is the engine's share of the
    tokens, by layer.
    """

    windows: int
    layers: tuple[int, ...]
    engine: VariantFigures
    true_query: VariantFigures
    all_dimensions: VariantFigures
    best_coverage: ByHead
    chosen: list[float]

    def headline(self) -> dict[str, str]:
        figures = {}
        for name in MEASURES:
            means = [getattr(getattr(self, variant), name).mean.value for variant in VARIANTS]
            figures[f"{name} (true query, all dims)"] = "{:.3f} ({:.3f}, {:.3f})".format(*means)
        return figures


class SpeculationTask(Task):
    """Windows of a text; in each, a few places of the decoded part are measured."""

    name = "speculation"

    def __init__(self, ids: Tensor, *, window: int, prompt_tokens: int, source: str) -> None:
        if ids.numel() < window or window - prompt_tokens < QUERIES:
            raise InputError(
                f"task {self.name!r}: a window of {window} tokens with a prompt of {prompt_tokens} "
                f"cannot be measured in a text of {ids.numel()}: it needs a whole window, and at "
                f"least {QUERIES} tokens after the prompt"
            )
        self._windows = ids[: ids.numel() // window * window].view(-1, window)
        self._prompt = prompt_tokens
        self._source = source

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "text": self._source,
            "window": self._windows.shape[1],
            "prompt_tokens": self._prompt,
            "places": PLACES,
            "queries": QUERIES,
        }

    def __len__(self) -> int:
        return len(self._windows)

    def suits(self, policy: str) -> bool:
        """Whether the policy rehearses, and uses what that gives."""
        return policy in REHEARSING

    @torch.no_grad()
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        session, calibration = reader.session, reader.calibration
        if calibration is None:
            raise InputError(f"task {self.name!r} needs a calibrated model")
        config = cache_plan(reader.policy, session.config, session.storage).config
        window = self._windows[index].to(session.model.device)
        steps = spread_steps(config, self._prompt, len(window), window.device)
        layers: list[int] = []
        found: list[dict[str, Any]] = []

        def see(layer: int, hidden: Tensor, query: Tensor, keys: Tensor) -> None:
            spec = session.adapter.layers[layer]
            if spec.is_sliding or layer < config.first_layer:
                return
            probe = LayerProbe(
                spec,
                session.adapter,
                calibration.layers[layer],
                config,
                hidden=hidden,
                query=query,
                keys=keys,
                prompt=self._prompt,
            )
            layers.append(layer)
            each = [compare(probe.scores(step), step, config.alpha_of(layer)) for step in steps]
            found.append({name: _mean(part[name] for part in each) for name in each[0]})

        with watching(session.model, session.adapter, see):
            read_window(session.adapter, window)
        measured = {name: [layer[name] for layer in found] for name in found[0]} if found else {}
        return {"layers": layers, "measured": measured, "fetched": None, "fetched_all_layers": None}

    def summarise(
        self, samples: Sequence[Sample], full: Sequence[Sample] | None = None
    ) -> Speculation:
        def figures(name: str) -> ByHead:
            return _by_head([each["measured"][name] for each in samples])

        engine, true_query, all_dimensions = (
            VariantFigures(*(figures(f"{variant}.{measure}") for measure in MEASURES))
            for variant in VARIANTS
        )
        return Speculation(
            windows=len(samples),
            layers=tuple(samples[0]["layers"]),
            engine=engine,
            true_query=true_query,
            all_dimensions=all_dimensions,
            best_coverage=figures("best_coverage"),
            chosen=[share for (share,) in figures("chosen").values],
        )


def speculation(name: str, inputs: Inputs) -> SpeculationTask:
    """Windows of the user's text, or of WikiText-2."""
    ids, source = read_ids(name, inputs)
    window, prompt = split_window(inputs)
    return SpeculationTask(ids, window=window, prompt_tokens=prompt, source=source)


def spread_steps(
    config: InfiniGenConfig, prompt: int, window: int, device: torch.device
) -> list[Step]:
    """`PLACES` steps of `QUERIES` tokens, evenly spaced over a window's tokens after the prompt."""
    room = window - prompt - QUERIES
    starts = sorted({prompt + round(at * room / (PLACES - 1)) for at in range(PLACES)})
    return [
        Step(
            start=start,
            queries=QUERIES,
            rows=1,
            visible=None,
            position_ids=torch.arange(start, start + QUERIES, device=device)[None],
            selecting=True,
            config=config,
        )
        for start in starts
    ]


def _mean(rows: Any) -> list[float]:
    return np.nanmean(np.array(list(rows)), axis=0).tolist()


def _by_head(tables: Sequence[list[list[float | None]]]) -> ByHead:
    """Of one table, layers by heads, for each window; None where nothing was chosen."""
    stacked = np.array(tables, dtype=np.float64)  # None becomes NaN
    by_window = [float(np.nanmean(table)) for table in stacked]
    return ByHead(share(by_window, [1.0] * len(by_window)), np.nanmean(stacked, axis=0).tolist())
