"""Measures points: models, prompts, and the call that each kind of point stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration, calibration_digest
from infinigen_kv.calibration.fingerprint import model_digest, model_fingerprint
from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.files import Result
from infinigen_kv.kernels.finding import find_kernels
from infinigen_kv.memory import PlanRequest, calibration_fields, check_memory, geometry_of
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv.session.attach import Session, attach, default_storage
from infinigen_kv.session.paper_link import paper_link_rate
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.bench.fidelity import measure_fidelity
from infinigen_kv_lab.bench.peers import Peers, twin
from infinigen_kv_lab.bench.run import EXTRA_STEPS, bench
from infinigen_kv_lab.figures.blocks import split_blocks
from infinigen_kv_lab.figures.guests import prompt_digest
from infinigen_kv_lab.figures.machine import processor
from infinigen_kv_lab.figures.point import Point

APART = 500  # tokens between the starts of the rows' texts


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is measured: not attached, with its tokenizer and calibration."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    calibration: Calibration
    name: str

    @property
    def layers(self) -> int:
        """L."""
        return len(adapter_for(self.model).layers)

    @property
    def positions(self) -> int | None:
        """Tokens that the model can tell apart; None for no limit."""
        return adapter_for(self.model).max_positions

    def cut(self, layers: int) -> Subject:
        """The same model, its first ``layers`` layers only, over the same weights.

        What was calibrated for a layer depends on those before it alone, so it stays.
        """
        model = twin(self.model, layers=layers)
        tuned = self.calibration.tuned
        kept = Calibration(
            fingerprint=model_fingerprint(adapter_for(model)),
            settings={**self.calibration.settings, "first_layers": layers},
            layers={i: each for i, each in self.calibration.layers.items() if i < layers},
            report={i: each for i, each in self.calibration.report.items() if int(i) < layers},
            tuned=tuned and tuned.first(layers),
        )
        return Subject(model, self.tokenizer, kept, f"{self.name}, first {layers} layers")


class Laboratory:
    """Measures points of one run.

    Parameters
    ----------
    main
        The model that points without a name mean.
    open_subject
        Loads and calibrates another model by its name.
    text
        Of the prompts.
    """

    def __init__(self, main: Subject, open_subject: Callable[[str], Subject], text: str) -> None:
        self.main = main
        self._open = open_subject
        self._text = text
        self._other: tuple[tuple[str, int | None], Subject] | None = None
        self._ids: dict[str, list[int]] = {}
        self._about: dict[tuple[str, int | None], dict[str, Any]] = {}

    def about(self, point: Point) -> Mapping[str, Any]:
        """What a point's result depends on beyond the point itself."""
        key = (point.model, point.layers)
        if key not in self._about:
            subject = self._subject(*key)
            model = subject.model
            ids = self.ids(subject)
            self._about[key] = {
                "version": version("infinigen-kv"),
                "model": model_digest(model),
                "dtype": str(model.dtype).removeprefix("torch."),
                "calibration": calibration_digest(subject.calibration),
                "text": prompt_digest(ids)[:16],
                "kernels": find_kernels("auto", model.device, model.dtype).name,
                "device": processor(model.device),
                "threads": torch.get_num_threads(),
            }
        return self._about[key]

    def ids(self, subject: Subject) -> list[int]:
        """The whole text in the model's tokens."""
        tokenizer = subject.tokenizer.name_or_path
        if tokenizer not in self._ids:
            encoded = subject.tokenizer(self._text, verbose=False)
            self._ids[tokenizer] = list(encoded["input_ids"])
        return self._ids[tokenizer]

    def prompt(self, subject: Subject, rows: int, tokens: int) -> Tensor:
        """Token ids ``(rows, tokens)``, each row from another place of the text."""
        ids = self.ids(subject)
        needed = tokens + (rows - 1) * APART
        if needed > len(ids):
            raise InputError(
                f"{rows} rows of {tokens} tokens need a text of {needed} tokens, but it has "
                f"{len(ids)}: give a longer one with --text"
            )
        starts = range(0, rows * APART, APART)
        made = torch.tensor([ids[start : start + tokens] for start in starts])
        return made.to(subject.model.device)

    def runnable(self, policies: tuple[str, ...], say: Callable[[str], None]) -> tuple[str, ...]:
        """Those of the policies that the main model can run; ``say`` is told why others cannot."""
        with attach(self.main.model, self.main.calibration) as session:
            reasons = {name: _unable(session, name) for name in policies}
        for name, why in reasons.items():
            if why is not None:
                say(f"policy {name} is left out: {why}")
        return tuple(name for name, why in reasons.items() if why is None)

    def measure(self, point: Point) -> Result:
        """Measure one point.

        Raises
        ------
        InfiniGenError
            The model cannot run it, e.g. has too few positions, or memory does not suffice.
        """
        subject = self._subject(point.model, point.layers)
        measured: dict[str, Callable[[Subject, Point], Result]] = {
            "bench": self._bench,
            "fidelity": self._fidelity,
            "blocks": self._blocks,
            "rate": self._rate,
        }
        return measured[point.kind](subject, point)

    def _subject(self, name: str, layers: int | None) -> Subject:
        """One model beside the main one is kept, the last that was asked for."""
        if not name and layers is None:
            return self.main
        if self._other is None or self._other[0] != (name, layers):
            self._other = None  # let go of it before the next one comes
            found = self._open(name) if name else self.main
            self._other = (name, layers), found if layers is None else found.cut(layers)
        return self._other[1]

    def _bench(self, subject: Subject, point: Point) -> Result:
        prompt = self.prompt(subject, point.batch, point.prompt_tokens)
        tokens = point.prompt_tokens + point.decode_tokens + EXTRA_STEPS
        with self._attached(subject, point) as session:
            session.check_length(tokens)
            _check_memory(session, subject.calibration, point, tokens)
        peers = Peers(subject.model, point.peers, tokens=tokens)
        peers.read(prompt)
        with self._attached(subject, point) as session:
            result = bench(
                session,
                prompt,
                decode_tokens=point.decode_tokens,
                policies=point.policies,
                budget=point.budget,
                also=peers.step,
            )
        return {
            **result.to_dict(),
            "parameters": sum(each.numel() for each in subject.model.parameters()),
            "peers": [each.to_dict() for each in peers.results()],
            "peers_skipped": peers.skipped,
        }

    def _fidelity(self, subject: Subject, point: Point) -> Result:
        tokens = self.prompt(subject, 1, point.prompt_tokens + point.decode_tokens)[0]
        measured = measure_fidelity(
            subject.model,
            subject.calibration,
            point.config(subject.calibration),
            tokens,
            prompt_tokens=point.prompt_tokens,
        )
        return measured.to_dict()

    def _blocks(self, subject: Subject, point: Point) -> Result:
        prompt = self.prompt(subject, point.batch, point.prompt_tokens)
        with self._attached(subject, point) as session:
            blocks = split_blocks(
                session,
                prompt,
                decode_tokens=point.decode_tokens,
                policies=point.policies,
                budget=point.budget,
            )
        return {
            "blocks": {name: each.to_dict() for name, each in blocks.items()},
            "link": point.link,
        }

    def _rate(self, subject: Subject, point: Point) -> Result:
        with self._attached(subject, point) as session:
            rate = paper_link_rate(session, context=point.prompt_tokens, rows=point.batch)
        return {"rate": rate}

    @staticmethod
    def _attached(subject: Subject, point: Point) -> AbstractContextManager[Session]:
        made, config = subject.calibration, point.config(subject.calibration)
        wanted = StorageConfig(home=point.home, link=point.link, resident=point.resident)
        storage = default_storage(made, config, subject.model.device, wanted)
        return attach(subject.model, made, config, storage)


def _unable(session: Session, policy: str) -> str | None:
    """Why the model cannot run a policy; None if it can."""
    try:
        session.new_cache(policy=policy).close()
    except InfiniGenError as error:
        return str(error)
    return None


def _check_memory(session: Session, calibration: Calibration, point: Point, tokens: int) -> None:
    """Refuse what does not fit, before anything is allocated."""
    check_memory(
        PlanRequest(
            geometry=geometry_of(session.adapter),
            context=tokens,
            new_tokens=point.decode_tokens + EXTRA_STEPS,
            rows=point.batch,
            config=session.config,
            storage=session.storage,
            device=session.model.device,
            policies=("ideal", *point.policies),
            **calibration_fields(calibration),
        )
    )
