"""``infinigen-kv eval``: figures, tables, kept points, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from command_line import TEXT, Run, last_json, refusal, save, tokenizer
from fewshot_records import RECORDS, folder
from infinigen_kv import InfiniGenConfig, StorageConfig
from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv_lab.evals import perplexity
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject
from infinigen_kv_lab.evals.run import evaluate as run_task
from infinigen_kv_lab.evals.task import Inputs, TaskOptions

WORDS = ("--window", 300, "--prompt-tokens", 270, "--limit", 2)
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason='needs: pip install "infinigen-kv[eval]"'
)


@pytest.fixture
def words(model_folder: Path, artefact: Path, text_file: Path) -> tuple[Any, ...]:
    return ("eval", model_folder, "--calibration", artefact, "--text", text_file, *WORDS)


def test_json_holds_what_the_library_measures(
    run: Run, words: tuple[Any, ...], artefact: Path, text_file: Path
) -> None:
    result = run(*words, "--tasks", "text", "--alpha", 3, "--budget", "30%", "--json")
    found = last_json(result)
    options = TaskOptions(window=300, prompt_tokens=270, text=text_file)
    task = make_task("text", Inputs(tokenizer(), tiny.MAX_POSITIONS, None, options))
    subject = Subject(
        tiny.llama(), Calibration.load(artefact), InfiniGenConfig(alpha=3.0), StorageConfig(), 0.3
    )
    expected = run_task(subject, task, ["ideal", "infinigen-paper", "infinigen"], limit=2)
    assert [each["policy"] for each in found["points"]] == ["ideal", "infinigen-paper", "infinigen"]
    for ours, theirs in zip(found["points"], expected, strict=True):
        assert (ours["samples"], ours["available"]) == (2, 5)
        assert ours["result"]["ppl"]["value"] == pytest.approx(
            theirs.to_dict()["result"]["ppl"]["value"], rel=1e-4
        )
        assert ours["settings"] == json.loads(json.dumps(theirs.to_dict()["settings"]))
    assert found["config"]["alpha"] == 3.0 and found["budget"] == 0.3
    assert found["points"][2]["result"]["fetched_share"] < 0.25
    for policy in ("ideal", "infinigen-paper", "infinigen"):
        assert policy in result.stdout
    assert "text, 2 of 5 samples" in result.stdout and "perplexity" in result.stdout


def test_what_is_kept_is_not_measured_again(
    run: Run, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    every = (*words, "--tasks", "text", "--policies", "ideal,infinigen", "--out", out, "--json")
    first = last_json(run(*every))
    assert len([*out.glob("text.*.json")]) == 2

    def never(*unused: Any) -> Any:
        raise AssertionError("measured again")

    with monkeypatch.context() as patch:
        patch.setattr(perplexity.PerplexityTask, "measure", never)
        assert last_json(run(*every)) == first


def test_an_interrupted_run_keeps_what_is_finished(
    run: Run, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    every = (*words, "--tasks", "text", "--policies", "infinigen", "--out", out, "--json")
    measure = perplexity.PerplexityTask.measure
    done: list[int] = []

    def interrupted(self: Any, reader: Any, index: int, shared: Any) -> Any:
        if index == 1:
            raise KeyboardInterrupt
        done.append(index)
        return measure(self, reader, index, shared)

    with monkeypatch.context() as patch:
        patch.setattr(perplexity.PerplexityTask, "measure", interrupted)
        result = run(*every)
    assert result.exit_code == 130 and done == [0]
    assert result.stderr.splitlines()[-1] == "interrupted"
    (kept,) = out.glob("text.infinigen.*.json")
    held = json.loads(kept.read_text(encoding="utf-8"))
    assert len(held["samples"]) == 1 and held["finished"] is False
    assert last_json(run(*every))["points"][0]["samples"] == 2
    assert len(json.loads(kept.read_text(encoding="utf-8"))["samples"]) == 2


def test_several_tasks_each_with_a_table(run: Run, words: tuple[Any, ...]) -> None:
    result = run(*words, "--tasks", "text, speculation", "--policies", "ideal,infinigen", "--json")
    found = last_json(result)
    names = [(each["task"], each["policy"]) for each in found["points"]]
    assert names == [("text", "ideal"), ("text", "infinigen"), ("speculation", "infinigen")]
    assert "task speculation: without ideal, which it does not suit" in result.stderr
    assert "speculation, 2 of 5 samples" in result.stdout


def test_a_model_that_computes_nan_gets_an_error(
    run: Run, words: tuple[Any, ...], tmp_path: Path
) -> None:
    model = tiny.llama()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    reason = refusal(
        run("eval", save(model, tmp_path / "broken"), *words[2:], "--tasks", "text", "--json")
    )
    assert "the model's logits contain NaN or infinity" in reason


@needs_harness
def test_few_shot_tasks_from_files(run: Run, words: tuple[Any, ...], tmp_path: Path) -> None:
    data = folder(tmp_path, "rte", RECORDS["rte"])
    extra = ("--data", data, "--shots", 1, "--exact-prefix", 40, "--policies", "ideal,infinigen")
    result = run(*words, "--tasks", "rte", *extra, "--json")
    full, ours = last_json(result)["points"]
    assert ours["result"]["documents"] == 2
    assert ours["settings"]["config"]["min_context"] == 40
    apart = ours["result"]["metrics"]["acc"]["value"] - full["result"]["metrics"]["acc"]["value"]
    assert ours["result"]["differences"]["acc"]["value"] == pytest.approx(apart)
    assert "acc less full" in result.stdout


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("--tasks", "wikitxt2"), "task 'wikitxt2' is not known: did you mean wikitext2?"),
        (("--tasks", " , "), "--tasks ' , ' names none"),
        (("--tasks", "text", "--policies", "infinigne"), "did you mean infinigen"),
        (("--tasks", "text", "--policies", ","), "--policies ',' names none"),
        (("--tasks", "text", "--limit", "0"), "--limit"),
        (("--tasks", "needles", "--lengths", "a,b"), "--lengths 'a,b' is not valid"),
        (("--tasks", "needles", "--lengths", "64"), "--lengths 64 is not valid"),
        (("--tasks", "text", "--capacities", ","), "--capacities ',' names none"),
        (("--tasks", "text", "--capacities", "50%,2MiB"), "--capacities '2MiB' is not valid"),
        (("--tasks", "text", "--capacities", "1"), "--capacities 1 is not valid"),
        (("--tasks", "text", "--codecs", "none,int2"), "--codecs 'int2' is not valid"),
        (("--tasks", "text", "--codec", "int8", "--codecs", "none"), "exclude each other"),
        (("--tasks", "text", "--home", "disk"), "--home changes how fast a policy is"),
        (("--tasks", "text", "--link", "emulated:1"), "--link changes how fast"),
        (("--tasks", "text", "--budget", "2"), "--budget '2' is not valid"),
        (("--tasks", "text", "--alpha", "-1"), "--alpha -1.0"),
        (("--tasks", "text", "--calibration", "none"), "none"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    run: Run, extra: tuple[str, ...], reason: str
) -> None:
    assert reason in refusal(run("eval", "./no-model", *extra))


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (("--tasks", "wikitext2"), "needs the test split of wikitext-2-raw-v1"),
        (("--tasks", "ptb", "--data", "none"), "--data none: no such folder"),
        (("--tasks", "german"), "needs long German texts as UTF-8: put them into a folder as"),
        (("--tasks", "code", "--data", "."), "code holds no file that ends in"),
        (("--tasks", "passkey", "--data", "."), "passkey_generated.jsonl is missing: fetch"),
        (("--tasks", "text"), "--text FILE"),
        (("--tasks", "text", "--text", "none.txt"), "none.txt: cannot be read"),
        (("--tasks", "speculation", "--text", "t", "--policies", "ideal"), "suits none of the"),
        (("--tasks", "text", "--text", "t", "--window", "513"), "the model's 512 positions"),
        (("--tasks", "text", "--text", "t", "--prompt-tokens", "512"), "leaves no tokens after"),
    ],
)
def test_data_that_is_not_right(
    run: Run,
    model_folder: Path,
    artefact: Path,
    tmp_path: Path,
    extra: tuple[str, ...],
    reason: str,
) -> None:
    (tmp_path / "t").write_text(TEXT, encoding="utf-8")
    result = run("eval", model_folder, "--calibration", artefact, *extra)
    assert reason in refusal(result)


def test_a_bad_line_of_a_task_file(
    run: Run, model_folder: Path, artefact: Path, tmp_path: Path
) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip('needs: pip install "infinigen-kv[eval]"')
    data = folder(tmp_path, "piqa", [*RECORDS["piqa"], "{"])
    words = ("eval", model_folder, "--calibration", artefact, "--tasks", "piqa", "--data", data)
    assert "piqa.validation.jsonl, line 3: not JSON" in refusal(run(*words))


def test_a_folder_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = run("eval", "./no-model", "--tasks", "text", "--out", tmp_path / "file")
    assert "cannot be written to" in refusal(result)


def test_several_homes_in_one_run(run: Run, words: tuple[Any, ...], tmp_path: Path) -> None:
    every = (*words, "--tasks", "text", "--policies", "ideal,infinigen", "--limit", 1)
    homes = ("--capacities", "50%, none", "--codecs", "none,int8", "--resident-layers", "none")
    out = tmp_path / "out"
    result = run(*every, *homes, "--out", out, "--json")
    found = last_json(result)["points"]
    # the full cache uses nothing of a home, so it is measured once
    assert [each["policy"] for each in found] == ["ideal", *["infinigen"] * 4]
    assert len([*out.glob("*.json")]) == 5
    stores = [each["settings"]["storage"] for each in found]
    places = [(each["capacity"], each["codec"]) for each in stores]
    assert places == [(None, "none"), (0.5, "none"), (0.5, "int8"), (None, "none"), (None, "int8")]
    costs = [each["result"]["costs"] for each in found]
    assert [each["missed_share"] is None for each in costs] == [True, False, False, True, True]
    assert 0.0 < costs[1]["missed_share"]["value"] < 1.0
    assert costs[2]["fetched_bytes"] < costs[1]["fetched_bytes"] < costs[3]["fetched_bytes"]
    assert costs[0]["fetched_bytes"] == 0.0 and costs[0]["home_bytes"] == 0
    for label in ("infinigen (50 %, int8)", "KiB", "missed", "the JSON has intervals"):
        assert label in result.stdout
    # one of the homes alone is a point of the same settings
    alone = run(*every, "--codec", "int8", "--resident-layers", "none", "--out", out, "--json")
    assert last_json(alone)["points"][1] == found[4]
    assert len([*out.glob("*.json")]) == 5


@needs_harness
def test_the_mean_over_few_shot_tasks(run: Run, words: tuple[Any, ...], tmp_path: Path) -> None:
    folder(tmp_path, "rte", RECORDS["rte"])
    data = folder(tmp_path, "copa", RECORDS["copa"])
    extra = ("--data", data, "--shots", 1, "--exact-prefix", 40, "--policies", "ideal,infinigen")
    result = run(*words, "--tasks", "rte,copa", *extra, "--json")
    found = last_json(result)
    assert [each["policy"] for each in found["means"]] == ["ideal", "infinigen"]
    mean = found["means"][1]
    ours = [each["result"] for each in found["points"] if each["policy"] == "infinigen"]
    values = [each["metrics"]["acc"]["value"] for each in ours]
    assert mean["accuracy"]["value"] == pytest.approx(sum(values) / 2)
    apart = [each["differences"]["acc"]["value"] for each in ours]
    assert mean["difference"]["value"] == pytest.approx(sum(apart) / 2)
    assert (mean["tasks"], mean["documents"]) == (["rte", "copa"], 4)
    assert "mean of rte, copa" in result.stdout


def test_the_calibrations_cost_is_in_the_json(run: Run, words: tuple[Any, ...]) -> None:
    found = last_json(run(*words, "--tasks", "text", "--policies", "infinigen", "--json"))
    assert {"collecting", "fitting", "skew", "saving"} == found["calibration_cost"].keys()
    assert found["means"] == []
