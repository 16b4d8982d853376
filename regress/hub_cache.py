"""The cache of the Hugging Face hub on this machine, and whether anything may be downloaded into it."""

from __future__ import annotations

import os
from pathlib import Path

_ON = {"1", "ON", "YES", "TRUE"}


def hub_cache() -> str:
    """Return the directory of the hub's cache; variables may have been set since its client was imported."""
    from huggingface_hub import constants

    home = os.environ.get("HF_HOME")
    return os.environ.get("HF_HUB_CACHE") or (str(Path(home, "hub")) if home else str(constants.HF_HUB_CACHE))


def offline_variable() -> str | None:
    """Return the variable that forbids downloads; None where they are allowed."""
    from huggingface_hub import constants

    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    found = next((name for name in names if os.environ.get(name, "").upper() in _ON), None)
    return "HF_HUB_OFFLINE" if found is None and constants.HF_HUB_OFFLINE else found
