"""What ranks run in tests of training on several of them; a module of its own, because ranks import it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from regress.engine.config import load_config
from regress.parallel.run import train


def trained(overrides: Sequence[str]) -> dict[str, Any]:
    """A whole run of ``regress train``; where it left its files."""
    result = train(load_config(overrides=list(overrides), environ={}).config, Console(quiet=True))
    return {"main": result.main, "metrics": result.metrics, "pass_rates": result.pass_rates}
