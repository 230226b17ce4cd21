"""`tune`: a wanted KL in, settings out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.texts import calibration_texts
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv.errors import InputError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv_lab.tuning.alternatives import Alternatives
from infinigen_kv_lab.tuning.measurements import Measurements
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.report import report
from infinigen_kv_lab.tuning.search import Search, reachable
from infinigen_kv_lab.tuning.trial import Trials
from infinigen_kv_lab.tuning.windows import Window, split_windows


def tune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    calibration: Calibration,
    options: TuneOptions | None = None,
    texts: Sequence[str] | None = None,
    *,
    kept: Measurements | None = None,
    progress: Progress = no_progress,
) -> Calibration:
    """Find settings with which a wanted KL costs the fewest bytes over the link.

    First the alpha of every layer. Its part of the KL comes from gradients (`HarmMeter`), what it
    moves from the engine's own steps at a few single alphas. The alphas that these curves propose
    are tried, the curves' promise corrected by what comes out. Then other settings at equal device
    memory (`Alternatives`). What is best is checked on text held back.

    Parameters
    ----------
    model, tokenizer
        Not attached. Not changed.
    calibration
        Of that model.
    texts
        None for those that models are calibrated on, which evaluations do not use.
    kept
        Where measurements are kept, so that an interrupted run goes on and one for another KL
        reuses them; None to keep none.
    progress
        Wraps the lists of what is to be done.

    Returns
    -------
    Calibration
        The same one with ``tuned`` settings, whose ``measured`` says what they cost.

    Raises
    ------
    InputError
        If the text or the model's positions are too few, or no layer selects.
    CalibrationError
        If the calibration belongs to another model.
    """
    wanted = options or TuneOptions()
    plain = replace(calibration, tuned=None)
    plain.check_model(adapter_for(model))
    windows, held_back = _windows(model, tokenizer, wanted, texts)
    trials = Trials(model, plain, windows, kept)
    given = Search(trials, reachable(trials, wanted))
    for task in progress(given.tasks, "tuning alpha"):
        task()
    others = Alternatives(given, wanted, progress)
    others.explore()
    found = others.search
    checks = Trials(model, plain, held_back, kept)
    checked = {
        each: checks.measure(each.options.config(each.best.alpha), each.options.storage)
        for each in progress(list({given, found}), "checking on text held back")
    }
    return replace(calibration, tuned=_tuned(found, report(given, found, checked, others.tried)))


def _tuned(found: Search, measured: dict[str, Any]) -> Tuned:
    options, config = found.options, found.options.config()
    layers = options.resident_layers
    return Tuned(
        alpha=found.best.alpha,
        max_fetch=config.max_fetch,
        partial_ratio=config.partial_ratio,
        target_kl=float(options.target_kl),
        measured=measured,
        resident=options.resident,
        resident_layers=None if layers == "auto" else layers,
    )


def check_positions(model: PreTrainedModel, wanted: TuneOptions) -> None:
    """Raise `InputError` if a window is longer than the model's positions."""
    positions = adapter_for(model).max_positions
    tokens = wanted.prompt_tokens + wanted.decode_tokens
    if positions is not None and tokens > positions:
        raise InputError(
            f"windows of {tokens} tokens ({wanted.prompt_tokens} and {wanted.decode_tokens}) are "
            f"longer than the model's {positions} positions: choose fewer prompt tokens"
        )


def _windows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    wanted: TuneOptions,
    texts: Sequence[str] | None,
) -> tuple[list[Window], list[Window]]:
    check_positions(model, wanted)
    return split_windows(
        tokenizer,
        calibration_texts() if texts is None else texts,
        prompt_tokens=wanted.prompt_tokens,
        decode_tokens=wanted.decode_tokens,
        count=wanted.windows,
        device=model.device,
    )
