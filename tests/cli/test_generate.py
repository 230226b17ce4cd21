"""``infinigen-kv generate``."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

import tiny
from command_line import TEXT, Run, last_json, refusal, save, tokenizer
from infinigen_kv.calibration.artefact import TENSORS

PROMPT = TEXT[:300]


def greedy(prompt: str, new_tokens: int) -> str:
    """The model's own continuation, without this package."""
    ids = torch.tensor([tokenizer()(prompt)["input_ids"]])
    output = tiny.llama().generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False
    )
    return str(tokenizer().decode(output[0, ids.shape[1] :], skip_special_tokens=True))


def test_full_cache_streams_the_models_own_text(run: Run, model_folder: Path) -> None:
    result = run("generate", model_folder, "--prompt", PROMPT, "--full", "--max-new-tokens", 20)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == greedy(PROMPT, 20).rstrip("\n")
    assert "full cache" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("generation_config.json", "cache_implementation", "static"),
        ("generation_config.json", "use_cache", False),
        ("config.json", "use_cache", False),
    ],
)
def test_what_a_checkpoint_says_of_caches_is_left_out_with_a_note(
    run: Run, model_folder: Path, tmp_path: Path, file: str, name: str, value: object
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "opinionated")
    if file == "config.json":  # from which the missing file is made
        (folder / "generation_config.json").unlink()
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, name: value}))
    result = run("generate", folder, "--prompt", PROMPT, "--full", "--max-new-tokens", 20)
    assert result.exit_code == 0
    assert result.stdout.rstrip("\n") == greedy(PROMPT, 20).rstrip("\n")
    (note,) = (line for line in result.stderr.splitlines() if name in line)
    assert note.startswith(f"note: the model's generation config has {name}={value!r}")


def test_full_cache_needs_no_calibration(run: Run, model_folder: Path, tmp_path: Path) -> None:
    run("generate", model_folder, "--prompt", "hi", "--full", "--max-new-tokens", 2)
    assert not (tmp_path / "cache" / "calibrations").exists()


def test_json_is_the_last_line(run: Run, model_folder: Path, artefact: Path) -> None:
    result = run(
        *("generate", model_folder, "--prompt", PROMPT, "--calibration", artefact),
        *("--max-new-tokens", 12, "--max-fetch", 0.25, "--json"),
    )
    found = last_json(result)
    assert found["text"] in result.stdout
    assert found["prompt_tokens"] == 300
    assert found["new_tokens"] == 12
    assert found["config"]["max_fetch"] == 0.25
    assert 0 < found["fetched_share"] <= 0.25
    assert found["seconds"] > 0


def test_share_of_a_context_too_short_to_select_is_null(
    run: Run, model_folder: Path, artefact: Path
) -> None:
    result = run(
        *("generate", model_folder, "--prompt", "hello", "--calibration", artefact),
        *("--max-new-tokens", 2, "--json"),
    )
    assert last_json(result)["fetched_share"] is None


def test_calibrates_where_no_artefact_is_given_and_only_once(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infinigen_kv.calibration.run.calibration_texts", lambda: [TEXT])
    words = ("generate", model_folder, "--prompt", "hello", "--max-new-tokens", 1)
    assert run(*words).exit_code == 0
    (made,) = (tmp_path / "cache" / "calibrations").iterdir()
    before = (made / TENSORS).stat().st_mtime_ns
    assert run(*words).exit_code == 0
    assert (made / TENSORS).stat().st_mtime_ns == before


def test_prompt_from_a_file_and_from_stdin(run: Run, model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    words = ("generate", model_folder, "--full", "--max-new-tokens", 5)
    direct = run(*words, "--prompt", PROMPT)
    assert run(*words, "--prompt-file", path).stdout == direct.stdout
    assert run(*words, "--prompt-file", "-", input=PROMPT).stdout == direct.stdout


def test_chat_template(run: Run, model_folder: Path) -> None:
    result = run(
        *("generate", model_folder, "--prompt", "hi", "--chat", "--full"),
        *("--max-new-tokens", 6, "--json"),
    )
    found = last_json(result)
    assert found["prompt_tokens"] == len("<hi>")
    assert found["text"] == greedy("<hi>", 6)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--alpha", "nan"), "--alpha nan is not valid: it must be a finite number >= 0"),
        (("--alpha", "-1"), "--alpha -1.0 is not valid: it must be a finite number >= 0"),
        (("--partial-ratio", "0"), "--partial-ratio 0.0 is not valid: it must be a number in (0,"),
        (("--partial-ratio", "1.5"), "--partial-ratio 1.5 is not valid"),
        (("--max-fetch", "0"), "--max-fetch 0.0 is not valid: it must be a number in (0, 1]"),
        (("--recent", "-3"), "--recent -3 is not valid: it must be an integer >= 0"),
        (("--sinks", "-1"), "--sinks -1 is not valid"),
        (("--min-context", "0"), "--min-context 0 is not valid: it must be an integer >= 1"),
        (("--rehearsal", "magic"), "--rehearsal 'magic' is not valid: it must be one of"),
        (("--rehearsal", "paper", "--tail"), "--tail is not valid with rehearsal='paper'"),
        (("--dtype", "int8"), "--dtype 'int8' is not valid: it must be one of float32"),
        (("--max-new-tokens", "0"), "'--max-new-tokens'"),
        (("--recent", "few"), "'--recent'"),
        (("--full", "--alpha", "4"), "--full attends to the whole cache: leave out --alpha"),
        (("--prompt-file", "x"), "give the prompt with either --prompt or --prompt-file"),
        (("--nonsense",), "--nonsense"),
    ],
)
def test_bad_options_are_refused_before_the_model_is_loaded(
    run: Run, words: tuple[str, ...], reason: str
) -> None:
    result = run("generate", "./no-model", "--prompt", "hi", *words)
    assert reason in refusal(result)
    if words[0] != "--dtype":
        assert "loading" not in result.stderr


def test_no_prompt(run: Run) -> None:
    assert "--prompt or --prompt-file" in refusal(run("generate", "./no-model"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read (No such file or directory)"),
        (b"caf\xe9", "not UTF-8 text (byte 3)"),
        (b" \n", "the text is empty"),
    ],
)
def test_unreadable_prompt_file(
    run: Run, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "prompt.txt"
    if content is not None:
        path.write_bytes(content)
    result = run("generate", "./no-model", "--prompt-file", path)
    assert f"--prompt-file {path}: {reason}" in refusal(result)


def test_folder_as_prompt_file(run: Run, tmp_path: Path) -> None:
    result = run("generate", "./no-model", "--prompt-file", tmp_path)
    assert "cannot be read (Is a directory)" in refusal(result)


def test_unknown_model(run: Run) -> None:
    reason = refusal(run("generate", "./no-model", "--prompt", "hi"))
    assert "model './no-model': no such file or folder" in reason


def test_unsupported_family(run: Run, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64)
    )
    folder = save(model, tmp_path / "gpt2")
    result = run("generate", folder, "--prompt", "hi")
    assert "gpt2" in refusal(result)
    assert "llama" in refusal(result)


def test_prompt_longer_than_the_model_allows_is_found_before_calibrating(
    run: Run, model_folder: Path, tmp_path: Path
) -> None:
    result = run("generate", model_folder, "--prompt", "x" * 500, "--max-new-tokens", 20)
    assert "520 tokens" in refusal(result)
    assert "512 positions" in refusal(result)
    assert not (tmp_path / "cache" / "calibrations").exists()


def test_missing_calibration(run: Run, tmp_path: Path) -> None:
    result = run("generate", "./no-model", "--prompt", "hi", "--calibration", tmp_path / "none")
    assert f"no calibration at {tmp_path / 'none'}" in refusal(result)


def test_truncated_calibration(run: Run, artefact: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(artefact, tmp_path / "truncated")
    data = (folder / TENSORS).read_bytes()
    (folder / TENSORS).write_bytes(data[: len(data) // 2])
    result = run("generate", "./no-model", "--prompt", "hi", "--calibration", folder)
    assert "is damaged" in refusal(result)
    assert "loading" not in result.stderr


def test_foreign_calibration(run: Run, model_folder: Path, foreign_artefact: Path) -> None:
    result = run("generate", model_folder, "--prompt", "hi", "--calibration", foreign_artefact)
    assert "the calibration belongs to another model" in refusal(result)


def test_prompt_of_bytes_that_are_no_text(run: Run) -> None:
    result = run("generate", "./no-model", "--prompt", b"caf\xe9".decode(errors="surrogateescape"))
    assert "--prompt: not UTF-8 text (character 3)" in refusal(result)


def test_unreadable_stdin(
    run: Run,
) -> None:
    result = run("generate", "./no-model", "--prompt-file", "-", input=io.BytesIO(b"\xff").read())
    assert "--prompt-file stdin: not UTF-8 text" in refusal(result)
