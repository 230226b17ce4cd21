"""The mask function of an attached model against Transformers' own; other masks, entry by entry."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.masking_utils import (
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import tiny
from calibrating import feed, left_padded, tokens
from infinigen_kv import attach
from infinigen_kv.attention.dense import causal_mask
from infinigen_kv.cache.masks import decoder_mask, mask_of_held, mask_of_selection
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.rehearsal.select import Selection
from infinigen_kv.session import hooks
from stepping import decode_step


def padding(*numbers: int) -> Tensor:
    return torch.arange(9) >= torch.tensor(numbers)[:, None]


@pytest.mark.parametrize("queries", [1, 4, 9])
@pytest.mark.parametrize("mask", [None, padding(0, 0)])
def test_no_mask_where_the_order_says_it_all(queries: int, mask: Tensor | None) -> None:
    given: dict[str, Any] = {"batch_size": 2, "q_length": queries, "kv_length": 9}
    given |= {"q_offset": 9 - queries, "attention_mask": mask}
    assert decoder_mask(**given) is None
    written_out = sdpa_mask(**given, allow_is_causal_skip=False)
    assert written_out is not None
    assert torch.equal(
        written_out, causal_mask(queries, 9, torch.device("cpu")).expand(2, -1, -1, -1)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_mask": padding(0, 3)},
        {"attention_mask": padding(0, 0)[:, :7]},  # Transformers takes the rest for padding
        {"mask_function": sliding_window_causal_mask_function(3), "local_size": 3},
        {"mask_function": lambda row, head, query, key: key <= query},  # nobody knows what it does
        {"kv_length": 12},  # a cache of fixed length
        {"kv_offset": 2, "kv_length": 7},
        {"q_offset": torch.tensor(5)},
        {"allow_is_causal_skip": False},
    ],
)
def test_all_others_are_transformers_own(changes: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "batch_size": 2,
        "q_length": 4,
        "kv_length": 9,
        "q_offset": 5,
        "kv_offset": 0,
    }
    given |= {"mask_function": causal_mask_function, **changes}
    ours, own = decoder_mask(**given), sdpa_mask(**given)
    assert ours is not None and own is not None
    assert torch.equal(ours, own)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_models_ask_for_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with a window get a mask, the others do not, unless there is padding."""
    seen: list[tuple[bool, bool]] = []

    def watched(*given: Any, **options: Any) -> Tensor | None:
        made = decoder_mask(*given, **options)
        seen.append((options.get("local_size") is not None, made is not None))
        return made

    monkeypatch.setattr(hooks, "decoder_mask", watched)
    model = tiny.TINY[family]()
    ids, mask = left_padded(tokens(2, 50), (0, 7))
    with attach(model) as attached:
        for given, expected in (
            (None, {(False, False), (True, True)}),
            (mask, {(False, True), (True, True)}),
        ):
            cache = attached.new_cache(policy="ideal")
            feed(model, cache, ids, given, slice(0, 30))
            seen.clear()
            feed(model, cache, ids, given, slice(30, 50))
            kinds = {True, False} if family == "gemma2" else {False}
            assert set(seen) == {each for each in expected if each[0] in kinds}


def test_the_mask_of_a_selection_is_what_was_chosen_and_each_querys_own_token() -> None:
    index = torch.tensor([[[[0, 3], [4, 1]], [[2, 2], [0, 5]]]])  # (1, H_kv 2, Q 2, 2)
    counts = torch.tensor([[2, 1]])
    made = mask_of_selection(Selection(index, counts), decode_step(InfiniGenConfig(), 5, 2))
    for head, query in itertools.product(range(2), range(2)):
        chosen = index[0, head, query, : counts[0, query]].tolist()
        wanted = [token in {*chosen, 5 + query} for token in range(7)]
        assert made[0, head, query].tolist() == wanted


def test_the_mask_of_a_full_home_follows_its_tokens() -> None:
    mask = torch.rand(2, 1, 3, 9) < 0.5
    positions = torch.tensor([[0, 4, 2], [5, 1, 3]])
    step = decode_step(InfiniGenConfig(), 6, 3, rows=2)
    made = mask_of_held(mask, positions, step)
    assert made is not None and mask_of_held(None, positions, step) is None
    for row, query in itertools.product(range(2), range(3)):
        columns = [*positions[row].tolist(), 6, 7, 8]
        assert made[row, 0, query].tolist() == [bool(mask[row, 0, query, at]) for at in columns]
