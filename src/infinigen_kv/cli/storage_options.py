"""The options that say where the KV lives and how it moves."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from infinigen_kv.cli.sizes import parse_size
from infinigen_kv.errors import InputError

if TYPE_CHECKING:
    from infinigen_kv.storage.config import StorageConfig


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """The fields of `StorageConfig` under the names of the command line."""

    home: Annotated[
        str, typer.Option("--home", metavar="ram|disk", help="Where the full cache lives.")
    ] = "ram"
    home_dir: Annotated[
        Path | None,
        typer.Option(
            "--home-dir",
            metavar="DIR",
            help="Folder of a disk home's file, which is removed at the end. "
            "[default: the temporary folder]",
            show_default=False,
        ),
    ] = None
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="none|emulated:GB/s[,us]|emulated:paper",
            help="What moves entries from home to device; an emulated link has a rate and a "
            "latency, or the balance of the paper's Figure 18.",
        ),
    ] = "none"
    codec: Annotated[
        str,
        typer.Option("--codec", metavar="none|int8|int4", help="How entries are packed at home."),
    ] = "none"
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity",
            metavar="SHARE|TOKENS",
            help="Limit of the home per row, e.g. 80% of prompt and new tokens, or 4000. "
            "[default: no limit]",
            show_default=False,
        ),
    ] = None
    evict: Annotated[
        str,
        typer.Option(
            "--evict",
            metavar="counter|lru|fifo",
            help="What makes room at the limit; attention sinks stay.",
        ),
    ] = "counter"
    resident: Annotated[
        str | None,
        typer.Option(
            "--resident",
            metavar="SHARE|SIZE",
            help="Fetched entries kept on the device: a share of the context, e.g. 20%, or bytes, "
            "e.g. 64MiB. [default: where entries have to move what was tuned, or 20%; else 0]",
            show_default=False,
        ),
    ] = None
    resident_layers: Annotated[
        str,
        typer.Option(
            "--resident-layers",
            metavar="auto|none|I,J,...",
            help="Layers kept on the device whole; auto: those that were tuned, or that cannot be "
            "predicted well.",
        ),
    ] = "auto"

    def given(self) -> list[str]:
        """Names of the options that differ from their defaults."""
        mine, default = asdict(self), asdict(StorageOptions())
        return ["--" + name.replace("_", "-") for name in mine if mine[name] != default[name]]

    def config(self) -> StorageConfig:
        """Validated settings; errors name the option as it was typed."""
        from infinigen_kv.storage.config import StorageConfig

        values: dict[str, Any] = asdict(self)
        if self.evict != StorageOptions().evict and self.capacity is None:
            raise InputError(
                f"--evict {self.evict!r} is not valid without --capacity: nothing is evicted then; "
                "give a capacity, or leave it out"
            )
        for name in ("capacity", "resident"):
            if values[name] is not None:
                values[name] = parse_size(f"--{name}", values[name], units=name == "resident")
        values["resident_layers"] = parse_layers(self.resident_layers)
        try:
            config = StorageConfig(**values)
            config.kind.check(config)  # before a model is loaded and calibrated
            return config
        except InputError as error:
            field, separator, rest = str(error).partition("=")
            if not separator or field not in values:
                raise
            raise InputError(f"--{field.replace('_', '-')} {rest}") from error


def storage_record(config: StorageConfig) -> dict[str, Any]:
    """Plain values for JSON."""
    folder = config.home_dir
    return {**asdict(config), "home_dir": None if folder is None else str(folder)}


def link_note(config: StorageConfig) -> str:
    """What to add to figures that were taken over an emulated link; empty for a real one."""
    return f", EMULATED link {config.link}" if config.link.startswith("emulated") else ""


def parse_layers(text: str) -> Any:
    """What ``--resident-layers`` says, as `StorageConfig` has it."""
    if text == "auto":
        return "auto"
    if text == "none":
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"--resident-layers {text!r} is not valid: it must be auto, none, or layer numbers "
            "like 0,3"
        ) from error
