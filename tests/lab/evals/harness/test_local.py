"""The five local tasks: prompts as lm-eval's own tasks make them, and lines that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fewshot_records import COPA, OPENBOOKQA, PIQA, RECORDS, RTE, WINOGRANDE, folder
from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals.harness.local import FORMS, TASKS, load, local_config, local_documents

YAML = {
    "copa": "super_glue/copa/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "piqa": "piqa/piqa.yaml",
    "rte": "glue/rte/default.yaml",
}
LOADER = """
from pathlib import Path

from datasets import Dataset

from infinigen_kv_lab.evals.harness.local import local_documents


def load(**unused):
    documents = local_documents({name!r}, Path({folder!r}))
    return {{split: Dataset.from_list(each) for split, each in documents.items()}}
"""


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_prompts_are_those_of_the_harness(name: str, shots: int, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason='needs: pip install "infinigen-kv[eval]"')
    from lm_eval.tasks import TaskManager

    from infinigen_kv_lab.evals.harness.replay import HarnessRun

    documents = local_documents(name, folder(tmp_path, name, RECORDS[name]))
    ours = HarnessRun(local_config(name, documents), shots=shots, seed=1)
    own = Path(lm_eval.__file__).parent / "tasks" / YAML[name]
    (tmp_path / "data.py").write_text(LOADER.format(folder=str(tmp_path), name=name), "utf-8")
    described = f"include: {own}\ntest_split: null\ncustom_dataset: !function data.load\n"
    (tmp_path / "own.yaml").write_text(described, encoding="utf-8")
    manager = TaskManager(include_defaults=False)
    (theirs,) = manager.load([str(tmp_path / "own.yaml")])["tasks"].values()
    theirs.set_config(key="num_fewshot", value=shots)
    theirs.set_fewshot_seed(seed=1)
    theirs.build_all_requests(rank=0, world_size=1)
    expected: dict[int, list[tuple[str, str]]] = {}
    for instance in theirs.instances:
        expected.setdefault(instance.doc_id, []).append(instance.args)
    assert [[each.arguments for each in doc] for doc in ours.documents] == [*expected.values()]
    assert ours._task.config.metric_list is not None
    mine = {each["metric"] for each in ours._task.config.metric_list}
    assert mine == {each["metric"] for each in theirs.config.metric_list}


@pytest.mark.parametrize("name", FORMS)
def test_files_of_one_task_may_differ_in_fields_it_does_not_use(name: str, tmp_path: Path) -> None:
    other = [{**each, "extra": 1} for each in RECORDS[name]]
    documents = local_documents(name, folder(tmp_path, name, other))
    assert documents["train"] == documents["validation"]


@pytest.mark.parametrize(
    ("name", "line", "reason"),
    [
        ("copa", "{", "line 3: not JSON"),
        ("copa", {**COPA[0], "question": "why"}, "line 3: its values make no question .*'why'"),
        ("copa", {**COPA[0], "label": 2}, "line 3: its values make no question"),
        ("copa", {**COPA[0], "choice1": ""}, "line 3: its values make no question"),
        ("copa", {"premise": "x."}, "line 3: no field 'choice1'; needed: premise, choice1"),
        ("openbookqa", {**OPENBOOKQA[0], "answerKey": "E"}, "line 3: its values make no question"),
        ("winogrande", {**WINOGRANDE[0], "sentence": "no gap"}, "line 3: its values"),
        ("winogrande", {**WINOGRANDE[0], "answer": "3"}, "line 3: its values"),
        ("piqa", {**PIQA[0], "label": 2}, "line 3: the right answer is number 2, but there are 2"),
        ("rte", {**RTE[0], "label": -1}, "line 3: the right answer is number -1"),
        ("rte", {**RTE[0], "label": None}, "line 3: its values make no question"),
    ],
)
def test_bad_lines_are_named(name: str, line: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name}.validation.jsonl, {reason}"):
        local_documents(name, folder(tmp_path, name, [*RECORDS[name], line]))


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"copa\.validation\.jsonl is missing: fetch"):
        local_documents("copa", tmp_path)
    with pytest.raises(InputError, match=r"copa\.train\.jsonl is missing: .*for the shots"):
        local_documents("copa", folder(tmp_path, "copa", COPA, train=False))


def test_every_task_is_described_for_the_harness_own_command_line() -> None:
    assert {path.stem for path in TASKS.glob("*.yaml")} == {f"{name}_local" for name in FORMS}


@pytest.mark.parametrize("shots", [0, 1])
@pytest.mark.parametrize("name", FORMS)
def test_the_described_tasks_have_the_same_prompts(name: str, shots: int, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason='needs: pip install "infinigen-kv[eval]"')
    from lm_eval.tasks import TaskManager

    from infinigen_kv_lab.evals.harness.replay import HarnessRun

    data = folder(tmp_path, name, RECORDS[name])
    ours = HarnessRun(local_config(name, local_documents(name, data)), shots=shots, seed=1)
    manager = TaskManager(
        include_path=str(TASKS), include_defaults=False, metadata={"data": str(data)}
    )
    (theirs,) = manager.load([f"{name}_local"])["tasks"].values()
    theirs.set_config(key="num_fewshot", value=shots)
    theirs.set_fewshot_seed(seed=1)
    theirs.build_all_requests(rank=0, world_size=1)
    expected: dict[int, list[tuple[str, str]]] = {}
    for instance in theirs.instances:
        expected.setdefault(instance.doc_id, []).append(instance.args)
    assert [[each.arguments for each in doc] for doc in ours.documents] == [*expected.values()]
    assert {each["metric"] for each in theirs.config.metric_list} == set(FORMS[name].metrics)


def test_the_described_tasks_need_a_folder() -> None:
    pytest.importorskip("datasets", reason='needs: pip install "infinigen-kv[eval]"')
    with pytest.raises(InputError, match=r"task 'rte' needs its data: .*--metadata"):
        load("rte")
