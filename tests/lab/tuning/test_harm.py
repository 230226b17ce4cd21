"""The harm of one layer's selection, against the engine with that layer alone selecting."""

import pytest
import torch
from transformers import PreTrainedModel

from calibrating import calibrate_tiny, selecting, tokens
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import InfiniGenError
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.session.attach import attach
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.tuning.harm import HarmMeter
from tiny import TINY

PROMPT, DECODED = 60, 24
ALPHA = 2.0
SMALL = 0.3  # nats, up to which the second order is near the truth


@pytest.mark.parametrize(
    ("family", "factor"),
    [("llama", 1.35), ("qwen2", 1.35), ("opt", 1.35), ("gemma2", 2.5)],  # the last caps its logits
)
def test_harm_is_the_kl_of_the_layer_alone(family: str, factor: float) -> None:
    model = TINY[family]().eval()
    calibration = calibrate_tiny(model)
    config = selecting(max_fetch=0.97)
    layers = [spec.index for spec in adapter_for(model).layers[1:] if not spec.is_sliding]
    meter = HarmMeter(model, adapter_for(model), calibration, config, layers, (ALPHA, 1e6))
    text = [tokens(1, PROMPT + DECODED, seed)[0] for seed in range(6)]
    harms = torch.stack([meter.read(each[:PROMPT], each[PROMPT:]) for each in text]).mean(0)
    assert harms.shape == (len(layers), 2)
    compared = 0
    for layer, (harm, _) in zip(layers, harms.tolist(), strict=True):
        real = _kl_of(layer, model, calibration, config, text)
        assert real > 0
        if real < SMALL:
            assert real / factor < harm < real * factor
            compared += 1
    assert compared >= 2


def test_a_covering_selection_does_no_harm_and_the_model_stays_as_it_was() -> None:
    model = TINY["llama"]().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attention = model.config._attn_implementation
    calibration = calibrate_tiny(model)
    meter = HarmMeter(model, adapter_for(model), calibration, selecting(max_fetch=1.0), [1], (1e6,))
    text = tokens(1, PROMPT + DECODED)[0]
    assert meter.read(text[:PROMPT], text[PROMPT:]).item() < 1e-9
    assert model.config._attn_implementation == attention
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert all(each.grad is None for each in model.parameters())


def test_a_model_that_computes_nan_is_refused() -> None:
    model = TINY["llama"]().eval()
    calibration = calibrate_tiny(model)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    meter = HarmMeter(model, adapter_for(model), calibration, selecting(), [1], (1.0,))
    text = tokens(1, PROMPT + DECODED)[0]
    with pytest.raises(InfiniGenError, match="logits contain NaN or infinity"):
        meter.read(text[:PROMPT], text[PROMPT:])
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def _kl_of(
    layer: int,
    model: PreTrainedModel,
    calibration: Calibration,
    config: InfiniGenConfig,
    text: list[torch.Tensor],
) -> float:
    """Mean KL(full || selected) where ``layer`` selects and the others are kept whole."""
    full_layers = tuple(
        spec.index
        for spec in adapter_for(model).layers
        if spec.index != layer and not spec.is_sliding
    )
    own = InfiniGenConfig(
        alpha=ALPHA,
        **{
            name: getattr(config, name)
            for name in ("partial_ratio", "recent_tokens", "sink_tokens", "max_fetch")
        },
        min_context=config.min_context,
    )
    found = []
    storage = StorageConfig(home="ram", resident_layers=full_layers)
    with attach(model, calibration, own, storage, kernels="torch") as session:
        for each in text:
            logits = {}
            for policy in ("ideal", "infinigen"):
                cache = session.new_cache(tokens=len(each), policy=policy)
                prefill(session, cache, each[None, :PROMPT])
                logits[policy] = torch.cat(
                    [forward(model, token[None, None], cache)[0] for token in each[PROMPT:]]
                ).log_softmax(-1)
                cache.close()
            full, ours = logits["ideal"], logits["infinigen"]
            found.append((full.exp() * (full - ours)).sum(-1))
    return torch.cat(found).double().mean().item()
