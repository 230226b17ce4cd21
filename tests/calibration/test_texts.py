import hashlib
import importlib.util
import os
import subprocess
import sys

import pytest

from infinigen_kv.calibration.texts import (
    CALIBRATION_MODULES,
    calibration_texts,
    documentation_text,
)
from infinigen_kv.errors import InputError


def test_documentation_holds_every_topic_in_sorted_order() -> None:
    text = documentation_text()
    assert 400_000 < len(text) < 700_000
    assert text.startswith('The "assert" statement')
    starts = [
        text.index(f'The "{word}" statement\n***') for word in ("assert", "del", "import", "while")
    ]
    assert starts == sorted(starts)


def test_calibration_is_mostly_prose_and_of_the_stated_size() -> None:
    found = calibration_texts()
    assert len(found) == len(CALIBRATION_MODULES) + len(CALIBRATION_MODULES) // 4
    assert 400_000 < sum(map(len, found)) < 650_000
    code = sum(len(text) for text in found[4::5])
    assert 0.2 < code / sum(map(len, found)) < 0.4
    assert "SequenceMatcher is a flexible class for comparing pairs of sequences" in found[2]
    assert all(text.strip() for text in found)


def test_calibration_repeats_no_docstring_in_the_source_excerpts() -> None:
    found = calibration_texts()
    code = "\n".join(found[4::5])
    prose = "\n".join(text for number, text in enumerate(found) if number % 5 != 4)
    sentences = {line for line in prose.splitlines() if len(line) > 60}
    assert not sentences & set(code.splitlines())


def test_calibration_shares_no_text_with_the_documentation() -> None:
    documentation = {line for line in documentation_text().splitlines() if len(line) > 50}
    shared = [
        line for text in calibration_texts() for line in text.splitlines() if line in documentation
    ]
    assert shared == []


def test_texts_are_the_same_in_another_process_and_execute_no_module() -> None:
    program = (
        "import hashlib, sys; from infinigen_kv.calibration.texts import *; "
        "t = '\\0'.join([documentation_text(), *calibration_texts()]); "
        "print(hashlib.sha256(t.encode()).hexdigest(), 'smtplib' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    whole = "\0".join([documentation_text(), *calibration_texts()])
    assert result.stdout.split() == [hashlib.sha256(whole.encode()).hexdigest(), "False"]


def _without(monkeypatch: pytest.MonkeyPatch, absent: set[str]) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str) -> object:
        if name in absent:
            if "." in name:
                raise ModuleNotFoundError(name)
            return None
        return find_spec(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_absent_modules_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = calibration_texts()
    _without(monkeypatch, {"doctest", "unittest.mock"})
    found = calibration_texts()
    assert len(found) == 18 + 5
    assert found[0] == whole[0]
    assert whole[1] not in found


def test_too_few_modules_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, set(CALIBRATION_MODULES[:11]))
    with pytest.raises(InputError, match="only 9 of 20 standard-library modules"):
        calibration_texts()
