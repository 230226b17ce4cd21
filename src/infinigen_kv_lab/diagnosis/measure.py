"""`diagnose`: a model and a text in, figures of every layer and a verdict out."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.files import plain
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.policies.layer_roles import speculated_layers
from infinigen_kv.progress import Progress, no_progress
from infinigen_kv.session.attach import Session, attach
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.diagnosis.evidence import Evidence, LayerEvidence, ResidentTrial
from infinigen_kv_lab.diagnosis.layerwise import LayerwiseKL
from infinigen_kv_lab.diagnosis.observing import LayerObserver
from infinigen_kv_lab.diagnosis.verdict import Thresholds, Verdict, judge
from infinigen_kv_lab.evals.perplexity import Perplexity, PerplexityTask
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.kit.intervals import Estimate

ENGINE, PAPER, ORACLE = "infinigen", "infinigen-paper", "oracle"
LEAST_DECODED = 32  # tokens: room for at least two of the places that a layer is measured at
HARM_TOKENS = 64  # of a window, read once for each layer that selects
TRIED = 0.1  # share of the layers that are tried to be kept whole: those that harm most


@dataclass(frozen=True, slots=True)
class Windows:
    """Which parts of a text are read.

    Parameters
    ----------
    ids
        ``(count, prompt + decoded)`` token ids.
    prompt
        Tokens at the start of each that are read in full; the others select.
    """

    ids: Tensor
    prompt: int

    @classmethod
    def spread(cls, ids: Sequence[int], *, prompt: int, decoded: int, count: int) -> Windows:
        """``count`` windows, or as many as there are, from evenly spaced parts of a text.

        Raises
        ------
        InputError
            If a number is out of range or the text has no whole window.
        """
        if prompt < 1 or decoded < LEAST_DECODED or count < 1:
            raise InputError(
                f"prompt={prompt}, decoded={decoded}, count={count} are not valid: they must be "
                f"at least 1, {LEAST_DECODED} and 1"
            )
        length = prompt + decoded
        there = len(ids) // length
        if there == 0:
            raise InputError(
                f"the text has {len(ids)} tokens, and one window takes {length} ({prompt} and "
                f"{decoded} after them): give a longer text or choose fewer tokens"
            )
        table = torch.tensor(ids[: there * length]).view(there, length)
        count = min(count, there)
        return cls(table[[at * there // count for at in range(count)]], prompt)


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """One way to choose, on the same tokens: KL(full || it) in nats per token with its interval,
    share of tokens with the same most likely one, perplexity over the full cache's, and the share
    of the cache that the selecting layers and all layers attend to.
    """

    kl: Estimate
    top1_same: float
    ratio: Estimate
    fetched: float
    fetched_all_layers: float

    @classmethod
    def of(cls, found: Perplexity) -> PolicyFigures:
        """From the result of a `PerplexityTask`."""
        return cls(
            kl=found.kl,
            top1_same=found.top1_same,
            ratio=found.ratio,
            fetched=found.fetched_share,
            fetched_all_layers=found.fetched_share_all_layers,
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was measured, and what it comes to.

    Attributes
    ----------
    evidence
        The layers that select, and the figures that the verdict rests on.
    unselected
        Why other layers do not select, by index.
    policies
        The whole model: ``infinigen`` as configured, ``infinigen-paper`` with its own defaults
        (absent where the configuration is the paper's rehearsal already), and ``oracle``: as many
        tokens as ``infinigen``, chosen by the true scores.
    windows, prompt_tokens, decoded_tokens
        How much text was read: so many windows of prompt and later tokens.
    """

    evidence: Evidence
    verdict: Verdict
    unselected: Mapping[int, str]
    policies: Mapping[str, PolicyFigures]
    windows: int
    prompt_tokens: int
    decoded_tokens: int
    seconds: float

    @property
    def layers(self) -> tuple[LayerEvidence, ...]:
        """Those that select."""
        return self.evidence.layers

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is undefined is None."""
        return plain(asdict(self))


def diagnose(
    model: PreTrainedModel,
    calibration: Calibration,
    windows: Windows,
    config: InfiniGenConfig | None = None,
    *,
    thresholds: Thresholds | None = None,
    progress: Progress = no_progress,
) -> Diagnosis:
    """Measure on held-back text whether InfiniGen suits a model, and which layers are weak.

    Parameters
    ----------
    model, calibration
        The model, not attached, and what was learned about it from other text.
    config
        Settings of the selection; None for what was tuned for the model, or the defaults.

    Raises
    ------
    InputError
        If no layer can select, the model has too few positions for a window, or a window's prompt
        is shorter than the configuration's ``min_context``.
    InfiniGenError
        If the model computes NaN or infinity.
    """
    started = time.perf_counter()
    settings = calibration.config() if config is None else config
    adapter = adapter_for(model)
    check_measurable(adapter, settings, windows)
    policies = _whole_model(model, calibration, settings, windows, progress)
    with attach(model, calibration, settings) as session:
        observer = LayerObserver(session, calibration, prompt=windows.prompt)
        for window in progress(list(windows.ids), "layers beside the truth"):
            observer.read(window)
        meter = _layerwise_kl(session, windows, 0)
        layers = progress(observer.layers, "each layer alone")
        harm = {layer: meter.kl({layer}) for layer in layers}
        if len(windows.ids) > 1:  # on the tokens that chose them, their worth would be flattered
            meter = _layerwise_kl(session, windows, -1)
        trial = _try_resident(meter, harm)
    unselected = _unselected(adapter, settings)
    evidence = Evidence(
        config=settings,
        layers=observer.evidence(harm),
        kl=policies[ENGINE].kl.value,
        best_kl=policies[ORACLE].kl.value,
        fetched=policies[ENGINE].fetched,
        full_layers=tuple(layer for layer in unselected if not adapter.layers[layer].is_sliding),
        trial=trial,
    )
    return Diagnosis(
        evidence=evidence,
        verdict=judge(evidence, thresholds),
        unselected=unselected,
        policies=policies,
        windows=len(windows.ids),
        prompt_tokens=windows.prompt,
        decoded_tokens=windows.ids.shape[1] - windows.prompt,
        seconds=time.perf_counter() - started,
    )


def check_measurable(adapter: Adapter, config: InfiniGenConfig, windows: Windows) -> None:
    """Raise `InputError` now where `diagnose` could not measure."""
    if not speculated_layers(adapter.layers, config):
        raise InputError(
            f"none of the model's {len(adapter.layers)} layers can select: a layer needs full "
            f"attention and a predecessor (and first_layer={config.first_layer} allows no earlier "
            "one); attend to everything instead"
        )
    length = windows.ids.shape[1]
    if adapter.max_positions is not None and length > adapter.max_positions:
        raise InputError(
            f"a window of {length} tokens is longer than the model's {adapter.max_positions} "
            "positions: choose fewer tokens"
        )
    if windows.prompt < config.min_context:
        raise InputError(
            f"after a prompt of {windows.prompt} tokens nothing is selected before the context has "
            f"{config.min_context} (min_context): choose a longer prompt or a smaller min_context"
        )


def _whole_model(
    model: PreTrainedModel,
    calibration: Calibration,
    config: InfiniGenConfig,
    windows: Windows,
    progress: Progress,
) -> dict[str, PolicyFigures]:
    """KL and what it takes, of each policy on the same windows."""
    task = PerplexityTask(
        "whole model",
        windows.ids.flatten(),
        window=windows.ids.shape[1],
        prompt_tokens=windows.prompt,
        source="",
    )
    names = [ENGINE, ORACLE] if config.rehearsal == "paper" else [ENGINE, ORACLE, PAPER]
    subject = Subject(model, calibration, config, StorageConfig())
    found: dict[str, PolicyFigures] = {}
    for point in evaluate(subject, task, names, progress=progress):
        assert isinstance(point.result, Perplexity)
        found[point.policy] = PolicyFigures.of(point.result)
    if not all(math.isfinite(each.kl.value) for each in found.values()):
        raise InfiniGenError(
            "the model's logits contain NaN or infinity, so it cannot be diagnosed; check the "
            "model's weights and dtype (float16 may overflow where bfloat16 does not)"
        )
    return found


def _layerwise_kl(session: Session, windows: Windows, index: int) -> LayerwiseKL:
    window, end = windows.ids[index], windows.prompt + HARM_TOKENS
    return LayerwiseKL(session, window[: windows.prompt], window[windows.prompt : end])


def _try_resident(meter: LayerwiseKL, harm: Mapping[int, float]) -> ResidentTrial | None:
    """Keep the layers that harm most on the device; None where there are too few to leave any."""
    count = max(1, round(TRIED * len(harm)))
    if count >= len(harm):
        return None
    kept = sorted(sorted(harm, key=harm.__getitem__, reverse=True)[:count])
    return ResidentTrial(
        layers=tuple(kept), kl=meter.kl(set(harm)), kl_kept=meter.kl(set(harm) - set(kept))
    )


def _unselected(adapter: Adapter, config: InfiniGenConfig) -> dict[int, str]:
    """Layers that do not select, and why."""
    reasons = {}
    selecting = speculated_layers(adapter.layers, config)
    for spec in adapter.layers:
        if spec.index in selecting:
            continue
        if spec.is_sliding:
            reasons[spec.index] = "sliding window: it keeps its window only"
        elif spec.index == 0:
            reasons[spec.index] = "first layer: no predecessor to rehearse from"
        else:
            reasons[spec.index] = f"below first_layer={config.first_layer}"
    return reasons
