"""InfiniGen for Hugging Face models: fetch the KV entries that the next layer will need."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infinigen_kv.batch import InfiniGenBatch
    from infinigen_kv.cache import InfiniGenCache
    from infinigen_kv.calibration import Calibration, calibrate
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
    from infinigen_kv.language_model import Generation, LanguageModel, load
    from infinigen_kv.models import load_model
    from infinigen_kv.scheduling import Request, generate_rows
    from infinigen_kv.session import Session, attach
    from infinigen_kv.storage_config import StorageConfig

# Where each public name lives. Imported on first use: torch and transformers take seconds, and
# `infinigen-kv --help` needs neither.
_HOMES = {
    "CacheStateError": "errors",
    "Calibration": "calibration",
    "CalibrationError": "errors",
    "DeviceError": "errors",
    "Generation": "language_model",
    "HomeError": "errors",
    "InfiniGenBatch": "batch",
    "InfiniGenCache": "cache",
    "InfiniGenConfig": "config",
    "InfiniGenError": "errors",
    "InputError": "errors",
    "LanguageModel": "language_model",
    "Request": "scheduling",
    "Session": "session",
    "StorageConfig": "storage_config",
    "UnsupportedModelError": "errors",
    "attach": "session",
    "calibrate": "calibration",
    "generate_rows": "scheduling",
    "load": "language_model",
    "load_model": "models",
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
