"""Planned workspace against the peak of what PyTorch allocates, by its own profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tiny
from allocations import allocated
from calibrating import calibrate_tiny, feed, tokens
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.cache.forward import prefill
from infinigen_kv.memory import Part, calibration_fields, model_request, plan_memory
from linking import FAST

PROMPT, NEW = 480, 2


@pytest.fixture(scope="module")
def llama() -> tuple[Any, Calibration]:
    """Wide enough that tensors of a few numbers do not count."""
    model = tiny.llama(hidden_size=192, intermediate_size=512, head_dim=32, num_hidden_layers=3)
    return model, calibrate_tiny(model)


def test_what_was_there_before_does_not_count() -> None:
    made: list[torch.Tensor] = []
    assert allocated(lambda: made.append(torch.empty(1 << 20, dtype=torch.uint8)))[0] == 1 << 20
    # the profiler knows the address by now, and tells of the end
    assert allocated(made.clear) == (0, 0)


def lasting(part: Part) -> int:
    """Bytes of a part that is there all the time, weights and what is made before left out."""
    before = part.phase != "always" or part.name in ("weights", "calibration")
    return 0 if before else part.device + part.host


@pytest.mark.parametrize(
    ("policy", "settings", "chunk"),
    [
        ("ideal", {}, None),
        ("ideal", {}, 160),
        ("infinigen", {}, None),
        ("infinigen", {}, 160),
        ("stream", {"link": FAST}, None),
        ("stream", {"link": FAST}, 160),
        ("stream", {"link": FAST, "codec": "int8"}, 160),
        ("infinigen", {"link": FAST, "resident_layers": (0,)}, 160),
    ],
)
def test_peak_of_reading_a_prompt(
    llama: tuple[Any, Calibration], policy: str, settings: dict[str, Any], chunk: int | None
) -> None:
    with attach(*llama, storage=StorageConfig(**settings)) as session:
        cache = session.new_cache(tokens=PROMPT + NEW, policy=policy)
        ids = tokens(1, PROMPT)
        most, kept = allocated(lambda: prefill(session, cache, ids, chunk=chunk))
        request = model_request(
            session.model,
            context=PROMPT + NEW,
            new_tokens=NEW,
            prompt_chunk=chunk,
            storage=session.storage,
            policies=(policy,),
            **calibration_fields(llama[1]),
        )
        plan = plan_memory(request)
    assert plan["prompt"].device == pytest.approx(most - kept, rel=0.3)
    held = sum(lasting(part) for part in plan.parts)
    assert held == pytest.approx(kept, rel=0.05)
    assert held + plan["prompt"].device == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("settings", [{"link": FAST}, {"link": FAST, "codec": "int8"}])
def test_peak_of_a_step_that_streams(
    llama: tuple[Any, Calibration], settings: dict[str, Any]
) -> None:
    with attach(*llama, storage=StorageConfig(**settings)) as session:
        cache = session.new_cache(tokens=PROMPT + 64, policy="stream")
        ids = tokens(1, PROMPT + 64)
        prefill(session, cache, ids[:, :PROMPT])
        feed(session.model, cache, ids, None, slice(PROMPT, PROMPT + 1))
        # what this step leaves for the next one, a layer under way, the last one has left too
        most, _ = allocated(
            lambda: feed(session.model, cache, ids, None, slice(PROMPT + 1, PROMPT + 2))
        )
        request = model_request(
            session.model,
            context=PROMPT + 2,
            storage=session.storage,
            policies=("stream",),
            **calibration_fields(llama[1]),
        )
        plan = plan_memory(request)
    assert plan["decode step"].device == pytest.approx(most, rel=0.35)


def test_softcap_materialises_scores() -> None:
    model = tiny.TINY["gemma2"]()
    capped = plan_memory(model_request(model, context=PROMPT + NEW, new_tokens=NEW))
    uncapped = plan_memory(
        model_request(tiny.TINY["gemma3"](), context=PROMPT + NEW, new_tokens=NEW)
    )
    # at least one float32 for each score
    assert capped["prompt"].device - uncapped["prompt"].device >= 4 * 2**22


def test_a_step_moves_no_more_than_may_be_fetched() -> None:
    model = tiny.llama()
    apart = StorageConfig(link=FAST, resident_layers=(0,))
    few = plan_memory(model_request(model, context=4096, storage=apart, policies=("infinigen",)))
    all_of_it = plan_memory(model_request(model, context=4096, storage=apart, policies=("stream",)))
    assert few["decode step"].device < all_of_it["decode step"].device / 2
