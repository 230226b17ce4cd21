"""Rows of different lengths that join and leave at any step, decoded together."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from infinigen_kv.batching.ragged import RaggedCache
from infinigen_kv.batching.row import Row, TokenIds, as_token_ids, check_size
from infinigen_kv.cache.forward import forward, prefill
from infinigen_kv.config import PROMPT_CHUNK
from infinigen_kv.errors import CacheStateError, InputError

if TYPE_CHECKING:
    from infinigen_kv.cache.blueprint import CacheBlueprint
    from infinigen_kv.session.attach import Session
    from infinigen_kv.storage.storage import Storage


class InfiniGenBatch:
    """Up to ``rows`` rows, each with a cache of its own, over one link and one file.

    A step runs the model's own layers once for all rows, and rehearsal and attention row by row, so
    that a row can join or leave without a copy of the others. One thread at a time may use it.

    Made by `Session.new_batch`.

    Parameters
    ----------
    session
        Whose model runs.
    blueprint
        Makes the rows' caches.
    storage
        What they share; closed with the batch.
    rows, tokens
        Rows at once, and tokens that each may hold.
    fixed_width
        Give every step all ``rows`` rows, with padding for those that it leaves out. How a matrix
        product rounds depends on its number of rows; so a row's logits are the same, to the last
        bit, whoever else is there.
    """

    def __init__(
        self,
        session: Session,
        blueprint: CacheBlueprint,
        storage: Storage,
        *,
        rows: int,
        tokens: int,
        fixed_width: bool = True,
    ) -> None:
        self.storage = storage
        self.tokens = tokens
        self.fixed_width = fixed_width
        self._session = session
        self._blueprint = blueprint
        self._rows: list[Row | None] = [None] * rows
        self._closed = False
        self._working = threading.Lock()

    def __enter__(self) -> InfiniGenBatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def rows(self) -> list[Row]:
        """Those that have joined and not left, by their places."""
        return [row for row in self._rows if row is not None]

    @property
    def free(self) -> int:
        """Rows that may still join."""
        return self._rows.count(None)

    @property
    def home_bytes(self) -> int:
        """Bytes reserved for KV in the homes of all rows."""
        return sum(row.cache.home_bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of KV, resident sets and partial keys of all rows on the device."""
        return sum(row.cache.device_bytes for row in self.rows)

    def join(
        self, prompt_ids: TokenIds, *, tokens: int | None = None, chunk: int | None = PROMPT_CHUNK
    ) -> Row:
        """Read a prompt into a free row, with full attention; the others stay as they are.

        Parameters
        ----------
        prompt_ids
            Token ids ``(T,)`` or ``(1, T)``.
        tokens
            Tokens that the row will hold at most, prompt included: reserved at once, and what
            shares of the context refer to. None for the batch's ``tokens``.
        chunk
            Tokens that one forward reads at most, None for all at once; see `cache.forward.prefill`.

        Returns
        -------
        Row
            Its ``logits`` are those of the prompt's last token.

        Raises
        ------
        InputError
            If the prompt is empty or too long, or ``tokens`` more than the batch's.
        CacheStateError
            If all rows are taken, or batch or session are closed.
        """
        with self._work():
            ids = self._known(prompt_ids).reshape(1, -1)
            limit = self._limit(ids.shape[1], tokens)
            if not self.free:
                raise CacheStateError(
                    f"all {len(self._rows)} rows are taken: release one, or use a batch of more "
                    "rows"
                )
            place = self._rows.index(None)
            storage = self.storage.for_row(limit, len(self._rows))
            cache = self._blueprint.cache(storage, owner=self._session)
            try:
                logits = prefill(self._session, cache, ids, chunk=chunk)
            except BaseException:
                cache.close()
                raise
            row = self._rows[place] = Row(place, limit, cache, logits[0, -1])
            return row

    @torch.no_grad()
    def step(
        self, rows: Mapping[Row, int] | Sequence[Row], token_ids: TokenIds | None = None
    ) -> Tensor:
        """One token more in some rows; where that fails, those that can are as before.

        Parameters
        ----------
        rows
            Rows and their tokens, ``{row: token}``, or rows alone; any of those that have joined,
            each once.
        token_ids
            Tokens ``(n,)`` where ``rows`` has none.

        Returns
        -------
        Tensor
            Logits ``(n, V)``, in the order of ``rows``; each row's are in its ``logits`` too.

        Raises
        ------
        InputError
            If there is not one token for each row, or no row, or one twice.
        CacheStateError
            If a row was released, is full, is another batch's, or could not go back after a step
            that failed. No row has changed then.
        """
        with self._work():
            chosen, ids = self._chosen(rows, token_ids)
            for row in chosen:
                self._check_row(row)
                self._check_room(row)
            width = len(self._rows) if self.fixed_width else len(chosen)
            cache = RaggedCache([row.cache for row in chosen], width)
            padded = torch.cat([ids, ids.new_zeros(width - len(chosen))])
            positions = cache.position_ids.to(ids.device)
            with cache.one_token():
                logits = forward(
                    self._session.model,
                    padded[:, None],
                    cache,
                    last_only=True,
                    position_ids=positions,
                )[: len(chosen), -1]
            for row, last in zip(chosen, logits, strict=True):
                row.logits = last
            return logits

    def release(self, row: Row) -> None:
        """Let a row go and free its memory and its space on disk; its place may be joined again.

        Raises
        ------
        CacheStateError
            If it was released before, or is another batch's.
        """
        with self._work():
            self._check_row(row)
            self._rows[row.place] = None
            row.leave().close()

    def close(self) -> None:
        """Release all rows, and end the threads and files; may be called twice."""
        self._closed = True
        with ExitStack() as undo:  # goes on with the others where one fails
            undo.callback(self.storage.close)
            for row in self.rows:
                self._rows[row.place] = None
                undo.callback(row.leave().close)

    @contextmanager
    def _work(self) -> Iterator[None]:
        if self._closed or self._session.closed:
            raise CacheStateError(
                "this batch is closed: make one with session.new_batch() of an attached model"
            )
        if not self._working.acquire(blocking=False):
            raise CacheStateError("this batch is at work in another thread")
        try:
            yield
        finally:
            self._working.release()

    def _check_row(self, row: Row) -> None:
        if row.is_released:
            raise CacheStateError(f"row {row.place} was released: join the request again")
        if row.place >= len(self._rows) or self._rows[row.place] is not row:
            raise CacheStateError(f"row {row.place} is another batch's")

    @staticmethod
    def _check_room(row: Row) -> None:
        """That the row can take one token more."""
        if row.cache.is_interrupted:
            raise CacheStateError(
                f"row {row.place} could not go back after a step that failed, for tokens were "
                "evicted or its disk fails: release it, and join the request again"
            )
        if row.length >= row.tokens:
            raise CacheStateError(
                f"row {row.place} holds {row.tokens} tokens, which is all that it was made for: "
                "release it, and join with more tokens=..."
            )

    def _limit(self, prompt: int, tokens: int | None) -> int:
        """Tokens that a new row may hold."""
        if tokens is not None:
            check_size("tokens", tokens)
            if tokens > self.tokens:
                raise InputError(
                    f"tokens={tokens} is not valid: the rows of this batch hold at most "
                    f"{self.tokens}"
                )
        limit = self.tokens if tokens is None else tokens
        if prompt > limit:
            raise InputError(
                f"the prompt has {prompt} tokens, but the row holds at most {limit}: shorten it, "
                "or use a batch made for more tokens"
            )
        return limit

    def _chosen(
        self, rows: Mapping[Row, int] | Sequence[Row], token_ids: TokenIds | None
    ) -> tuple[list[Row], Tensor]:
        if isinstance(rows, Mapping):
            if token_ids is not None:
                raise InputError("tokens are given twice: in rows and as token_ids")
            token_ids = list(rows.values())
        chosen = list(rows)
        ids = self._known([] if token_ids is None else token_ids)
        if len(chosen) != len(ids) or not chosen:
            raise InputError(
                f"{len(chosen)} rows and {len(ids)} tokens are given: a step needs at least one "
                "row, and one token for each"
            )
        if len(set(chosen)) != len(chosen):
            raise InputError("a row is given twice: each takes one token a step")
        return chosen, ids

    def _known(self, given: TokenIds) -> Tensor:
        """Checked token ids ``(n,)``, on the model's device."""
        model: Any = self._session.model
        return as_token_ids(given, model.get_input_embeddings().num_embeddings).to(model.device)
