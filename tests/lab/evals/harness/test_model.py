"""The engine as the harness sees it, and its figures on local tasks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from calibrating import calibrate_tiny, generate, selecting
from command_line import TEXT, save, tokenizer
from fewshot_records import RECORDS, folder
from infinigen_kv import Calibration, StorageConfig, attach
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.reading import Reader
from infinigen_kv_lab.evals.registry import make_task
from infinigen_kv_lab.evals.run import Subject, evaluate
from infinigen_kv_lab.evals.task import Inputs, TaskOptions
from stepping import plain, stepped
from tiny import MAX_POSITIONS, llama

pytest.importorskip("lm_eval", reason='needs: pip install "infinigen-kv[eval]"')

from lm_eval.api.registry import get_model
from lm_eval.tasks import TaskManager

from infinigen_kv_lab.evals.fewshot import Accuracy, HarnessTask
from infinigen_kv_lab.evals.harness import replay
from infinigen_kv_lab.evals.harness.__main__ import main
from infinigen_kv_lab.evals.harness.model import InfiniGenLM, LoadedInfiniGenLM
from infinigen_kv_lab.evals.harness.replay import HarnessRun

CONTEXT = TEXT[:90].strip()
EXACT = 40


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama(eos_token_id=1)


@pytest.fixture(scope="module")
def calibration(model: PreTrainedModel) -> Calibration:
    return calibrate_tiny(model)


def with_end() -> PreTrainedTokenizerBase:
    made = tokenizer()
    made.eos_token = "<s>"
    return made


def lm(
    model: PreTrainedModel, calibration: Calibration, policy: str = "ideal", **options: Any
) -> InfiniGenLM:
    @contextmanager
    def readers() -> Iterator[Reader]:
        with attach(model, calibration, selecting()) as session:
            yield Reader(session, policy)

    settings = {"exact_prefix": EXACT, "max_length": MAX_POSITIONS, **options}
    return InfiniGenLM(readers, with_end(), **settings)


def requests(*arguments: tuple[Any, ...]) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each) for each in arguments]


def ids(text: str) -> list[int]:
    return list(tokenizer()(text)["input_ids"])


def test_log_likelihoods(model: PreTrainedModel, calibration: Calibration) -> None:
    asked = [(CONTEXT, " yes"), (CONTEXT, " no way"), ("abc", " yes")]
    found = lm(model, calibration).loglikelihood(requests(*asked), disable_tqdm=True)
    for (context, answer), (value, greedy) in zip(asked, found, strict=True):
        tokens = torch.tensor(ids(context + answer))
        rows = plain(model, tokens)[len(context) - 1 : -1]
        expected = rows.gather(1, tokens[len(context) :, None]).sum().item()
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy == bool((rows.argmax(-1) == tokens[len(context) :]).all())


def test_log_likelihoods_select(model: PreTrainedModel, calibration: Calibration) -> None:
    answer = " yes"
    (found,) = lm(model, calibration, "infinigen").loglikelihood(
        requests((CONTEXT, answer)), disable_tqdm=True
    )
    tokens = torch.tensor(ids(CONTEXT + answer))
    rows = stepped(model, calibration, selecting(), tokens, EXACT)[len(CONTEXT) - 1 - EXACT : -1]
    assert found[0] == pytest.approx(
        rows.gather(1, tokens[len(CONTEXT) :, None]).sum().item(), abs=1e-2
    )


def test_rolling_log_likelihoods(model: PreTrainedModel, calibration: Calibration) -> None:
    text = TEXT[:100]
    found = lm(model, calibration).loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    tokens = torch.tensor([1, *ids(text)])
    expected = plain(model, tokens)[:-1].gather(1, tokens[1:, None]).sum().item()
    assert found == [pytest.approx(expected, abs=1e-2)]
    # longer than the model: every token is predicted once, the first window from its start
    short = lm(model, calibration, max_length=40)
    (two,) = short.loglikelihood_rolling(requests((TEXT[:60],)), disable_tqdm=True)
    tokens = torch.tensor([1, *ids(TEXT[:60])])
    first = plain(model, tokens[:40]).gather(1, tokens[1:41, None]).sum().item()
    rest = plain(model, tokens[20:60])[-20:].gather(1, tokens[41:61, None]).sum().item()
    assert two == pytest.approx(first + rest, abs=1e-2)


def test_a_tokenizer_without_special_tokens_cannot_start_a_text(model: PreTrainedModel) -> None:
    made = InfiniGenLM(
        lambda: nullcontext(cast(Any, None)),
        tokenizer(),
        exact_prefix=EXACT,
        max_length=MAX_POSITIONS,
    )
    with pytest.raises(InputError, match="neither a BOS nor an EOS token"):
        made.loglikelihood_rolling(requests(("abc",)))


def test_answers_end_where_they_should(model: PreTrainedModel, calibration: Calibration) -> None:
    prompt = torch.tensor([ids(CONTEXT)])
    made = generate(model, prompt, new=12, eos_token_id=None)[0].tolist()
    text = str(tokenizer().decode(made, skip_special_tokens=True))
    stop = text[5]
    options = {"until": [stop, ""], "max_gen_toks": 12}
    asked = requests(
        (CONTEXT, {"max_gen_toks": 12}), (CONTEXT, options), (CONTEXT, {"until": stop})
    )
    found = lm(model, calibration).generate_until(asked, disable_tqdm=True)
    assert found[0] == text.partition("<s>")[0]
    assert found[1] == found[2] == text[: text.index(stop)]
    with pytest.raises(InputError, match="only answers greedily"):
        lm(model, calibration).generate_until(requests((CONTEXT, {"do_sample": True})))


def test_figures_are_the_harness_own(
    model: PreTrainedModel, calibration: Calibration, tmp_path: Path
) -> None:
    """Measured document by document, and by the harness in one go with the same model."""
    import lm_eval

    records = RECORDS["piqa"] * 4
    data = folder(tmp_path, "piqa", records)
    options = TaskOptions(shots=1, exact_prefix=EXACT)
    task = make_task("piqa", Inputs(tokenizer(), MAX_POSITIONS, data, options))
    assert isinstance(task, HarnessTask) and len(task) == 8
    subject = Subject(model, calibration, selecting(), StorageConfig())
    full, ours = evaluate(subject, task, ["ideal", "infinigen"], limit=6)
    assert isinstance(ours.result, Accuracy) and isinstance(full.result, Accuracy)
    for policy, result in (("ideal", full.result), ("infinigen", ours.result)):
        task._run._task.set_fewshot_seed(seed=options.seed)

        @contextmanager
        def readers(policy: str = policy) -> Iterator[Reader]:
            with attach(model, calibration, task.config(selecting())) as session:
                yield Reader(session, policy)

        theirs = lm_eval.evaluate(
            lm=InfiniGenLM(readers, tokenizer(), exact_prefix=EXACT, max_length=MAX_POSITIONS),
            task_dict={"piqa": task._run._task},
            limit=6,
            bootstrap_iters=0,
        )["results"]["piqa"]
        assert result.documents == result.selecting == 6
        assert result.metrics["acc"].value == pytest.approx(theirs["acc,none"])
        assert result.metrics["acc_norm"].value == pytest.approx(theirs["acc_norm,none"])
    assert 0.0 < ours.result.fetched_share < 0.31
    apart = ours.result.metrics["acc"].value - full.result.metrics["acc"].value
    assert ours.result.differences["acc"].value == pytest.approx(apart)
    assert full.result.differences == {}


def harness_task(model: PreTrainedModel, description: dict[str, Any]) -> HarnessTask:
    from datasets import Dataset

    documents = [{"text": TEXT[at : at + 70], "answer": "x"} for at in (0, 100, 200)]
    splits = {"test": Dataset.from_list(documents)}
    described = {
        "task": "own",
        "custom_dataset": lambda **unused: splits,
        "test_split": "test",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        **description,
    }
    run = HarnessRun(described, shots=0, seed=1)
    options = TaskOptions(exact_prefix=EXACT)
    inputs = Inputs(with_end(), MAX_POSITIONS, None, options)
    return HarnessTask("own", run, inputs, {})


def test_tasks_of_the_other_kinds(model: PreTrainedModel, calibration: Calibration) -> None:
    """Rolling log-likelihoods, whose figure is no mean over documents, and generated answers."""
    subject = Subject(model, calibration, selecting(), StorageConfig())
    rolling = harness_task(
        model,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "bits_per_byte"}],
        },
    )
    (point,) = evaluate(subject, rolling, ["ideal"])
    assert isinstance(point.result, Accuracy)
    total, count = 0.0, 0
    for at in (0, 100, 200):
        tokens = torch.tensor([1, *ids(TEXT[at : at + 70])])
        total += plain(model, tokens)[:-1].gather(1, tokens[1:, None]).sum().item()
        count += len(TEXT[at : at + 70].encode())
    found = point.result.metrics["bits_per_byte"]
    assert found.value == pytest.approx(-total / count / math.log(2), rel=1e-3)
    assert math.isnan(found.low)
    generating = harness_task(
        model,
        {
            "output_type": "generate_until",
            "generation_kwargs": {"until": [], "max_gen_toks": 3, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    )
    full, ours = evaluate(subject, generating, ["ideal", "infinigen"])
    assert isinstance(full.result, Accuracy) and isinstance(ours.result, Accuracy)
    assert full.result.metrics["exact_match"].value == 0.0
    assert 0.0 < ours.result.fetched_share < 0.31
    with attach(model, calibration, selecting()) as session:
        answers = generating.measure(Reader(session, "ideal"), 1, None)["answers"]
    expected = generate(model, torch.tensor([ids(TEXT[100:170])]), new=3, eos_token_id=None)[0]
    assert answers == [tokenizer().decode(expected, skip_special_tokens=True)]


def test_short_prompts_have_settings_of_their_own(tmp_path: Path) -> None:
    data = folder(tmp_path, "rte", RECORDS["rte"])
    options = TaskOptions(shots=1, exact_prefix=64)
    task = make_task("rte", Inputs(tokenizer(), MAX_POSITIONS, data, options))
    made = task.config(selecting(min_context=256, recent_tokens=32))
    assert (made.min_context, made.recent_tokens) == (64, 4)
    kept = task.config(selecting(min_context=9, recent_tokens=0))
    assert (kept.min_context, kept.recent_tokens) == (9, 0)
    assert (made.alpha, made.max_fetch) == (2.0, 0.3)


def test_more_shots_than_examples(tmp_path: Path) -> None:
    data = folder(tmp_path, "rte", RECORDS["rte"])
    with pytest.raises(InputError, match="task 'rte' makes no prompts with 3 shots"):
        make_task("rte", Inputs(tokenizer(), MAX_POSITIONS, data, TaskOptions(shots=3)))


def test_the_hubs_tasks_need_a_network_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    # reading the descriptions of all its tasks takes the harness many seconds
    monkeypatch.setattr(replay, "TaskManager", partial(TaskManager, include_defaults=False))
    with pytest.raises(InputError, match="cannot be loaded by lm-evaluation-harness"):
        make_task("lm-eval:no_such_task_at_all", Inputs(tokenizer(), 512, None, TaskOptions()))


def test_made_by_the_harness_from_its_arguments(tmp_path: Path) -> None:
    save(llama(eos_token_id=1), tmp_path / "model")
    calibrate_tiny(llama()).save(tmp_path / "calibration")
    made = LoadedInfiniGenLM.create_from_arg_string(
        f"pretrained={tmp_path / 'model'},policy=infinigen,calibration={tmp_path / 'calibration'},"
        "exact_prefix=40,max_fetch=0.3,alpha=2.0,partial_ratio=0.5,recent_tokens=2,dtype=float32",
        {"batch_size": 1, "device": "cpu", "max_batch_size": None},
    )
    assert made.max_length == MAX_POSITIONS
    (found,) = made.loglikelihood(requests((CONTEXT, " yes")), disable_tqdm=True)
    config = selecting(min_context=40)
    tokens = torch.tensor(ids(CONTEXT + " yes"))
    rows = stepped(llama(), calibrate_tiny(llama()), config, tokens, 40)[len(CONTEXT) - 41 : -1]
    expected = rows.gather(1, tokens[len(CONTEXT) :, None]).sum().item()
    assert found[0] == pytest.approx(expected, abs=1e-2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"policy": "infinigne"}, "infinigen"),
        ({"alhpa": 3.0}, "unknown setting 'alhpa'"),
        ({"dtype": "int4"}, "dtype='int4' is not valid"),
        ({"max_fetch": 2.0}, "max_fetch=2.0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        LoadedInfiniGenLM("./no-model", **arguments)


def test_the_harness_own_command_line_knows_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["lm-eval", "run", "--help"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0
    assert "--model_args" in capsys.readouterr().out
    assert get_model("infinigen_kv") is LoadedInfiniGenLM


def test_errors_of_the_command_line_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> str:
        raise InputError("there is none")

    monkeypatch.setattr("infinigen_kv_lab.evals.harness.__main__.usable", absent)
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == "infinigen_kv: there is none"
