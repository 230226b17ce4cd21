"""lm-evaluation-harness (extra ``eval``): this engine as one of its models, its tasks as ours.

Nothing here is imported unless a task needs it, and `installed` is called first.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from infinigen_kv.errors import InputError

OLDEST = "0.4.12"
NEWEST_BEFORE = "0.5"
INSTALL = 'pip install "infinigen-kv[eval]"'


def installed() -> str:
    """The version of lm-eval that is installed.

    Raises
    ------
    InputError
        There is none, or one that does not fit.
    """
    try:
        found = version("lm_eval")
    except PackageNotFoundError:
        raise InputError(f"this task needs lm-evaluation-harness: {INSTALL}") from None
    from packaging.version import Version

    if not Version(OLDEST) <= Version(found) < Version(NEWEST_BEFORE):
        raise InputError(
            f"lm-eval {found} does not fit: it must be at least {OLDEST} and below "
            f"{NEWEST_BEFORE} ({INSTALL})"
        )
    return found
