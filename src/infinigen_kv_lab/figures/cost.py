"""How long points take relative to each other, for an estimate of the time left."""

from __future__ import annotations

from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.run import EXTRA_STEPS
from infinigen_kv_lab.figures.point import Point

# Seconds of a 135M model on two cores; only their relations matter.
PER_TOKEN = 1.5e-3  # of reading a prompt
LONG = 8000  # tokens at which attention doubles what reading one costs
STEP = 0.04
SHARE_MOVED = {"stream": 1.0, "paging": 1.5, "stream-int8": 0.55, "stream-int4": 0.3}
SHARE_OF_OTHERS = 0.1


def expected_seconds(point: Point, kv_bytes: int, layers: int) -> float:
    """A point's time, up to a factor that all points of a model share.

    Parameters
    ----------
    kv_bytes
        Of one token's KV in all ``layers``.
    layers
        Of the main model.
    """
    read = PER_TOKEN * point.prompt_tokens * (1 + point.prompt_tokens / LONG)
    depth = 1.0 if point.layers is None else point.layers / layers
    if point.kind == "fidelity":
        return depth * (read + 2 * PER_TOKEN * point.decode_tokens)
    systems = max(1, len(point.policies) + len(point.peers) + (point.kind == "bench"))
    steps = point.decode_tokens + EXTRA_STEPS
    moved = sum(SHARE_MOVED.get(name, SHARE_OF_OTHERS) for name in point.policies)
    rate = LinkSpec.parse(point.link).rate
    waited = 0.0
    if rate is not None:
        waited = moved * point.batch * point.prompt_tokens * kv_bytes * depth / rate
    return depth * systems * (point.batch * read + steps * STEP) + steps * waited
