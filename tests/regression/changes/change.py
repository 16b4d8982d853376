"""Changes of the engine that say which diagnosis is right: what may be said of each, written before it was run.

They vary what the corpus does not: other places, other sizes, other terms. Each lasts as long as its patch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from regress.engine import training_passes
from regress.replay.fault_injection import Patch, injected

Objective = Any


@dataclass(frozen=True)
class Change:
    """A change of the engine, and the rules that may be said of it first; silence is never wrong.

    Attributes:
        fault: function of a patch, or of a run that was built.
        steps: until it shows.
        rules: ids of rules, any of which is right as the first.
    """

    fault: Callable[[Any], None]
    case: str
    rules: tuple[str, ...]
    variant: str = "mbs4"
    steps: int = 1

    @property
    def name(self) -> str:
        """As in test ids."""
        return f"{self.fault.__name__}-{self.case}-{self.variant}"

    @property
    def injected(self) -> Any:
        """The context in which the engine is changed."""
        return injected(self.fault)


def in_token_loss(patch: Patch, change: Callable[..., Any]) -> None:
    """Replace the loss of each token by ``change(right, *args, **rest)``."""
    right: Any = training_passes.token_loss
    patch.setattr(training_passes, "token_loss", lambda *args, **rest: change(right, *args, **rest))


def with_objective(patch: Patch, **values: Any) -> None:
    """Compute the loss of each token under another objective."""

    def wrong(right: Any, *args: Any, **rest: Any) -> Any:
        return right(*args[:-1], replace(args[-1], **values), **rest)

    in_token_loss(patch, wrong)
