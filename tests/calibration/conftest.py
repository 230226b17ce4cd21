"""A tokenizer for tiny models and a cache folder of each test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infinigen_kv.files import CACHE_VARIABLE
from tiny import VOCABULARY

SPECIAL = 3  # ids below are padding and the like


class CharTokenizer:
    """One token for each character."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [SPECIAL + ord(each) % (VOCABULARY - SPECIAL) for each in text]}


@pytest.fixture
def tokenizer() -> CharTokenizer:
    return CharTokenizer()


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Calibrations of a test are kept here."""
    folder = tmp_path / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder
