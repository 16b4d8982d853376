"""Replays by a user's own trainer at the end of a session: variants and quantities it lacks, counted and named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from regress.plugin.rows import ForeignRow

_SHOWN = 5


def supported(rows: Iterable[ForeignRow]) -> bool:
    """Return True if anything was judged, or if there was no test of such a replay."""
    told = list(rows)
    return not told or any(row.unsupported is None for row in told)


def foreign_lines(rows: Iterable[ForeignRow]) -> Iterator[str]:
    """Yield sentences on replays that were left out, by reason, and on quantities that were not recorded."""
    told = list(rows)
    if not told:
        return
    adapter = told[0].adapter
    replays = dict.fromkeys(row.replay for row in told)
    reasons: dict[str, dict[str, None]] = {}
    for row in told:
        if row.unsupported is not None:
            reasons.setdefault(row.unsupported, {})[row.replay] = None
    left_out = sum(len(names) for names in reasons.values())
    if left_out:
        yield f"{adapter} does not support {left_out} of {len(replays)} replays:"
        for reason, names in reasons.items():
            yield f"  {_named(names)}: {reason}"
    missing = dict.fromkeys(row.not_recorded for row in told if row.not_recorded is not None)
    if missing:
        yield f"{adapter} did not record {', '.join(str(name) for name in missing)}"
    if left_out == len(replays):
        yield f"nothing was compared: {adapter} supports none of the replays, so the session fails"


def _named(names: Iterable[str]) -> str:
    known = list(names)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    return f"{', '.join(known[:_SHOWN])}{more}"
