"""From the names of figures to a folder: points, pictures, tables, and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from infinigen_kv.files import FOLDER, PointStore, plain, to_json, write_whole
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.run import WARM_UP
from infinigen_kv_lab.figures.catalogue import FIGURES
from infinigen_kv_lab.figures.cost import expected_seconds
from infinigen_kv_lab.figures.definition import Figure, Found, Row, Setting
from infinigen_kv_lab.figures.drawing import Canvas
from infinigen_kv_lab.figures.laboratory import Laboratory
from infinigen_kv_lab.figures.machine import machine_facts
from infinigen_kv_lab.figures.measuring import Measured, look_up, measure_points, points_of
from infinigen_kv_lab.figures.page import Sheet, heading, render_page
from infinigen_kv_lab.figures.point import Point
from infinigen_kv_lab.figures.scale import Scale
from infinigen_kv_lab.figures.sheets import PAGE, Order, Outcome, write_sheets

PROMPT = "prompt.json"


def make_figures(
    order: Order[Figure], setting: Setting, laboratory: Laboratory, say: Callable[[str], None]
) -> Outcome:
    """Measure, draw and write; an interruption stops measuring, what is there is drawn."""
    store = PointStore(order.folder / FOLDER, say)
    _write_prompt(order.folder, setting, laboratory)
    points = points_of(order.figures, setting)
    measured = measure_points(
        points,
        laboratory,
        store,
        again=order.again,
        cost=lambda point: expected_seconds(point, kv_bytes(laboratory), setting.layers),
        say=say,
    )
    outcome = Outcome(order.folder / PAGE, interrupted=measured.interrupted)

    def draw(figure: Figure) -> Sheet | str | None:
        wanted = figure in order.figures
        part = measured if wanted else _earlier(figure, setting, laboratory, store)
        if part is None:
            return None
        return _draw(figure, setting, part, laboratory) or _why(figure, setting, part)

    sheets = write_sheets(FIGURES, draw, outcome, _facts(setting, laboratory))
    page = _page(order, setting, laboratory, sheets, outcome.missing)
    write_whole(outcome.page, page)
    return outcome


def kv_bytes(laboratory: Laboratory) -> int:
    """Bytes of one token's KV in all layers of the main model."""
    from infinigen_kv.models.adapters import adapter_for

    model = laboratory.main.model
    layers = adapter_for(model).layers
    return sum(2 * each.num_kv_heads * each.head_dim for each in layers) * model.dtype.itemsize


def paper_link(
    order: Order[Figure], scale: Scale, laboratory: Laboratory, say: Callable[[str], None]
) -> str:
    """The link at the paper's balance for the headline prompt, measured once and kept.

    All figures of a page share it, so that a new one goes with all of them only.

    Raises
    ------
    InfiniGenError
        The model cannot read such a prompt.
    """
    store = PointStore(order.folder / FOLDER, say)
    point = Point(kind="rate", prompt_tokens=scale.prompt_tokens, decode_tokens=1)
    about = laboratory.about(point)
    again = order.again and len(order.figures) == len(FIGURES)
    held = None if again else store.get(point, about)
    if held is None:
        say(f"measuring a block on {scale.prompt_tokens} tokens, for the paper's link ...")
        held = laboratory.measure(point)
        store.put(point, about, held)
    return f"emulated:{held['rate'] / 1e9:.4g}"


def footer(setting: Setting, laboratory: Laboratory, links: Sequence[str]) -> str:
    """What a picture's numbers depend on, for its lower edge."""
    model = laboratory.main.model
    dtype = str(model.dtype).removeprefix("torch.")
    about = laboratory.about(setting.base())
    threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
    parts = [f"{setting.model}, {dtype}", f"{about['device']}, {threads}"]
    paced = [link for link in dict.fromkeys(links) if LinkSpec.parse(link).is_emulated]
    if paced:
        parts.append(f"EMULATED link{_rates(paced, setting)}")
    else:
        parts.append("no emulated link")
    return " | ".join(parts)


def _rates(links: Sequence[str], setting: Setting) -> str:
    timed = [link for link in links if link != setting.counting_link]
    rates = sorted({(LinkSpec.parse(link).rate or 0.0) / 1e9 for link in timed})
    if not rates:
        return ", unlimited"
    shown = f", {rates[0]:.3g}" + (f" to {rates[-1]:.3g}" if len(rates) > 1 else "") + " GB/s"
    return shown if len(timed) == len(links) else f"{shown}, and unlimited"


def _earlier(
    figure: Figure, setting: Setting, laboratory: Laboratory, store: PointStore
) -> Measured | None:
    """A figure that was not asked for, if all its points are there."""
    points = figure.points(setting)
    if any(point.model for point in points):
        return None  # to look it up would load other models
    measured = look_up(points, laboratory, store)
    return measured if len(measured.found) == len(points) else None


def _draw(
    figure: Figure, setting: Setting, measured: Measured, laboratory: Laboratory
) -> Sheet | None:
    rows = figure.rows(setting, measured.found)
    if not rows:
        return None
    points = [point for point in figure.points(setting) if point in measured.found]
    canvas = Canvas(figure.title, footer(setting, laboratory, [point.link for point in points]))
    figure.draw(canvas, rows)
    remarks = [
        *figure.remarks(setting, rows),
        *(_skipped(points, measured.found) if figure.shows_peers else ()),
        *(f"Missing: {each}" for each in _failures(figure, setting, measured)),
    ]
    return Sheet(
        name=figure.name,
        title=figure.title,
        about=figure.about,
        remarks=tuple(dict.fromkeys(remarks)),
        rows=tuple(plain(row) for row in rows),
        png=canvas.png(),
    )


def _skipped(points: Sequence[Point], found: Found) -> list[str]:
    return [
        f"Left out: {why}."
        for point in points
        for why in found[point].get("peers_skipped", {}).values()
    ]


def _failures(figure: Figure, setting: Setting, measured: Measured) -> list[str]:
    return [
        f"{point.label}: {measured.failed[point]}"
        for point in figure.points(setting)
        if point in measured.failed
    ]


def _why(figure: Figure, setting: Setting, measured: Measured) -> str:
    failures = _failures(figure, setting, measured)
    if failures:
        return f"cannot run on this model: {'; '.join(failures)}"
    return "its points are not measured yet" if measured.interrupted else "nothing to draw"


def _facts(setting: Setting, laboratory: Laboratory) -> dict[str, Any]:
    return {
        "model": setting.model,
        "link": setting.link,
        "link_is_emulated": LinkSpec.parse(setting.link).is_emulated,
        **laboratory.about(setting.base()),
    }


def _page(
    order: Order[Figure],
    setting: Setting,
    laboratory: Laboratory,
    sheets: Sequence[Sheet],
    missing: Mapping[str, str],
) -> str:
    spec = LinkSpec.parse(setting.link)
    warnings = []
    if spec.is_emulated:
        warnings.append(
            f"The link is EMULATED ({(spec.rate or 0.0) / 1e9:.3g} GB/s): bytes are really moved, "
            "and a transfer takes at least bytes / rate."
        )
    about = laboratory.about(setting.base())
    settings: Row = {
        "model": setting.model,
        "type": about["dtype"],
        "decode steps by": f"{about['kernels']} kernels",
        "link": setting.link if spec.is_emulated else "the machine's own",
        "headline prompt": f"{setting.scale.prompt_tokens} tokens",
        "headline steps": f"{setting.scale.decode_tokens}, after {WARM_UP} to warm up",
        "sweeps": f"{setting.scale.sweep_prompt} tokens, {setting.scale.sweep_tokens} steps",
        "budget": "20 % of the cached tokens, where it does not vary",
        **{f"results of {guest.source}": guest.path for guest in setting.guests},
    }
    return render_page(
        title=f"infinigen-kv: speed figures of {setting.model}",
        command=order.command,
        warnings=warnings,
        groups={
            "Machine": machine_facts(laboratory.main.model.device),
            "Settings": {name: str(value) for name, value in settings.items()},
        },
        sheets=sheets,
        missing={heading(name): why for name, why in missing.items()},
    )


def _write_prompt(folder: Path, setting: Setting, laboratory: Laboratory) -> None:
    """The headline prompt, for programs that are to read the same one."""
    subject, scale = laboratory.main, setting.scale
    tokens = laboratory.prompt(subject, 1, scale.prompt_tokens)[0].tolist()
    values = {
        "model": setting.model,
        "model_folder": subject.model.config._name_or_path,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "prompt_sha256": setting.prompt_digest,
        "warm_up_tokens": WARM_UP,
        "decode_tokens": scale.decode_tokens,
        "token_ids": tokens,
    }
    write_whole(folder / PROMPT, to_json(values))
