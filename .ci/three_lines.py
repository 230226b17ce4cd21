"""The wheel without extras: a model of one's own, as in the README."""

import string

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infinigen_kv import attach, calibrate


def tokenizer(text: str, **options: object) -> dict[str, list[int]]:
    """One token for each printable character."""
    return {"input_ids": [string.printable.index(each) % 100 for each in text if each.isascii()]}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=None,
    )
).eval()
inputs = {"input_ids": torch.arange(200)[None] % 100}

calibration = calibrate(model, tokenizer, use_cache=False)
with attach(model, calibration) as session:
    output = model.generate(**inputs, cache=(cache := session.new_cache()), max_new_tokens=64)

if output.shape != (1, 264) or cache.get_seq_length() != 263:
    raise SystemExit(f"generated {tuple(output.shape)}, cached {cache.get_seq_length()}")
