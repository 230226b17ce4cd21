"""What `tune` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from infinigen_kv.cli.output import percent, table

if TYPE_CHECKING:
    from infinigen_kv.calibration.tuned import Tuned


def print_tuned(tuned: Tuned, model: str) -> None:
    """Alphas, what they cost, what else was tried, and whether the target was reached."""
    found: dict[str, Any] = dict(tuned.measured)
    table(
        f"{model}: alpha by layer",
        ["layers", "alpha"],
        [[layers, f"{alpha:g}"] for layers, alpha in _runs(tuned.alpha, found["layers"])],
    )
    _print_costs(found)
    if found["alternatives"]:
        _print_alternatives(found)
    if not found["reached"]:
        typer.echo(
            f"The target of {tuned.target_kl:g} nats is out of reach: the least that was measured "
            f"is {found['least_kl']:.3g}. Raise --max-fetch or --partial-ratio, or accept a larger "
            "--target-kl; `infinigen-kv diagnose` says which layers are to blame."
        )
    share = found["resident"]
    tried = any(each["max_fetch"] == each["resident"] for each in found["alternatives"])
    if share and tuned.max_fetch > share and not tried:
        typer.echo(
            f"A step may want {percent(tuned.max_fetch)} of the cache and the resident set holds "
            f"{percent(share)}: steps that want more than it holds move all that they want."
        )


def _print_costs(found: dict[str, Any]) -> None:
    single, before = found["single_alpha"], found["alpha_only"]
    rows = [
        _cost("held back", found["kl"], found["link_bytes"], found["fetched_share"]),
        _cost("tuned on", found["kl_tuned_on"], found["link_bytes_tuned_on"], None),
        _cost(
            f"one alpha of {single['alpha']:.2f} for all layers, tuned on (interpolated)",
            found["kl_tuned_on"],
            single["link_bytes"],
            single["fetched_share"],
        ),
    ]
    if _adopted(found):
        rows.insert(1, _cost("held back, alpha only", before["kl"], before["link_bytes"], None))
    table("what it costs, per decode step", ["text", "KL (nats)", "link MB", "fetched"], rows)
    saved = found["bytes_saved"]
    typer.echo(f"{_fewer(saved)} bytes than one alpha for all layers")


def _print_alternatives(found: dict[str, Any]) -> None:
    """Whether the device's memory is better used in another way."""
    table(
        "tried at equal device memory, KL as with the best alphas before",
        ["partial ratio", "resident set", "layers kept whole", "max. fetched", "link bytes", ""],
        [
            [
                f"{each['partial_ratio']:g}",
                percent(each["resident"]),
                "auto"
                if each["resident_layers"] is None
                else ", ".join(map(str, each["resident_layers"])) or "none",
                percent(each["max_fetch"]),
                "KL out of reach" if each["bytes_saved"] is None else _fewer(each["bytes_saved"]),
                "taken" if each["adopted"] else "",
            ]
            for each in found["alternatives"]
        ],
    )
    if not _adopted(found):
        typer.echo("none saves enough: partial ratio and resident set stay as they are")
        return
    before = found["alpha_only"]
    saved = 1 - found["link_bytes_tuned_on"] / before["link_bytes_tuned_on"]
    held = 1 - found["link_bytes"] / before["link_bytes"]
    typer.echo(
        f"{_fewer(saved)} bytes than alpha alone at KL {found['kl_tuned_on']:.4f} and "
        f"{before['kl_tuned_on']:.4f}; {_fewer(held)} on text held back, at {found['kl']:.4f} and "
        f"{before['kl']:.4f}"
    )


def _adopted(found: dict[str, Any]) -> bool:
    return any(each["adopted"] for each in found["alternatives"])


def _fewer(saved: float) -> str:
    return f"{abs(saved):.0%} {'fewer' if saved >= 0 else 'more'}".replace("%", " %")


def _cost(text: str, kl: float, moved: float, share: float | None) -> list[str]:
    return [text, f"{kl:.4f}", f"{moved / 1e6:.3f}", "-" if share is None else percent(share)]


def _runs(alphas: tuple[float, ...], layers: list[int]) -> list[tuple[str, float]]:
    """Neighbouring layers of one alpha together."""
    runs: list[tuple[list[int], float]] = []
    for layer in layers:
        alpha = alphas[layer]
        if runs and runs[-1][1] == alpha and runs[-1][0][-1] == layer - 1:
            runs[-1][0].append(layer)
        else:
            runs.append(([layer], alpha))
    return [
        (str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}", alpha)
        for each, alpha in runs
    ]
