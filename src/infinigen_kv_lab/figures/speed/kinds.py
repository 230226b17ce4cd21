"""The call that each kind of measurement stands for."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor

from infinigen_kv.memory import PlanRequest, calibration_fields, check_memory, geometry_of
from infinigen_kv.session.attach import Session, attach, default_storage
from infinigen_kv.session.paper_link import paper_link_rate
from infinigen_kv.storage.config import StorageConfig
from infinigen_kv_lab.bench.fidelity import measure_fidelity
from infinigen_kv_lab.bench.peers import Peers
from infinigen_kv_lab.bench.run import EXTRA_STEPS, bench
from infinigen_kv_lab.figures.speed.block_times import split_blocks
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.subject import Subject
from infinigen_kv_lab.points import Result


def measure_bench(subject: Subject, measurement: SpeedMeasurement, prompt: Tensor) -> Result:
    """Policies and peers in turns; `InputError` where they do not fit into memory."""
    tokens = measurement.prompt_tokens + measurement.decode_tokens + EXTRA_STEPS
    with _attached(subject, measurement) as session:
        session.check_length(tokens)
        _check_memory(session, subject, measurement, tokens)
    peers = Peers(subject.model, measurement.peers, tokens=tokens)
    peers.read(prompt)
    with _attached(subject, measurement) as session:
        result = bench(
            session,
            prompt,
            decode_tokens=measurement.decode_tokens,
            policies=measurement.policies,
            budget=measurement.budget,
            also=peers.step,
        )
    return {
        **result.to_dict(),
        "parameters": sum(weight.numel() for weight in subject.model.parameters()),
        "peers": [peer.to_dict() for peer in peers.results()],
        "peers_skipped": peers.skipped,
    }


def measure_text(subject: Subject, measurement: SpeedMeasurement, prompt: Tensor) -> Result:
    """KL and perplexity of one policy, teacher-forced."""
    return measure_fidelity(
        subject.model,
        subject.calibration,
        measurement.config(subject.calibration),
        prompt[0],
        prompt_tokens=measurement.prompt_tokens,
    ).to_dict()


def measure_blocks(subject: Subject, measurement: SpeedMeasurement, prompt: Tensor) -> Result:
    """One block's time, split into its parts."""
    with _attached(subject, measurement) as session:
        blocks = split_blocks(
            session,
            prompt,
            decode_tokens=measurement.decode_tokens,
            policies=measurement.policies,
            budget=measurement.budget,
        )
    parts = {name: times.to_dict() for name, times in blocks.items()}
    return {"blocks": parts, "link": measurement.link}


def measure_rate(subject: Subject, measurement: SpeedMeasurement, prompt: Tensor) -> Result:
    """The rate of a link at the paper's balance, bytes a second."""
    with _attached(subject, measurement) as session:
        rows, tokens = prompt.shape
        return {"rate": paper_link_rate(session, context=tokens, rows=rows)}


KINDS = {
    "bench": measure_bench,
    "fidelity": measure_text,
    "blocks": measure_blocks,
    "rate": measure_rate,
}
"""By `SpeedMeasurement.kind`; each takes token ids ``(rows, tokens)``, too."""


def _attached(subject: Subject, measurement: SpeedMeasurement) -> AbstractContextManager[Session]:
    model, calibration = subject.model, subject.calibration
    config = measurement.config(calibration)
    storage = StorageConfig(
        home=measurement.home, link=measurement.link, resident=measurement.resident
    )
    storage = default_storage(calibration, config, model.device, storage)
    return attach(model, calibration, config, storage)


def _check_memory(
    session: Session, subject: Subject, measurement: SpeedMeasurement, tokens: int
) -> None:
    """Refuse what does not fit, before anything is allocated."""
    check_memory(
        PlanRequest(
            geometry=geometry_of(session.adapter),
            context=tokens,
            new_tokens=measurement.decode_tokens + EXTRA_STEPS,
            rows=measurement.batch,
            config=session.config,
            storage=session.storage,
            device=session.model.device,
            policies=("ideal", *measurement.policies),
            **calibration_fields(subject.calibration),
        )
    )
