"""Whether InfiniGen suits a model, which of its layers are weak, and what would help."""

from infinigen_kv_lab.diagnosis.evidence import Evidence, LayerEvidence, ResidentTrial
from infinigen_kv_lab.diagnosis.measure import Diagnosis, Windows, diagnose
from infinigen_kv_lab.diagnosis.verdict import Thresholds, Verdict, judge

__all__ = [
    "Diagnosis",
    "Evidence",
    "LayerEvidence",
    "ResidentTrial",
    "Thresholds",
    "Verdict",
    "Windows",
    "diagnose",
    "judge",
]
