"""Names to what they stand for: the engine's own entries, and those that other packages bring.

A package brings entries by an entry point in its metadata; ``infinigen_kv.policies`` and
``infinigen_kv.homes`` are the groups. So the engine finds them without importing anybody by name.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from infinigen_kv.errors import InputError


class Named(Protocol):
    """An entry of a registry."""

    @property
    def name(self) -> str:
        """Its key."""


T = TypeVar("T", bound=Named)


class Registry(Mapping[str, T], Generic[T]):
    """A mapping of names; a name that nobody registered is an error that lists near ones.

    Parameters
    ----------
    kind
        What an entry is, as a setting is called: ``policy``, ``home``.
    group
        Entry points whose objects are sequences of entries; they are loaded when a name is looked
        up that the engine does not know, or all names are asked for.
    own
        The engine's entries.
    """

    def __init__(self, kind: str, group: str, own: Iterable[T]) -> None:
        self.kind = kind
        self._group = group
        self._entries: dict[str, T] = {}
        self._loaded = False
        for entry in own:
            self.register(entry)

    def register(self, entry: T) -> None:
        """Add an entry for this process.

        Raises
        ------
        InputError
            The name is taken.
        """
        if entry.name in self._entries:
            raise InputError(f"{self.kind} {entry.name!r} is registered already: choose a new name")
        self._entries[entry.name] = entry

    def __getitem__(self, name: str) -> T:
        if name in self:
            return self._entries[name]
        near = difflib.get_close_matches(str(name).lower(), self._entries, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        names = ", ".join(self._entries)
        raise InputError(f"{self.kind}={name!r} is not valid: {hint}it must be one of {names}")

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        if name not in self._entries:
            self._load()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        self._load()
        return len(self._entries)

    def _load(self) -> None:
        """Register what other packages bring; one that cannot be imported is said, once."""
        if self._loaded:
            return
        self._loaded = True
        for point in entry_points(group=self._group):
            for entry in self._entries_of(point):
                self.register(entry)

    def _entries_of(self, point: EntryPoint) -> Iterable[T]:
        try:
            entries: Iterable[T] = point.load()
        except (ImportError, AttributeError) as error:
            warnings.warn(
                f"{self._group} of {point.value} cannot be loaded ({error}): they are left out; "
                "reinstall or remove the package that brings them",
                stacklevel=2,
            )
            return ()
        return entries
