"""What the engine must know about a model: its attention layers and how they make a query.

`Adapter` is the contract and, at the same time, the implementation for models laid out like
Llama. A family that departs from it overrides only what differs, in a file of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from infinigen_kv.errors import UnsupportedModelError
from infinigen_kv.models.adapters.layer_spec import LayerSpec
from infinigen_kv.models.adapters.rotary import rotate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_WEIGHT_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class Adapter:
    """Uniform view of a model's attention layers.

    Parameters
    ----------
    model
        A causal language model of the adapter's family.
    shapes_only
        Accept a model on the ``meta`` device, whose weights are shapes without data.

    Raises
    ------
    UnsupportedModelError
        The model uses a feature that no adapter supports, or its attention layers are not laid
        out as the family's are.
    """

    family: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]

    attention_name: ClassVar[str] = "self_attn"
    head_dim_name: ClassVar[str] = "head_dim"
    is_rotary: ClassVar[bool] = True

    model: PreTrainedModel
    decoder: nn.Module
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    max_positions: int | None

    def __init__(self, model: PreTrainedModel, *, shapes_only: bool = False) -> None:
        self.model = model
        self._shapes_only = shapes_only
        self.config: Any = model.config
        self._check_features()
        untyped: Any = model
        self.decoder = untyped.get_decoder()
        self.hidden_size = int(self.config.hidden_size)
        self.max_positions = getattr(self.config, "max_position_embeddings", None)
        self.layers = self._find_layers()
        self._rotary = self._find_rotary()
        # Models with a rotary base of its own for each kind of layer ask which kind is meant.
        self._rotary_by_type = self._rotary is not None and (
            "layer_type" in inspect.signature(self._rotary.forward).parameters
        )

    # What the engine calls

    @property
    def rereads_after(self) -> int | None:
        """Positions after which the model's `prepare_inputs_for_generation` drops a cache and has
        the whole text read anew; None for never.
        """
        return None

    def query_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Query projection of a layer.

        Parameters
        ----------
        index
            Layer index.

        Returns
        -------
        weight : Tensor of shape (H * D, M)
            Rows head by head; the live parameter or a view of it, unless the family says otherwise.
        bias : Tensor of shape (H * D,) or None
        """
        module: Any = self.layers[index].module
        return module.q_proj.weight, module.q_proj.bias

    def key_weight(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Key projection of a layer: as `query_weight`, with shapes (H_kv * D, M), (H_kv * D,)."""
        module: Any = self.layers[index].module
        return module.k_proj.weight, module.k_proj.bias

    def rotary(
        self, index: int, hidden: Tensor, position_ids: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines of a layer's rotary positions, from the model's own module.

        Parameters
        ----------
        index
            Layer index.
        hidden : Tensor of shape (B, Q, M)
            Only its dtype and device count.
        position_ids : Tensor of shape (B, Q) or (1, Q)
            The positions of the whole forward pass: models whose frequencies depend on the longest
            position (dynamic and long RoPE) take it from here, and keep it in their module.

        Returns
        -------
        (cos, sin) : Tensors of shape (B, Q, rotary dims)
            None for models without rotary positions.
        """
        if self._rotary is None:
            return None
        kind = (self._layer_type(index),) if self._rotary_by_type else ()
        cos, sin = self._rotary(hidden, position_ids, *kind)
        return cos, sin

    def rotary_key(self, index: int) -> Hashable:
        """Layers with the same key share the result of `rotary`."""
        return self._layer_type(index) if self._rotary_by_type else None

    def finish_query(
        self, index: int, query: Tensor, rotary: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Turn a raw query projection into what the model passes to its attention function.

        Parameters
        ----------
        index
            Layer index.
        query : Tensor of shape (B, Q, H * D)
            The projection, bias included.
        rotary
            Result of `rotary` for a layer with the same `rotary_key`.

        Returns
        -------
        Tensor of shape (B, H, Q, D)

        Raises
        ------
        ValueError
            The model has rotary positions and ``rotary`` is None.
        """
        spec = self.layers[index]
        heads = query.view(*query.shape[:-1], spec.num_heads, spec.head_dim)  # (B, Q, H, D)
        heads = self._normalise_query(spec, heads).transpose(1, 2)
        if not self.is_rotary:
            return heads
        if rotary is None:
            raise ValueError(
                f"rotary is None, but {self.family} models have rotary positions: "
                f"pass the result of rotary({index}, hidden, position_ids)."
            )
        return rotate(heads, *rotary)

    @staticmethod
    def attention_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Hidden states among the arguments of an attention module's forward, for its hooks.

        Some families pass them by position and others by name.

        Parameters
        ----------
        args, kwargs
            What a forward (pre-)hook registered ``with_kwargs=True`` receives.

        Returns
        -------
        Tensor of shape (B, Q, M)
        """
        hidden: Tensor = args[0] if args else kwargs["hidden_states"]
        return hidden

    # What families override

    def _is_sliding(self, index: int) -> bool:
        return False

    def _scaling(self, module: Any) -> float:
        return float(module.scaling)

    def _softcap(self, module: Any) -> float | None:
        return None

    def _normalise_query(self, spec: LayerSpec, heads: Tensor) -> Tensor:
        """Norm of the query's heads (B, Q, H, D), before the rotation."""
        return heads

    def _projection_rows(self, spec: LayerSpec) -> dict[str, int]:
        """Names of the modules that project queries and keys, with their output sizes."""
        return {
            "q_proj": spec.num_heads * spec.head_dim,
            "k_proj": spec.num_kv_heads * spec.head_dim,
        }

    # Construction

    def _layer_type(self, index: int) -> str:
        layer_types = getattr(self.config, "layer_types", None)
        return FULL_ATTENTION if layer_types is None else layer_types[index]

    def _check_features(self) -> None:
        for name in ("attention_chunk_size", "use_bidirectional_attention"):
            value = getattr(self.config, name, None)
            if value:
                self._reject(f"config.{name} = {value!r}; only causal attention is supported")
        allowed = (FULL_ATTENTION, SLIDING_ATTENTION)
        for index, kind in enumerate(getattr(self.config, "layer_types", None) or ()):
            if kind not in allowed:
                self._reject(f"config.layer_types[{index}] = {kind!r}; allowed: {allowed}")

    def _find_layers(self) -> tuple[LayerSpec, ...]:
        blocks = getattr(self.decoder, "layers", None)
        count = int(self.config.num_hidden_layers)
        if not isinstance(blocks, nn.ModuleList) or len(blocks) < count:
            self._reject(f"{type(self.decoder).__name__} does not hold {count} decoder layers")
        specs = tuple(self._layer_spec(index, blocks[index]) for index in range(count))
        for spec in specs:
            for name, rows in self._projection_rows(spec).items():
                self._check_projection(spec, name, rows)
        return specs

    def _layer_spec(self, index: int, block: nn.Module) -> LayerSpec:
        module = getattr(block, self.attention_name, None)
        head_dim = getattr(module, self.head_dim_name, None)
        if not isinstance(module, nn.Module) or not isinstance(head_dim, int):
            self._reject(
                f"layer {index} ({type(block).__name__}) has no attention module "
                f"{self.attention_name!r} with a {self.head_dim_name!r}"
            )
        if module.layer_idx != index:
            self._reject(
                f"the attention module of layer {index} calls itself layer {module.layer_idx}; "
                "number the layers anew after removing or moving any"
            )
        num_heads = int(self.config.num_attention_heads)
        return LayerSpec(
            index=index,
            module=module,
            num_heads=num_heads,
            num_kv_heads=int(getattr(self.config, "num_key_value_heads", None) or num_heads),
            head_dim=head_dim,
            scaling=self._scaling(module),
            softcap=self._softcap(module),
            is_sliding=self._is_sliding(index),
        )

    def _check_projection(self, spec: LayerSpec, name: str, rows: int) -> None:
        projection = getattr(spec.module, name, None)
        where = f"layer {spec.index}: {name}"
        if not isinstance(projection, nn.Linear):
            self._reject(
                f"{where} is a {type(projection).__name__}, not a torch.nn.Linear; "
                "merge adapters such as LoRA into the weights first"
            )
        weight, expected = projection.weight, (rows, self.hidden_size)
        if weight.dtype not in _WEIGHT_DTYPES or tuple(weight.shape) != expected:
            self._reject(
                f"{where} has a weight of type {weight.dtype} and shape {tuple(weight.shape)}, "
                f"not a floating-point one of shape {expected}; load the model unquantised"
            )
        if weight.is_meta and not self._shapes_only:
            self._reject(f"{where} has no data (device meta); load the model without offloading")

    def _find_rotary(self) -> nn.Module | None:
        if not self.is_rotary:
            return None
        rotary = getattr(self.decoder, "rotary_emb", None)
        if not isinstance(rotary, nn.Module):
            self._reject(f"{type(self.decoder).__name__} has no module 'rotary_emb'")
        return rotary

    def _reject(self, reason: str) -> NoReturn:
        raise UnsupportedModelError(
            f"{type(self.model).__name__} (family {self.family}) cannot be used: {reason}."
        )
