"""InfiniGen for Hugging Face models: fetch the few KV entries that the next layer is about to
need.
"""

from infinigen_kv.attach import Session, attach
from infinigen_kv.cache import InfiniGenCache
from infinigen_kv.calibration import Calibration, calibrate
from infinigen_kv.config import InfiniGenConfig
from infinigen_kv.errors import (
    CacheStateError,
    CalibrationError,
    InfiniGenError,
    InputError,
    UnsupportedModelError,
)
from infinigen_kv.folding import fold_skew
from infinigen_kv.language_model import Generation, LanguageModel, load
from infinigen_kv.models import load_model

__all__ = [
    "CacheStateError",
    "Calibration",
    "CalibrationError",
    "Generation",
    "InfiniGenCache",
    "InfiniGenConfig",
    "InfiniGenError",
    "InputError",
    "LanguageModel",
    "Session",
    "UnsupportedModelError",
    "attach",
    "calibrate",
    "fold_skew",
    "load",
    "load_model",
]
