"""Whether a forward reads a prompt or decodes, which nobody tells a cache outright."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

LONGEST_DRAFT = 64  # tokens; what assisted decoding verifies at once stays below


class Phase:
    """Where in its life a cache is, from what it was told and the forwards that it has seen."""

    def __init__(self) -> None:
        self._saw_prompt = False
        self._prompt_until = 0
        self._forced = False
        self._drafting: Literal["no", "armed", "yes"] = "no"

    def decodes(self, start: int, queries: int) -> bool:
        """Whether ``queries`` tokens on top of ``start`` are a decode step, so that they select.

        A single token is one, unless it may belong to a prompt that is fed token by token.
        """
        if self._forced:
            return start > 0
        if start < self._prompt_until or not self._saw_prompt or self._drafting == "armed":
            return False
        return queries == 1 or (self._drafting == "yes" and queries <= LONGEST_DRAFT)

    def ends_prompt(self, start: int, queries: int) -> bool | None:
        """Whether a prompt ends with such a forward; None if nobody said."""
        return start + queries >= self._prompt_until if start < self._prompt_until else None

    def expect_prompt(self, tokens: int) -> None:
        """The first ``tokens`` tokens are prompt."""
        self._prompt_until = tokens
        self._drafting = "no" if self._drafting == "yes" else self._drafting

    @property
    def verifies_drafts(self) -> bool:
        """Whether tokens that decode may be taken back."""
        return self._forced or self._drafting == "yes"

    @property
    def awaits_drafts(self) -> bool:
        """Whether the next forward is the first one that verifies drafts."""
        return self._drafting == "armed"

    def until_decoding(self, start: int) -> int:
        """Tokens of a prompt that are still to come."""
        return max(0, self._prompt_until - start)

    def expect_drafts(self) -> None:
        """Short forwards after the next one verify drafts."""
        self._drafting = "armed"

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside the block every forward on top of others decodes."""
        before, self._forced = self._forced, True
        try:
            yield
        finally:
            self._forced = before

    def finished(self, start: int, queries: int) -> None:
        """A forward is over, and its tokens are held."""
        self._saw_prompt |= queries > 1 or start + 1 == self._prompt_until
        if self._drafting == "armed":
            self._drafting = "yes"

    def cropped(self, length: int) -> None:
        """Only the first ``length`` tokens are held now."""
        self._prompt_until = min(self._prompt_until, length)
        if length == 0:
            self._saw_prompt = False

    def reset(self) -> None:
        """The cache is empty, and as new."""
        self._saw_prompt = False
        self._prompt_until = 0
        self._drafting = "no"
