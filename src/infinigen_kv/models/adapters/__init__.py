"""What differs between model families, behind one interface."""

from infinigen_kv.models.adapters.base import Adapter
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.adapters.registry import adapter_for, supported_families
from infinigen_kv.models.adapters.rotary import rotate

__all__ = ["Adapter", "LayerSpec", "adapter_for", "rotate", "supported_families"]
