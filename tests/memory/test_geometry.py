"""Sizes read from configurations against those of loaded models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from command_line import save
from infinigen_kv import InputError, UnsupportedModelError
from infinigen_kv.memory import geometry_of, read_geometry
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.models.loading import LoadedModel, model_shapes


@pytest.mark.parametrize("family", tiny.TINY)
def test_a_configuration_says_what_the_loaded_model_says(family: str, tmp_path: Path) -> None:
    model = tiny.TINY[family]()
    model.save_pretrained(tmp_path)
    assert read_geometry(str(tmp_path)) == geometry_of(adapter_for(model))


def test_sizes_of_a_model() -> None:
    found = geometry_of(adapter_for(tiny.gemma2()))
    assert found.weight_bytes == sum(
        each.nbytes for each in [*tiny.gemma2().parameters(), *tiny.gemma2().buffers()]
    )
    assert (found.hidden_size, found.mlp_size, found.vocabulary) == (32, 64, tiny.VOCABULARY)
    assert (found.max_positions, found.window) == (tiny.MAX_POSITIONS, 20)
    assert [layer.is_sliding for layer in found.layers] == [True, False, True, False]
    first = found.layers[0]
    assert (first.num_heads, first.num_kv_heads, first.head_dim) == (4, 2, 16)
    assert first.has_softcap and first.copied_query == 0


def test_a_fused_projection_that_must_be_copied_is_counted() -> None:
    assert geometry_of(adapter_for(tiny.gpt_neox())).layers[1].copied_query == 64 * 64
    assert geometry_of(adapter_for(tiny.phi3())).layers[1].copied_query == 0


def test_dtypes(tmp_path: Path) -> None:
    tiny.llama().to(torch.bfloat16).save_pretrained(tmp_path)
    own = read_geometry(str(tmp_path))
    assert own.dtype == torch.bfloat16
    wide = read_geometry(str(tmp_path), dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert wide.weight_bytes == pytest.approx(2 * own.weight_bytes, rel=0.01)
    assert wide.with_dtype(torch.bfloat16).weight_bytes == wide.weight_bytes // 2


def test_no_weights_are_read(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = model_shapes(str(tmp_path))
    assert all(each.is_meta for each in model.parameters())
    assert read_geometry(str(tmp_path)) == geometry_of(adapter_for(tiny.llama()))


def test_shapes_alone_make_no_cache(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has no data"):
        adapter_for(model_shapes(str(tmp_path)))


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.json is not valid JSON"):
        read_geometry(str(tmp_path))
    with pytest.raises(InputError, match="no such file or folder"):
        read_geometry("./nothing/here.gguf")
    gguf = tmp_path / "damaged.gguf"
    gguf.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(InputError, match=r"damaged.gguf: cannot be read"):
        read_geometry(str(gguf))
    gguf.write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a GGUF file"):
        read_geometry(str(gguf))


def test_an_unsupported_family(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}
    save(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path)
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        read_geometry(str(tmp_path))


@pytest.mark.model
def test_the_embedded_model_is_sized_without_converting_it(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinigen_kv.models.loading.converted_folder", None)
    assert read_geometry("smollm2", dtype=torch.float32) == geometry_of(adapter_for(smollm2.model))
