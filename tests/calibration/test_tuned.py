"""Settings that were tuned: where they hold, and what an artefact keeps of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrating import calibrate_tiny, tokens
from infinigen_kv.cache.forward import prefill
from infinigen_kv.calibration.artefact import Calibration, calibration_digest
from infinigen_kv.calibration.tuned import Tuned
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import CalibrationError
from infinigen_kv.session.attach import attach
from infinigen_kv.storage.config import StorageConfig
from tiny import TINY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALPHA = (1.0, 2.0, 3.0, 4.0)
TUNED = Tuned(ALPHA, 0.1, 0.5, 0.02, {}, resident=0.1, resident_layers=(0, 2))
PLAIN = Tuned(ALPHA, 0.1, 0.5, 0.02)
MADE = Calibration({}, {}, {}, {}, TUNED)


@pytest.mark.parametrize(
    ("wanted", "device"),
    [
        (StorageConfig(link="emulated:4"), CPU),
        (StorageConfig(home="disk", codec="int8"), CPU),
        (StorageConfig(), CUDA),
    ],
)
def test_they_are_used_where_entries_move(wanted: StorageConfig, device: torch.device) -> None:
    found = MADE.storage(wanted, device)
    assert found == replace(wanted, resident=0.1, resident_layers=(0, 2))


@pytest.mark.parametrize(
    ("wanted", "device"),
    [
        (StorageConfig(), CPU),
        (StorageConfig(codec="int4"), CPU),
        (StorageConfig(home="device"), CUDA),
    ],
)
def test_they_are_not_used_where_nothing_moves(wanted: StorageConfig, device: torch.device) -> None:
    assert MADE.storage(wanted, device) == wanted


def test_what_is_given_stays() -> None:
    link: dict[str, Any] = {"link": "emulated:4"}
    assert MADE.storage(StorageConfig(**link, resident=0.0)) == StorageConfig(
        **link, resident=0.0, resident_layers=(0, 2)
    )
    assert MADE.storage(StorageConfig(**link, resident_layers=())) == StorageConfig(
        **link, resident=0.1, resident_layers=()
    )
    untouched = StorageConfig(**link)
    assert replace(MADE, tuned=PLAIN).storage(untouched) == untouched
    assert replace(MADE, tuned=None).storage(untouched) == untouched


def test_a_cache_has_the_tuned_resident_set_and_layers() -> None:
    model = TINY["llama"]().eval()
    made = replace(calibrate_tiny(model), tuned=TUNED)
    storage = made.storage(StorageConfig(link="emulated:1000"))
    with attach(model, made, storage=storage) as session:
        cache = session.new_cache(tokens=40)
        prefill(session, cache, tokens(1, 30))
        assert sorted(cache.resident_layers) == [0, 2]
        assert cache.speculated_layers == [1, 3]
        assert cache.storage.config.resident == 0.1
    with attach(model, made) as session:  # all in one memory
        assert session.storage == StorageConfig()


def test_they_come_back_from_json() -> None:
    assert Tuned.from_dict(TUNED.to_dict()) == TUNED
    older = {k: v for k, v in PLAIN.to_dict().items() if not k.startswith("resident")}
    assert Tuned.from_dict(older) == PLAIN


@pytest.mark.parametrize(
    "damage", [{"resident": 1.5}, {"resident": "x"}, {"resident_layers": ["a"]}, {"other": 1}]
)
def test_damaged_ones_are_refused(damage: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match="tune again"):
        Tuned.from_dict({**TUNED.to_dict(), **damage})


def test_layers_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    model = TINY["llama"]().eval()
    made = replace(calibrate_tiny(model), tuned=replace(TUNED, resident_layers=(0, 9)))
    made.save(tmp_path / "made")
    with (
        pytest.raises(CalibrationError, match=r"keep layers \[0, 9\] whole"),
        attach(model, Calibration.load(tmp_path / "made")),
    ):
        pass


def test_the_first_layers_of_a_model_keep_theirs() -> None:
    assert TUNED.first(2) == replace(TUNED, alpha=ALPHA[:2], resident_layers=(0,))
    assert PLAIN.first(3) == replace(PLAIN, alpha=ALPHA[:3])


def test_results_depend_on_them() -> None:
    settings = {"rank": 4}
    digests = {
        calibration_digest(Calibration({}, settings, {}, {}, tuned))
        for tuned in (None, PLAIN, TUNED, replace(TUNED, resident=0.2))
    }
    assert len(digests) == 4
    assert MADE.config() == InfiniGenConfig(alpha=ALPHA, max_fetch=0.1, partial_ratio=0.5)
