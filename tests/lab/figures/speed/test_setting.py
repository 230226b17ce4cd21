"""How much is measured, cut to what a model can run."""

from __future__ import annotations

import pytest

from infinigen_kv import InputError
from infinigen_kv_lab.bench.run import EXTRA_STEPS
from infinigen_kv_lab.figures.speed.setting import FULL_SCALE, QUICK_SCALE, SHORTEST, SpeedScale


@pytest.mark.parametrize("scale", [QUICK_SCALE, FULL_SCALE])
@pytest.mark.parametrize("positions", [256, 1024, 2048, 8192])
def test_everything_fits_the_model(scale: SpeedScale, positions: int) -> None:
    fits = scale.within(positions)
    steps = max(fits.decode_tokens, fits.sweep_tokens) + EXTRA_STEPS
    for prompt in (fits.prompt_tokens, fits.sweep_prompt, *fits.lengths, *fits.contexts):
        assert prompt + steps <= positions
    assert fits.sweep_prompt + fits.text_tokens <= positions
    assert fits.text_tokens >= fits.sweep_tokens
    assert max(fits.lengths) == fits.prompt_tokens, "the headline point is one of the lengths"


def test_a_model_without_a_limit() -> None:
    assert FULL_SCALE.within(None) == FULL_SCALE


def test_a_model_that_is_too_short() -> None:
    steps = max(QUICK_SCALE.decode_tokens, QUICK_SCALE.sweep_tokens) + EXTRA_STEPS
    assert QUICK_SCALE.within(SHORTEST + steps).prompt_tokens == SHORTEST
    with pytest.raises(InputError, match="positions leave 31 tokens"):
        QUICK_SCALE.within(SHORTEST + steps - 1)


def test_another_size() -> None:
    small = FULL_SCALE.resized(700, 5)
    assert (small.prompt_tokens, small.decode_tokens) == (700, 5)
    assert small.sweep_prompt == 700 and small.lengths == (512, 700)
    assert FULL_SCALE.resized(None, None) == FULL_SCALE
    assert FULL_SCALE.resized(6000, None).lengths == FULL_SCALE.lengths


@pytest.mark.parametrize(("prompt", "steps"), [(31, None), (None, -1)])
def test_sizes_out_of_range(prompt: int | None, steps: int | None) -> None:
    with pytest.raises(InputError, match="is not valid"):
        FULL_SCALE.resized(prompt, steps)
