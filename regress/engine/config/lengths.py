"""Division of ``data.max_seq_length`` between prompt and completion, and the variables that decide on it.

| strategy | prompt | completion |
|---|---|---|
| ``balanced`` | ``L // 2`` | the rest |
| ``prompt_heavy`` | ``int(0.6 L)`` | the rest |
| ``completion_heavy`` | ``int(0.4 L)`` | the rest |
| ``custom`` | as given | as given |
"""

from collections.abc import Callable, Mapping
from typing import Any

from regress.engine.config.environment import entry_of
from regress.engine.config.leaves import KeyPath
from regress.engine.config.origins import COMMAND_LINE, DEFAULT, ENVIRONMENT, FILE, PRESET, Origin
from regress.engine.config.sections.task import CUSTOM, STRATEGIES
from regress.engine.config.store import Entry, Store

STRATEGY = "strategy"
"""Layer of a length that a strategy has set."""
VARIABLES: Mapping[str, KeyPath] = {
    "LENGTH_ALLOCATION_STRATEGY": ("data", "length_allocation_strategy"),
    "MAX_PROMPT_LENGTH": ("data", "max_prompt_length"),
    "MAX_COMPLETION_LENGTH": ("data", "max_completion_length"),
}
"""Variables without our prefix, which lose against those with it."""

LENGTH: KeyPath = ("data", "max_seq_length")
CHOICE: KeyPath = ("data", "length_allocation_strategy")
PARTS: tuple[KeyPath, KeyPath] = (("data", "max_prompt_length"), ("data", "max_completion_length"))

_RANKS = {DEFAULT: 0, PRESET: 0, FILE: 1, ENVIRONMENT: 2, COMMAND_LINE: 2}
"""Sources given with the command count alike: their lengths must fit their ``data.max_seq_length``."""


def apply_length_variables(environ: Mapping[str, str], store: Store) -> None:
    """Put the variables into the store, except where the command line chose a config group."""
    for name, path in VARIABLES.items():
        if name in environ and store.origin(path).layer != COMMAND_LINE:
            store.put(entry_of(path, environ[name], Origin(ENVIRONMENT, name)))


def allocated(longest: int, strategy: str) -> tuple[int, int]:
    """Return the prompt's and the completion's share of a sequence of so many tokens, in tokens."""
    share = {"balanced": 0.5, "prompt_heavy": 0.6, "completion_heavy": 0.4}[strategy]
    prompt = int(share * longest)
    return prompt, longest - prompt


def allocate(store: Store, value: Callable[[KeyPath], Any]) -> None:
    """Set the lengths of prompt and completion that follow from that of the sequence.

    A part given where the sequence's length or the strategy is given, or later, stays; the other one is then the rest.
    Without a strategy only a sequence's length that is given later than both parts is divided, ``balanced``. Where both
    parts are given and the sequence's length nowhere, it is at least their sum.

    Args:
        value: returns the checked value of a key.
    """
    _lengthen(store, value)
    strategy, longest = value(CHOICE), value(LENGTH)
    if strategy == CUSTOM:
        return
    rank = max(_rank(store, LENGTH), _rank(store, CHOICE))
    given = [_rank(store, part) >= rank for part in PARTS]
    if rank == 0 or all(given) or (strategy is None and any(given)):
        return
    name = strategy or STRATEGIES[0]
    values = allocated(longest, name)
    if any(given):
        known = given.index(True)
        other = value(PARTS[known])
        if other >= longest:
            return  # the rule of the lengths says so
        values = (other, longest - other) if known == 0 else (longest - other, other)
    for part, length, stays in zip(PARTS, values, given, strict=True):
        if not stays:
            store.put(Entry(part, length, Origin(STRATEGY, f"{name} of data.max_seq_length={longest}")))


def _lengthen(store: Store, value: Callable[[KeyPath], Any]) -> None:
    if _rank(store, LENGTH) > 0 or not all(_rank(store, part) > 0 for part in PARTS):
        return
    total = sum(value(part) for part in PARTS)
    if total > value(LENGTH):
        store.put(Entry(LENGTH, total, Origin(DEFAULT, "sum of prompt and completion")))


def _rank(store: Store, path: KeyPath) -> int:
    return _RANKS[store.origin(path).layer]
