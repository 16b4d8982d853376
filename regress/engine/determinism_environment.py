"""Determinism environment: variables that change arithmetic, applied before torch starts work.

This module does not import torch when it loads, because some libraries read their variables on import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

DETERMINISTIC_MODE = "DETERMINISTIC_MODE"


def export_environment(system_envs: Mapping[str, str]) -> None:
    """Set the configured variables in this process and its children; call it before importing torch."""
    os.environ.update(system_envs)


def configure_torch(threads: int) -> None:
    """Set the number of threads, and torch's deterministic switches if ``DETERMINISTIC_MODE=1`` asks for them.

    The switches are those of ROLL's variable of the same name: deterministic cuDNN, no cuDNN benchmark,
    ``torch.use_deterministic_algorithms(True)``.
    """
    import torch

    torch.set_num_threads(threads)
    deterministic = os.environ.get(DETERMINISTIC_MODE) == "1"
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(deterministic)
