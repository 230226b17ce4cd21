"""`calibrate`: sample text in, artefact out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.adapters import adapter_for
from infinigen_kv.adapters.base import Adapter
from infinigen_kv.calibration.artefact import Calibration, LayerCalibration, remove
from infinigen_kv.calibration.collect import Collector, LayerSums
from infinigen_kv.calibration.fingerprint import digest, model_fingerprint, text_hash
from infinigen_kv.errors import CalibrationError, InputError
from infinigen_kv.paths import cache_dir
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.rehearsal.predictor import fit_correction
from infinigen_kv.rehearsal.skew import skew_matrix
from infinigen_kv.texts import calibration_texts

DEFAULT_TOKENS = 16_384
DEFAULT_WINDOW = 1_024
DEFAULT_RANK = 32
FEWEST_TOKENS = 256

logger = logging.getLogger(__name__)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str] | None = None,
    *,
    tokens: int = DEFAULT_TOKENS,
    window: int = DEFAULT_WINDOW,
    rank: int = DEFAULT_RANK,
    use_cache: bool = True,
    progress: Progress = no_progress,
) -> Calibration:
    """Learn what the rehearsals need to know about a model, from sample text.

    Parameters
    ----------
    model, tokenizer
        A causal model of a supported family. It is not changed.
    texts
        Sample text; None for docstrings and source of the standard library. It need not resemble
        the prompts.
    tokens, window
        Tokens to use at most, in forwards of ``window`` tokens.
    rank
        Rank r of the correction to each layer's query projection.
    use_cache
        Look in the user's cache folder first, and leave the result there.
    progress
        Wraps the list of windows, e.g. `infinigen_kv.progress.bar`.

    Returns
    -------
    Calibration
        Its ``report`` holds per layer ``unexplained``: the share of the query's power that the
        prediction misses, with the correction and (``own_weights``) without.

    Raises
    ------
    InputError
        If a number is out of range or the texts are too short.
    UnsupportedModelError
        If the model's family has no adapter.
    """
    adapter = adapter_for(model)
    sample = list(texts) if texts is not None else calibration_texts()
    settings = _settings(sample, tokens, window, rank, adapter)
    fingerprint = model_fingerprint(adapter)
    folder = cache_dir() / "calibrations" / digest([fingerprint, settings])
    if use_cache and (found := _cached(folder)) is not None:
        return found
    windows = _windows(tokenizer, sample, tokens, settings["window"])
    sums = _collect(model, adapter, windows, progress)
    layers = {}
    report = {}
    for index in list(sums):
        layers[index], report[str(index)] = _fit(adapter, index, sums.pop(index), rank)
    made = Calibration(fingerprint, settings, layers, report)
    if use_cache:
        made.save(folder)
    return made


def _settings(
    sample: list[str], tokens: int, window: int, rank: int, adapter: Adapter
) -> dict[str, Any]:
    for name, value, least in (("tokens", tokens, 1), ("window", window, 2), ("rank", rank, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise InputError(f"{name}={value!r} is not valid: it must be an integer >= {least}")
    return {
        "tokens": tokens,
        "window": min(window, adapter.max_positions or window),
        "rank": rank,
        "texts_sha256": text_hash(sample),
    }


def _cached(folder: Any) -> Calibration | None:
    if not folder.exists():
        return None
    try:
        return Calibration.load(folder)
    except CalibrationError as error:
        logger.warning("ignoring the cached calibration: %s", error)
        remove(folder)
        return None


def _windows(
    tokenizer: PreTrainedTokenizerBase, sample: list[str], tokens: int, window: int
) -> list[Tensor]:
    """Consecutive windows ``(1, window)`` of every text in turn, ``tokens`` in all."""
    pieces = [
        piece
        for text in sample
        for piece in torch.tensor(tokenizer(text, verbose=False)["input_ids"]).long().split(window)
        if piece.numel() > 1
    ]
    # every text contributes, whatever its place in the list
    stride = max(1, sum(piece.numel() for piece in pieces) // tokens)
    chosen = pieces[::stride][: max(1, tokens // window)]
    found = sum(piece.numel() for piece in chosen)
    if found < FEWEST_TOKENS:
        raise InputError(
            f"the calibration text has {found} tokens: it must have at least {FEWEST_TOKENS}"
        )
    return [piece[None] for piece in chosen]


@torch.no_grad()
def _collect(
    model: PreTrainedModel, adapter: Adapter, windows: list[Tensor], progress: Progress
) -> dict[int, LayerSums]:
    collector = Collector(adapter)
    training = model.training
    model.eval()
    try:
        with collector.watching():
            for window in progress(windows, "calibrating"):
                adapter.decoder(input_ids=window.to(model.device), use_cache=False)
    finally:
        model.train(training)
    return collector.sums


@torch.no_grad()
def _fit(
    adapter: Adapter, index: int, sums: LayerSums, rank: int
) -> tuple[LayerCalibration, dict[str, float]]:
    weight, bias = adapter.query_weight(index)
    weight = weight.detach().cpu()
    bias = None if bias is None else bias.detach().cpu()
    rank = min(rank, *sums.cross_moment.shape)
    down, up = fit_correction(sums.input_moment, sums.cross_moment, weight, bias, rank)
    own = torch.zeros(sums.cross_moment.shape, dtype=torch.float64)
    own[:-1] = weight.double().mT
    if bias is not None:
        own[-1] = bias.double()
    report = {
        "unexplained": _unexplained(sums, own + down.double() @ up.double()),
        "own_weights": _unexplained(sums, own),
    }
    return LayerCalibration(down, up, skew_matrix(sums.query_moment)), report


def _unexplained(sums: LayerSums, mapping: Tensor) -> float:
    """E|q - [x 1] W|^2 / E|q|^2 for a map W ``(M+1, N)``."""
    error = (
        sums.query_power.sum()
        - 2 * (mapping * sums.cross_moment).sum()
        + (mapping * (sums.input_moment @ mapping)).sum()
    )
    return (error / sums.query_power.sum()).item()
