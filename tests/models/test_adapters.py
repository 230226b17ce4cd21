"""Every adapter against what the model itself hands to its attention function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel
from transformers.masking_utils import eager_mask

from infinigen_kv.errors import UnsupportedModelError
from infinigen_kv.models.adapters import Adapter, adapter_for, rotate, supported_families
from tiny import MAX_POSITIONS, TINY, gemma2, gemma3, llama, phi3, qwen2, qwen3

CAPTURE = "capture_for_tests"
PADDING = (0, 5, 11)
LENGTH = 40  # longer than every window of the tiny models

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 24,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [2.0, 4.0, 8.0, 16.0],
}
VARIANTS: dict[str, Callable[[], Any]] = {
    **TINY,
    "phi3_long_rope": lambda: phi3(
        rope_parameters=dict(LONG_ROPE), original_max_position_embeddings=24
    ),
    "llama_bias": lambda: llama(attention_bias=True),
    "llama_dynamic_rope": lambda: llama(
        max_position_embeddings=24,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
    ),
    "qwen2_sliding": lambda: qwen2(use_sliding_window=True, sliding_window=20, max_window_layers=2),
    "qwen3_sliding": lambda: qwen3(use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "gemma2_uncapped": lambda: gemma2(attn_logit_softcapping=None),
    "gemma3_capped": lambda: gemma3(attn_logit_softcapping=5.0),
}


@dataclass
class Call:
    """One call of the attention function."""

    module: nn.Module
    query: Tensor
    key: Tensor
    mask: Tensor
    scaling: float
    softcap: float | None
    hidden: Tensor  # input of the attention module


@dataclass
class Run:
    adapter: Adapter
    calls: list[Call]
    position_ids: Tensor
    cached_keys: list[Tensor]

    def rotary(self, index: int) -> tuple[Tensor, Tensor] | None:
        return self.adapter.rotary(index, self.calls[index].hidden, self.position_ids)


def observe(model: Any) -> Run:
    """Run a left-padded batch and record every call of the attention function."""
    calls: list[Call] = []
    hidden: dict[int, Tensor] = {}

    def capture(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        scaling, softcap = kwargs["scaling"], kwargs.get("softcap")
        calls.append(Call(module, query, key, mask, scaling, softcap, hidden[len(calls)]))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(CAPTURE, capture)
    AttentionMaskInterface.register(CAPTURE, eager_mask)
    adapter = adapter_for(model)
    hooks = [
        spec.module.register_forward_pre_hook(
            lambda _, args, kwargs, index=spec.index: hidden.__setitem__(
                index, adapter.attention_input(args, kwargs)
            ),
            with_kwargs=True,
        )
        for spec in adapter.layers
    ]
    tokens, mask, position_ids = left_padded_batch()
    with torch.no_grad():
        model.set_attn_implementation(CAPTURE)
        output = model(tokens, attention_mask=mask, position_ids=position_ids, use_cache=True)
    for hook in hooks:
        hook.remove()
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    return Run(adapter, calls, position_ids, [layer.keys for layer in cache.layers])


def left_padded_batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(2, 128, (len(PADDING), LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    for row, padded in enumerate(PADDING):
        mask[row, :padded] = 0
    tokens = tokens * mask
    return tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(scope="module", params=VARIANTS)
def run(request: pytest.FixtureRequest) -> Run:
    return observe(VARIANTS[request.param]())


def test_layers_are_the_models_own_in_order(run: Run) -> None:
    assert len(run.calls) == len(run.adapter.layers) == run.adapter.config.num_hidden_layers
    for index, (spec, call) in enumerate(zip(run.adapter.layers, run.calls, strict=True)):
        assert spec.index == index
        assert spec.module is call.module
        kept = run.cached_keys[index].shape[2]  # sliding layers keep their window only
        torch.testing.assert_close(run.cached_keys[index], call.key[:, :, -kept:])


def test_shapes_scaling_and_softcap_are_what_the_model_passes(run: Run) -> None:
    for spec, call in zip(run.adapter.layers, run.calls, strict=True):
        assert call.query.shape == (len(PADDING), spec.num_heads, LENGTH, spec.head_dim)
        assert call.key.shape == (len(PADDING), spec.num_kv_heads, LENGTH, spec.head_dim)
        assert spec.scaling == call.scaling
        assert spec.softcap == call.softcap
        assert call.hidden.shape == (len(PADDING), LENGTH, run.adapter.hidden_size)


def test_finished_query_is_what_the_model_passes(run: Run) -> None:
    for index, call in enumerate(run.calls):
        weight, bias = run.adapter.query_weight(index)
        raw = F.linear(call.hidden, weight, bias)
        query = run.adapter.finish_query(index, raw, run.rotary(index))
        torch.testing.assert_close(query, call.query, atol=1e-5, rtol=1e-5)


def test_finished_query_of_one_decode_step(run: Run) -> None:
    """The last position alone gives the same query as within the whole prompt."""
    for index, call in enumerate(run.calls):
        last = call.hidden[:, -1:]
        rotary = run.adapter.rotary(index, last, run.position_ids[:, -1:])
        raw = F.linear(last, *run.adapter.query_weight(index))
        query = run.adapter.finish_query(index, raw, rotary)
        torch.testing.assert_close(query, call.query[:, :, -1:], atol=1e-5, rtol=1e-5)


def test_key_weight_is_the_models(run: Run) -> None:
    for index, (spec, call) in enumerate(zip(run.adapter.layers, run.calls, strict=True)):
        raw = F.linear(call.hidden, *run.adapter.key_weight(index))
        heads = raw.view(len(PADDING), LENGTH, spec.num_kv_heads, spec.head_dim).transpose(1, 2)
        k_norm = getattr(spec.module, "k_norm", None)
        heads = heads if k_norm is None else k_norm(heads)
        rotary = run.rotary(index)
        heads = heads if rotary is None else rotate(heads, *rotary)
        torch.testing.assert_close(heads, call.key, atol=1e-5, rtol=1e-5)


def test_sliding_layers_are_those_whose_mask_has_a_window(run: Run) -> None:
    for spec, call in zip(run.adapter.layers, run.calls, strict=True):
        first_row = call.mask[0, 0]  # no padding in row 0
        sees_first_token = bool(first_row[-1, 0] == 0)
        assert spec.is_sliding is not sees_first_token


def test_layers_with_one_rotary_key_share_the_rotary(run: Run) -> None:
    first: dict[Any, tuple[Tensor, Tensor] | None] = {}
    for spec in run.adapter.layers:
        rotary = run.rotary(spec.index)
        assert (rotary is not None) is run.adapter.is_rotary
        shared = first.setdefault(run.adapter.rotary_key(spec.index), rotary)
        torch.testing.assert_close(rotary, shared, atol=0, rtol=0)


def test_attention_of_the_tiny_models_is_peaked(run: Run) -> None:
    """Flat attention would hide a wrong score from every test built on these models."""
    for spec, call in zip(run.adapter.layers, run.calls, strict=True):
        keys = call.key.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1)
        scores = call.query @ keys.transpose(2, 3) * spec.scaling
        assert scores[0].std() > 0.7


def test_every_family_has_a_tiny_model() -> None:
    families = [adapter_for(build()).family for build in TINY.values()]
    assert tuple(dict.fromkeys(families)) == supported_families()
    assert len(set(families)) == 9


def test_maximum_context() -> None:
    assert adapter_for(TINY["opt"]()).max_positions == MAX_POSITIONS
    assert adapter_for(llama(max_position_embeddings=96)).max_positions == 96


def test_weights_follow_the_model() -> None:
    """A change of the parameter shows in the weights returned before it."""
    for name in ("llama", "phi3", "opt"):
        adapter = adapter_for(TINY[name]())
        weight, _ = adapter.query_weight(1)
        key, _ = adapter.key_weight(1)
        with torch.no_grad():
            for parameter in adapter.layers[1].module.parameters():
                parameter.fill_(2.0)
        assert bool((weight == 2).all() and (key == 2).all()), name


def test_rotate_turns_pairs_by_their_angle() -> None:
    angles = torch.tensor([0.3, 1.1])
    cos, sin = angles.cos().repeat(2)[None, None], angles.sin().repeat(2)[None, None]
    heads = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).view(1, 1, 1, 5)
    pairs = torch.complex(heads[..., :2], heads[..., 2:4]) * torch.polar(torch.ones(2), angles)
    expected = torch.cat((pairs.real, pairs.imag, heads[..., 4:]), dim=-1)
    torch.testing.assert_close(rotate(heads, cos, sin), expected)


def test_rotary_model_without_rotary_is_an_error() -> None:
    adapter = adapter_for(llama())
    with pytest.raises(ValueError, match="rotary is None"):
        adapter.finish_query(0, torch.zeros(1, 1, 64), None)


def test_unknown_family_names_the_supported_ones() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(UnsupportedModelError, match="'gpt2'") as error:
        adapter_for(model)
    for family in supported_families():
        assert family in str(error.value)


def change_config(**values: Any) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        for name, value in values.items():
            setattr(model.config, name, value)

    return change


def quantise(model: Any) -> None:
    q_proj = model.model.layers[2].self_attn.q_proj
    q_proj.weight = nn.Parameter(q_proj.weight.to(torch.int8), requires_grad=False)


def wrap_projection(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.k_proj = nn.Sequential(attention.k_proj)


def drop_layer(model: Any) -> None:
    del model.model.layers[1]
    model.config.num_hidden_layers -= 1


def move_to_meta(model: Any) -> None:
    model.model.layers[0].to("meta")


def rename_attention(model: Any) -> None:
    block = model.model.layers[3]
    block.attn = block.self_attn
    del block.self_attn


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change_config(attention_chunk_size=64), "attention_chunk_size = 64"),
        (change_config(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
        (
            change_config(layer_types=["full_attention", "linear_attention"] * 2),
            r"layer_types\[1\] = 'linear_attention'",
        ),
        (quantise, "layer 2: q_proj has a weight of type torch.int8"),
        (wrap_projection, "layer 1: k_proj is a Sequential"),
        (drop_layer, "layer 1 calls itself layer 2"),
        (move_to_meta, "layer 0: q_proj has no data"),
        (rename_attention, "layer 3 .* has no attention module 'self_attn'"),
        (change_config(num_hidden_layers=9), "does not hold 9 decoder layers"),
    ],
)
def test_unsupported_feature_is_named(spoil: Callable[[Any], None], message: str) -> None:
    model = gemma3()
    spoil(model)
    with pytest.raises(UnsupportedModelError, match=message):
        adapter_for(model)
