"""lm-evaluation-harness (extra ``eval``): this engine as one of its models, its tasks as ours.

Nothing here is imported unless a task needs it, and `usable` is called first.
"""

from __future__ import annotations

from importlib import import_module
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
    from packaging.version import InvalidVersion, Version

    try:
        fits = Version(OLDEST) <= Version(found) < Version(NEWEST_BEFORE)
    except (InvalidVersion, TypeError):  # None where the metadata are damaged
        fits = False
    if not fits:
        raise InputError(
            f"lm-eval {found} does not fit: it must be at least {OLDEST} and below "
            f"{NEWEST_BEFORE} ({INSTALL})"
        )
    return found


def usable() -> str:
    """As `installed`, and it can be imported.

    Raises
    ------
    InputError
        As `installed`, or if a part of it or of what it needs is missing or damaged.
    """
    found = installed()
    try:
        for name in ("lm_eval.api.task", "lm_eval.tasks", "lm_eval.evaluator", "datasets"):
            import_module(name)
    except (ImportError, SyntaxError, AttributeError) as error:
        raise InputError(
            f"lm-eval {found} cannot be imported ({type(error).__name__}: {error}): install it "
            f"again ({INSTALL} --force-reinstall)"
        ) from error
    return found
