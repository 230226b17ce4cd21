"""From the names of accuracy figures to a folder: trials, pictures, tables, and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from infinigen_kv.errors import InfiniGenError
from infinigen_kv.files import plain, write_whole
from infinigen_kv_lab.figures.accuracy.catalogue import ACCURACY_FIGURES
from infinigen_kv_lab.figures.accuracy.cost import expected_seconds
from infinigen_kv_lab.figures.accuracy.definition import SHARE, AccuracyFigure, AccuracySetting
from infinigen_kv_lab.figures.accuracy.laboratory import AccuracyLaboratory
from infinigen_kv_lab.figures.accuracy.trial import Points, Trial
from infinigen_kv_lab.figures.drawing import Canvas
from infinigen_kv_lab.figures.machine import machine_facts, processor
from infinigen_kv_lab.figures.page import Sheet, heading, render_page
from infinigen_kv_lab.figures.sheets import PAGE, Order, Outcome, write_sheets
from infinigen_kv_lab.figures.worklist import Measurements, Within, work_through

INTERVALS = " | intervals of 95 %, bootstrap over these"

Evaluated = Measurements[Trial, Points]


def make_accuracy_figures(
    order: Order[AccuracyFigure],
    setting: AccuracySetting,
    laboratory: AccuracyLaboratory,
    say: Callable[[str], None],
) -> Outcome:
    """Evaluate, draw and write; an interruption stops evaluating, what is there is drawn."""
    evaluated = evaluate_trials(order, setting, laboratory, say)
    outcome = Outcome(order.folder / PAGE, interrupted=evaluated.interrupted)

    def draw(figure: AccuracyFigure) -> Sheet | str | None:
        wanted = figure in order.figures
        part = evaluated if wanted else _earlier(figure, setting, laboratory)
        if part is None:
            return None
        return _draw(figure, setting, part, laboratory) or _why(figure, setting, part)

    facts = {"model": setting.model, **_about(laboratory)}
    sheets = write_sheets(ACCURACY_FIGURES, draw, outcome, facts)
    page = render_page(
        title=f"infinigen-kv: accuracy figures of {setting.model}",
        command=order.command,
        warnings=(),
        groups={
            "Machine": machine_facts(laboratory.model.device),
            "Settings": _settings(setting, laboratory),
        },
        sheets=sheets,
        missing={heading(name): why for name, why in outcome.missing.items()},
    )
    write_whole(outcome.page, page)
    return outcome


def evaluate_trials(
    order: Order[AccuracyFigure],
    setting: AccuracySetting,
    laboratory: AccuracyLaboratory,
    say: Callable[[str], None],
) -> Evaluated:
    """Evaluate what is not there yet; of what an interruption cut short, as much as there is."""
    results: Evaluated = Measurements()
    shares = _shares_missing(order, setting, laboratory, results, say)
    finished = [trial for trial, share in shares.items() if share == 0.0]
    if finished:
        say(f"{len(finished)} of {len(shares)} evaluations were made before")
    for trial in finished:
        results.found[trial] = laboratory.measure(trial, lambda share: None)

    def measure(trial: Trial, within: Within) -> Points:
        return laboratory.measure(trial, within, again=order.again)

    todo = [trial for trial in shares if trial not in results.found]
    work_through(
        todo,
        results,
        measure,
        cost=lambda trial: shares[trial] * expected_seconds(trial),
        say=say,
    )
    if results.interrupted:
        _add_parts(todo, results, laboratory)
    return results


def _shares_missing(
    order: Order[AccuracyFigure],
    setting: AccuracySetting,
    laboratory: AccuracyLaboratory,
    results: Evaluated,
    say: Callable[[str], None],
) -> dict[Trial, float]:
    """By trial the share of its samples that is to be measured, most of all whether it can be.

    Data that is not there is found now, and said once, not after hours.
    """
    shares: dict[Trial, float] = {}
    for trial in trials_of(order.figures, setting):
        missing, reason = _missing(trial, laboratory)
        if reason is None:
            shares[trial] = 1.0 if order.again else missing
            continue
        if reason not in results.failed.values():
            say(f"{trial.task}: cannot be measured: {reason}")
        results.failed[trial] = reason
    return shares


def trials_of(figures: Sequence[AccuracyFigure], setting: AccuracySetting) -> list[Trial]:
    """Trials of several figures, each once."""
    return list(dict.fromkeys(trial for figure in figures for trial in figure.trials(setting)))


def _missing(trial: Trial, laboratory: AccuracyLaboratory) -> tuple[float, str | None]:
    """Share of a trial's samples that is to be measured, and why it cannot be, if so."""
    try:
        return 1 - laboratory.kept(trial) / laboratory.wanted(trial), None
    except InfiniGenError as error:
        return 1.0, " ".join(str(error).split())


def _add_parts(todo: Sequence[Trial], results: Evaluated, laboratory: AccuracyLaboratory) -> None:
    for trial in todo:
        if trial not in results.found and trial not in results.failed:
            part = laboratory.partly(trial)
            if part is not None:
                results.found[trial] = part


def _earlier(
    figure: AccuracyFigure, setting: AccuracySetting, laboratory: AccuracyLaboratory
) -> Evaluated | None:
    """A figure that was not asked for, if all its trials are there but those that cannot be."""
    results: Evaluated = Measurements()
    for trial in figure.trials(setting):
        missing, reason = _missing(trial, laboratory)
        if reason is not None:
            results.failed[trial] = reason
        elif missing:
            return None
        else:
            results.found[trial] = laboratory.measure(trial, lambda share: None)
    return results if results.found else None


def _draw(
    figure: AccuracyFigure,
    setting: AccuracySetting,
    evaluated: Evaluated,
    laboratory: AccuracyLaboratory,
) -> Sheet | None:
    rows = figure.rows(setting, evaluated.found)
    if not rows:
        return None
    trials = [trial for trial in figure.trials(setting) if trial in evaluated.found]
    rests = rests_on([evaluated.found[trial] for trial in trials])
    about = _about(laboratory)
    footer = f"{setting.model}, {about['dtype']} | {rests}{INTERVALS if figure.intervals else ''}"
    canvas = Canvas(figure.title, footer)
    figure.draw(canvas, rows)
    remarks = [
        *figure.remarks(setting, rows),
        f"Measured on: {rests}.",
        *(f"Missing: {each}" for each in _failures(figure, setting, evaluated)),
    ]
    return Sheet(
        name=figure.name,
        title=figure.title,
        about=figure.about,
        remarks=tuple(dict.fromkeys(remarks)),
        rows=tuple(plain(row) for row in rows),
        png=canvas.png(),
    )


def rests_on(results: Sequence[Points]) -> str:
    """How many samples of each task a figure rests on, in words; of unequal ones the fewest."""
    counts: dict[str, tuple[int, int]] = {}
    for points in results:
        for point in points.values():
            held = counts.get(point.task, (point.samples, point.available))
            counts[point.task] = min(held, (point.samples, point.available))
    return ", ".join(
        f"{task}: {some} of {every} {_unit(task)}" for task, (some, every) in counts.items()
    )


def _unit(task: str) -> str:
    units = {"passkey": "prompts", "needles": "contexts"}
    if task in ("copa", "openbookqa", "winogrande", "piqa", "rte"):
        return "documents"
    return units.get(task, "windows")


def _failures(figure: AccuracyFigure, setting: AccuracySetting, evaluated: Evaluated) -> list[str]:
    """What could not be evaluated, and why; each reason once."""
    by_reason: dict[str, list[Trial]] = {}
    for trial in figure.trials(setting):
        if trial in evaluated.failed:
            by_reason.setdefault(evaluated.failed[trial], []).append(trial)
    return [f"{_which(trials)}: {reason}" for reason, trials in by_reason.items()]


def _which(trials: Sequence[Trial]) -> str:
    if len(trials) == 1:
        return trials[0].label
    return ", ".join(dict.fromkeys(trial.task for trial in trials))


def _why(figure: AccuracyFigure, setting: AccuracySetting, evaluated: Evaluated) -> str:
    failures = _failures(figure, setting, evaluated)
    if failures:
        return "; ".join(failures)
    return "its trials are not evaluated yet" if evaluated.interrupted else "nothing to draw"


def _about(laboratory: AccuracyLaboratory) -> dict[str, str]:
    model = laboratory.model
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": processor(model.device),
    }


def _settings(setting: AccuracySetting, laboratory: AccuracyLaboratory) -> dict[str, str]:
    scale = setting.scale
    text = scale.text
    return {
        "model": setting.model,
        "type": _about(laboratory)["dtype"],
        "perplexities": f"windows of {text.window} tokens, the first {text.prompt_tokens} read in "
        f"full; {text.windows} at most",
        "sweeps": f"windows of {scale.sweep.window} tokens; {scale.sweep.windows} at most",
        "intervals": "95 %, bootstrap over windows, prompts or documents; none from one alone",
        "budget of h2o": f"{100 * SHARE:g} % of the cached tokens, where it does not vary",
    }
