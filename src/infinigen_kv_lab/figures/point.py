"""One measurement that figures are made of: what is measured, and the name of its file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.settings import BUDGET

Kind = Literal["bench", "fidelity", "blocks", "rate"]

FORMAT = 1  # raised when the results of earlier files no longer mean the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is measured, model and machine apart.

    Parameters
    ----------
    kind
        ``bench``: `bench.run.bench`; ``fidelity``: `bench.fidelity.measure_fidelity`, which knows
        one policy only; ``blocks``: `figures.blocks.split_blocks`; ``rate``:
        `session.paper_link.paper_link_rate`.
    model
        A name of ``--models``; empty for the main one.
    layers
        Keep only the model's first so many layers; None for all.
    policies, peers
        What takes turns in one process.
    prompt_tokens, decode_tokens, batch
        P, T and B.
    link
        As in `StorageConfig`, the rate of ``emulated:paper`` already put in.
    home, resident
        As in `StorageConfig`.
    budget
        As in `Session.new_cache`.
    rehearsal, alpha, partial_ratio, max_fetch
        As in `InfiniGenConfig`; None for its defaults.
    """

    kind: Kind = "bench"
    model: str = ""
    layers: int | None = None
    policies: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    prompt_tokens: int
    decode_tokens: int
    batch: int = 1
    link: str = "none"
    home: Literal["ram", "device"] = "ram"
    resident: float | None = None
    budget: float = BUDGET
    rehearsal: Literal["calibrated", "paper"] = "calibrated"
    alpha: float | None = None
    partial_ratio: float | None = None
    max_fetch: float | None = None

    def config(self, calibration: Calibration) -> InfiniGenConfig:
        """Settings of the selection; what was tuned for the model where the point varies none."""
        own = {
            name: value
            for name in ("alpha", "partial_ratio", "max_fetch")
            if (value := getattr(self, name)) is not None
        }
        return calibration.config(rehearsal=self.rehearsal, **own)

    @property
    def label(self) -> str:
        """For a line of progress."""
        parts = [self.kind, f"{self.batch} x {self.prompt_tokens} tokens"]
        parts += [self.model] if self.model else []
        parts += [f"{self.layers} layers"] if self.layers else []
        varied = ("alpha", "partial_ratio", "resident")
        parts += [
            f"{name.replace('_', ' ')} {value:g}"
            for name in varied
            if (value := getattr(self, name)) is not None
        ]
        if len(self.policies) == 1 or self.kind == "fidelity":
            parts += [*self.policies]
        elif self.policies:
            parts += [f"{len(self.policies) + len(self.peers)} systems"]
        if self.link != "none":
            parts += [self.link]
        return ", ".join(parts)

    def record(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """The head of the point's file.

        ``about`` is what a result depends on beyond the point: model, calibration, machine.
        """
        # through JSON, as it will come back
        return dict(json.loads(json.dumps({"format": FORMAT, "point": asdict(self), **about})))

    def file_name(self, about: Mapping[str, Any]) -> str:
        """A name that tells points with other settings apart."""
        text = json.dumps(self.record(about), sort_keys=True)
        short = hashlib.sha256(text.encode()).hexdigest()[:16]
        kind = re.sub(r"[^a-z]+", "-", self.kind)
        return f"{kind}-{short}.json"
