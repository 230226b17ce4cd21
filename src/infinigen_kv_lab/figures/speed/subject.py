"""A model that is measured, with what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infinigen_kv.calibration.artefact import Calibration
from infinigen_kv.calibration.fingerprint import model_fingerprint
from infinigen_kv.models.adapters import adapter_for
from infinigen_kv_lab.bench.peers import twin


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is measured: not attached, with its tokenizer and calibration."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    calibration: Calibration
    name: str

    @property
    def layers(self) -> int:
        """L."""
        return len(adapter_for(self.model).layers)

    @property
    def dtype(self) -> str:
        """Of the weights."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def kv_bytes(self) -> int:
        """Bytes of one token's KV in all layers."""
        layers = adapter_for(self.model).layers
        numbers = sum(2 * each.num_kv_heads * each.head_dim for each in layers)
        return numbers * self.model.dtype.itemsize

    @property
    def positions(self) -> int | None:
        """Tokens that the model can tell apart; None for no limit."""
        return adapter_for(self.model).max_positions

    def cut(self, layers: int) -> Subject:
        """The same model, its first ``layers`` layers only, over the same weights.

        What was calibrated for a layer depends on those before it alone, so it stays.
        """
        model = twin(self.model, layers=layers)
        tuned = self.calibration.tuned
        kept = Calibration(
            fingerprint=model_fingerprint(adapter_for(model)),
            settings={**self.calibration.settings, "first_layers": layers},
            layers={i: each for i, each in self.calibration.layers.items() if i < layers},
            report={i: each for i, each in self.calibration.report.items() if int(i) < layers},
            tuned=tuned and tuned.first(layers),
        )
        return Subject(model, self.tokenizer, kept, f"{self.name}, first {layers} layers")
