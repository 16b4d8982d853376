"""What a failing replay test says."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from regress.report.text import explain, headline

if TYPE_CHECKING:
    import pytest

    from regress.golden.case import GoldenCase
    from regress.replay.matrix import Item
    from regress.replay.outcome import Outcome, ReplayOutcome


def explain_replay(item: Item, outcome: Outcome, replay: ReplayOutcome, node: pytest.Item) -> tuple[str, str]:
    """The first line and the details of a failing test."""
    details = explain(
        outcome.failed,
        where=item.id,
        others=[verdict for verdict in replay.failed if verdict not in outcome.failed],
        environment=environment_differences(item.replay.case),
        commands=commands(item, node),
    )
    return headline(outcome.failed[0], item.replay.name), details


def environment_differences(case: GoldenCase) -> list[str]:
    """What of the recording's environment is another one now."""
    from regress.golden.provenance import differences
    from regress.replay.record import provenance_of

    return [] if case.manifest is None else differences(case.manifest.provenance, provenance_of(case))


def commands(item: Item, node: pytest.Item) -> dict[str, str]:
    """How to repeat this test alone, with its dump kept, and how to accept the new values."""
    test = shlex.quote(node.nodeid)
    case, quantity = item.replay.case.name, item.quantity
    expression = shlex.quote(f"{case}/base and {quantity}")
    return {
        "reproduce": f"pytest {test}",
        "keep the dump": f"pytest {test} --regress-keep-dumps",
        "update": f"pytest --update-golden -k {expression}",
    }
