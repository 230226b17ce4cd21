"""Replace a folder so that, whenever the process dies, the old one or the new one is whole."""

from __future__ import annotations

from pathlib import Path


def replace_folder(folder: Path, staged: Path, scratch: Path) -> None:
    """Put ``staged`` in the place of ``folder``, which comes back if that fails.

    In between the old one has a name of its own beside ``folder``, where `current` finds it: no
    system call that all systems have puts one folder in the place of another that is not empty.

    Parameters
    ----------
    scratch
        Takes what is no longer needed; on the same file system, and emptied by the caller.
    """
    aside = aside_of(folder)
    try:
        if folder.exists():
            if aside.exists():  # of a process that died once its own was in place
                aside.rename(scratch / "older")
            folder.rename(aside)
        staged.replace(folder)
    except BaseException:
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise
    if aside.exists():
        aside.rename(scratch / "old")


def current(folder: Path) -> Path:
    """Where the content of ``folder`` is: aside, if a process died while it replaced it."""
    aside = aside_of(folder)
    return aside if aside.exists() and not folder.exists() else folder


def aside_of(folder: Path) -> Path:
    """Where the old content is while another takes its place."""
    return folder.parent / f".{folder.name}-replaced"
