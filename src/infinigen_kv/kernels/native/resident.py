"""Bookkeeping of the resident set in compiled code; see `storage.pools.resident` for its arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from infinigen_kv.kernels.native.numbers import compiled, partition


@compiled
def look_up(
    place_of: Any,
    slot_of: Any,
    used: Any,
    slots: Any,
    counts: Any,
    clock: int,
    budget: int,
    spare_place: int,
) -> tuple[Any, Any, Any, int]:
    """Find a step's entries and give the missing ones the places that were used longest ago.

    Parameters
    ----------
    place_of, slot_of, used
        ``(B, H_kv, *)`` int64.
    slots
        ``(B, H_kv, n)`` int64, n at most ``budget``.
    counts
        ``(B,)`` int64: leading columns that count.
    clock
        The time now, later than any use.
    budget, spare_place
        Places for fetched entries, and the one that stands for "not here".

    Returns
    -------
    tuple
        Places ``(B, H_kv, n)``; slots to fetch and their places ``(B, H_kv, m)``, filled up with a
        slot of the head and ``spare_place``; how many entries are to be fetched.
    """
    rows, heads, columns = slots.shape
    places = np.full((rows, heads, columns), spare_place)
    missing = np.zeros((rows, heads), np.int64)
    for row in range(rows):
        for head in range(heads):
            here, times, found = place_of[row, head], used[row, head], places[row, head]
            for column in range(counts[row]):
                place = here[slots[row, head, column]]
                found[column] = place
                if place == spare_place:
                    missing[row, head] += 1
                else:
                    times[place] = clock
    most = np.max(missing)
    fetch = np.zeros((rows, heads, most), np.int64)
    targets = np.full((rows, heads, most), spare_place)
    if most > 0:
        for row in range(rows):
            for head in range(heads):
                fetch[row, head, :] = slots[row, head, 0]
                victims = oldest(used[row, head], budget, missing[row, head])
                used[row, head][victims] = clock
                targets[row, head, : len(victims)] = victims
                admit(
                    place_of[row, head], slot_of[row, head], slots[row, head, : counts[row]],
                    victims, spare_place, places[row, head], fetch[row, head],
                )  # fmt: skip
    return places, fetch, targets, np.sum(missing)


@compiled
def admit(
    place_of: Any, slot_of: Any, slots: Any, victims: Any, spare_place: int, places: Any, fetch: Any
) -> None:
    """Give the slots of one head that are not here the places ``victims``, in turn."""
    number = 0
    for column in range(len(slots)):
        if places[column] == spare_place:
            move(place_of, slot_of, slots[column], victims[number], spare_place)
            places[column], fetch[number] = victims[number], slots[column]
            number += 1


@compiled
def move(place_of: Any, slot_of: Any, slot: int, place: int, spare_place: int) -> None:
    """Point a slot at a place and back; who was there before is not here any more."""
    former = slot_of[place]
    if former >= 0:
        place_of[former] = spare_place
    slot_of[place] = slot
    if slot >= 0:
        place_of[slot] = place


@compiled
def oldest(used: Any, budget: int, count: int) -> Any:
    """The ``count`` places below ``budget`` with the smallest times."""
    places = np.arange(budget)
    partition(-used[:budget], places, count)
    return places[:count]


@compiled
def move_in(
    place_of: Any,
    slot_of: Any,
    slots: Any,
    place: int,
    spare_place: int,
    kept_keys: Any,
    kept_values: Any,
    keys: Any,
    values: Any,
) -> None:
    """Keep one new token per row in ``place``: ``slots`` ``(B,)``, -1 if it was dropped at once.

    What is kept is ``(B, H_kv, places, D)``, and what is new ``(B, H_kv, D)``.
    """
    for row in range(len(slots)):
        slot = slots[row]
        for head in range(keys.shape[1]):
            if slot >= 0:
                stale = place_of[row, head, slot]
                if stale != spare_place:
                    slot_of[row, head, stale] = -1
            move(place_of[row, head], slot_of[row, head], slot, place, spare_place)
            kept_keys[row, head, place] = keys[row, head]
            kept_values[row, head, place] = values[row, head]


@compiled
def fill(kept: Any, places: Any, entries: Any) -> None:
    """``kept[b, h, places[b, h, i]] = entries[b, h, i]``."""
    rows, heads, count, _ = entries.shape
    for row in range(rows):
        for head in range(heads):
            for number in range(count):
                kept[row, head, places[row, head, number]] = entries[row, head, number]
