"""Message of a failing replay test."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from regress.credential_redaction import redacted
from regress.plugin.pytest_options import reproduce, said
from regress.plugin.quantity_selection import selector
from regress.plugin.replay_parts import ReplayPart
from regress.plugin.session_settings import SETTINGS
from regress.report.verdict_entries import link
from regress.report.verdict_text import explain, headline

if TYPE_CHECKING:
    from regress.golden.golden_case import GoldenCase
    from regress.replay.replay_outcome import Outcome, ReplayOutcome
    from regress.replay.test_matrix import Item

_ENVIRONMENT = pytest.StashKey[dict[str, list[str]]]()


def explain_replay(
    item: Item,
    part: ReplayPart,
    outcome: Outcome,
    replay: ReplayOutcome,
    node: pytest.Item,
    *,
    updates: bool = True,
) -> tuple[str, str]:
    """Return the first line and the details of a failing quantity of a test.

    Args:
        updates: False for values of a user's own trainer, which cannot become golden. Those that break an invariant
            cannot either: no update is advised that would be refused.
    """
    updates = updates and not any(verdict.quantity == "invariants" for verdict in replay.failed)
    details = explain(
        outcome.failed,
        where=item.id,
        divergence=replay.divergence,
        diagnoses=replay.diagnoses,
        environment=environment_differences(item.replay.case, node.config),
        commands=commands(item, part, node, updates=updates) | _report(item, outcome, node),
    )
    return headline(outcome.failed[0], item.replay.name), details


def _report(item: Item, outcome: Outcome, node: pytest.Item) -> dict[str, str]:
    """Return the link to this test in the report of the session."""
    folder = node.config.stash[SETTINGS].report
    return {} if folder is None else {"report": link(folder, item.replay.name, outcome.failed[0])}


def environment_differences(case: GoldenCase, config: pytest.Config) -> list[str]:
    """Return the differences from the environment of the recording; computed once per case, as git takes its time."""
    found = config.stash.setdefault(_ENVIRONMENT, {})
    if case.name not in found:
        from regress.golden.golden_provenance import differences
        from regress.replay.case_truth import provenance_of

        now = provenance_of(case)
        found[case.name] = [] if case.manifest is None else differences(case.manifest.provenance, now)
    return found[case.name]


def commands(item: Item, part: ReplayPart, node: pytest.Item, *, updates: bool = True) -> dict[str, str]:
    """Return the commands that repeat this test, keep its dump, and accept new values if an update can."""
    here = selector(node, part, item)
    again = reproduce(node.config, node.nodeid, here)
    found = {"reproduce": again, "keep the dump": f"{again} --regress-keep-dumps"}
    if updates and item.quantity != "trajectory" and item.replay.precision != "bitwise":
        run = redacted(shlex.join(["pytest", *said(node.config)]))
        quantity = here.rpartition("/")[2]
        found["update"] = f"{run} --update-golden -k {shlex.quote(f'[{item.replay.name}/ and /{quantity}')}"
    return found
