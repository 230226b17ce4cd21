"""Measures speed: models, prompts, and the call that each kind of measurement stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinigen_kv.calibration.artefact import calibration_digest
from infinigen_kv.calibration.fingerprint import model_digest
from infinigen_kv.errors import InfiniGenError, InputError
from infinigen_kv.files import to_json, write_whole
from infinigen_kv.kernels.finding import find_kernels
from infinigen_kv.session.attach import Session, attach
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.run import WARM_UP
from infinigen_kv_lab.figures.figure import Figure
from infinigen_kv_lab.figures.machine import processor
from infinigen_kv_lab.figures.rig import Basis, Description, MeasurementRig
from infinigen_kv_lab.figures.speed.figure import Results, SpeedFigure
from infinigen_kv_lab.figures.speed.kinds import KINDS
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.peer_results import prompt_digest
from infinigen_kv_lab.figures.speed.setting import SpeedSetting
from infinigen_kv_lab.figures.speed.subject import Subject
from infinigen_kv_lab.figures.worklist import ShareDone, unheeded
from infinigen_kv_lab.points import PointStore, Result

APART = 500  # tokens between the starts of the rows' texts
PROMPT_FILE = "prompt.json"


class SpeedRig(MeasurementRig[SpeedSetting, SpeedMeasurement, Result]):
    """Measures what speed figures are made of.

    Parameters
    ----------
    main
        The model that measurements without a name mean.
    open_subject
        Loads and calibrates another model by its name.
    text
        Of the prompts.
    store
        Of finished measurements; without one they are kept as long as this object.
    """

    figure_set = "speed"

    def __init__(
        self,
        main: Subject,
        open_subject: Callable[[str], Subject],
        text: str,
        store: PointStore | None = None,
    ) -> None:
        self.main = main
        self._open = open_subject
        self._text = text
        self._store = PointStore(None) if store is None else store
        self._results: dict[SpeedMeasurement, Result | None] = {}
        self._other: tuple[tuple[str, int | None], Subject] | None = None
        self._ids: dict[str, list[int]] = {}
        self._about: dict[tuple[str, int | None], dict[str, Any]] = {}

    @property
    def device(self) -> torch.device:
        """Where the main model is."""
        return self.main.model.device

    def missing(self, measurement: SpeedMeasurement) -> float:
        """0 for what was measured before; other models are asked about once they are loaded."""
        return 1.0 if measurement.model or self._kept(measurement) is None else 0.0

    def measure(
        self,
        measurement: SpeedMeasurement,
        done: ShareDone = unheeded,
        *,
        again: bool = False,
    ) -> Result:
        """A measurement's result; see `MeasurementRig.measure`."""
        kept = None if again else self._kept(measurement)
        if kept is None:
            key = measurement.key(self.about(measurement))
            kept = self._store.put(key, {"result": self.perform(measurement)})["result"]
            self._results[measurement] = kept
        return kept

    def cost(self, measurement: SpeedMeasurement) -> float:
        """Seconds, up to a factor."""
        return measurement.expected_seconds(self.main.kv_bytes, self.main.layers)

    def _kept(self, measurement: SpeedMeasurement) -> Result | None:
        """What an earlier run left, looked up once, or this one measured."""
        if measurement not in self._results:
            point = self._store.get(measurement.key(self.about(measurement)))
            self._results[measurement] = point and point["result"]
        return self._results[measurement]

    def paper_link(self, prompt_tokens: int, say: Callable[[str], None], *, again: bool) -> str:
        """The link at the paper's balance for a prompt, measured once and kept.

        All figures of a page share it.

        Raises
        ------
        InfiniGenError
            The model cannot read such a prompt.
        """
        rate = SpeedMeasurement(kind="rate", prompt_tokens=prompt_tokens, decode_tokens=1)
        if again or self.missing(rate):
            say(f"measuring a block on {prompt_tokens} tokens, for the paper's link ...")
        return f"emulated:{self.measure(rate, again=again)['rate'] / 1e9:.4g}"

    def about(self, measurement: SpeedMeasurement) -> Mapping[str, Any]:
        """What a result depends on beyond the measurement itself."""
        key = (measurement.model, measurement.layers)
        if key not in self._about:
            subject = self._subject(*key)
            model = subject.model
            ids = self.ids(subject)
            self._about[key] = {
                "version": version("infinigen-kv"),
                "model": model_digest(model),
                "dtype": subject.dtype,
                "calibration": calibration_digest(subject.calibration),
                "text": prompt_digest(ids)[:16],
                "kernels": find_kernels("auto", model.device, model.dtype).name,
                "device": processor(model.device),
                "threads": torch.get_num_threads(),
            }
        return self._about[key]

    def describe(self, setting: SpeedSetting) -> Description:
        """Model, machine and link; see `MeasurementRig.describe`."""
        spec, about = LinkSpec.parse(setting.link), self.about(setting.headline())
        scale = setting.scale
        warning = (
            f"The link is EMULATED ({(spec.rate or 0.0) / 1e9:.3g} GB/s): bytes are really moved, "
            "and a transfer takes at least bytes / rate."
        )
        return Description(
            facts={
                "model": setting.model,
                "link": setting.link,
                "link_is_emulated": spec.is_emulated,
                **about,
            },
            settings={
                "model": setting.model,
                "type": about["dtype"],
                "decode steps by": f"{about['kernels']} kernels",
                "link": setting.link if spec.is_emulated else "the machine's own",
                "headline prompt": f"{scale.prompt_tokens} tokens",
                "headline steps": f"{scale.decode_tokens}, after {WARM_UP} to warm up",
                "sweeps": f"{scale.sweep_prompt} tokens, {scale.sweep_tokens} steps",
                "budget": "20 % of the cached tokens, where it does not vary",
                **{f"results of {each.source}": each.path for each in setting.peer_results},
            },
            warnings=[warning] if spec.is_emulated else [],
        )

    def basis(
        self,
        setting: SpeedSetting,
        figure: Figure[SpeedSetting, SpeedMeasurement, Result],
        results: Results,
    ) -> Basis:
        """Model, machine and links of a figure, and the peers that it lacks."""
        about = self.about(setting.headline())
        threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
        parts = [
            f"{setting.model}, {about['dtype']}",
            f"{about['device']}, {threads}",
            _links(list(dict.fromkeys(each.link for each in results)), setting),
        ]
        skipped: list[str] = []
        if isinstance(figure, SpeedFigure) and figure.shows_peers:
            peers = [result.get("peers_skipped", {}).values() for result in results.values()]
            skipped = [f"Left out: {why}." for reasons in peers for why in reasons]
        return Basis(" | ".join(parts), skipped)

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

    def perform(self, measurement: SpeedMeasurement) -> Result:
        """Measure, whatever is kept."""
        subject = self._subject(measurement.model, measurement.layers)
        prompt = self.prompt(subject, measurement.batch, measurement.text_tokens)
        return KINDS[measurement.kind](subject, measurement, prompt)

    def _subject(self, name: str, layers: int | None) -> Subject:
        """One model beside the main one is kept, the last that was asked for."""
        if not name and layers is None:
            return self.main
        if self._other is None or self._other[0] != (name, layers):
            self._other = None  # let go of it before the next one comes
            found = self._open(name) if name else self.main
            self._other = (name, layers), found if layers is None else found.cut(layers)
        return self._other[1]


def _unable(session: Session, policy: str) -> str | None:
    """Why the model cannot run a policy; None if it can."""
    try:
        session.new_cache(policy=policy).close()
    except InfiniGenError as error:
        return str(error)
    return None


def _links(links: Sequence[str], setting: SpeedSetting) -> str:
    """The emulated ones in words, with the least and largest rate of those that are waited for."""
    paced = [link for link in links if LinkSpec.parse(link).is_emulated]
    timed = [link for link in paced if link != setting.counting_link]
    if not paced:
        return "no emulated link"
    if not timed:
        return "EMULATED link, unlimited"
    rates = sorted({(LinkSpec.parse(link).rate or 0.0) / 1e9 for link in timed})
    upper = f" to {rates[-1]:.3g}" if len(rates) > 1 else ""
    also = "" if len(timed) == len(paced) else ", and unlimited"
    return f"EMULATED link, {rates[0]:.3g}{upper} GB/s{also}"


def write_prompt(folder: Path, setting: SpeedSetting, rig: SpeedRig) -> None:
    """The headline prompt, for programs that are to read the same one."""
    subject, scale = rig.main, setting.scale
    values = {
        "model": setting.model,
        "model_folder": subject.model.config._name_or_path,
        "dtype": subject.dtype,
        "prompt_sha256": setting.prompt_digest,
        "warm_up_tokens": WARM_UP,
        "decode_tokens": scale.decode_tokens,
        "token_ids": rig.prompt(subject, 1, scale.prompt_tokens)[0].tolist(),
    }
    write_whole(folder / PROMPT_FILE, to_json(values))
