"""What a limited home has evicted, against loops over all keys that a run has ever made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor
from transformers import PreTrainedModel

from calibrating import selecting, tokens
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.cache.layer import OffloadedLayer
from infinigen_kv.storage.homes.slots import Eviction
from infinigen_kv_lab.evals.misses import Misses
from infinigen_kv_lab.evals.perplexity import Perplexity, PerplexityTask
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.run import Subject, evaluate

PROMPT, LENGTH, CAPACITY = 40, 64, 30
IDS = tokens(1, LENGTH, seed=9)[0]


class Attended(NamedTuple):
    """What one layer had and did in one forward: arrays of the new tokens, and held positions."""

    layer: int
    query: Any
    keys: Any
    held: set[int] | None
    count: int | None  # type: ignore[assignment]


def limited(capacity: int | float | None = CAPACITY, evict: Eviction = "fifo") -> StorageConfig:
    return StorageConfig(capacity=capacity, evict=evict, resident_layers=())


def watch(monkeypatch: pytest.MonkeyPatch) -> list[Attended]:
    """Filled with every attention that an engine's layer computes from now on."""
    seen: list[Attended] = []
    attend = OffloadedLayer.attend

    def watched(self: Any, query: Tensor, keys: Tensor, *rest: Any, **options: Any) -> Tensor:
        positions, chosen = self.pool.positions, self._chosen
        seen.append(
            Attended(
                self.spec.index,
                query[0].double().numpy(),
                keys[0].double().numpy(),
                None if positions is None else set(positions[0].tolist()),
                None if chosen is None else chosen.index.shape[3],
            )
        )
        return attend(self, query, keys, *rest, **options)

    monkeypatch.setattr(OffloadedLayer, "attend", watched)
    return seen


def naive(seen: list[Attended], scaling: float, capacity: int | None) -> Misses:
    """``capacity`` for a home that drops the oldest tokens but one sink; None to believe what it
    says.
    """
    found, keys = Misses(), dict[int, Any]()
    for each in seen:
        before = keys.get(each.layer, each.keys[:, :0])
        now = keys[each.layer] = np.concatenate([before, each.keys], axis=1)
        if each.query.shape[1] > 1:
            continue
        cached = before.shape[1]
        held = set(range(cached)) if each.held is None else each.held
        if capacity is not None:
            assert held == {0, *range(max(0, cached - capacity + 1), cached)}
        count = each.count or len(held)
        group = len(each.query) // len(now)
        for head in range(len(now)):
            margins = []
            for query in each.query[head * group : (head + 1) * group, 0]:
                scores = [scaling * float(query @ key) for key in now[head]]
                weights = np.exp(np.array(scores) - max(scores))
                weights /= weights.sum()
                found.mass += sum(weights[at] for at in range(cached) if at not in held)
                found.queries += 1
                margins.append([score - max(scores[:-1]) for score in scores[:-1]])
            best = sorted(range(cached), key=lambda at: -max(each[at] for each in margins))[:count]
            found.wanted += count
            found.missed += sum(at not in held for at in best)
    return found


@pytest.mark.parametrize(
    ("policy", "evict"), [("infinigen", "fifo"), ("infinigen", "counter"), ("stream", "fifo")]
)
def test_misses_are_those_of_a_loop(
    policy: str,
    evict: Eviction,
    model: PreTrainedModel,
    calibration: Calibration,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = watch(monkeypatch)
    with attach(model, calibration, selecting(), limited(evict=evict)) as session:
        reader = Reader(session, policy)
        reader.start(IDS[:PROMPT], room=LENGTH - PROMPT).feed(IDS[PROMPT:])
        scaling = session.adapter.layers[0].scaling
    expected = naive(seen, scaling, CAPACITY if evict == "fifo" else None)
    found = reader.misses
    assert found is not None and expected.queries == 4 * 4 * (LENGTH - PROMPT)
    assert (found.wanted, found.missed) == (expected.wanted, expected.missed)
    assert 0 < found.missed < found.wanted
    assert found.queries == expected.queries
    assert found.mass == pytest.approx(expected.mass, rel=1e-4)


def test_nothing_is_missed_while_there_is_room(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    with attach(model, calibration, selecting(), limited(1.0)) as session:
        reader = Reader(session, "infinigen")
        reader.start(IDS[:PROMPT], room=LENGTH - PROMPT).feed(IDS[PROMPT:])
    assert reader.misses is not None and reader.misses.wanted > 0
    assert reader.misses.missed == 0 and reader.misses.mass == 0.0


def test_copies_of_a_text_remember_their_own_keys(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    middle = PROMPT + 8

    def misses(*, copies: int) -> tuple[float, ...]:
        with attach(model, calibration, selecting(), limited()) as session:
            reader = Reader(session, "infinigen")
            reading = reader.start(IDS[:PROMPT], room=LENGTH - PROMPT)
            reading.feed(IDS[PROMPT:middle])
            for _ in range(copies):
                reading.fork().feed(IDS[middle:])
        found = reader.misses
        assert found is not None
        return found.wanted, found.missed, found.mass, found.queries

    none, one, two = (np.array(misses(copies=count)) for count in (0, 1, 2))
    assert (one > none).all()
    np.testing.assert_allclose(two - one, one - none, rtol=1e-6)


def test_a_task_reports_them_with_an_interval(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    ids = tokens(1, 3 * LENGTH, seed=2)[0]
    task = PerplexityTask("text", ids, window=LENGTH, prompt_tokens=PROMPT, source="x")
    subject = Subject(model, calibration, selecting(), limited())
    full, ours, evicting = evaluate(subject, task, ["ideal", "infinigen", "h2o"])
    for point in (full, evicting):  # neither has a home that is limited
        assert isinstance(point.result, Perplexity)
        assert point.result.costs.missed_share is point.result.costs.missed_mass is None
    assert isinstance(ours.result, Perplexity)
    counted = []
    for window in ids.view(3, LENGTH):
        with attach(model, calibration, selecting(), limited()) as session:
            reader = Reader(session, "infinigen")
            reader.start(window[:PROMPT], room=LENGTH - PROMPT).feed(window[PROMPT:])
            assert reader.misses is not None
            counted.append(reader.misses)
    found = ours.result.costs.missed_share
    assert found is not None
    rate = sum(each.missed for each in counted) / sum(each.wanted for each in counted)
    assert found.value == pytest.approx(rate)
    rates = [each.missed / each.wanted for each in counted]
    assert min(rates) <= found.low <= found.value <= found.high <= max(rates)
    assert "missed" in ours.result.headline() and "missed" not in full.result.headline()
