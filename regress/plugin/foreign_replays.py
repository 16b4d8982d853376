"""Replays by a user's own trainer at the end of a session: variants and quantities it lacks, counted and named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regress.plugin.worker_rows import ForeignRow

_SHOWN = 5


def foreign_lines(rows: Iterable[ForeignRow]) -> Iterator[str]:
    """Yield sentences on replays that were left out, by reason, and on quantities that were not recorded."""
    every = list(rows)
    yield from _not_possible(row for row in every if not row.adapter)
    adapted = [row for row in every if row.adapter]
    if not adapted:
        return
    adapter = adapted[0].adapter
    replays = dict.fromkeys(row.replay for row in adapted)
    reasons = _reasons(adapted)
    left_out = sum(len(names) for names in reasons.values())
    if left_out:
        yield f"{adapter} does not support {left_out} of {len(replays)} replays:"
        for reason, names in reasons.items():
            yield f"  {_named(names)}: {reason}"
    missing = dict.fromkeys(row.not_recorded for row in adapted if row.not_recorded is not None)
    if missing:
        yield f"{adapter} did not record {', '.join(str(name) for name in missing)}"
    if left_out == len(replays):
        yield f"nothing was compared: {adapter} supports none of the replays, so the session fails"


def _not_possible(rows: Iterable[ForeignRow]) -> Iterator[str]:
    """Yield sentences on replays that the engine of this package left out, by reason."""
    for reason, names in _reasons(rows).items():
        yield f"not possible, and left out: {_named(names)}: {reason}"


def _reasons(rows: Iterable[ForeignRow]) -> dict[str, dict[str, None]]:
    """Return the replays that were left out, in order, by reason."""
    reasons: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.unsupported is not None:
            reasons.setdefault(row.unsupported, {})[row.replay] = None
    return reasons


def _named(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{', '.join(known[:_SHOWN])}{more}"
