"""Made-up results for any point: shaped like measured ones, so that pictures can be looked at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.policies.registry import POLICIES
from infinigen_kv.storage.link import LinkSpec
from infinigen_kv_lab.bench.peers import PEERS
from infinigen_kv_lab.figures.figure import AnyFigure
from infinigen_kv_lab.figures.speed.measurement import SpeedMeasurement
from infinigen_kv_lab.figures.speed.setting import FULL_SCALE, SpeedScale, SpeedSetting

UNTUNED = Calibration({}, {}, {})
LINK, UNPACED = "emulated:0.146", "emulated:1000000"
KV = 23040  # bytes of a token

# Share of stream's bytes, own milliseconds a step, KL; at a budget of 20 % and the default alpha.
SYSTEMS: Mapping[str, tuple[float, float, float]] = {
    "ideal": (0.0, 37.0, 0.0),
    "stream": (1.0, 46.0, 0.0),
    "stream-int8": (0.53, 60.0, 0.0004),
    "stream-int4": (0.29, 70.0, 0.02),
    "h2o": (0.2, 55.0, 0.31),
    "scissorhands": (0.2, 58.0, 0.36),
    "streaming-llm": (0.2, 45.0, 0.52),
    "quest": (0.2, 75.0, 0.06),
    "paging": (1.7, 60.0, 0.0),
    "paging-h2o": (0.7, 66.0, 0.31),
    "infinigen": (0.0014, 47.0, 0.015),
    "infinigen-paper": (0.11, 62.0, 0.41),
    "oracle": (0.033, 70.0, 0.009),
}


def setting(scale: SpeedScale = FULL_SCALE, **changes: Any) -> SpeedSetting:
    values = {
        "scale": scale,
        "link": LINK,
        "counting_link": UNPACED,
        "policies": tuple(POLICIES),
        "peers": PEERS,
        "layers": 30,
        "model": "smollm2",
        "prompt_digest": "made up",
    }
    return SpeedSetting(**{**values, **changes})


def result(point: SpeedMeasurement) -> dict[str, Any]:
    if point.kind == "rate":
        return {"rate": 0.146e9}
    if point.kind == "fidelity":
        return _fidelity(point)
    if point.kind == "blocks":
        return {"blocks": {name: _block(name) for name in point.policies}, "link": point.link}
    policies = {name: _policy(point, name) for name in ("ideal", *point.policies)}
    base = policies["ideal"]["step_ms_median"]
    for each in policies.values():
        each["ratio_to_ideal"] = each["step_ms_median"] / base
    return {
        "policies": list(policies.values()),
        "link": point.link,
        "link_is_emulated": point.link != "none",
        "link_rate": LinkSpec.parse(point.link).rate,
        "batch": point.batch,
        "prompt_tokens": point.prompt_tokens,
        "decode_tokens": point.decode_tokens,
        "parameters": round(134.5e6 * (point.layers or 30) / 30),
        "peers": [_peer(point, name) for name in point.peers if name != "QuantizedCache"],
        "peers_skipped": {"QuantizedCache": "QuantizedCache needs <quanto>"} if point.peers else {},
    }


def found(figure: AnyFigure, made: SpeedSetting) -> dict[SpeedMeasurement, dict[str, Any]]:
    return {each: result(each) for each in figure.measurements(made)}


def _policy(point: SpeedMeasurement, name: str) -> dict[str, Any]:
    share, own, kl = SYSTEMS[name]
    hits = math.nan
    if name in ("infinigen", "oracle"):
        resident = 0.2 if point.resident is None else point.resident
        hits = 1 - 0.99 ** (1 + 1200 * resident) if resident else 0.0
        alpha = 4.25 if point.alpha is None else point.alpha
        share = 0.038 * (1 - hits) * math.exp(0.35 * (alpha - 4.25))
        kl *= math.exp(-0.45 * (alpha - 4.25))
    elif name == "infinigen-paper":
        alpha = 5.0 if point.alpha is None else point.alpha
        share *= math.exp(0.3 * (alpha - 5))
        kl *= math.exp(-0.3 * (alpha - 5))
    elif share == 0.2:
        share *= point.budget / 0.2
        kl *= (0.2 / point.budget) ** 0.7
    moved = share * KV * point.prompt_tokens * point.batch
    rate = LinkSpec.parse(point.link).rate
    wait = 0.0 if rate is None else 1e3 * moved / rate
    own *= (point.layers or 30) / 30 * (0.8 + 0.2 * point.batch)
    step = own + max(0.0, wait - 0.6 * own)
    return {
        "policy": name,
        "step_ms_median": step,
        "step_ms_p90": 1.12 * step,
        "tokens_per_s": 1e3 * point.batch / step,
        "link_bytes_per_step": moved,
        "link_wait_ms_per_step": wait,
        "fetched_share": 1.0 if name in ("ideal", "stream") else 3 / point.prompt_tokens**0.55,
        "resident_hit_rate": hits,
        "prompt_seconds": 0.0022 * point.prompt_tokens * (1.1 if share else 1.0),
        "kl_to_ideal": kl,
    }


def _peer(point: SpeedMeasurement, name: str) -> dict[str, Any]:
    step = 30 + point.prompt_tokens * (0.013 if name == "DynamicCache" else 0.002)
    return {
        "name": name,
        "step_ms_median": step,
        "step_ms_p90": 1.1 * step,
        "tokens_per_s": 1e3 / step,
        "prompt_seconds": 0.0026 * point.prompt_tokens,
        "kl_to_ideal": 1e-5,
    }


def _fidelity(point: SpeedMeasurement) -> dict[str, Any]:
    alpha = 4.25 if point.alpha is None else point.alpha
    ratio = 0.375 if point.partial_ratio is None else point.partial_ratio
    assert point.config(UNTUNED) == InfiniGenConfig(alpha=alpha, partial_ratio=ratio)
    kl = 0.021 * math.exp(-0.6 * (alpha - 4.25)) * (0.375 / ratio) ** 0.5
    return {
        "kl_mean": kl,
        "ppl": 31.4 * math.exp(0.4 * kl),
        "ppl_full": 31.4,
        "fetched_share": 0.09 * math.exp(0.3 * (alpha - 4.25)) * (0.375 / ratio) ** 0.4,
    }


def _block(name: str) -> dict[str, float]:
    share, own, _ = SYSTEMS[name]
    parts = {
        "transfer": 19.0 * share,
        "attention": 0.42,
        "feed_forward": 0.62,
        "prediction": (own - 37) / 60,
    }
    return {**parts, "total": sum(parts.values())}
