"""What environment variables say about tuning, read and checked in one place.

``CUPYFLASH_CONFIG``: a file of winners, or a folder with one file per GPU model, that goes before all others.
``CUPYFLASH_CACHE_DIR``: where the tuner keeps winners, in place of the user's cache folder.
``CUPYFLASH_TUNE``: "off" (default), or "first-call" to tune a kind of problem when it is first computed.
"""

from __future__ import annotations

import os
import threading
import warnings
from pathlib import Path

TUNE_MODES = ("off", "first-call")

_warned: set[str] = set()
_lock = threading.Lock()


class ConfigWarning(UserWarning):
    """Winners, or a setting about them, that cannot be used; the next best is."""


def warn_once(message: str) -> None:
    """Warns, but never twice of the same in one process."""
    with _lock:
        if message in _warned:
            return
        _warned.add(message)
    warnings.warn(message, ConfigWarning, stacklevel=2)


def config_path() -> Path | None:
    """The file or folder of ``CUPYFLASH_CONFIG``."""
    text = os.environ.get("CUPYFLASH_CONFIG", "")
    return Path(os.path.expanduser(text)) if text else None


def cache_folder() -> Path | None:
    """Where the user's winners are kept; None if there is no home to keep them in. The folder need not exist."""
    text = os.environ.get("CUPYFLASH_CACHE_DIR", "")
    if text:
        return Path(os.path.expanduser(text))
    try:
        from platformdirs import user_cache_path  # not at import: it costs some milliseconds
    except ImportError as error:
        warn_once(
            f"{error}: winners in the user's cache folder are not looked for; install platformdirs, or set "
            "CUPYFLASH_CACHE_DIR"
        )
        return None
    try:
        folder = user_cache_path("cupyflash", appauthor=False)
    except RuntimeError:  # of a user without a home; older versions leave "~/.cache" as it is
        return None
    return folder if folder.is_absolute() else None


def tune_mode() -> str:
    """One of ``TUNE_MODES``; what is none of them counts as "off", with a warning."""
    text = os.environ.get("CUPYFLASH_TUNE", "") or "off"
    if text not in TUNE_MODES:
        warn_once(f"CUPYFLASH_TUNE is {text!r}; expected {' or '.join(TUNE_MODES)}: nothing is tuned at first calls")
        return "off"
    return text
