"""Which entries a decode step moves: one small file per policy, all behind `Policy`."""

from infinigen_kv.policies.base import Policy
from infinigen_kv.policies.full import FullPolicy
from infinigen_kv.policies.infinigen import InfiniGenPolicy

__all__ = ["FullPolicy", "InfiniGenPolicy", "Policy"]
