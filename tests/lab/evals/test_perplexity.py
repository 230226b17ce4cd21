"""Perplexity of windows against plain forwards and single decode steps, and the texts' forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from calibrating import covering, selecting, tokens
from command_line import TEXT, tokenizer
from infinigen_kv import Calibration, InfiniGenConfig, StorageConfig
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals import perplexity
from infinigen_kv_lab.evals.perplexity import Perplexity, PerplexityTask
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.task import Inputs, TaskOptions
from stepping import plain, stepped

WINDOW, PROMPT, CHUNK = 110, 50, 16
IDS = tokens(1, 3 * WINDOW + 20, seed=3)[0]
WINDOWS = IDS[: 3 * WINDOW].view(3, WINDOW)


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "CHUNK", CHUNK)


def task(ids: torch.Tensor = IDS, window: int = WINDOW, prompt: int = PROMPT) -> PerplexityTask:
    return PerplexityTask("text", ids, window=window, prompt_tokens=prompt, source="x")


def run(
    model: PreTrainedModel, calibration: Calibration, config: InfiniGenConfig, policy: str
) -> Perplexity:
    subject = Subject(model, calibration, config, StorageConfig())
    (point,) = evaluate(subject, task(), [policy])
    assert isinstance(point.result, Perplexity)
    return point.result


def mean_loss(scores: torch.Tensor, window: torch.Tensor, first: int, end: int) -> float:
    """Of the tokens that decoded positions ``first`` to ``end`` predict; row 0 is the first."""
    places = range(first, min(end, WINDOW - PROMPT - 1))
    losses = [-scores[at, window[PROMPT + at + 1]].item() for at in places]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("policy", ["infinigen", "infinigen-paper", "h2o"])
def test_the_figures_are_those_of_single_decode_steps(
    policy: str, model: PreTrainedModel, calibration: Calibration
) -> None:
    config = selecting()
    found = run(model, calibration, config, policy)
    assert (found.windows, found.tokens) == (3, 3 * (WINDOW - PROMPT - 1))
    ours = [stepped(model, calibration, config, each, PROMPT, policy=policy) for each in WINDOWS]
    full = [plain(model, each)[PROMPT:] for each in WINDOWS]
    edges = [*range(0, WINDOW - PROMPT, CHUNK), WINDOW - PROMPT]
    assert [chunk.start for chunk in found.chunks] == edges[:-1]
    assert [chunk.end for chunk in found.chunks] == edges[1:]
    parts: list[tuple[Any, int, int]] = [
        (found, 0, edges[-1]),
        *((c, c.start, c.end) for c in found.chunks),
    ]
    for figures, start, end in parts:
        losses = [mean_loss(s, w, start, end) for s, w in zip(ours, WINDOWS, strict=True)]
        exact = [mean_loss(s, w, start, end) for s, w in zip(full, WINDOWS, strict=True)]
        assert figures.ppl.value == pytest.approx(math.exp(sum(losses) / 3), rel=1e-3)
        assert figures.ppl_full.value == pytest.approx(math.exp(sum(exact) / 3), rel=1e-3)
        ratio = math.exp((sum(losses) - sum(exact)) / 3)
        assert figures.ratio.value == pytest.approx(ratio, rel=1e-3)
        assert figures.ratio.low <= ratio <= figures.ratio.high
    kl = torch.stack([(f.exp() * (f - o)).sum(-1) for f, o in zip(full, ours, strict=True)])
    assert kl.mean() > 1e-3
    assert found.kl.value == pytest.approx(kl.mean().item(), rel=1e-3)
    assert found.chunks[1].kl == pytest.approx(kl[:, CHUNK : 2 * CHUNK].mean().item(), rel=1e-3)
    same = [(f.argmax(-1) == o.argmax(-1)).double() for f, o in zip(full, ours, strict=True)]
    assert found.top1_same == pytest.approx(torch.stack(same).mean().item())
    assert 0.0 < found.fetched_share <= 0.31
    whole = 1 if policy.startswith("infinigen") else 0  # layers attended to in full, of four
    shares = (4 - whole) * found.fetched_share + whole
    assert found.fetched_share_all_layers == pytest.approx(shares / 4)
    growth = found.chunks[-1].ratio.value - found.chunks[0].ratio.value
    assert found.gap_growth.value == pytest.approx(growth, abs=1e-9)


def test_the_full_cache_against_itself(model: PreTrainedModel, calibration: Calibration) -> None:
    found = run(model, calibration, selecting(), "ideal")
    assert found.ratio.value == pytest.approx(1.0) and found.kl.value == pytest.approx(
        0.0, abs=1e-6
    )
    assert found.top1_same == found.fetched_share == 1.0


def test_selecting_everything_is_the_full_cache(
    model: PreTrainedModel, calibration: Calibration
) -> None:
    found = run(model, calibration, covering(), "infinigen")
    assert found.ratio.value == pytest.approx(1.0, abs=1e-4)
    assert found.fetched_share == 1.0


def test_windows_do_not_overlap_and_the_rest_is_left_out() -> None:
    assert len(task()) == 3
    assert len(task(window=len(IDS))) == 1


@pytest.mark.parametrize("decoded", [2, CHUNK, CHUNK + 1, 2 * CHUNK + 2])
def test_any_number_of_decoded_tokens(
    decoded: int, model: PreTrainedModel, calibration: Calibration
) -> None:
    """A last chunk of one token has nothing to predict, and so no figures."""
    made = task(window=PROMPT + decoded)
    subject = Subject(model, calibration, selecting(), StorageConfig())
    (point,) = evaluate(subject, made, ["infinigen"], limit=2)
    assert isinstance(point.result, Perplexity)
    assert point.result.tokens == 2 * (decoded - 1)
    assert len(point.result.chunks) == math.ceil((decoded - 1) / CHUNK)
    sizes = [min(chunk.end, decoded - 1) - chunk.start for chunk in point.result.chunks]
    total = sum(
        size * math.log(chunk.ppl.value)
        for size, chunk in zip(sizes, point.result.chunks, strict=True)
    )
    assert total / sum(sizes) == pytest.approx(math.log(point.result.ppl.value))


def test_the_result_is_strict_json(model: PreTrainedModel, calibration: Calibration) -> None:
    subject = Subject(model, calibration, selecting(), StorageConfig())
    (point,) = evaluate(subject, task(), ["infinigen"], limit=1)
    values = json.loads(json.dumps(point.to_dict(), allow_nan=False))
    assert values["result"]["ppl"]["low"] is None  # of one window there is no interval
    assert values["result"]["chunks"][0]["end"] == CHUNK


@pytest.mark.parametrize(
    ("window", "prompt", "reason"),
    [
        (WINDOW, WINDOW - 1, "at least two tokens of the window"),
        (WINDOW, 0, "at least 1"),
        (len(IDS) + 1, PROMPT, f"the text has {len(IDS)} tokens, which is no whole window"),
    ],
)
def test_windows_that_cannot_be_measured(window: int, prompt: int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        task(window=window, prompt=prompt)


def inputs(data: Path | None, positions: int | None = 512, **options: object) -> Inputs:
    return Inputs(tokenizer(), positions, data, TaskOptions(**options))  # type: ignore[arg-type]


def decoded(made: object) -> str:
    assert isinstance(made, PerplexityTask)
    return str(tokenizer().decode(made._windows.flatten()))


def test_wikitext_rows_are_joined_as_in_the_paper(tmp_path: Path) -> None:
    (tmp_path / "wikitext2").mkdir()
    raw = " \n = Title = \n \nSome  text . \n"
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(raw, encoding="utf-8")
    made = make_task("wikitext2", inputs(tmp_path, window=20, prompt_tokens=10))
    # rows: "", " = Title = \n", "", "Some  text . \n"
    assert decoded(made) == "\n\n = Title = \n\n\n\n\nSome  text . \n"[:20]


def test_penn_treebank_lines_are_joined_as_in_the_paper(tmp_path: Path) -> None:
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.valid.txt").write_text(" first line \n second \n", encoding="utf-8")
    made = make_task("ptb", inputs(tmp_path, window=18, prompt_tokens=9))
    assert decoded(made) == "first line\n\nsecond"


def test_defaults_follow_the_models_positions(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text(TEXT, encoding="utf-8")
    made = make_task("text", inputs(None, 300, text=path))
    assert made.settings["window"] == 300 and made.settings["prompt_tokens"] == 200
    with pytest.raises(InputError, match="no whole window of 3072"):
        make_task("text", inputs(None, None, text=path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"window": 513}, "window of 513 tokens is longer than the model's 512 positions"),
        ({"window": 50, "prompt_tokens": 50}, "leaves no tokens after the prompt"),
        ({"prompt_tokens": 600}, "leaves no tokens after the prompt"),
    ],
)
def test_windows_that_do_not_fit(tmp_path: Path, options: dict[str, int], reason: str) -> None:
    path = tmp_path / "own.txt"
    path.write_text(TEXT, encoding="utf-8")
    with pytest.raises(InputError, match=reason):
        make_task("text", inputs(None, text=path, **options))


def test_missing_texts() -> None:
    with pytest.raises(InputError, match=r"task 'text' needs a text: .* --text FILE"):
        make_task("text", inputs(None))
    with pytest.raises(InputError, match=r"wiki\.test\.raw.*--data DIR"):
        make_task("wikitext2", inputs(None))
    with pytest.raises(InputError, match=r"ptb\.valid\.txt is missing: fetch"):
        make_task("ptb", inputs(Path("none")))
