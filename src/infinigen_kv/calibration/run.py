"""`calibrate`: sample text in, artefact out."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration, LayerCalibration, remove
from infinigen_kv.calibration.collect import Collector, LayerSums
from infinigen_kv.calibration.cost import Stages
from infinigen_kv.calibration.fingerprint import (
    digest,
    model_fingerprint,
    precision_of,
    text_hash,
)
from infinigen_kv.calibration.replacing import current
from infinigen_kv.calibration.texts import calibration_texts
from infinigen_kv.checks import check_integer
from infinigen_kv.errors import CalibrationError, InfiniGenError, InputError
from infinigen_kv.files import cache_dir
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.soundness import check_known, check_weights
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.rehearsal.predictor import fit_correction
from infinigen_kv.rehearsal.skew import skew_matrix

DEFAULT_TOKENS = 16_384
DEFAULT_WINDOW = 1_024
DEFAULT_RANK = 32
FEWEST_TOKENS = 256
METHOD = 1  # raised when a change of the method makes earlier artefacts differ

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
        prediction misses, with the correction and (``own_weights``) without. Its ``cost`` holds
        seconds and memory of collecting, fitting and skew.

    Raises
    ------
    InputError
        If a number is out of range or the texts are too short.
    UnsupportedModelError
        If the model's family has no adapter.
    InfiniGenError
        If the model has weights of NaN or infinity, or computes them.
    """
    adapter = adapter_for(model)
    if isinstance(texts, str):
        texts = [texts]
    sample = list(texts) if texts is not None else calibration_texts()
    settings = _settings(sample, tokens, window, rank, adapter)
    check_weights(adapter)
    fingerprint = model_fingerprint(adapter)
    folder = cached_folder(fingerprint, settings)
    if use_cache and (found := _cached(folder)) is not None:
        return found
    layers = {}
    report = {}
    with Stages(model.device) as stages:
        with stages.stage("collecting"):
            windows = _windows(tokenizer, sample, tokens, settings["window"])
            sums = _collect(model, adapter, windows, progress)
        for index in list(sums):
            mine = sums.pop(index)
            layers[index], report[str(index)] = _fit(adapter, index, mine, rank, stages)
    made = Calibration(
        fingerprint,
        settings,
        layers,
        report,
        cost=stages.to_dict(),
        precision=precision_of(adapter),
    )
    if use_cache:
        try:
            made.save(folder)
        except (OSError, CalibrationError) as error:  # e.g. another process was there first
            logger.warning("the calibration is not kept for next time: %s", error)
    return made


def cached_folder(fingerprint: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    """Where the user's cache holds the calibration of a model with these settings."""
    return cache_dir() / "calibrations" / digest([dict(fingerprint), dict(settings)])


def _settings(
    sample: list[str], tokens: int, window: int, rank: int, adapter: Adapter
) -> dict[str, Any]:
    for name, value, least in (("tokens", tokens, 1), ("window", window, 2), ("rank", rank, 1)):
        check_integer(name, value, least)
    return {
        "method": METHOD,
        "tokens": tokens,
        "window": min(window, adapter.max_positions or window),
        "rank": rank,
        "texts_sha256": text_hash(sample),
    }


def _cached(folder: Any) -> Calibration | None:
    if not current(folder).exists():
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
    """Windows ``(1, window or fewer)`` from all of the texts, at most ``tokens`` in all."""
    pieces = [
        piece
        for text in sample
        for piece in torch.tensor(tokenizer(text, verbose=False)["input_ids"]).long().split(window)
        if piece.numel() > 1
    ]
    # evenly spaced, so that every text contributes, whatever its place in the list
    share = min(1.0, tokens / max(1, sum(piece.numel() for piece in pieces)))
    spaced = [int((at + 1) * share) > int(at * share) for at in range(len(pieces))]
    order = sorted(range(len(pieces)), key=lambda at: not spaced[at])  # these first, then the rest
    chosen: list[Tensor] = []
    found = 0
    for piece in (pieces[at] for at in order):
        chosen.append(piece[: tokens - found])
        found += chosen[-1].numel()
        if found == tokens:
            break
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
    with _evaluating(model), collector.watching():
        for window in progress(windows, "calibrating"):
            check_known(window, model)
            adapter.decoder(input_ids=window.to(model.device), use_cache=False)
    return collector.sums


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode inside the block; after it every module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@torch.no_grad()
def _fit(
    adapter: Adapter, index: int, sums: LayerSums, rank: int, stages: Stages
) -> tuple[LayerCalibration, dict[str, float]]:
    weight, bias = adapter.query_weight(index)
    weight = weight.detach().cpu()
    bias = None if bias is None else bias.detach().cpu()
    rank = min(rank, *sums.cross_moment.shape)
    moments = (sums.input_moment, sums.cross_moment, sums.query_moment)
    if not all(bool(each.isfinite().all()) for each in moments):
        raise InfiniGenError(
            f"the inputs or queries of layer {index} contain NaN or infinity, or queries too large "
            "for their squares, so it cannot be calibrated; check the model's weights and dtype "
            "(float16 may overflow where bfloat16 does not)"
        )
    with stages.stage("fitting"):
        down, up = fit_correction(sums.input_moment, sums.cross_moment, weight, bias, rank)
        own = torch.zeros(sums.cross_moment.shape, dtype=torch.float64)
        own[:-1] = weight.double().mT
        if bias is not None:
            own[-1] = bias.double()
        report = {
            "unexplained": _unexplained(sums, own + down.double() @ up.double()),
            "own_weights": _unexplained(sums, own),
        }
    with stages.stage("skew"):
        skew = skew_matrix(sums.query_moment)
    return LayerCalibration(down, up, skew), report


def _unexplained(sums: LayerSums, mapping: Tensor) -> float:
    """E|q - [x 1] W|^2 / E|q|^2 for a map W ``(M+1, N)``."""
    error = (
        sums.query_power.sum()
        - 2 * (mapping * sums.cross_moment).sum()
        + (mapping * (sums.input_moment @ mapping)).sum()
    )
    return (error / sums.query_power.sum()).item()
