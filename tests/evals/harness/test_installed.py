"""Versions of lm-evaluation-harness."""

from __future__ import annotations

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv.evals import harness


@pytest.mark.parametrize("found", ["0.4.11", "0.5.0", "1.0", None])
def test_versions_that_do_not_fit(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if found is None:
            raise harness.PackageNotFoundError
        return found

    monkeypatch.setattr(harness, "version", version)
    reason = "needs lm-evaluation-harness" if found is None else f"lm-eval {found} does not fit"
    with pytest.raises(InputError, match=rf"{reason}.*infinigen-kv\[eval\]"):
        harness.installed()


@pytest.mark.parametrize("found", ["0.4.12", "0.4.13", "0.4.99"])
def test_versions_that_fit(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "version", lambda name: found)
    assert harness.installed() == found
