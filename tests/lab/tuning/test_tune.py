"""`tune` on a tiny model: what it stores, and that everything uses it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrating import RandomTokenizer, calibrate_tiny, tokens
from infinigen_kv import Calibration, InfiniGenConfig
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv.errors import CalibrationError, InputError
from infinigen_kv.session.attach import attach
from infinigen_kv_lab.tuning import tune
from infinigen_kv_lab.tuning.options import TuneOptions
from infinigen_kv_lab.tuning.search import ALPHAS, reachable
from infinigen_kv_lab.tuning.trial import Trials
from infinigen_kv_lab.tuning.windows import split_windows
from tiny import TINY

SMALL = TuneOptions(
    target_kl=1e-5, max_fetch=0.6, prompt_tokens=40, decode_tokens=20, windows=2, resident=0.2
)
TEXT = ["x" * 300]


def test_alphas_reach_the_target_and_are_stored(tmp_path: Path) -> None:
    model = TINY["llama"]().eval()
    calibration = calibrate_tiny(model)
    everything = _kl(model, calibration, 1e6)
    nothing = _kl(model, calibration, 0.0)
    target = (everything * nothing) ** 0.5 if everything > 0 else nothing / 3
    found = tune(model, RandomTokenizer(), calibration, replace(SMALL, target_kl=target), TEXT)
    tuned = found.tuned
    assert tuned is not None and len(tuned.alpha) == len(model.model.layers)
    assert tuned.measured["reached"] and tuned.measured["kl_tuned_on"] <= target
    assert _kl(model, calibration, tuned.alpha) == pytest.approx(tuned.measured["kl_tuned_on"])
    found.save(tmp_path / "made")
    again = Calibration.load(tmp_path / "made")
    assert again.tuned == tuned
    assert again.config().alpha == tuned.alpha and again.config().max_fetch == 0.6
    with attach(model, again) as session:
        assert session.config == again.config()


def test_what_is_given_wins_over_what_was_tuned() -> None:
    tuned = Tuned((1.0, 2.0), 0.4, 0.5, 0.02)
    made = Calibration({}, {}, {}, {}, tuned)
    assert made.config() == InfiniGenConfig(alpha=(1.0, 2.0), max_fetch=0.4, partial_ratio=0.5)
    assert made.config(alpha=3.0).alpha == 3.0
    assert made.config(alpha=3.0).max_fetch == 0.4
    assert made.config(rehearsal="paper") == InfiniGenConfig(rehearsal="paper")


def test_each_layer_uses_its_own_alpha() -> None:
    model = TINY["llama"]().eval()
    calibration = calibrate_tiny(model)
    shares = {}
    for name, alpha in (("own", (9.0, 0.0, 1e6, 0.0)), ("low", 0.0), ("high", 1e6)):
        config = InfiniGenConfig(
            alpha=alpha if isinstance(alpha, float) else alpha[: len(model.model.layers)],
            max_fetch=0.9,
            min_context=1,
            recent_tokens=1,
        )
        shares[name] = _shares(model, calibration, config)
    layers = sorted(shares["low"])
    for layer in layers:
        expected = "high" if layer == 2 else "low"
        assert shares["own"][layer] == shares[expected][layer]
    assert shares["low"][layers[0]] < shares["high"][layers[0]]


def test_windows_are_disjoint_and_come_from_all_of_the_text() -> None:
    tokenizer: Any = _Counting()
    tuning, held_back = split_windows(
        tokenizer,
        ["a" * 60, "b" * 60],
        prompt_tokens=7,
        decode_tokens=3,
        count=4,
        device=torch.device("cpu"),
    )
    seen = [
        int(token)
        for window in [*tuning, *held_back]
        for token in [*window.prompt, *window.decoded]
    ]
    assert len(tuning) == len(held_back) == 4
    assert len(set(seen)) == len(seen) == 80
    assert max(seen) >= 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"target_kl": 0}, "target_kl=0 is not valid: it must be a number of nats above 0"),
        ({"target_kl": float("nan")}, "target_kl=nan is not valid"),
        ({"windows": 0}, "windows=0 is not valid: it must be an integer >= 1"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TuneOptions(**values)


@pytest.mark.parametrize(
    ("resident", "share"), [(None, 0.2), (0.1, 0.1), (0.5, 0.3), (0.0, 0.3), (1_000_000, 0.3)]
)
def test_no_step_wants_more_than_the_resident_set_holds(
    resident: float | int | None, share: float
) -> None:
    assert TuneOptions(resident=resident).config().max_fetch == share
    assert TuneOptions(resident=resident, max_fetch=0.6).config().max_fetch == 0.6


def test_unless_the_target_is_out_of_reach() -> None:
    model = TINY["llama"]().eval()
    calibration = calibrate_tiny(model)
    windows, _ = split_windows(
        RandomTokenizer(),
        ["x" * 800],
        prompt_tokens=150,
        decode_tokens=20,
        count=1,
        device=torch.device("cpu"),
    )
    trials = Trials(model, calibration, windows)
    options = TuneOptions(resident=0.25)
    least = trials.measure(options.config(ALPHAS[-1]), options.storage).kl
    within, beyond = (replace(options, target_kl=least * factor) for factor in (1.01, 0.99))
    assert reachable(trials, within) == within
    assert reachable(trials, beyond) == replace(beyond, max_fetch=0.3)
    given = replace(beyond, max_fetch=0.25)
    assert reachable(trials, given) == given


def test_too_little_text_is_said_before_anything_is_measured() -> None:
    model = TINY["llama"]().eval()
    with pytest.raises(InputError, match=r"has 100 tokens: it must have at least 120"):
        tune(model, RandomTokenizer(), calibrate_tiny(model), SMALL, ["x" * 100])


def test_windows_longer_than_the_model() -> None:
    model = TINY["llama"]().eval()
    wanted = replace(SMALL, prompt_tokens=100_000)
    with pytest.raises(InputError, match="longer than the model's"):
        tune(model, RandomTokenizer(), calibrate_tiny(model), wanted, TEXT)


@pytest.mark.parametrize(
    "damage",
    [
        {"alpha": [1, "x"]},
        {"max_fetch": 3},
        {"more": 1},
        {"partial_ratio": None},
        {"target_kl": float("nan")},
        {"target_kl": True},
        {"target_kl": 10**400},
    ],
)
def test_damaged_settings_are_refused(damage: dict[str, object]) -> None:
    values = {**Tuned((1.0, 2.0), 0.4, 0.5, 0.02).to_dict(), **damage}
    with pytest.raises(CalibrationError, match="tune again"):
        Tuned.from_dict(values)


@pytest.mark.parametrize("count", [3, 5])
def test_alphas_for_another_number_of_layers_are_refused(count: int) -> None:
    config = InfiniGenConfig(alpha=(4.0,) * count)
    with (
        pytest.raises(InputError, match=f"alpha has {count} values, and the model 4 layers"),
        attach(TINY["llama"]().eval(), None, config),
    ):
        pass


def test_settings_for_another_number_of_layers_are_refused() -> None:
    model = TINY["llama"]().eval()
    made = replace(calibrate_tiny(model), tuned=Tuned((1.0,), 0.4, 0.5, 0.02))
    with (
        pytest.raises(CalibrationError, match="tuned settings are for 1 layers"),
        attach(model, made),
    ):
        pass


def test_damaged_settings_do_not_keep_the_model_from_being_tuned_again() -> None:
    model = TINY["llama"]().eval()
    made = replace(calibrate_tiny(model), tuned=Tuned((1.0,), 0.4, 0.5, 0.02))
    found = tune(model, RandomTokenizer(), made, SMALL, TEXT).tuned
    assert found is not None and len(found.alpha) == 4


class _Counting:
    """Token ids that say where in all of the text they are."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        start, self._next = self._next, self._next + len(text)
        return {"input_ids": list(range(start, self._next))}


def _kl(model, calibration, alpha) -> float:  # type: ignore[no-untyped-def]
    windows, _ = split_windows(
        RandomTokenizer(),
        TEXT,
        prompt_tokens=40,
        decode_tokens=20,
        count=2,
        device=torch.device("cpu"),
    )
    return Trials(model, calibration, windows).measure(SMALL.config(alpha), SMALL.storage).kl


def _shares(model, calibration, config) -> dict[int, float]:  # type: ignore[no-untyped-def]
    from infinigen_kv.cache.forward import forward, prefill
    from infinigen_kv.cache.recorder import FetchRecorder

    with attach(model, calibration, config) as session, torch.no_grad():
        cache = session.new_cache(tokens=60)
        prefill(session, cache, tokens(1, 50))
        recorder = cache.recorder = FetchRecorder()
        forward(model, tokens(1, 1, 5), cache)
        cache.close()
    return {layer: share for layer, share in recorder.fetched_by_layer.items() if layer > 0}
