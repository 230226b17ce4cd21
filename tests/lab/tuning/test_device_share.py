"""Equal device memory, counted number by number and in caches."""

import pytest

from calibrating import calibrate_tiny
from infinigen_kv.memory import calibration_fields, model_request, plan_memory
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.tuning.device_share import DeviceShare
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.trial import Trials
from tiny import TINY, llama

TOKENS = 10_000


def _numbers(
    *, layers: int, whole: int, selecting: int, dim: int, rank: int, resident: float
) -> float:
    """Of one KV head, layer by layer."""
    total = 0.0
    for layer in range(layers):
        if layer < whole:
            total += TOKENS * 2 * dim
            continue
        total += resident * TOKENS * 2 * dim
        total += TOKENS * rank if layer < whole + selecting else 0
    return total


@pytest.mark.parametrize("ratio", [0.125, 0.25, 0.5])
@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("selecting", [29, 27])
def test_other_settings_keep_as_much_on_the_device(ratio: float, more: int, selecting: int) -> None:
    device = DeviceShare((0,), apart=29, selecting=selecting, head_dim=64)
    before = _numbers(layers=30, whole=1, selecting=selecting, dim=64, rank=24, resident=0.3)
    left = device.resident(device.size(0.375, 0.3), ratio, more)
    assert left is not None
    after = _numbers(
        layers=30,
        whole=1 + more,
        selecting=selecting - more,
        dim=64,
        rank=round(64 * ratio),
        resident=left,
    )
    assert 0.999 * before < after <= before


def test_too_little_left_is_no_setting() -> None:
    device = DeviceShare((), apart=4, selecting=4, head_dim=64)
    assert device.resident(device.size(0.375, 0.1), 0.75) is None
    assert device.resident(device.size(0.375, 0.1), 0.375, 1) is None
    assert device.resident(device.size(0.375, 0.9), 0.375, 4) is None


def test_sizes_are_those_of_the_model() -> None:
    model = TINY["gemma2"]().eval()  # layers 1 and 3 have full attention
    trials = Trials(model, calibrate_tiny(model), [])
    device = DeviceShare.of(trials, TuneOptions(resident_layers=(3,)))
    assert (device.whole, device.apart, device.selecting) == ((3,), 1, 1)
    assert device.head_dim == adapter_for(model).layers[0].head_dim


def test_planned_caches_hold_as_much() -> None:
    """By the memory plan, which asks the engine's own classes."""
    model = llama(head_dim=128, hidden_size=32, num_hidden_layers=6)
    trials = Trials(model, calibrate_tiny(model), [])
    device = DeviceShare.of(trials, TuneOptions(resident_layers=(0,)))
    size = device.size(0.375, 0.4)
    held = []
    for ratio, more in ((0.375, 0), (0.25, 0), (0.5, 0), (0.375, 1)):
        storage = StorageConfig(
            link="emulated:1000",
            resident=device.resident(size, ratio, more),
            resident_layers=tuple(range(1 + more)),
        )
        request = model_request(
            model,
            context=100_000,
            config=TuneOptions(partial_ratio=ratio).config(),
            storage=storage,
            **calibration_fields(trials.calibration),
        )
        held.append(plan_memory(request).caches[0].device_bytes)
    # maps from slots to places are not counted as memory of a setting
    assert max(held) < 1.02 * min(held)
