"""The rehearsal fitted anew while decoding: against NumPy over all tokens, and against itself."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import tiny
from both_kernels import BOTH
from calibrating import calibrate_tiny, feed, left_padded, run, selecting, tokens
from fitting import DIM, HEADS, KV_HEADS, mixed
from infinigen_kv import Calibration, attach
from infinigen_kv.cache.forward import decode, forward, prefill
from infinigen_kv.kernels.finding import KernelsName
from infinigen_kv.kernels.reference import TorchKernels
from infinigen_kv.policies.infinigen import InfiniGenPolicy
from infinigen_kv.policies.rehearsal_layer import RehearsalLayer
from infinigen_kv.policies.step import Step
from infinigen_kv.rehearsal.partial_keys import GUESSED_WEIGHT
from infinigen_kv.rehearsal.recent import MAX_WAITING, MIN_WAITING
from infinigen_kv.storage.pools.local import LocalPool
from infinigen_kv_lab.bench.fidelity import forgetting

RANK = 3
PROMPT, EVERY = 40, 16


# One layer's policy.


class Driven:
    """A policy that is shown a prompt and then decode steps of random tokens."""

    def __init__(self, **changes: Any) -> None:
        self.config = selecting(refit_every=EVERY, partial_ratio=RANK / DIM, **changes)
        self.query, self.keys, self.values = mixed(7, 1, 120)
        layer = RehearsalLayer(
            lambda hidden, step: hidden, None, scaling=0.3, softcap=None, alpha=1.0
        )
        self.policy = InfiniGenPolicy(layer, self.config, TorchKernels())
        self.pool = LocalPool(self.keys, self.values)
        self.at = 0

    def show(self, count: int, *, selecting: bool) -> None:
        part = slice(self.at, self.at + count)
        query, keys, values = (each[:, :, part] for each in (self.query, self.keys, self.values))
        step = Step(
            start=self.at, queries=count, rows=1, visible=None, config=self.config,
            position_ids=torch.arange(self.at, self.at + count)[None], selecting=selecting,
        )  # fmt: skip
        if selecting:
            self.policy.rehearse(query, step, self.pool)
        everything, all_values, _ = self.pool.extend(keys, values)
        self.policy.observe(query, keys, values, step, self.pool, None)
        if not selecting:
            self.policy.finish_prompt(everything, all_values, step, None)
        self.at += count

    def scores(self) -> Tensor:
        partial = self.policy._partial_keys
        assert partial is not None
        return partial.scores(self.query[:, :, :1], 1.0, None, absolute=True)[:, :, :, 0]

    def expected_scores(self, known: int) -> Tensor:
        """Of the newest token's score, from a fit to the first ``known`` tokens, in NumPy."""
        group, token = HEADS // KV_HEADS, self.at - 1
        scores = []
        for head in range(KV_HEADS):
            mean, kernel, basis = self.fitted(head, PROMPT, None)
            if known > PROMPT:  # for what these partial keys tell of the keys, and for the keys
                mean, kernel, _ = self.fitted(head, known, basis)
            newest = self.keys[0, head, token].double().numpy()
            each = self.query[0, head * group : (head + 1) * group, 0].double().numpy()
            scores.append(each @ kernel @ (newest - mean) + each @ mean)
        return torch.tensor(np.array(scores), dtype=torch.float32)

    def fitted(self, head: int, known: int, basis: Any) -> tuple[Any, Any, Any]:
        """Mean key, B C^T and C of the first ``known`` tokens, where keys in part are what their
        products with ``basis`` tell.
        """
        group = HEADS // KV_HEADS
        q = self.query[0, head * group : (head + 1) * group, :known].double().numpy()
        k = self.keys[0, head, :known].double().numpy()
        late = ((np.arange(known) + 1.0) / 4096) ** 3
        square = sum((each * late[:, None]).T @ each for each in q)
        mean = k.mean(axis=0)
        scatter = (k - mean).T @ (k - mean)
        if basis is not None:
            z = (k - mean) @ basis
            told = z @ np.linalg.lstsq(z, k - mean, rcond=None)[0]
            scatter = GUESSED_WEIGHT * told.T @ told + (1 - GUESSED_WEIGHT) * scatter
        root_q, root_k = _root(square), _root(scatter)
        left, size, right = np.linalg.svd(root_q @ root_k)
        score = left[:, :RANK] * size[:RANK] @ right[:RANK]
        kernel = np.linalg.inv(root_q) @ score @ np.linalg.inv(root_k)
        return mean, kernel, np.linalg.inv(root_k) @ right[:RANK].T


def _root(square: Any) -> Any:
    values, vectors = np.linalg.eigh(square)
    return vectors * np.sqrt(values) @ vectors.T


def test_a_refit_is_a_fit_to_all_tokens_so_far() -> None:
    driven = Driven()
    driven.show(PROMPT, selecting=False)
    for _ in range(EVERY):
        driven.show(1, selecting=True)
    stale = driven.expected_scores(PROMPT)
    assert_close(driven.scores()[0, :, :, -1], stale, atol=1e-2, rtol=1e-2)
    driven.show(1, selecting=True)  # fitted before it is added
    fresh = driven.expected_scores(PROMPT + EVERY)
    assert_close(driven.scores()[0, :, :, -1], fresh, atol=1e-2, rtol=1e-2)
    driven.show(1, selecting=True)
    assert (
        driven.expected_scores(PROMPT) - driven.expected_scores(PROMPT + EVERY)
    ).abs().max() > 0.1
    assert_close(
        driven.scores()[0, :, :, -1], driven.expected_scores(PROMPT + EVERY), atol=1e-2, rtol=1e-2
    )


def test_values_are_guessed_from_all_tokens_so_far() -> None:
    driven = Driven()
    driven.show(PROMPT, selecting=False)
    for _ in range(EVERY + 1):
        driven.show(1, selecting=True)
    partial, found = driven.policy._partial_keys, driven.policy._value_map
    assert partial is not None and found is not None
    for head in range(KV_HEADS):
        known = PROMPT + EVERY
        z = partial.projection.partial_keys(driven.keys)[0, head, :known].double().numpy()
        v = driven.values[0, head, :known].double().numpy()
        rows = np.vstack([z - z.mean(axis=0), np.eye(RANK) * np.sqrt((z**2).mean(axis=0).max())])
        targets = np.vstack([v - v.mean(axis=0), np.zeros((RANK, DIM))])
        slope = np.linalg.lstsq(rows, targets, rcond=None)[0]
        np.testing.assert_allclose(found.slope[0, head], slope, atol=1e-3)
        base = v.mean(axis=0) - z.mean(axis=0) @ slope
        np.testing.assert_allclose(found.base[0, head, 0], base, atol=1e-3)


@pytest.mark.parametrize("every", [0, 1000])
def test_it_stays_that_of_the_prompt_where_asked_or_too_short(every: int) -> None:
    driven = Driven()
    driven.config = selecting(refit_every=every, partial_ratio=RANK / DIM)
    driven.policy._config = driven.config
    driven.show(PROMPT, selecting=False)
    for _ in range(PROMPT):
        driven.show(1, selecting=True)
    wanted = driven.expected_scores(PROMPT)
    assert_close(driven.scores()[0, :, :, -1], wanted, atol=1e-2, rtol=1e-2)
    if every:
        assert driven.policy.until_refit(driven.at) == 1  # as many tokens as the prompt had
    else:
        assert driven.policy.until_refit(driven.at) is None


def test_tokens_do_not_pile_up() -> None:
    driven = Driven(min_context=8)
    driven.policy._config = selecting(refit_every=1000, partial_ratio=RANK / DIM)
    driven.show(PROMPT, selecting=False)
    for _ in range(MAX_WAITING + 3):
        driven.show(1, selecting=True)
        assert MIN_WAITING <= driven.policy._running.waiting <= MAX_WAITING


# The engine.


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny.TINY[request.param]()


@pytest.fixture(scope="module")
def calibration(model: Any) -> Calibration:
    return calibrate_tiny(model)


def test_tokens_at_once_see_what_single_steps_see(model: Any, calibration: Calibration) -> None:
    ids = tokens(1, PROMPT + 3 * EVERY + 5)
    found = {}
    for every in (EVERY, 0):
        with attach(model, calibration, selecting(refit_every=every)) as session:
            single, wide = session.new_cache(), session.new_cache()
            expected = run(model, single, ids, prompt=PROMPT)[:, PROMPT:]
            feed(model, wide, ids, None, slice(0, PROMPT))
            with torch.no_grad():
                found[every] = decode(model, ids[:, PROMPT:], wide)
        assert_close(found[every], expected, atol=2e-4, rtol=2e-4)
    assert_close(found[EVERY][:, :EVERY], found[0][:, :EVERY])
    assert (found[EVERY] - found[0])[:, EVERY:].abs().max() > 1e-3  # it is fitted anew


@pytest.mark.parametrize("kernels", BOTH)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_are_fitted_when_each_has_grown(family: str, kernels: KernelsName) -> None:
    """A short row's prompt knows few tokens, so its turn comes sooner than the long one's.

    Without groups: the favourites of two query heads have the same margin, and of tokens that tie
    PyTorch chooses any.
    """
    model = tiny.TINY[family](num_key_value_heads=4)
    total, padding = PROMPT + 2 * EVERY + 3, (0, 28)
    ids, mask = left_padded(tokens(2, total), padding)
    config = selecting(refit_every=EVERY)
    with attach(model, calibrate_tiny(model), config, kernels=kernels) as session:
        both = run(model, session.new_cache(), ids, mask, prompt=PROMPT)
        for row, pad in enumerate(padding):
            alone = run(model, session.new_cache(), ids[row : row + 1, pad:], prompt=PROMPT - pad)
            assert_close(both[row, PROMPT:], alone[0, PROMPT - pad :], atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def small() -> tuple[Any, Calibration]:
    model = tiny.llama(num_hidden_layers=2)
    return model, calibrate_tiny(model)


@pytest.mark.parametrize("prompt", [5, 29, 30])
def test_tokens_at_once_find_the_first_fit(small: tuple[Any, Calibration], prompt: int) -> None:
    """A prompt too short to select from: the first fit comes in the middle of what is decoded."""
    model, calibration = small
    ids = tokens(1, 30 + 4 * EVERY)
    with attach(model, calibration, selecting(refit_every=EVERY, min_context=30)) as session:
        single, wide = session.new_cache(), session.new_cache()
        expected = run(model, single, ids, prompt=prompt)[:, prompt:]
        prefill(session, wide, ids[:, :prompt])
        with torch.no_grad():
            found = decode(model, ids[:, prompt:], wide)
    assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(("min_context", "padding"), [(30, (0, 28)), (50, (0, 20, 35))])
def test_a_row_that_starts_to_select_leaves_the_others_alone(
    small: tuple[Any, Calibration], min_context: int, padding: tuple[int, ...]
) -> None:
    """Its fit reads all keys, and must not undo what the others' partial keys were turned into."""
    model, calibration = small
    ids, mask = left_padded(tokens(len(padding), 110), padding)
    with attach(model, calibration, selecting(refit_every=EVERY, min_context=min_context)) as s:
        both = run(model, s.new_cache(), ids, mask, prompt=PROMPT)
        for row, pad in enumerate(padding):
            alone = run(model, s.new_cache(), ids[row : row + 1, pad:], prompt=PROMPT - pad)
            assert_close(both[row, PROMPT:], alone[0, PROMPT - pad :], atol=2e-4, rtol=2e-4)


def test_rows_that_change_places_take_what_they_learned(
    model: Any, calibration: Calibration
) -> None:
    ids = tokens(2, PROMPT + 2 * EVERY)
    turn = PROMPT + EVERY // 2
    with attach(model, calibration, selecting(refit_every=EVERY)) as session:
        straight = run(model, session.new_cache(), ids, prompt=PROMPT)
        cache = session.new_cache()
        run(model, cache, ids[:, :turn], prompt=PROMPT)
        cache.batch_select_indices(torch.tensor([1, 0]))
        turned = [
            feed(model, cache, ids.flip(0), None, slice(at, at + 1))
            for at in range(turn, ids.shape[1])
        ]
    assert_close(torch.cat(turned, 1).flip(0), straight[:, turn:], atol=2e-4, rtol=2e-4)


def test_what_is_forgotten_leaves_no_trace(model: Any, calibration: Calibration) -> None:
    ids = tokens(1, PROMPT + 2 * EVERY)
    with attach(model, calibration, selecting(refit_every=EVERY)) as session, torch.no_grad():
        cache = session.new_cache()
        prefill(session, cache, ids[:, :PROMPT])
        with forgetting(cache):
            decode(model, ids[:, PROMPT:].flip(1), cache)
        again = decode(model, ids[:, PROMPT:], cache)
        untouched = session.new_cache()
        prefill(session, untouched, ids[:, :PROMPT])
        assert torch.equal(again, decode(model, ids[:, PROMPT:], untouched))


def test_a_copied_cache_goes_its_own_way(model: Any, calibration: Calibration) -> None:
    ids = tokens(1, PROMPT + 2 * EVERY)
    half = PROMPT + EVERY // 2
    with attach(model, calibration, selecting(refit_every=EVERY)) as session, torch.no_grad():
        cache = session.new_cache()
        run(model, cache, ids[:, :half], prompt=PROMPT)
        fork = copy.deepcopy(cache)
        first = decode(model, ids[:, half:], cache)
        assert torch.equal(decode(model, ids[:, half:], fork), first)


def test_cropped_tokens_that_waited_are_not_learned() -> None:
    """As assisted decoding takes back what the model does not agree with."""
    model = tiny.llama()
    calibration = calibrate_tiny(model)
    ids = tokens(1, PROMPT + 2 * EVERY)
    half = PROMPT + EVERY // 2
    with attach(model, calibration, selecting(refit_every=EVERY)) as session, torch.no_grad():
        cache, straight = session.new_cache(), session.new_cache()
        for each in (cache, straight):
            run(model, each, ids[:, :half], prompt=PROMPT)
        for token in (5, 6, 7):
            feed(model, cache, torch.full((1, half + 9), token), None, slice(half, half + 1))
            cache.crop(half)
        found, wanted = (decode(model, ids[:, half:], each) for each in (cache, straight))
        assert torch.equal(found, wanted)


def test_drafts_that_are_rejected_are_not_learned(small: tuple[Any, Calibration]) -> None:
    model, calibration = small
    ids = tokens(1, PROMPT + 3 * EVERY)
    with attach(model, calibration, selecting(refit_every=EVERY)) as session, torch.no_grad():
        cache = session.new_cache()
        expected = run(model, session.new_cache(), ids, prompt=PROMPT)[:, PROMPT:]
        prefill(session, cache, ids[:, :PROMPT])
        found = []
        for at in range(PROMPT, ids.shape[1]):
            drafted = torch.cat([ids[:, at : at + 1], tokens(1, 4, seed=at)], dim=1)
            with cache.decoding():
                found.append(forward(model, drafted, cache)[:, :1])
            cache.crop(at + 1)
    assert_close(torch.cat(found, dim=1), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("steps", [EVERY, MAX_WAITING - 1])
def test_a_forward_that_fails_is_not_learned(small: tuple[Any, Calibration], steps: int) -> None:
    """Also where it fits anew, and where waiting tokens become too many."""
    model, calibration = small
    turn = PROMPT + steps
    ids = tokens(1, turn + 2 * EVERY)

    def fail(*arguments: Any) -> None:
        raise KeyboardInterrupt

    every = EVERY if steps == EVERY else 1000
    with attach(model, calibration, selecting(refit_every=every)) as session, torch.no_grad():
        cache, untouched = session.new_cache(), session.new_cache()
        for each in (cache, untouched):
            run(model, each, ids[:, :turn], prompt=PROMPT)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            forward(model, ids[:, turn : turn + 1], cache)
        hook.remove()
        found, wanted = (
            torch.cat([forward(model, each, one) for each in ids[:, turn:].split(1, dim=1)], dim=1)
            for one in (cache, untouched)
        )
    assert torch.equal(found, wanted)


def test_a_cache_that_went_back_waits_no_longer_than_asked(small: tuple[Any, Calibration]) -> None:
    model, calibration = small
    ids = tokens(1, PROMPT + 4 * EVERY)
    with attach(model, calibration, selecting(refit_every=EVERY)) as session, torch.no_grad():
        cache = session.new_cache()
        prefill(session, cache, ids[:, :PROMPT])
        decode(model, ids[:, PROMPT:], cache)
        cache.crop(PROMPT)
        decode(model, ids[:, PROMPT : PROMPT + 1], cache)
        assert cache.offloaded[-1].policy.until_refit(PROMPT + 1) == EVERY - 1


def test_autograd_and_inference_mode_by_turns(small: tuple[Any, Calibration]) -> None:
    model, calibration = small
    ids = tokens(1, PROMPT + 4 * EVERY)
    modes = (torch.enable_grad, torch.no_grad, torch.inference_mode)
    with attach(model, calibration, selecting(refit_every=EVERY)) as session:
        expected = run(model, session.new_cache(), ids, prompt=PROMPT)[:, PROMPT:]
        cache, found = session.new_cache(), []
        with torch.inference_mode():
            prefill(session, cache, ids[:, :PROMPT])
        for number, token in enumerate(ids[:, PROMPT:].split(1, dim=1)):
            with modes[number % 3]():
                found.append(forward(model, token, cache).detach().clone())
    assert_close(torch.cat(found, dim=1), expected, atol=2e-4, rtol=2e-4)
