"""Refusing a run that does not fit, with the settings under which it would: found by planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import reduce

from infinigen_kv.checks import check_integer
from infinigen_kv.errors import InputError
from infinigen_kv.memory import changes
from infinigen_kv.memory.budget import Budget, Shortfall, machine_budget, shortfalls
from infinigen_kv.memory.changes import Change, Style
from infinigen_kv.memory.plan import MemoryPlan, plan_memory
from infinigen_kv.memory.request import PlanRequest

TOGETHER = ("codec", "home", "resident", "prompt_chunk", "resident_layers", "dtype")
PLACE_NAMES = {"device": "memory", "host": "host memory", "disk": "disk space"}


@dataclass(frozen=True, slots=True)
class Advice:
    """Changes that together make a run fit, and what it needs then."""

    changes: tuple[Change, ...]
    plan: MemoryPlan

    def text(self, style: Style) -> str:
        """For one line."""
        joint = " " if style == "option" else ", "
        *first, last = (change.text(style) for change in self.changes)
        words = joint.join([*first, last])
        if first and self.changes[-1].name == "context":
            words = f"{joint.join(first)} and {last}"
        return f"{words} ({readable(self.plan.total('device'))})"


def check_memory(
    request: PlanRequest,
    *,
    device_memory: int | None = None,
    fixed: Collection[str] = (),
    style: Style = "setting",
) -> MemoryPlan:
    """Refuse a run that does not fit into memory, before it allocates any.

    Parameters
    ----------
    request
        The run, of a model that is loaded.
    device_memory
        Bytes that it may use on the device, weights included; None for what the machine has.
    fixed
        Settings that the caller cannot change; see `advise`.
    style
        Of the settings in the error.

    Raises
    ------
    InputError
        Says by how much it does not fit, and which settings to change.
    """
    if device_memory is not None:
        instead = ", in bytes, or None for what the machine has"
        check_integer("device_memory", device_memory, 1, instead=instead)
    budget = machine_budget(request, device_memory=device_memory, loaded=True)
    plan = plan_memory(request)
    lacking = shortfalls(plan, budget)
    if lacking:
        raise InputError(refusal(lacking, advise(request, budget, fixed), style))
    return plan


def advise(request: PlanRequest, budget: Budget, fixed: Collection[str] = ()) -> list[Advice]:
    """What would make a run fit: single settings, the mildest value of each, or several together.

    Also a smaller batch, and a shorter context. ``fixed`` names those that the caller cannot
    change: ``rows``, ``context``, or a field of the settings.
    """
    found: dict[str, Advice] = {}
    for change in changes.changes(request):
        if change.name not in fixed and change.name not in found:
            for each in _advice(request, (change,), budget):
                found[change.name] = each
    strongest = () if found else _strongest(request, fixed)
    advice = list(found.values()) or _fewest(request, strongest, budget)
    limits = _limits(request, (), budget, fixed)
    if advice or limits:
        return advice + limits
    return _limits(request, strongest, budget, fixed)


def refusal(lacking: list[Shortfall], advice: list[Advice], style: Style) -> str:
    """One line: what is missing, and what to do."""
    parts = [
        f"{readable(each.needed)} of {PLACE_NAMES[each.place]}, {readable(each.missing)} more than "
        f"the {readable(each.available)} there are"
        for each in lacking
    ]
    what = "no setting makes it fit, so take a smaller model"
    if advice:
        what = f"it fits with {', or '.join(each.text(style) for each in advice)}"
    other = "--device-memory" if style == "option" else "device_memory"
    return f"the run needs {' and '.join(parts)}: {what}; {other} sets another limit"


def readable(nbytes: int) -> str:
    """``1.50 GiB``."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.{2 if nbytes < 10 * size else 1}f} {unit}"
    return f"{nbytes} bytes"


def _advice(request: PlanRequest, made: Iterable[Change], budget: Budget) -> list[Advice]:
    """The changes, if the run fits with them."""
    made = tuple(made)
    plan = plan_memory(reduce(lambda run, change: change.apply(run), made, request))
    return [] if shortfalls(plan, budget) else [Advice(made, plan)]


def _strongest(request: PlanRequest, fixed: Collection[str]) -> tuple[Change, ...]:
    """The strongest value of every setting that goes with the ones before it."""
    chosen: list[Change] = []
    for name in TOGETHER:
        values = [each for each in changes.changes(request) if each.name == name]
        if name not in fixed and values:
            chosen.append(values[-1])
            request = values[-1].apply(request)
    return tuple(chosen)


def _fewest(request: PlanRequest, made: tuple[Change, ...], budget: Budget) -> list[Advice]:
    """As few of the changes as suffice: the first ones, without those that are not needed."""
    advice: list[Advice] = []
    for count in range(1, len(made) + 1):
        advice = _advice(request, made[:count], budget)
        if advice:
            made = made[:count]
            break
    for change in made if advice else ():
        less = [each for each in advice[0].changes if each is not change]
        advice = _advice(request, less, budget) or advice
    return advice


def _limits(
    request: PlanRequest, made: tuple[Change, ...], budget: Budget, fixed: Collection[str]
) -> list[Advice]:
    """On top of changes: the largest batch that fits, and the longest context."""
    found = []
    if "rows" not in fixed:
        found += _most(request, made, changes.rows, 1, request.rows, budget)
    if "context" not in fixed:
        shortest = request.new_tokens + 1
        found += _most(request, made, changes.context, shortest, request.context, budget)
        if not found and "rows" not in fixed and made:
            alone = (*made, changes.rows(1))
            found = _most(request, alone, changes.context, shortest, request.context, budget)
    return found


def _most(
    request: PlanRequest,
    made: tuple[Change, ...],
    change: Callable[[int], Change],
    least: int,
    excess: int,
    budget: Budget,
) -> list[Advice]:
    """With the largest number from ``least`` on, below ``excess``, that fits."""
    best: list[Advice] = []
    while least < excess:
        number = (least + excess) // 2 if best else least
        advice = _advice(request, (*made, change(number)), budget)
        if advice:
            best, least = advice, number + 1
        elif not best:
            return []
        else:
            excess = number
    return best
