"""Trackers that can be used here: known to accelerate, installed, logged in."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from regress.engine.tracking.tracker_login import has_wandb_login
from regress.errors import ConfigError, reason
from regress.optional_packages import install

AUTOMATIC = ("wandb", "tensorboard")
"""Trackers that are tried where nobody names one, the best first."""
MODULES = {"tensorboard": ("torch.utils.tensorboard", "tensorboardX")}
"""Modules of which a tracker needs one, where it is not the one of its name."""


def chosen_trackers(names: Sequence[str] | None, warn: Callable[[str], None]) -> list[str]:
    """Return the trackers to open: those that are named, or the best that works here.

    Args:
        names: ``tracking.trackers``; ``None``: automatic.
        warn: called once if the best one is not the one that is used.

    Raises:
        ConfigError: if a tracker that is named is unknown, not installed, or has no login.
    """
    if names is not None:
        for name in names:
            _require(name)
        return list(dict.fromkeys(names))
    missed: list[str] = []
    for name in AUTOMATIC:
        why = unusable(name)
        if why is None:
            break
        missed.append(f"{name} {why}")
    else:
        name = ""
    if missed:
        instead = f"metrics go to {name} instead" if name else "metrics go to metrics.jsonl alone"
        warn(f"tracking.trackers: {' and '.join(missed)}; {instead}")
    return [name] if name else []


def _require(name: str) -> None:
    if name not in LOGGER_TYPE_TO_CLASS:
        near = get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1) or sorted(LOGGER_TYPE_TO_CLASS)
        raise ConfigError(
            f"tracking.trackers: accelerate knows no tracker {name!r}; did you mean {', '.join(near)}?"
        )
    why = unusable(name)
    if why is not None:
        remedy = "" if "has no login" in why else f"; run {install(name)}"
        raise ConfigError(f"tracking.trackers: {name} {why}{remedy}")


def unusable(name: str) -> str | None:
    """Return why a tracker cannot be used here, as the end of a sentence; ``None``: it can."""
    error: BaseException | None = None
    for module in MODULES.get(name, (name,)) if _is_accelerates(name) else ():
        try:
            importlib.import_module(module)
            error = None
            break
        except (
            Exception
        ) as caught:  # a package that cannot be imported is as good as none, whatever it raises
            error = error or caught
    if error is not None:
        return f"is not installed ({reason(error)})"
    if name == "wandb" and not has_wandb_login():
        return "has no login (run wandb login, set WANDB_API_KEY, or record without a server: WANDB_MODE=offline)"
    return None


def _is_accelerates(name: str) -> bool:
    """Return True for accelerate's own trackers; what a class that somebody registered needs is unknown."""
    return bool(LOGGER_TYPE_TO_CLASS[name].__module__ == "accelerate.tracking")
