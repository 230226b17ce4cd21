"""One measurement of a speed figure: what takes turns, on what prompt, with what settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.settings import BUDGET
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.run import EXTRA_STEPS
from infinigen_kv_lab.points import PointKey

Kind = Literal["bench", "fidelity", "blocks", "rate"]

FORMAT = 1  # raised when the results of earlier files no longer mean the same

# Of a 135M model on two cores; only their relations matter.
PROMPT_TOKEN_SECONDS = 1.5e-3
LONG_TOKENS = 8000  # at which attention doubles what reading one costs
STEP_SECONDS = 0.04
SHARE_MOVED = {"stream": 1.0, "paging": 1.5, "stream-int8": 0.55, "stream-int4": 0.3}
SHARE_MOVED_BY_OTHERS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedMeasurement:
    """What is measured, model and machine apart.

    Parameters
    ----------
    kind
        ``bench``: `bench.run.bench`; ``fidelity``: `bench.fidelity.measure_fidelity`, which knows
        one policy only; ``blocks``: `block_times.split_blocks`; ``rate``:
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
    def text_tokens(self) -> int:
        """Of each row's text that is read: the prompt, and for ``fidelity`` what follows it."""
        return self.prompt_tokens + (self.decode_tokens if self.kind == "fidelity" else 0)

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

    def key(self, about: Mapping[str, Any]) -> PointKey:
        """What its result is kept under.

        ``about`` is what that depends on beyond the measurement: model, calibration, machine.
        """
        return PointKey.of(self.kind, {"format": FORMAT, "point": asdict(self), **about})

    def expected_seconds(self, kv_bytes: int, layers: int) -> float:
        """Its time, up to a factor that all of a model share.

        Parameters
        ----------
        kv_bytes
            Of one token's KV in all ``layers``.
        layers
            Of the main model.
        """
        read = PROMPT_TOKEN_SECONDS * self.prompt_tokens * (1 + self.prompt_tokens / LONG_TOKENS)
        depth = 1.0 if self.layers is None else self.layers / layers
        if self.kind == "fidelity":
            return depth * (read + 2 * PROMPT_TOKEN_SECONDS * self.decode_tokens)
        systems = max(1, len(self.policies) + len(self.peers) + (self.kind == "bench"))
        steps = self.decode_tokens + EXTRA_STEPS
        moved = sum(SHARE_MOVED.get(name, SHARE_MOVED_BY_OTHERS) for name in self.policies)
        rate = LinkSpec.parse(self.link).rate
        waited = 0.0
        if rate is not None:
            waited = moved * self.batch * self.prompt_tokens * kv_bytes * depth / rate
        return depth * systems * (self.batch * read + steps * STEP_SECONDS) + steps * waited
