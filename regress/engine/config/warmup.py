"""Warm-up of a run that is shorter than the one that its configuration was written for."""

from __future__ import annotations

from regress.engine.config.origins import Origin, author
from regress.engine.config.rules import updates_per_rollout
from regress.engine.config.schema import Config
from regress.engine.config.store import Entry, Store

_WARMUP = ("optimizer", "warmup_steps")
_DECIDE = (
    ("max_steps",),
    ("trainer", "epochs"),
    ("trainer", "mini_batch_size"),
    ("data", "prompts_per_step"),
    ("data", "group_size"),
)
"""Keys that decide how many optimizer updates a run makes."""


def shorten_warmup(config: Config, store: Store) -> tuple[str, ...]:
    """Let the last update of a short run have the full learning rate; return a sentence where that changes something.

    Whoever gives both, a warm-up and the length of the run, contradicts himself, and a rule refuses it.
    """
    asked, updates = config.optimizer.warmup_steps, config.max_steps * updates_per_rollout(config)
    if asked == 0 or asked < updates:
        return ()
    last = max(_DECIDE, key=store.age)
    origin = store.origin(last)
    if store.age(last) < store.age(_WARMUP) or author(origin) == author(store.origin(_WARMUP)):
        return ()
    shortened = config.optimizer.warmup_steps = max(updates - 1, 0)
    store.put(Entry(_WARMUP, shortened, Origin("shortened", f"from {asked} for {updates} updates")))
    return (
        f"optimizer.warmup_steps={asked} is not less than the {updates} optimizer updates of this run "
        f"({'.'.join(last)}: {origin}), so the learning rate rises over {shortened}",
    )
