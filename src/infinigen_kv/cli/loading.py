"""From options to a model and its calibration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from infinigen_kv.cli.options import ModelOptions, SelectionOptions, parse_dtype
from infinigen_kv.cli.output import say, waiting
from infinigen_kv.progress import bar

if TYPE_CHECKING:
    from infinigen_kv.calibration.artefact import Calibration
    from infinigen_kv.config import InfiniGenConfig
    from infinigen_kv.models.loading import LoadedModel
    from infinigen_kv.storage.config import StorageConfig


def load(options: ModelOptions) -> LoadedModel:
    """Load the model that the user named."""
    dtype = parse_dtype(options.dtype)
    with waiting(f"loading {options.model} ..."):
        from infinigen_kv.models.loading import load_model

        return load_model(
            options.model,
            dtype=dtype,
            device=options.device,
            trust_remote_code=options.trust_remote_code,
        )


def read_calibration(folder: Path | None, *, with_tuned: bool = True) -> Calibration | None:
    """The artefact that ``--calibration`` names, read before the model is loaded."""
    if folder is None:
        return None
    from infinigen_kv.calibration.artefact import Calibration

    return Calibration.load(folder, with_tuned=with_tuned)


def calibrated(loaded: LoadedModel, given: Calibration | None) -> Calibration:
    """``given``, or the model's calibration from the user's cache, made if there is none."""
    if given is not None:
        return given
    from infinigen_kv.calibration.run import calibrate

    say("calibrating, unless that was done before ...")
    return calibrate(loaded.model, loaded.tokenizer, progress=bar)


def selected_config(selection: SelectionOptions, made: Calibration) -> InfiniGenConfig:
    """The settings as typed; what was tuned for the model for the others, which is said."""
    config = selection.config(made)
    if made.tuned is not None and config.alpha == made.tuned.alpha:
        say(f"using the settings tuned for this model (KL {made.tuned.target_kl:g})")
    return config


def selected_storage(
    where: StorageConfig, config: InfiniGenConfig, made: Calibration, loaded: LoadedModel
) -> StorageConfig:
    """Where the KV lives as typed; what was tuned for the model for the rest."""
    from infinigen_kv.session.attach import default_storage

    return default_storage(made, config, loaded.model.device, where)


def check_fit(
    loaded: LoadedModel, given: Calibration | None, config: InfiniGenConfig | None, tokens: int
) -> None:
    """Raise now what would otherwise surface after minutes of calibrating.

    That is: the model's family is not supported, the calibration belongs to another model, or
    ``tokens`` exceed its positions.
    """
    from infinigen_kv.session.attach import attach

    with attach(loaded.model, given, config) as session:
        session.check_length(tokens)


def check_memory_fit(
    loaded: LoadedModel, given: Calibration | None, device_memory: int | None, **settings: Any
) -> None:
    """As `check_fit`: raise now if the run would not fit into memory.

    ``settings`` are fields of `memory.PlanRequest`. Layers that calibration finds hard to predict
    are unknown without one; who runs the model checks again.
    """
    from infinigen_kv.memory import calibration_fields, check_memory, model_request

    request = model_request(loaded.model, **settings, **calibration_fields(given))
    fixed = ("rows",) if request.rows == 1 else ()
    check_memory(request, device_memory=device_memory, fixed=fixed, style="option")
