"""How much of its tolerance each quantity used in the last runs, kept in a file of SQLite."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypedDict

from regress.errors import ConfigError, reason
from regress.json_schema import Count, Finite, Name, conform
from regress.untrusted_files import DOCUMENT, open_file, parse_json, read_bytes

ROSE = 2.0
"""Factor over all earlier runs from which on a quantity is reported first."""
_TABLES = """
create table if not exists run (id integer primary key, sha256 text unique not null, title text not null);
create table if not exists used (
    run integer not null references run (id), quantity text not null, precision text not null,
    share real not null, failed integer not null, primary key (run, quantity, precision)
);
"""


class _Closest(TypedDict):
    multiple: Finite


class _Row(TypedDict):
    quantity: Name
    precision: str
    closest: _Closest | None
    failed: Count


class _Report(TypedDict):
    """Shape of a report, as far as a history reads it."""

    title: str
    headroom: list[_Row]


@dataclass(frozen=True)
class Course:
    """One quantity in one precision over the runs of a history.

    Attributes:
        shares: part of the tolerance that the largest passing error used, by run, the oldest first.
        failed: comparisons that failed in the last run.
    """

    quantity: str
    precision: str
    shares: tuple[float, ...]
    failed: int

    @property
    def rose(self) -> bool:
        """True if the last run used more than twice what any earlier one did, or failed."""
        earlier = self.shares[:-1]
        return self.failed > 0 or (bool(earlier) and self.shares[-1] > ROSE * max(earlier))

    def __str__(self) -> str:
        name = f"{self.quantity} {self.precision}".strip()
        if self.failed:
            return f"{name}: {self.failed} comparisons failed"
        now, earlier = self.shares[-1], self.shares[:-1]
        if not earlier:
            return f"{name}: {now:.2g} of its tolerance"
        runs = f"{len(earlier)} run" + "s" * (len(earlier) != 1)
        return f"{name}: {median(earlier):.2g} of its tolerance in {runs} ({max(earlier):.2g} at most), now {now:.2g}"


def add_reports(history: Path, reports: Iterable[Path]) -> int:
    """Add reports to a history, the oldest first, and return how many were new.

    Raises:
        ConfigError: for a file that is not a report, or no history.
    """
    found = [_report(path) for path in reports]
    count = 0
    with _opened(history) as store:
        for digest, tree in found:
            done = store.execute(
                "insert or ignore into run (sha256, title) values (?, ?)", (digest, tree["title"])
            )
            if done.rowcount:
                rows = [
                    (done.lastrowid, row["quantity"], row["precision"], _share(row), row["failed"])
                    for row in tree["headroom"]
                ]
                store.executemany("insert into used values (?, ?, ?, ?, ?)", rows)
                count += 1
    return count


def courses(history: Path, last: int) -> list[Course]:
    """Return the quantities of the last run over up to so many runs that have them: those that rose first."""
    query = (
        "select cast(quantity as text), cast(precision as text), cast(share as real), cast(failed as integer), "
        "run = (select max(id) from run) from used order by quantity, precision, run"
    )
    with _opened(history) as store:
        rows = store.execute(query).fetchall()
    if not all(math.isfinite(share) for _, _, share, *_ in rows):
        raise ConfigError(f"{history} holds a share of a tolerance that is not finite: give another file")
    found: dict[tuple[str, str], list[tuple[float, int, int]]] = {}
    for quantity, precision, *row in rows:
        found.setdefault((quantity, precision), []).append(tuple(row))
    every = [
        Course(*key, tuple(share for share, _, _ in runs[-last:]), runs[-1][1])
        for key, runs in found.items()
        if runs[-1][2]
    ]
    return sorted(every, key=lambda one: (not one.rose, -one.shares[-1]))


def history_json(found: Iterable[Course]) -> str:
    """Return the courses as JSON."""
    rows = [{**vars(one), "rose": one.rose} for one in found]
    return json.dumps({"schema_version": 1, "quantities": rows}, indent=1, allow_nan=False) + "\n"


def _share(row: _Row) -> float:
    """Return the part of its tolerance that a row's closest passing comparison used; 0 where none passed."""
    return 0.0 if row["closest"] is None else float(row["closest"]["multiple"])


def _report(path: Path) -> tuple[str, _Report]:
    """Return the hash of a report, and what it says."""
    try:
        data = read_bytes(path, DOCUMENT)
        report: _Report = conform(parse_json(data), _Report, "the report")
        rows = Counter((row["quantity"], row["precision"]) for row in report["headroom"])
        if twice := [" ".join(name) for name, count in rows.items() if count > 1]:
            raise ValueError(f"it has several rows of {twice[0]}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"""{path} is not a report of regress ({reason(error)}): give a report.json of
        pytest --regress-report, or of --report""") from error
    return hashlib.sha256(data).hexdigest(), report


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    try:
        if path.exists():
            open_file(path).close()  # no pipe is waited for
        with closing(sqlite3.connect(path, timeout=30)) as store, store:
            store.executescript(_TABLES)
            yield store
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:  # the last of a schema that is no text
        why = error if isinstance(error, sqlite3.Error) else reason(error)
        raise ConfigError(
            f"{path} is not a history that can be read and written ({why}): give another file"
        ) from error
