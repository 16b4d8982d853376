"""Faults of objectives over ranks, planted on each rank before its first step."""

from __future__ import annotations

from typing import Any

from regress.engine import batch_token_selection, grpo_trainer
from regress.engine.run_construction import Run


def local_statistics(run: Run) -> None:
    """Compare the tokens of this rank with each other, and not with those of all ranks."""
    batch_token_selection._collected = _own(batch_token_selection._collected)


def _own(collected: Any) -> Any:
    class Alone:
        def sum(self, values: Any) -> Any:
            return values

    return lambda values, microbatches, tokens, world: collected(values, microbatches, tokens, Alone())


def own_microbatches(run: Run) -> None:
    """Divide by the microbatches of this rank, and not by those of all ranks."""
    weigh = grpo_trainer.weigh
    grpo_trainer.weigh = lambda *args, **options: 2 * weigh(*args, **options)
