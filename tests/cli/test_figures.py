"""``infinigen-kv figures speed``."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, last_json, refusal
from infinigen_kv import InputError
from infinigen_kv_lab.bench.run import WARM_UP
from infinigen_kv_lab.figures.speed import kinds
from infinigen_kv_lab.figures.speed.peer_results import FORMAT, prompt_digest

LINK = ("--link", "emulated:1000")
SMALL = ("--quick", "--prompt-tokens", 300, "--decode-tokens", 2)


@pytest.fixture
def speed(run: Run, model_folder: Path, artefact: Path, tmp_path: Path, text_file: Path) -> Run:
    """Run it with the tiny model, into ``tmp_path / "out"``."""

    def invoke(*words: object) -> Any:
        own = ("--calibration", artefact, "--out", tmp_path / "out", *SMALL)
        link = () if "--link" in words else LINK
        text = () if "--text" in words else ("--text", text_file)
        return run("figures", "speed", model_folder, *own, *link, *text, *words)

    return invoke


def test_a_point_is_measured_once_unless_it_is_damaged(
    speed: Run, tmp_path: Path, model_folder: Path
) -> None:
    found = last_json(speed("--figures", "resident", "--json"))
    out = tmp_path / "out"
    files = [str(out / f"figure-resident.{kind}") for kind in ("png", "csv", "json")]
    assert found == {
        "page": str(out / "index.html"),
        "figures": {"resident": files},
        "missing": {},
    }
    assert (out / "figure-resident.png").read_bytes().startswith(b"\x89PNG")
    held = json.loads((out / "figure-resident.json").read_text())
    with (out / "figure-resident.csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert [float(row["resident_share"]) for row in table] == [0.0, 0.1, 0.3]
    assert list(table[0]) == list(held["rows"][0])
    assert held["link"] == "emulated:1000" and held["link_is_emulated"]
    page = (out / "index.html").read_text()
    assert "EMULATED" in page and "infinigen-kv figures speed" in page and "emulated:1000" in page
    assert model_folder.name in page

    again = speed("--figures", "resident")
    assert again.exit_code == 0 and "3 of 3 points were measured before" in again.stderr
    assert again.stdout.splitlines() == [files[0], str(out / "index.html")]

    victim = min((out / "points").glob("bench-*.json"))
    victim.write_text(victim.read_text()[:50])
    repaired = speed("--figures", "resident")
    assert f"{victim} is damaged" in repaired.stderr and "[1/1]" in repaired.stderr
    assert json.loads(victim.read_text())["result"]


def test_the_papers_link_is_measured_once(
    speed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "paper_link_rate", lambda *_, **__: 1.25e12)
    words = ("--link", "auto", "--figures", "resident")
    first = speed(*words)
    assert first.exit_code == 0 and "for the paper's link" in first.stderr
    held = json.loads((tmp_path / "out" / "figure-resident.json").read_text())
    assert held["link"] == "emulated:1250"
    assert "for the paper's link" not in speed(*words).stderr


def test_results_of_other_programs_and_figures_of_earlier_runs(speed: Run, tmp_path: Path) -> None:
    assert speed("--figures", "memory").exit_code == 0
    prompt = json.loads((tmp_path / "out" / "prompt.json").read_text())
    assert prompt["prompt_sha256"] == prompt_digest(prompt["token_ids"])
    assert len(prompt["token_ids"]) == 300 and prompt["warm_up_tokens"] == WARM_UP
    peers = tmp_path / "peers.json"
    point = {"system": "llama.cpp", "context": 100, "tokens_per_s": 5.0}
    peers.write_text(json.dumps({"format": FORMAT, "source": "program", "points": [point]}))
    found = last_json(speed("--figures", "16b", "--peers", peers, "--json"))
    assert set(found["figures"]) == {"16b", "memory"}, "all points of memory are there"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Figure 16b" in page and "Figure memory" in page
    rows = json.loads((tmp_path / "out" / "figure-memory.json").read_text())["rows"]
    assert rows[-1]["system"] == "llama.cpp" and rows[-1]["step_ms"] == 200.0


def test_ctrl_c_keeps_and_draws_what_is_done(
    speed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, calls = kinds.bench, iter(range(10))

    def interrupted(*given: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return bench(*given, **options)

    monkeypatch.setattr(kinds, "bench", interrupted)
    result = speed("--figures", "resident,memory")
    assert result.exit_code == 130
    assert "finished points are kept" in result.stderr and "interrupted" in result.stderr
    out = tmp_path / "out"
    rows = json.loads((out / "figure-resident.json").read_text())["rows"]
    assert len(rows) == 2 and len(list((out / "points").iterdir())) == 2
    assert "not measured yet" in (out / "index.html").read_text()


def test_a_figure_that_cannot_run_leaves_the_others(
    speed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = speed("--figures", "16b,resident", "--models", "nobody/nothing", "--json")
    found = last_json(result)
    assert set(found["figures"]) == {"16b", "resident"}, "16b is left with the main model"
    page = (tmp_path / "out" / "index.html").read_text()
    assert "Missing:" in page and "nobody/nothing" in page
    assert "cannot be measured" in result.stderr

    def refused(*given: Any, **options: Any) -> Any:
        raise InputError("not on this model")

    monkeypatch.setattr(kinds, "split_blocks", refused)
    found = last_json(speed("--figures", "18,resident", "--json"))
    assert list(found["figures"]) == ["resident"]
    assert "not on this model" in found["missing"]["18"]
    alone = speed("--figures", "18")
    assert alone.exit_code == 2 and "figure 18 is not drawn" in alone.stderr
    assert "Traceback" not in alone.stderr


# Bad input, before a model is loaded.


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--figures", "19"), "there are 14, 15, 16a, 16b, 17, 18, link"),
        (("--link", "fast"), "--link 'fast' is not valid"),
        (("--peers", "missing.json"), "--peers missing.json: cannot be read"),
        (("--text", "missing.txt"), "--text missing.txt: cannot be read"),
    ],
)
def test_bad_options(speed: Run, words: tuple[str, ...], reason: str) -> None:
    result = speed(*words)
    assert reason in refusal(result)
    assert "loading" not in result.stderr


def test_a_folder_that_cannot_be_written_to(run: Run, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("figures", "speed", model_folder, "--out", tmp_path / "file")
    assert "cannot be written to" in refusal(result) and "loading" not in result.stderr


def test_a_text_without_enough_tokens(speed: Run, text_file: Path, tmp_path: Path) -> None:
    text_file.write_text("short")
    result = speed("--figures", "resident", "--text", text_file)
    assert result.exit_code == 2 and "need a text of 300 tokens" in result.stderr


# bench --peers.


def test_bench_beside_transformers_caches(run: Run, model_folder: Path, artefact: Path) -> None:
    words = ("--calibration", artefact, "--prompt-tokens", 40, "--decode-tokens", 2)
    own = ("bench", model_folder, *words, "--policies", "ideal", "--peers")
    found = last_json(run(*own, "staticcache,DynamicCache", "--json"))
    assert [each["name"] for each in found["peers"]] == ["StaticCache", "DynamicCache"]
    assert all(abs(each["kl_to_ideal"]) < 1e-6 for each in found["peers"])
    table = run(*own, "StaticCache")
    assert table.exit_code == 0 and "Static" in table.stdout
    assert "did you mean StaticCache" in refusal(run(*own, "StatikCache"))
