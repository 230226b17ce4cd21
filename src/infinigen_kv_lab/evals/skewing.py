"""What the paper's skew does to queries and keys: few columns come to carry most of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.errors import InputError
from infinigen_kv.models.soundness import read_window
from infinigen_kv_lab.evals.observing import ByLayer, ModelTask, by_layer, read_ids
from infinigen_kv_lab.evals.probe import seeing_attention
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.task import Inputs, Result, Sample
from infinigen_kv_lab.evals.windows import split_window

TOP = 0.3  # of the columns: the paper's partial ratio (section 4.3)
SERIES = ("query", "query_skewed", "key", "key_skewed")


@dataclass(frozen=True, slots=True)
class Skewing(Result):
    """Shares of the magnitude that the largest `TOP` of a head's columns carry, by layer.

    The magnitude of a column is its sum of absolute values over the window's tokens, of the
    queries and keys as the attention uses them. Columns are ordered for each head by itself; the
    shares are means over heads. ``curves``: by the name of a series and by layer, the share of
    every column, largest first.
    """

    windows: int
    window: int
    layers: tuple[int, ...]
    query: ByLayer
    query_skewed: ByLayer
    key: ByLayer
    key_skewed: ByLayer
    curves: dict[str, list[list[float]]]

    def headline(self) -> dict[str, str]:
        return {
            f"{name.replace('_', ', ')}: top {TOP:.0%}".replace("%", " %"): str(
                getattr(self, name).mean
            )
            for name in SERIES
        }


class SkewingTask(ModelTask):
    """Windows of a text, each read once with full attention."""

    @torch.no_grad()
    def measure(self, reader: Reader, index: int, shared: Any) -> Sample:
        session, calibration = reader.session, reader.calibration
        if calibration is None:
            raise InputError(f"task {self.name!r} needs a calibrated model")
        layers: list[int] = []
        curves: dict[str, list[list[float]]] = {name: [] for name in SERIES}

        def see(layer: int, query: Tensor, keys: Tensor) -> None:
            if layer not in calibration.layers:
                return
            layers.append(layer)
            skew = calibration.layers[layer].skew.to(keys.device)
            for name, tensor in (("query", query), ("key", keys)):
                grouped = tensor[0].float().unflatten(0, (len(skew), -1))  # (H_kv, G, N, D)
                curves[name].append(column_shares(grouped))
                curves[f"{name}_skewed"].append(column_shares(grouped @ skew.unsqueeze(1)))

        window = self._windows[index].to(session.model.device)
        with seeing_attention(session.model, see):
            read_window(session.adapter, window)
        return {"layers": layers, "curves": curves, "fetched": None, "fetched_all_layers": None}

    def summarise(self, samples: Sequence[Sample], full: Sequence[Sample] | None = None) -> Skewing:
        curves = {
            name: np.mean([each["curves"][name] for each in samples], axis=0).tolist()
            for name in SERIES
        }
        tops = [
            {name: [_top(curve) for curve in each["curves"][name]] for name in SERIES}
            for each in samples
        ]
        return Skewing(
            windows=len(samples),
            window=self._windows.shape[1],
            layers=tuple(samples[0]["layers"]),
            **{name: by_layer(tops, name) for name in SERIES},
            curves=curves,
        )


def skewing(name: str, inputs: Inputs) -> SkewingTask:
    """Windows of the user's text, or of WikiText-2."""
    ids, source = read_ids(name, inputs)
    window, _ = split_window(inputs)
    return SkewingTask(name, ids, window=window, source=source)


def column_shares(tensor: Tensor) -> list[float]:
    """Each column's share of the sum of absolute values, largest first, mean over heads.

    ``tensor`` is ``(H_kv, G, N, D)``; the result has D values that add up to 1.
    """
    magnitude = tensor.abs().sum(dim=2).flatten(0, 1).double()  # (H, D)
    shares = magnitude / magnitude.sum(dim=1, keepdim=True)
    return shares.sort(dim=1, descending=True).values.mean(dim=0).tolist()


def without_skew(calibration: Calibration) -> Calibration:
    """The same calibration, its skew matrices identities: the paper's rehearsal without a skew."""
    layers = {
        index: replace(layer, skew=torch.eye(layer.skew.shape[-1]).expand_as(layer.skew).clone())
        for index, layer in calibration.layers.items()
    }
    return replace(calibration, layers=layers, settings={**calibration.settings, "skew": "none"})


def _top(curve: list[float]) -> float:
    return sum(curve[: max(1, round(TOP * len(curve)))])
