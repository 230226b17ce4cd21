"""The arithmetic of a decode step, behind one interface: compiled for a CPU, or plain PyTorch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from infinigen_kv.attention.dense import decode_attention, decode_weights
from infinigen_kv.attention.entries import Entries
from infinigen_kv.errors import InputError
from infinigen_kv.rehearsal.partial_keys import PartialKeys
from infinigen_kv.rehearsal.select import Candidates, Selection, choose
from infinigen_kv.rehearsal.tail import Tail, attention_with_tail
from infinigen_kv.storage.pools.resident import ResidentSet

if TYPE_CHECKING:
    from infinigen_kv.kernels.native.kernels import NativeKernels

KernelsName = Literal["auto", "native", "torch"]
KERNELS: tuple[KernelsName, ...] = get_args(KernelsName)
NATIVE_DTYPES = (torch.float32, torch.bfloat16)

AddLowRank = Callable[[Tensor, Tensor], Tensor]
"""``(projected (B, Q, N), inputs (B, Q, M)) -> (B, Q, N)``; may overwrite ``projected``."""


class Kernels(ABC):
    """What one decode step computes apart from the model itself; one query per row."""

    name: str
    resident_set: type[ResidentSet] = ResidentSet

    def __deepcopy__(self, memo: dict[int, Any]) -> Kernels:
        """Another one, since a copied cache may be used in another thread."""
        return type(self)()

    @abstractmethod
    def choose(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        """Score all tokens and select: `rehearsal.select.choose`.

        Parameters
        ----------
        query
            Predicted, ``(B, H, 1, D)``.
        keys
            The partial keys.
        candidates
            What may and what must be chosen.
        alpha, scaling, softcap
            As in `choose` and `attention.dense.decode_attention`.

        Raises
        ------
        InfiniGenError
            Where a score is NaN or infinite.
        """

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        entries: Entries,
        counts: Tensor | None,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        weighed: bool = False,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over entries and each query's own token.

        Parameters
        ----------
        query
            ``(B, H, 1, D)``.
        entries, counts
            What was moved; ``counts`` ``(B, 1)`` says how many of its leading columns are meant in
            each row, None for all.
        keys, values
            Of the own token, ``(B, H_kv, 1, D)``.
        weighed
            Also return the probabilities.
        tail
            What stands for the other tokens, see `rehearsal.tail`; not together with ``weighed``.

        Returns
        -------
        output
            ``(B, 1, H, D_v)``.
        weights
            ``(B, H_kv, n + 1)`` float32: probabilities summed over a group's queries, the own
            token's last; None unless ``weighed``.
        """

    def attend_all(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Tensor:
        """As `attention.dense.decode_attention`, over all tokens, the own one last."""
        return decode_attention(query, keys, values, scaling=scaling, softcap=softcap, visible=mask)

    def append(self, partial: PartialKeys, keys: Tensor) -> None:
        """Add the partial keys of one new token per row, ``keys`` ``(B, H_kv, 1, D)``."""
        partial.append(keys)

    def low_rank(self, down: Tensor, bias: Tensor, up: Tensor) -> AddLowRank:
        """What adds ``(x down^T + bias) up`` to a projection of ``x``.

        ``down`` is ``(r, M)``, ``bias`` ``(r,)`` and ``up`` ``(r, N)``, all contiguous.
        """

        def add(projected: Tensor, inputs: Tensor) -> Tensor:
            return projected + F.linear(inputs, down, bias) @ up

        return add


class TorchKernels(Kernels):
    """Plain PyTorch, on any device: the reference."""

    name = "torch"

    def choose(
        self,
        query: Tensor,
        keys: PartialKeys,
        candidates: Candidates,
        *,
        scaling: float,
        alpha: float,
        softcap: float | None,
    ) -> Selection:
        return choose(keys.scores(query, scaling, softcap), candidates, alpha)

    def attend(
        self,
        query: Tensor,
        entries: Entries,
        counts: Tensor | None,
        keys: Tensor,
        values: Tensor,
        *,
        scaling: float,
        softcap: float | None,
        weighed: bool = False,
        tail: Tail | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        moved_keys, moved_values = entries.gather()
        all_keys = torch.cat([moved_keys, keys], dim=2)
        all_values = torch.cat([moved_values, values], dim=2)
        visible = None if counts is None else _meant_and_own(counts, moved_keys)
        if tail is not None:
            assert not weighed
            output = attention_with_tail(
                query, all_keys, all_values, visible, tail.partial, tail.values, tail.hidden(),
                scaling=scaling, softcap=softcap,
            )  # fmt: skip
            return output, None
        output = decode_attention(
            query, all_keys, all_values, scaling=scaling, softcap=softcap, visible=visible
        )
        if not weighed:
            return output, None
        return output, decode_weights(
            query, all_keys, scaling=scaling, softcap=softcap, visible=visible
        )


def find_kernels(name: KernelsName, device: torch.device, dtype: torch.dtype) -> Kernels:
    """The kernels for a cache.

    ``auto`` takes the native ones on a CPU where numba is installed and the dtype is float32 or
    bfloat16, and says once where numba is missing.

    Raises
    ------
    InputError
        If ``native`` is asked for and cannot be had.
    """
    if name not in KERNELS:
        raise InputError(f"kernels={name!r} is not valid: it must be one of {', '.join(KERNELS)}")
    fits = device.type == "cpu" and dtype in NATIVE_DTYPES
    if name == "native" and not fits:
        raise InputError(
            f"kernels='native' computes on a CPU in float32 or bfloat16, but the model is on "
            f"{device} in {str(dtype).removeprefix('torch.')}: use kernels='auto'"
        )
    if name == "torch" or not fits:
        return TorchKernels()
    native = _native_kernels()
    if not isinstance(native, str):
        return native()
    if name == "native":
        raise InputError(
            f"kernels='native' needs numba, which cannot be used ({native}): pip install "
            "'infinigen-kv[native]', or use kernels='torch'"
        )
    _warn_slow(native)
    return TorchKernels()


@cache
def _native_kernels() -> type[NativeKernels] | str:
    """The native kernels, or why there are none."""
    try:
        from infinigen_kv.kernels.native.kernels import NativeKernels
    except (ImportError, OSError) as error:  # OSError: a library of its compiler cannot be loaded
        return str(error)
    return NativeKernels


@cache  # once
def _warn_slow(reason: str) -> None:
    warnings.warn(
        f"numba cannot be used ({reason}), so decode steps run slower PyTorch code: pip install "
        "'infinigen-kv[native]'",
        stacklevel=3,
    )


def _meant_and_own(counts: Tensor, moved: Tensor) -> Tensor:
    """Columns of moved entries that count, and the query's own: ``(B, 1, 1, n + 1)``."""
    columns = moved.shape[2]
    places = torch.arange(columns + 1, device=moved.device)
    visible = (places < counts.to(moved.device)) | (places == columns)
    return visible[:, None, None, :]
