"""Warnings of engines: problems that were worked around."""

from __future__ import annotations

import warnings


def warn(text: str) -> None:
    """Issue a warning."""
    warnings.warn(text, RuntimeWarning, stacklevel=3)
