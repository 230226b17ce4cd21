"""Progress of long loops, on stderr and only where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")

Progress = Callable[[Sequence[Any], str], Iterable[Any]]
"""Wraps a sequence and says what it is: ``for item in progress(items, "calibrating")``."""


def no_progress(items: Sequence[T], description: str) -> Iterable[T]:
    """Show nothing."""
    return items


def bar(items: Sequence[T], description: str) -> Iterable[T]:
    """A bar on stderr with the time left; silent where stderr is no terminal."""
    return tqdm(items, desc=description, leave=False, disable=None)
