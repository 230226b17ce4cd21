"""The offline part: one pass over sample text gives an artefact that belongs to one model."""

from infinigen_kv.calibration.artefact import Calibration, LayerCalibration
from infinigen_kv.calibration.run import calibrate

__all__ = ["Calibration", "LayerCalibration", "calibrate"]
