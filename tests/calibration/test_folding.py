"""The skew folded into OPT's weights changes nothing but the columns' magnitudes."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from infinigen_kv import Calibration, CalibrationError, InputError, calibrate
from infinigen_kv.calibration.folding import fold_skew
from infinigen_kv.models.adapters import adapter_for
from tiny import TINY, VOCABULARY


class TokenIds:
    """Reads a text of numbers as token ids."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


@pytest.fixture(scope="module")
def opt() -> tuple[Any, Calibration]:
    model = TINY["opt"]()
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(VOCABULARY, (2048,), generator=generator).tolist()
    text = " ".join(map(str, numbers))
    calibration = calibrate(
        model, cast(Any, TokenIds()), [text], tokens=2048, window=128, rank=4, use_cache=False
    )
    return model, calibration


def queries(model: Any, index: int, ids: Tensor) -> Tensor:
    """Queries of a layer as its attention uses them, by a hook on the projection."""
    seen = []
    projection = adapter_for(model).layers[index].module.q_proj
    handle = projection.register_forward_hook(lambda module, args, output: seen.append(output))
    with torch.no_grad():
        model(ids)
    handle.remove()
    spec = adapter_for(model).layers[index]
    return seen[0].reshape(-1, spec.num_heads, spec.head_dim).transpose(0, 1)  # (H, n, D)


def test_logits_stay_and_original_is_untouched(opt: tuple[Any, Calibration]) -> None:
    model, calibration = opt
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded, _ = fold_skew(model, calibration)
    ids = torch.arange(100)[None] % VOCABULARY
    with torch.no_grad():
        torch.testing.assert_close(folded(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_folded_queries_are_the_skewed_ones(opt: tuple[Any, Calibration]) -> None:
    model, calibration = opt
    folded, _ = fold_skew(model, calibration)
    ids = torch.arange(64)[None] % VOCABULARY
    for index, layer in calibration.layers.items():
        expected = queries(model, index, ids) @ layer.skew
        torch.testing.assert_close(queries(folded, index, ids), expected, atol=1e-4, rtol=1e-4)


def test_new_calibration_belongs_to_the_new_model_and_predicts_skewed_queries(
    opt: tuple[Any, Calibration],
) -> None:
    model, calibration = opt
    folded, moved = fold_skew(model, calibration)
    moved.check_model(adapter_for(folded))
    with pytest.raises(CalibrationError, match="another model"):
        calibration.check_model(adapter_for(folded))
    for index, layer in calibration.layers.items():
        heads, dim = layer.skew.shape[:2]
        old = (layer.down @ layer.up).reshape(-1, heads, dim).transpose(0, 1)
        new = moved.layers[index].down @ moved.layers[index].up
        torch.testing.assert_close(
            new.reshape(-1, heads, dim).transpose(0, 1), old @ layer.skew, atol=1e-4, rtol=1e-4
        )
        assert torch.equal(moved.layers[index].skew[0], torch.eye(dim))


def test_rotary_model_is_refused(opt: tuple[Any, Calibration]) -> None:
    with pytest.raises(InputError, match="rotary"):
        fold_skew(TINY["llama"](), opt[1])
