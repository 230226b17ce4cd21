"""``infinigen-kv plan``, and runs that are refused because of their plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from command_line import TEXT, Run, last_json, refusal
from infinigen_kv.memory import model_request, plan_memory

LIMIT = plan_memory(model_request(tiny.llama(), context=400, new_tokens=128, rows=3)).total(
    "device"
)  # bytes: three rows fit
PARTS = ["weights", "calibration", "home", "KV kept on the device", "partial keys"]


def test_the_figures_are_the_plans(run: Run, model_folder: Path) -> None:
    found = last_json(run("plan", model_folder, "--context", 400, "--batch", 3, "--json"))
    plan = plan_memory(model_request(tiny.llama(), context=400, new_tokens=128, rows=3))
    assert [part["name"] for part in found["parts"]][:5] == PARTS
    assert [part["device"] for part in found["parts"]] == [part.device for part in plan.parts]
    assert found["total"] == {"device": plan.total("device"), "host": 0, "disk": 0}
    assert found["fits"] and found["fits_with"] == [] and found["missing"] == {}
    assert found["available"]["device"] > found["total"]["device"]
    assert found["device_kv_bytes"] == plan.caches[0].device_bytes


def test_no_weights_are_needed(run: Run, model_folder: Path) -> None:
    result = run("plan", model_folder, "--context", 400)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert f"{model_folder}, float32 on cpu: 1 x 400 tokens, 128 of them new" in lines[0]
    for name in ("weights", "partial keys", "needed", "available"):
        assert any(line.split()[: len(name.split())] == name.split() for line in lines), name
    assert lines[-1] == "it fits"


def test_what_does_not_fit_says_what_would(run: Run, model_folder: Path) -> None:
    words = ("plan", model_folder, "--context", 400, "--batch", 8)
    found = last_json(run(*words, "--device-memory", LIMIT, "--json"))
    assert not found["fits"]
    assert found["missing"]["device"] == found["total"]["device"] - LIMIT
    assert found["fits_with"]
    for each in found["fits_with"]:
        assert each["total"] <= LIMIT
    result = run(*words, "--device-memory", LIMIT)
    last = result.stdout.splitlines()[-1]
    assert result.exit_code == 0
    assert last.startswith("the run needs ") and " of memory, " in last
    assert found["fits_with"][0]["change"] in last
    assert last.endswith("; --device-memory sets another limit")


def test_the_advice_is_an_option_that_works(run: Run, model_folder: Path) -> None:
    words = ("plan", model_folder, "--context", 400, "--device-memory", LIMIT, "--json")
    said = [each["change"] for each in last_json(run(*words, "--batch", 8))["fits_with"]]
    options = [each.rpartition(" (")[0].split() for each in said if each.startswith("--")]
    assert ["--batch", "3"] in options
    for option in options:  # of the same option the later one counts
        assert last_json(run(*words, "--batch", 8, *option))["fits"], option


def test_a_card_that_this_machine_lacks(run: Run, model_folder: Path) -> None:
    words = ("plan", model_folder, "--context", 400, "--device", "cuda:7")
    assert "say how much memory yours has" in refusal(run(*words))
    sizes = ("--device-memory", "24GiB", "--host-memory", "64GiB")
    found = last_json(run(*words, *sizes, "--json"))
    assert found["available"]["device"] == 24 * 2**30
    assert found["available"]["host"] == 64 * 2**30
    assert found["total"]["host"] > 0 and found["device"] == "cuda:7"
    assert "device" in run(*words, *sizes).stdout


def test_a_home_on_disk(run: Run, model_folder: Path, tmp_path: Path) -> None:
    words = ("plan", model_folder, "--context", 400, "--home", "disk", "--home-dir", tmp_path)
    found = last_json(run(*words, "--json"))
    assert found["total"]["disk"] == found["home_bytes"] > 0
    assert not list(tmp_path.glob("*.kv"))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--context", "1"), "'--context'"),
        (("--context", "600"), "--context 600 is more than the model's 512 positions"),
        (("--context", "99", "--batch", "0"), "'--batch'"),
        (("--context", "99", "--codec", "int2"), "--codec 'int2' is not valid"),
        (("--context", "99", "--policy", "magic"), "policy='magic' is not valid"),
        (("--context", "99", "--device-memory", "20%"), "--device-memory '20%' is not valid"),
        (("--context", "99", "--device-memory", "much"), "--device-memory 'much' is not valid"),
        (("--context", "99", "--device-memory", "0"), "it must be a size like 24GiB"),
        (("--context", "99", "--device", "mps"), "--device 'mps': not a device"),
        (("--context", "99", "--prompt-chunk", "few"), "--prompt-chunk"),
        ((), "'--context'"),
    ],
)
def test_bad_options(run: Run, model_folder: Path, words: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(run("plan", model_folder, *words))


def test_an_unknown_model(run: Run) -> None:
    assert "no such file or folder" in refusal(run("plan", "./no-model", "--context", 99))


@pytest.mark.parametrize("command", ["generate", "bench"])
def test_a_run_that_does_not_fit_is_refused_before_calibrating(
    run: Run, model_folder: Path, tmp_path: Path, command: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    words: dict[str, tuple[object, ...]] = {
        "generate": ("--prompt", TEXT[:300], "--max-new-tokens", 10),
        "bench": ("--text", text, "--prompt-tokens", 300, "--decode-tokens", 2, "--batch", 2),
    }
    result = run(command, model_folder, *words[command], "--device-memory", "300KiB")
    reason = refusal(result)
    assert "the run needs " in reason and "more than the 300.0 KiB there are" in reason
    assert reason.endswith("; --device-memory sets another limit")
    assert not (tmp_path / "cache" / "calibrations").exists()


def test_bench_counts_all_its_caches(
    run: Run, model_folder: Path, artefact: Path, text_file: Path
) -> None:
    words: tuple[object, ...] = (
        *("bench", model_folder, "--text", text_file, "--calibration", artefact),
        *("--prompt-tokens", 200, "--decode-tokens", 2, "--policies"),
    )
    plans = []
    for names in (("ideal",), ("ideal", "stream", "infinigen")):
        request = model_request(tiny.llama(), context=210, new_tokens=10, policies=names)
        plans.append(plan_memory(request).total("device"))
    assert plans[0] < plans[1]
    limit = ("--device-memory", f"{plans[1] - 1}B")
    assert "the run needs" in refusal(run(*words, "stream,infinigen", *limit))
    assert run(*words, "ideal", *limit).exit_code == 0
