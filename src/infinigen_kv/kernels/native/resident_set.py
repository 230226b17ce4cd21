"""The resident set with its bookkeeping in compiled code."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from infinigen_kv.kernels.native.arrays import as_array
from infinigen_kv.kernels.native.resident import fill, look_up, move_in
from infinigen_kv.storage.pools.resident import Misses, ResidentSet


class NativeResidentSet(ResidentSet):
    """As `ResidentSet`, on a CPU."""

    def look_up(self, slots: Tensor, valid: Tensor | None) -> tuple[Tensor, Misses | None]:
        self._clock += 1
        rows, _, columns = slots.shape
        counts = np.full(rows, columns) if valid is None else valid[:, 0].sum(dim=1).numpy()
        places, fetch, targets, missing = look_up(
            self._place_of.numpy(),
            self._slot_of.numpy(),
            self._used.numpy(),
            slots.contiguous().numpy(),
            counts,
            self._clock,
            self.budget,
            self.spare_place,
        )
        found = torch.from_numpy(places)
        if missing == 0:
            return found, None
        return found, Misses(torch.from_numpy(fetch), torch.from_numpy(targets), missing)

    def fill(self, misses: Misses, keys: Tensor, values: Tensor) -> None:
        places = misses.places.numpy()
        fill(as_array(self._keys), places, as_array(keys))
        fill(as_array(self._values), places, as_array(values))

    def add_new(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        if slots.shape[1] != 1:
            super().add_new(slots, keys, values)
            return
        place = self.budget + self._newest
        self._newest = (self._newest + 1) % self.ring
        move_in(
            self._place_of.numpy(),
            self._slot_of.numpy(),
            slots[:, 0].contiguous().numpy(),
            place,
            self.spare_place,
            as_array(self._keys),
            as_array(self._values),
            as_array(keys.squeeze(2)),
            as_array(values.squeeze(2)),
        )
