"""GGUF files converted once to safetensors, kept in the user's cache folder.

A conversion is made in a temporary folder beside its final place and renamed into it, under a lock:
a folder with the final name is complete, whenever a process was interrupted.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import logging
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from infinigen_kv.errors import InputError
from infinigen_kv.files import CACHE_VARIABLE, cache_dir

logger = logging.getLogger(__name__)

# Part of every folder's name. Raise it when what a conversion writes changes.
FORMAT = 1
MANIFEST = "conversion.json"

# Older releases misread the tokenizer of some GGUF files; the conversion would keep the mistake.
MIN_TRANSFORMERS = (5, 18)

Converter = Callable[[Path, Path], None]

# What transformers and gguf raise over damaged or unknown files.
_DAMAGED = (OSError, ValueError, LookupError, RuntimeError, TypeError, struct.error)


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's weights (float32, so exactly the dequantised ones) and tokenizer.

    Parameters
    ----------
    gguf : Path
        File to read.
    folder : Path
        Existing folder that receives ``config.json``, safetensors and the tokenizer's files.

    Raises
    ------
    InputError
        The file is damaged, its architecture is unknown to transformers, or a package is missing.
    """
    _require_packages(gguf)
    options = {"gguf_file": gguf.name, "local_files_only": True}
    quantization = {}
    if hasattr(transformers, "GgufConfig"):
        # Releases that have it keep the weights packed by default; such a model cannot be saved.
        quantization = {"quantization_config": transformers.GgufConfig(dequantize=True)}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **options)
        # The bar of the dequantisation knows no switch; loggers keep the stream that they have.
        with contextlib.redirect_stderr(io.StringIO()):
            model, info = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                dtype=torch.float32,
                output_loading_info=True,
                **options,
                **quantization,
            )
    except _DAMAGED as error:
        raise _unreadable(gguf, "converted", error) from error
    if info["missing_keys"]:
        raise InputError(
            f"{gguf}: weights are missing, among them {min(info['missing_keys'])}: "
            "give a GGUF file that holds a whole model"
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gguf_config(gguf: Path) -> Any:
    """Configuration of the model in a GGUF file, whose weights are left alone.

    Raises
    ------
    InputError
        As `convert_gguf`.
    """
    _require_packages(gguf)
    _check_magic(gguf)
    try:
        return AutoConfig.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, local_files_only=True
        )
    except _DAMAGED as error:
        raise _unreadable(gguf, "read", error) from error


def converted_folder(gguf: Path, *, convert: Converter = convert_gguf) -> Path:
    """Folder with the converted model, converting it where that was not done before.

    Parameters
    ----------
    gguf : Path
        A GGUF file. The folder belongs to its name and content, wherever the file lies.
    convert : callable
        Writes the model of the first path into the folder at the second.

    Returns
    -------
    Path
        A complete Hugging Face model folder below `cache_dir`.

    Raises
    ------
    InputError
        The file is no GGUF file or cannot be converted, or the cache folder cannot be written.
    """
    digest = _digest(gguf)
    parent = cache_dir() / "models"
    folder = parent / f"{gguf.stem}-{digest[:16]}-v{FORMAT}"
    if _is_complete(folder):
        return folder
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not _is_complete(folder):
                logger.warning("converting %s, once (about 15 s for 135M weights)", gguf.name)
                _convert_into(folder, gguf, digest, convert)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"the converted model cannot be written below {parent} ({error}): "
            f"make room there, or set {CACHE_VARIABLE} to another folder"
        ) from error
    return folder


def _convert_into(folder: Path, gguf: Path, digest: str, convert: Converter) -> None:
    """Convert beside `folder`, then rename. Called with the lock on `folder` held."""
    prefix = f".{folder.name}."
    # The lock is ours, so whatever carries the prefix was left by an interrupted process.
    for leftover in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)
    work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        convert(gguf, work)
        sizes = {file.name: file.stat().st_size for file in sorted(work.iterdir())}
        manifest = {"format": FORMAT, "source": gguf.name, "sha256": digest, "files": sizes}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for file in (*work.iterdir(), work):
            _flush(file)
        if folder.exists():  # damaged, as the caller found
            folder.rename(work.with_name(f"{work.name}.damaged"))
        work.rename(folder)
    finally:
        for leftover in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _flush(path: Path) -> None:
    """Bring a file or folder to the disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_complete(folder: Path) -> bool:
    """Whether the folder holds every file that its manifest lists, at the listed size."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return False  # absent, or the manifest itself is damaged


def _digest(gguf: Path) -> str:
    """SHA-256 of the file in hexadecimal, after a look at its first bytes."""
    _check_magic(gguf)
    try:
        with gguf.open("rb") as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise InputError(f"{gguf}: cannot be read ({error})") from error
    return digest.hexdigest()


def _check_magic(gguf: Path) -> None:
    try:
        with gguf.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise InputError(f"{gguf}: cannot be read ({error})") from error
    if magic != b"GGUF":
        raise InputError(f"{gguf}: not a GGUF file (it does not start with 'GGUF')")


def _unreadable(gguf: Path, done: str, error: Exception) -> InputError:
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return InputError(
        f"{gguf}: cannot be {done} ({reason}): "
        "the file may be damaged, or its architecture unknown to transformers"
    )


def _require_packages(gguf: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    found = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if found < MIN_TRANSFORMERS:
        missing.append("transformers>={}.{}".format(*MIN_TRANSFORMERS))
    if missing:
        raise InputError(
            f"{gguf}: reading a GGUF file needs {' and '.join(missing)}: "
            "pip install 'infinigen-kv[gguf]'"
        )
