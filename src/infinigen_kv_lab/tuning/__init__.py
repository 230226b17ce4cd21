"""Settings for one model: which alpha each layer needs so that a wanted KL costs the least."""

from infinigen_kv_lab.tuning.run import tune

__all__ = ["tune"]
