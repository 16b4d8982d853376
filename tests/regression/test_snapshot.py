"""The judge says of every fault, and of healthy replays, what it said when the snapshot was taken.

It says the same of a dump that it knows nothing of but what lies in it, beside the golden case or another dump.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import snapshot

from regress.compare.diagnosis.probable_cause import UNKNOWN
from regress.dump.dump_reader import DumpReader

KNOWN: dict[str, dict[str, Any]] = json.loads(snapshot.FILE.read_text())
ALL = snapshot.subjects()
BY_DEFAULT = (
    "ratio_inverted-dense-mbs4",
    "healthy-dapo-packed-dynamic",
)
"""Rows of the terms of the loss, and of a healthy replay."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[snapshot.Subject, int | None], DumpReader]:
    """``good(one, steps)``: the healthy replay beside a subject, which runs once."""
    return cache(lambda one, steps: one.dump(tmp_path_factory.mktemp("good") / "dump", steps=steps))


def rows() -> list[Any]:
    rest = pytest.mark.extended
    return [pytest.param(one, id=one.name, marks=() if one.name in BY_DEFAULT else rest) for one in ALL]


def counts(row: dict[str, Any], known: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Numbers of verdicts on what there was when the snapshot was taken.

    Stages that are new are covered, too, and invariants that are new hold.
    """
    rest = {name: found for name, found in row["counts"].items() if name in known["counts"]}
    wrong = {
        name: {status: count for status, count in rest[name].items() if status != "ok"}
        for name in ("coverage", "invariants")
        if name in rest
    }
    return {**rest, **wrong}


SAME = ("first", "held", "patterns", "rules")
FROM_THE_CASE = ("formula", "microbatches", "samples")
"""Patterns that may come from facts which a replay hands to the judge beside the golden values."""
OF_BOTH_DUMPS = {"everywhere"}
"""Patterns that need all places of both sides, which golden values do not have."""
GENERAL = {"accumulation": {"gradients", "backward-of-a-module"}}
"""Cause that gradients of microbatches prove -> those that contain it, where nothing tells such gradients."""
COUNTED_OTHERWISE = {"no-update", "update-without-a-gradient"}
"""Causes of a counter of updates that take the golden one for right; of two dumps either may be."""
WITHOUT_A_PLAN = {
    "microbatches_swapped_at_the_end-tied-pp2-mbs4": "coverage forward_data coverage at step0/rank1/micro0"
}
"""Fault -> first divergence, where a dump says itself which samples a microbatch has, and a replay knows it better."""


def require_alike(found: dict[str, Any], name: str, known: dict[str, Any], *, trusted: bool) -> None:
    """A comparison of dumps says what a replay says, but for what only the case, or a plan, proves."""
    if name in WITHOUT_A_PLAN:
        assert (found["first"], found["rules"]) == (WITHOUT_A_PLAN[name], [UNKNOWN])
        return
    assert [found.get(key) for key in ("first", "held")] == [known.get(key) for key in ("first", "held")]
    seen, all_of = ({*row.get("patterns", ())} for row in (found, known))
    assert seen - OF_BOTH_DUMPS <= all_of
    lost = {pattern.split(":")[0] for pattern in all_of - seen}
    assert lost <= {*FROM_THE_CASE}
    rules, expected = {*found.get("rules", ())}, {*known.get("rules", ())}
    if lost:
        general = set().union(*(GENERAL.get(rule, set()) for rule in expected if "microbatches" in lost))
        assert rules <= expected | {UNKNOWN} | general
    elif not trusted and "/step " in known.get("first", ""):
        assert rules == expected - COUNTED_OTHERWISE | {"step-counter"}
    else:
        assert found.get("rules") == known.get("rules")


@pytest.mark.parametrize("one", rows())
def test_it_says_what_it_said_whichever_way_it_is_asked(
    one: snapshot.Subject, good: Callable[[snapshot.Subject, int | None], DumpReader], tmp_path: Path
) -> None:
    known = KNOWN[one.name]
    dump = one.dump(tmp_path / "bad", steps=known["steps"])
    scene, verdicts = snapshot.judged(one, dump)
    found = snapshot.told(verdicts, scene)
    assert {key: found.get(key) for key in (*SAME, "broken")} == {
        key: known.get(key) for key in (*SAME, "broken")
    }
    assert counts(found, known) == counts(known, known)
    healthy = good(replace(one, fault=None), known["steps"])
    for golden in (f"golden:{snapshot.GOLDEN / one.case}", str(healthy.folder)):
        scene, verdicts = snapshot.compared(golden, str(dump.folder))
        found = snapshot.told(verdicts, scene)
        require_alike(found, one.name, known, trusted=golden.startswith("golden:"))


def test_the_snapshot_has_every_fault_and_no_other() -> None:
    assert {*KNOWN} == {one.name for one in ALL}
    assert {*KNOWN} >= {*BY_DEFAULT}
    assert len(KNOWN) >= 90
    broken = [row for name, row in KNOWN.items() if not name.startswith("healthy")]
    assert all("first" in row for row in broken)
    assert all(
        set(row["counts"][quantity]) == {"ok"}
        for name, row in KNOWN.items()
        if name.startswith("healthy")
        for quantity in row["counts"]
    )


def test_an_inverted_ratio_is_an_exchange_of_old_and_new() -> None:
    row = KNOWN["ratio_inverted-dense-mbs4"]
    assert row["first"].startswith("ratio prob_ratio drift at step0/")
    assert row["rules"][0] == "ratio-inverted"
