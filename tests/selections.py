"""What a recorder saw, as sets."""

from __future__ import annotations

from infinigen_kv.cache.recorder import FetchRecorder
from infinigen_kv.rehearsal.select import Selection

Sets = dict[tuple[int, int, int], list[set[int]]]  # by layer, row and position: by KV head


def as_sets(recorder: FetchRecorder, padding: tuple[int, ...], first: int) -> Sets:
    """What was selected, by (layer, row, position); tokens and positions without padding.

    ``first`` is the position of the first query that was recorded.
    """
    found: Sets = {}
    position: dict[int, int] = {}
    for layer, selection in recorder.selections:
        rows, _, queries, _ = selection.index.shape
        start = position.get(layer, first)
        position[layer] = start + queries
        for row in range(rows):
            for query in range(queries):
                heads = heads_of(selection, row, query, padding[row])
                found[layer, row, start + query - padding[row]] = heads
    return found


def heads_of(selection: Selection, row: int, query: int, shift: int) -> list[set[int]]:
    """What one query of a row selected, by KV head; tokens ``shift`` lower."""
    index = selection.index[row, :, query] - shift
    count = index.shape[-1] if selection.counts is None else int(selection.counts[row, query])
    heads = [head[:count].tolist() for head in index]
    assert all(len(set(head)) == count for head in heads), "a token was selected twice"
    return [set(head) for head in heads]
