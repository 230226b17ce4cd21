"""What a run will need of memory, from the model's sizes and the settings alone."""

from infinigen_kv.memory.advice import Advice, advise, check_memory, readable, refusal
from infinigen_kv.memory.budget import Budget, Shortfall, machine_budget, shortfalls
from infinigen_kv.memory.geometry import ModelGeometry, geometry_of, read_geometry
from infinigen_kv.memory.plan import CacheBytes, MemoryPlan, Part, plan_memory
from infinigen_kv.memory.request import PlanRequest, calibration_fields, model_request

__all__ = [
    "Advice",
    "Budget",
    "CacheBytes",
    "MemoryPlan",
    "ModelGeometry",
    "Part",
    "PlanRequest",
    "Shortfall",
    "advise",
    "calibration_fields",
    "check_memory",
    "geometry_of",
    "machine_budget",
    "model_request",
    "plan_memory",
    "read_geometry",
    "readable",
    "refusal",
    "shortfalls",
]
