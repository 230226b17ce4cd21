"""Where this package keeps what it computes once: converted models and calibrations."""

import os
from pathlib import Path

import platformdirs

from infinigen_kv.errors import InputError

CACHE_VARIABLE = "INFINIGEN_KV_CACHE"


def cache_dir() -> Path:
    """Folder of the user's cached files, created with mode 0700 where it does not exist.

    Returns
    -------
    Path
        ``$INFINIGEN_KV_CACHE`` where that is set and not empty, else the platform's cache folder.

    Raises
    ------
    InputError
        The folder cannot be created.
    """
    chosen = os.environ.get(CACHE_VARIABLE, "")
    try:
        path = (
            Path(chosen).expanduser().absolute()
            if chosen
            else platformdirs.user_cache_path("infinigen-kv", appauthor=False)
        )
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: "~" without a home folder
        raise InputError(
            f"the cache folder cannot be created ({error}): "
            f"set {CACHE_VARIABLE} to a folder that can be written"
        ) from error
    return path
