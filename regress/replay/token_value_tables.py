"""Token values of replays, kept for the report beside their outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from regress.compare.dumps.golden_source import token_text
from regress.compare.quantities import QUANTITIES, Kind
from regress.compare.verdicts.tolerance import Tolerance
from regress.dump.canonical_json import dumps, loads, plain
from regress.dump.coordinates import Place
from regress.dump.dump_files import write_atomically
from regress.dump.dump_reader import DumpReader
from regress.golden.golden_case import GoldenCase
from regress.replay.replay_judge import records_of
from regress.replay.replay_outcome import ReplayOutcome
from regress.replay.test_matrix import Replay
from regress.report.token_values import TokenTable, token_table
from regress.report.verdict_entries import Call

FILE = "tokens.json"
REPLAYS, UPDATES = 6, 2
"""Number of failing replays whose tokens a report shows, and of updates of each."""

_AT_TOKENS = frozenset(quantity.name for quantity in QUANTITIES if quantity.kind is Kind.TOKEN)


def keep_tables(
    folder: Path,
    replay: Replay,
    golden: GoldenCase,
    dump: DumpReader,
    outcome: ReplayOutcome,
    tolerances: Callable[[str], Tolerance | None],
) -> None:
    """Write the tables of the updates that failed first, or of the one that came closest."""
    text = token_text(golden)
    updates = _updates(outcome)
    tables = [
        token_table(
            replay.name,
            update.place,
            records_of(dump, update),
            golden.truth(update.where),
            update.frame,
            tolerances,
            text,
        )
        for update in replay.plan
        if update.place in updates
    ]
    tree = plain([table.to_json() for table in tables], "tokens")
    write_atomically(folder / FILE, [dumps(tree).encode()])


def _updates(outcome: ReplayOutcome) -> list[Place]:
    failed = [verdict.place for verdict in outcome.failed]
    if not failed:
        found = [one.closest for one in outcome.outcomes.values() if one.closest is not None]
        near = [verdict for verdict in found if verdict.quantity in _AT_TOKENS]
        failed = [verdict.place for verdict in sorted(near, key=lambda verdict: -verdict.multiple)[:1]]
    return list(dict.fromkeys(place.of_update for place in failed))[:UPDATES]


def chosen_tables(root: Path, calls: Iterable[Call]) -> list[TokenTable]:
    """Return the tables of the replays that failed, or of the one that came closest where none did.

    Args:
        root: root of the replays' folders.
    """
    return [table for where in _wheres([*calls]) for table in _read(root / where / FILE)]


def _wheres(calls: Sequence[Call]) -> list[str]:
    failed = sorted({call.where for call in calls if not call.verdict.ok})
    if failed:
        return failed[:REPLAYS]
    near = [call for call in calls if call.verdict.quantity in _AT_TOKENS]
    return [call.where for call in sorted(near, key=lambda call: (-call.verdict.multiple, call.label))[:1]]


def _read(path: Path) -> list[TokenTable]:
    """Return the tables of a replay; none if it was judged without golden values, as bitwise replays are."""
    return [TokenTable.from_json(tree) for tree in loads(path.read_bytes())] if path.is_file() else []
