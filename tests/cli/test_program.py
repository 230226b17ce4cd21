"""How the program ends, whatever happens inside, and what it says about itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import Run, refusal
from infinigen_kv import cli
from infinigen_kv.calibration.run import DEFAULT_TOKENS
from infinigen_kv.cli import generate
from infinigen_kv.errors import CacheStateError, UnsupportedModelError
from waiting import PATIENCE

COMMANDS = ("demo", "calibrate", "generate", "fidelity", "diagnose")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> tuple[str, ...]:
    """Words of a run during which ``error`` occurs."""

    def load(*args: Any) -> None:
        raise error

    monkeypatch.setattr(sys.modules[generate.__module__], "load", load)
    return ("generate", "any", "--prompt", "hi")


def test_no_words_show_the_help(run: Run) -> None:
    result = run()
    assert result.exit_code == 0
    assert all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_states_the_defaults_in_force(run: Run) -> None:
    assert f"[default: {DEFAULT_TOKENS}]" in run("calibrate", "--help").stdout
    assert "4.25 (calibrated), 5.0 (paper)" in " ".join(run("generate", "--help").stdout.split())


def test_version(run: Run) -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("infinigen-kv ")


def test_unknown_command(run: Run) -> None:
    assert "No such command 'generat'" in refusal(run("generat"))


def test_a_fault_is_one_line_with_a_hint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(*failing(monkeypatch, RuntimeError("first\nsecond")))
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("infinigen-kv: fault: RuntimeError: first second (")
    assert "--debug" in line
    assert "INFINIGEN_KV_DEBUG=1" in line


def test_debug_shows_the_traceback(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = failing(monkeypatch, RuntimeError("deep down"))
    by_option = run("--debug", *words)
    by_environment = run(*words, env={"INFINIGEN_KV_DEBUG": "1"})
    for result in (by_option, by_environment):
        assert result.exit_code == 1
        assert "Traceback" in result.stderr
        assert "deep down" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (UnsupportedModelError("not this one"), 2, "infinigen-kv: not this one"),
        (OSError(28, "No space left on device"), 2, "infinigen-kv: No space left on device"),
        (PermissionError(13, "Permission denied", "/x"), 2, "infinigen-kv: /x: Permission denied"),
        (CacheStateError("in use"), 1, "infinigen-kv: fault: in use"),
        (MemoryError(), 1, "infinigen-kv: fault: MemoryError"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_exit_codes(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    reason: str,
) -> None:
    result = run(*failing(monkeypatch, error))
    assert result.exit_code == code
    assert result.stderr.startswith(reason)
    assert len(result.stderr.splitlines()) == 1


def program(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed program in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "infinigen_kv", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_help_loads_no_heavy_library() -> None:
    code = (
        "import sys, infinigen_kv.cli\n"
        "try: infinigen_kv.cli.main()\n"
        "finally: print([m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"


def test_as_a_process(model_folder: Path, tmp_path: Path) -> None:
    words = ("generate", str(model_folder), "--prompt", "hello", "--full", "--max-new-tokens", "3")
    done = program(*words, INFINIGEN_KV_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert 1 <= len(done.stdout.rstrip("\n")) <= 3
    refused = program(*words, "--alpha", "nan", INFINIGEN_KV_CACHE=str(tmp_path))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("infinigen-kv: --full attends to the whole cache")


def test_main_leaves_through_system_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["infinigen-kv", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
