"""Rows that tests send to the end of the session, through `user_properties`.

These survive a crashed worker of pytest-xdist, and reach JUnit files. Their values must be Python builtins, so a row is
strict JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from regress.replay.replay_outcome import ReplayOutcome
    from regress.report.verdict_entries import Call

UPDATE = "regress_update"
CALL = "regress_call"
ASKED = "regress_golden"
FOREIGN = "regress_foreign"
FAILED = "regress_failed"
JUDGED = "regress_judged"
NOTE = "regress_note"
"""Property names: a row of the update table, a verdict for the report, the file of a stored check, a row on
a replay by a user's own trainer, replay and failing quantities of a test, how many quantities a test judged, and what
passed without being judged.
"""
KEPT = (UPDATE, CALL, ASKED, FOREIGN, FAILED, JUDGED, NOTE)


@dataclass(frozen=True)
class UpdateRow:
    """One line of the table that ends an update.

    Attributes:
        owner, name: whose golden it is and what it is called: test and check, or case and quantity.
        status: status of the old golden, such as `drift`; `new` if there was none.
        changed, total: tensors (or other leaves) that changed, and all of them.
        max_error, multiple: the largest change, and the largest in multiples of its tolerance.
        old, new: the values where the change is largest.
    """

    owner: str
    name: str
    status: str
    changed: int
    total: int
    max_error: float = 0.0
    multiple: float = 0.0
    old: str = ""
    new: str = ""


def send_update_row(node: pytest.Item, row: UpdateRow) -> None:
    """Send a row to be printed at the end of the session."""
    node.user_properties.append((UPDATE, _text(asdict(row))))


def send_calls(node: pytest.Item, calls: Iterable[Call]) -> None:
    """Send verdicts to the report of the session; only worth the space if a report is asked for."""
    for call in calls:
        node.user_properties.append((CALL, _text(call.to_json())))


@dataclass(frozen=True)
class ForeignRow:
    """A test of a replay by a user's own trainer: the reason a variant is unsupported, or the unrecorded quantity.

    Attributes:
        adapter: name of the trainer; empty for the engine of this package, which tells only of what is not possible.
    """

    adapter: str
    replay: str
    unsupported: str | None = None
    not_recorded: str | None = None


def send_foreign_row(node: pytest.Item, row: ForeignRow) -> None:
    """Send a row to be counted at the end of the session."""
    node.user_properties.append((FOREIGN, _text(asdict(row))))


def foreign_row(text: str) -> ForeignRow:
    """Return the row that `send_foreign_row` sent."""
    from regress.dump.canonical_json import loads

    return ForeignRow(**loads(text))


@dataclass(frozen=True)
class FailedRow:
    """A failing test of a replay.

    Attributes:
        replay: ``case/variant``.
        quantities: what selects each that failed, or could not be judged; see
            `regress.plugin.quantity_selection.selector`.
    """

    replay: str
    quantities: list[str]


def send_failed_row(node: pytest.Item, row: FailedRow) -> None:
    """Send a row for the last screen of the session."""
    node.user_properties.append((FAILED, _text(asdict(row))))


def send_judged_count(node: pytest.Item, quantities: int) -> None:
    """Send the number of quantities that a test of a golden case judged, for the last lines of the session."""
    node.user_properties.append((JUDGED, str(quantities)))


def failed_row(text: str) -> FailedRow:
    """Return the row that `send_failed_row` sent."""
    from regress.dump.canonical_json import loads

    return FailedRow(**loads(text))


def send_properties(node: pytest.Item, call: Call, replay: ReplayOutcome | None = None) -> None:
    """Add the test's gravest or closest verdict to its properties, if a JUnit file is written, which shows them.

    A failing test has the first divergence of its replay, and its cause, as well.

    See docs/reference/report.md.
    """
    if not node.config.getoption("xmlpath", None):  # else tests would send them for nobody
        return
    verdict = call.verdict
    found: dict[str, object] = {
        "regress_where": call.where,
        "regress_precision": call.precision,
        "regress_place": str(verdict.place),
        "regress_quantity": verdict.quantity,
        "regress_tensor": verdict.name,
        "regress_verdict": str(verdict.status),
        "regress_multiple": verdict.multiple,
        "regress_max_error": verdict.max_error,
        "regress_tolerance": verdict.tolerance,
        "regress_elements": verdict.count,
        "regress_beyond": verdict.over,
        "regress_worst": "" if verdict.worst is None else verdict.worst.where,
        "regress_reason": verdict.reason,
    }
    if not verdict.ok and replay is not None and replay.divergence is not None:
        from regress.report.verdict_text import headline

        found["regress_first_divergence"] = headline(replay.divergence.first, call.where)
        found["regress_cause"] = next((f"{one.cause} (rule {one.rule})" for one in replay.diagnoses), "")
    node.user_properties += [(name, str(value)) for name, value in found.items() if value != ""]


def _text(tree: Mapping[str, Any]) -> str:
    from regress.dump.canonical_json import dumps, plain

    return dumps(plain(tree, "row"))


def update_row(text: str) -> UpdateRow:
    """Return the row that `send_update_row` sent."""
    from regress.dump.canonical_json import loads

    return UpdateRow(**loads(text))


def received_call(text: str) -> Call:
    """Return the verdict that `send_calls` sent."""
    from regress.dump.canonical_json import loads
    from regress.report.verdict_entries import Call

    return Call.from_json(loads(text))
