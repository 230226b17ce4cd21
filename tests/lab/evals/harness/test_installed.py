"""Versions of lm-evaluation-harness."""

from __future__ import annotations

import pytest

from infinigen_kv.errors import InputError
from infinigen_kv_lab.evals import harness


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


@pytest.mark.parametrize("found", [None, "not a version", ""])
def test_metadata_that_are_damaged(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "version", lambda name: found)
    with pytest.raises(InputError, match=rf"lm-eval {found} does not fit.*infinigen-kv\[eval\]"):
        harness.installed()


@pytest.mark.parametrize("fault", [ImportError("no module 'jinja2'"), SyntaxError("bad line")])
def test_a_damaged_installation(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise fault

    monkeypatch.setattr(harness, "version", lambda name: "0.4.12")
    monkeypatch.setattr(harness, "import_module", broken)
    reason = rf"lm-eval 0.4.12 cannot be imported \({type(fault).__name__}: .*install it again"
    with pytest.raises(InputError, match=reason):
        harness.usable()
