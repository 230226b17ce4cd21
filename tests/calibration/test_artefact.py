"""Calibrations on disk: what comes back, what is refused, and what a failed write leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as save_tensors

from infinigen_kv.calibration.artefact import HEADER, TENSORS, Calibration, LayerCalibration
from infinigen_kv.calibration.fingerprint import model_fingerprint, precision_of
from infinigen_kv.calibration.replacing import aside_of
from infinigen_kv.errors import CalibrationError, InfiniGenError
from infinigen_kv.models.adapters import adapter_for
from tiny import llama, randomise


def made(seed: int = 0, **fingerprint: Any) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    layers = {
        index: LayerCalibration(
            torch.randn(9, 2, generator=generator),
            torch.randn(2, 12, generator=generator),
            torch.randn(3, 4, 4, generator=generator).mT,  # as a view, not contiguous
        )
        for index in (1, 2, 10)
    }
    report = {"1": {"unexplained": 0.25}}
    return Calibration(fingerprint or {"family": "llama"}, {"rank": 2}, layers, report)


def same(one: Calibration, other: Calibration) -> bool:
    return (
        one.fingerprint == other.fingerprint
        and one.settings == other.settings
        and one.report == other.report
        and list(one.layers) == list(other.layers)
        and all(
            torch.equal(getattr(one.layers[index], name), getattr(other.layers[index], name))
            for index in one.layers
            for name in ("down", "up", "skew")
        )
    )


def rewrite_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = json.loads((folder / HEADER).read_text())
    change(header)
    (folder / HEADER).write_text(json.dumps(header))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return made().save(tmp_path / "calibration")


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    folder = made().save(tmp_path / "deep" / "down")
    assert folder == tmp_path / "deep" / "down"
    assert {entry.name for entry in folder.iterdir()} == {TENSORS, HEADER}
    assert same(Calibration.load(folder), made())
    assert same(Calibration.load(str(folder)), made())


def test_nothing_in_the_artefact_needs_to_be_run(saved: Path) -> None:
    header = json.loads((saved / HEADER).read_text())
    assert header["fingerprint"] == {"family": "llama"}
    assert (saved / TENSORS).read_bytes()[8:9] == b"{"  # safetensors: a length, then JSON


def test_saving_again_replaces_the_old_one(saved: Path) -> None:
    made(seed=1).save(saved)
    assert same(Calibration.load(saved), made(seed=1))
    assert [entry.name for entry in saved.parent.iterdir()] == [saved.name]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    assert same(Calibration.load(made().save(tmp_path / "new")), made())


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors"])
def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / name).write_text("precious")
    with pytest.raises(CalibrationError, match=r"mine exists and is not a calibration: choose"):
        made().save(tmp_path / "mine")
    assert (tmp_path / "mine" / name).read_text() == "precious"


def test_a_calibration_with_something_beside_it_is_not_overwritten(saved: Path) -> None:
    (saved / "notes.txt").write_text("precious")
    with pytest.raises(CalibrationError, match="choose another output folder"):
        made(seed=1).save(saved)
    assert same(Calibration.load(saved), made())


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CalibrationError, match="choose another output folder"):
        made().save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize(
    ("exists", "method"),
    [
        *((True, each) for each in ("write_bytes", "write_text", "rename", "replace")),
        *((False, each) for each in ("write_bytes", "write_text", "replace")),
    ],
)
def test_an_interrupted_write_leaves_the_old_one_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    exists: bool,
    method: str,
    failure: BaseException,
) -> None:
    folder = tmp_path / "calibration"
    if exists:
        made().save(folder)
    working = getattr(Path, method)
    calls = []

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise failure
        return working(*args, **kwargs)

    monkeypatch.setattr(Path, method, fail_once)
    with pytest.raises((KeyboardInterrupt, OSError)):
        made(seed=1).save(folder)
    assert calls
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == (["calibration"] if exists else [])
    if exists:
        assert same(Calibration.load(folder), made())


@pytest.mark.parametrize("step", range(4))
def test_a_process_that_dies_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """From some move of a folder on nothing is done any more, tidying up included."""
    folder = tmp_path / "calibration"
    made().save(folder)
    moves = 0

    def dying(working: Any) -> Any:
        def move(*args: Any) -> Any:
            nonlocal moves
            moves += 1
            if moves > step:
                raise KeyboardInterrupt
            return working(*args)

        return move

    with monkeypatch.context() as patch:
        for method in ("rename", "replace"):
            patch.setattr(Path, method, dying(getattr(Path, method)))
        if step < 3:
            with pytest.raises(KeyboardInterrupt):
                made(seed=1).save(folder)
        else:
            made(seed=1).save(folder)
    assert same(Calibration.load(folder), made(seed=0 if step < 2 else 1))
    for seed in (2, 3):
        made(seed=seed).save(folder)
        assert same(Calibration.load(folder), made(seed=seed))
        assert [entry.name for entry in tmp_path.iterdir()] == ["calibration"]


def test_what_is_in_the_way_of_the_old_one_is_not_deleted(saved: Path) -> None:
    (precious := aside_of(saved)).mkdir()
    (precious / "notes.txt").write_text("precious")
    with pytest.raises(CalibrationError, match="exists and is not a calibration"):
        made(seed=1).save(saved)
    assert (precious / "notes.txt").exists() and same(Calibration.load(saved), made())


def test_a_missing_artefact(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no calibration at .*nowhere: cannot read"):
        Calibration.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="no calibration at"):
        Calibration.load(tmp_path / "file")


def test_missing_tensors(saved: Path) -> None:
    (saved / TENSORS).unlink()
    with pytest.raises(CalibrationError, match=f"cannot read .*{TENSORS}: No such file"):
        Calibration.load(saved)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_tensors(saved: Path, keep: int) -> None:
    whole = (saved / TENSORS).read_bytes()
    (saved / TENSORS).write_bytes(whole[:keep])
    with pytest.raises(CalibrationError, match=r"is damaged \(its checksum differs\): calibrate"):
        Calibration.load(saved)


def test_one_flipped_bit(saved: Path) -> None:
    content = bytearray((saved / TENSORS).read_bytes())
    content[-1] ^= 1
    (saved / TENSORS).write_bytes(content)
    with pytest.raises(CalibrationError, match="checksum differs"):
        Calibration.load(saved)


@pytest.mark.parametrize("content", [b"", b"{", b"not json", b"\xff\xfe\x00", b'{"format": 1,'])
def test_a_damaged_header(saved: Path, content: bytes) -> None:
    (saved / HEADER).write_bytes(content)
    with pytest.raises(CalibrationError, match=f"{HEADER} is damaged: .*; calibrate again"):
        Calibration.load(saved)


@pytest.mark.parametrize("cut", [1, 10, 60, 200])
def test_a_truncated_header(saved: Path, cut: int) -> None:
    text = (saved / HEADER).read_text()
    (saved / HEADER).write_text(text.rstrip()[:-cut])
    with pytest.raises(CalibrationError, match="damaged"):
        Calibration.load(saved)


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{}", '{"format": 1}'])
def test_another_format(saved: Path, content: str) -> None:
    (saved / HEADER).write_text(content)
    with pytest.raises(CalibrationError, match=r"has format .*, this version reads 2: calibrate"):
        Calibration.load(saved)


@pytest.mark.parametrize("name", ["fingerprint", "settings", "tensors_sha256"])
def test_a_header_that_lacks_something(saved: Path, name: str) -> None:
    rewrite_header(saved, lambda header: header.pop(name))
    with pytest.raises(CalibrationError, match=f"lacks '{name}': calibrate again"):
        Calibration.load(saved)


@pytest.mark.parametrize("name", ["fingerprint", "settings", "report", "cost", "precision"])
@pytest.mark.parametrize("value", [[], "text", 3, None])
def test_a_header_of_the_wrong_shape(saved: Path, name: str, value: Any) -> None:
    rewrite_header(saved, lambda header: header.update({name: value}))
    with pytest.raises(CalibrationError, match=f"'{name}' is no object; calibrate again"):
        Calibration.load(saved)


@pytest.mark.parametrize(
    ("layer", "fit"),
    [
        ("one", {"unexplained": 0.25}),
        ("-1", {"unexplained": 0.25}),
        ("", {"unexplained": 0.25}),
        *(("1", fit) for fit in (None, 0.25, [0.25], "text", {}, {"own_weights": 0.25})),
        *(
            ("1", {"unexplained": share})
            for share in (None, "0.25", [0.25], dict[str, Any](), True)
        ),
    ],
)
def test_a_report_of_the_wrong_shape(saved: Path, layer: str, fit: Any) -> None:
    rewrite_header(saved, lambda header: header["report"].update({layer: fit}))
    with pytest.raises(CalibrationError, match=f"its report on '{layer}' is not .*calibrate again"):
        Calibration.load(saved)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "is not safetensors"),
        (b"PK\x03\x04 pickled", "is not safetensors"),
        (save_tensors({"1.down": torch.zeros(2)}), "lacks the tensor '1.up'"),
        (save_tensors({"lm_head.weight": torch.zeros(2)}), "tensors of something else"),
    ],
)
def test_tensors_of_something_else(saved: Path, payload: bytes, message: str) -> None:
    (saved / TENSORS).write_bytes(payload)
    digest = sha256(payload).hexdigest()
    rewrite_header(saved, lambda header: header.update(tensors_sha256=digest))
    with pytest.raises(CalibrationError, match=message):
        Calibration.load(saved)


def test_a_calibration_of_another_model_is_refused() -> None:
    model = llama(num_hidden_layers=3)
    calibration = made(**model_fingerprint(adapter_for(model)))
    calibration.check_model(adapter_for(model))
    other = llama(num_hidden_layers=3)
    randomise(other, seed=5)
    with pytest.raises(
        CalibrationError,
        match=r"belongs to another model: its query_weights_sha256 is .*; calibrate this model",
    ):
        calibration.check_model(adapter_for(other))
    with pytest.raises(CalibrationError, match=r"another model: its hidden_size is 32, .* is 48"):
        calibration.check_model(adapter_for(llama(hidden_size=48)))


@pytest.mark.parametrize("part", ["self_attn.v_proj", "self_attn.o_proj", "mlp.down_proj"])
def test_a_fine_tuned_model_with_its_base_models_query_weights_is_refused(part: str) -> None:
    base, tuned = (llama(num_hidden_layers=3) for _ in range(2))
    with torch.no_grad():
        tuned.get_submodule(f"model.layers.0.{part}").weight.mul_(1.1)
    calibration = made(**model_fingerprint(adapter_for(base)))
    with pytest.raises(
        CalibrationError, match=r"another model: its weights_sha256 is .*; calibrate this model"
    ):
        calibration.check_model(adapter_for(tuned))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_weight_is_seen_beside_those_that_the_fingerprint_looks_at(value: float) -> None:
    healthy, broken = (llama(num_hidden_layers=3, intermediate_size=512) for _ in range(2))
    weight = broken.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 1] = value
    fingerprint = model_fingerprint(adapter_for(healthy))
    assert model_fingerprint(adapter_for(broken)) == fingerprint
    with pytest.raises(InfiniGenError, match=r"weights contain NaN .* \(in layers\.1\.mlp"):
        made(**fingerprint).check_model(adapter_for(broken))


def test_a_calibration_without_a_layer_that_the_model_needs_is_refused() -> None:
    adapter = adapter_for(llama(num_hidden_layers=4))
    with pytest.raises(CalibrationError, match="lacks layer 3: calibrate this model again"):
        made(**model_fingerprint(adapter)).check_model(adapter)


def test_a_calibration_without_a_fingerprint_is_refused() -> None:
    with pytest.raises(CalibrationError, match="another model: its family is null"):
        made(other=1).check_model(adapter_for(llama()))


def test_the_cost_is_kept_and_saving_is_part_of_it(tmp_path: Path) -> None:
    cost = {"fitting": {"seconds": 1.5, "peak_bytes": 7}}
    replace(made(), cost=cost).save(tmp_path / "one")
    found = Calibration.load(tmp_path / "one").cost
    assert found["fitting"] == cost["fitting"]
    assert found["saving"]["seconds"] > 0 and found["saving"]["peak_bytes"] >= 0


def test_the_precision_is_kept(tmp_path: Path) -> None:
    adapter = adapter_for(llama())
    precision = precision_of(adapter)
    replace(made(), precision=precision).save(tmp_path / "one")
    assert Calibration.load(tmp_path / "one").precision == precision


def test_an_artefact_that_does_not_know_its_precision(saved: Path) -> None:
    rewrite_header(saved, lambda header: header.pop("precision"))
    assert Calibration.load(saved).precision == {}


def test_an_artefact_that_does_not_know_its_cost(saved: Path) -> None:
    assert Calibration.load(saved).cost == {}
    rewrite_header(saved, lambda header: header.pop("cost"))
    assert Calibration.load(saved).cost == {}


@pytest.mark.parametrize(
    "stage", [None, 3, {}, {"seconds": 1.0}, {"seconds": "1", "peak_bytes": 2}]
)
def test_a_cost_of_the_wrong_shape(saved: Path, stage: Any) -> None:
    rewrite_header(saved, lambda header: header.update(cost={"fitting": stage}))
    with pytest.raises(CalibrationError, match="its cost is no numbers; calibrate again"):
        Calibration.load(saved)
