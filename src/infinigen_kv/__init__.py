"""InfiniGen for Hugging Face models: fetch the KV entries that the next layer will need."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinigen_kv.batching.batch import InfiniGenBatch
    from infinigen_kv.batching.scheduling import Request, generate_rows
    from infinigen_kv.cache.cache import InfiniGenCache
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.calibration.run import calibrate
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.errors import (
        CacheStateError,
        CalibrationError,
        DeviceError,
        HomeError,
        InfiniGenError,
        InputError,
        UnsupportedModelError,
    )
    from infinigen_kv.models.loading import load_model
    from infinigen_kv.session.attach import Session, attach
    from infinigen_kv.session.language_model import Generation, LanguageModel, load
    from infinigen_kv.storage.config import StorageConfig

# Where each public name lives. Imported on first use: torch and transformers take seconds, and
# `infinigen-kv --help` needs neither.
_HOMES = {
    "CacheStateError": "errors",
    "Calibration": "calibration.artefact",
    "CalibrationError": "errors",
    "DeviceError": "errors",
    "Generation": "session.language_model",
    "HomeError": "errors",
    "InfiniGenBatch": "batching.batch",
    "InfiniGenCache": "cache.cache",
    "InfiniGenConfig": "config",
    "InfiniGenError": "errors",
    "InputError": "errors",
    "LanguageModel": "session.language_model",
    "Request": "batching.scheduling",
    "Session": "session.attach",
    "StorageConfig": "storage.config",
    "UnsupportedModelError": "errors",
    "attach": "session.attach",
    "calibrate": "calibration.run",
    "generate_rows": "batching.scheduling",
    "load": "session.language_model",
    "load_model": "models.loading",
}

__all__ = [
    "CacheStateError",
    "Calibration",
    "CalibrationError",
    "DeviceError",
    "Generation",
    "HomeError",
    "InfiniGenBatch",
    "InfiniGenCache",
    "InfiniGenConfig",
    "InfiniGenError",
    "InputError",
    "LanguageModel",
    "Request",
    "Session",
    "StorageConfig",
    "UnsupportedModelError",
    "attach",
    "calibrate",
    "generate_rows",
    "load",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
