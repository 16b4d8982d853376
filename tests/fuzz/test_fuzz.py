"""Readers under mutated inputs: one sentence or a result, never a traceback, a hang or a memory bomb.

``pytest tests/fuzz --fuzz-inputs 20000`` reads more of them; input ``n`` is the same everywhere, so a finding is seen
again with ``python -m tests.fuzz.child n n+1 1``.
"""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.fuzz.hunt import MEMORY, Hunt, hunt
from tests.fuzz.openers import OWN, entered_by_targets, openers
from tests.fuzz.targets import PLANTED, TARGETS, seeds

DEFAULT = 50
FOUND = (
    *(16, 31, 48, 52, 61, 88, 141, 142, 170, 178, 188, 193, 196, 211, 214),
    *(2966, 8157, 8775, 9015, 12455, 14776, 16966, 17789),
)
"""Inputs that once were defects."""


@pytest.mark.timeout(0)
def test_mutated_inputs_are_refused_in_one_sentence(request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--fuzz-inputs", default=None) or DEFAULT
    _require_none(hunt(0, count), count)


@pytest.mark.extended
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", FOUND)
def test_inputs_that_were_defects(number: int) -> None:
    _require_none(hunt(number, number + 1), 1)


@pytest.mark.extended
@pytest.mark.timeout(0)
def test_bugs_that_are_planted_are_found() -> None:
    """A traceback, a hang and a memory bomb: readers that have lost a guard."""
    raised = hunt(0, 60, ("planted_traceback",), patience=2).findings
    assert any("has no attribute 'position'" in found["defect"] for found in raised)
    stuck = hunt(130, 140, ("planted_hang",), patience=2).findings
    assert any(found["defect"] == "it hangs" and "open_whatever" in found["traceback"] for found in stuck)
    assert any(found["memory"] > MEMORY for found in hunt(0, 200, ("planted_memory",)).findings)


def test_every_kind_has_a_seed_in_the_tree() -> None:
    assert all(seeds().values())
    assert {*seeds()} == {*TARGETS, *PLANTED}


def test_reasons_are_about_functions_that_are_there() -> None:
    """Catches a function that was renamed, and with it a reason that would cover another one of the old name."""
    assert sorted(OWN.keys() - openers().keys()) == []


@pytest.mark.extended
@pytest.mark.timeout(0)
def test_every_function_that_opens_a_file_has_a_target_or_a_reason(
    tmp_path: Path,
) -> None:
    """Targets on whole seeds enter every function that opens or parses, but for those that are listed with a reason."""
    # what an earlier test has cached, or a thread that it has started, would not be seen
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        seen = fresh.submit(entered_by_targets, tmp_path).result()
    known = openers()
    entered = {name for name, (path, first, _) in known.items() if (path, first) in seen}
    unreached = sorted(known.keys() - entered - OWN.keys())
    assert not unreached, "\n".join(unreached)
    assert len(entered) > 80


def _require_none(found: Hunt, count: int) -> None:
    print(f"{found.read} inputs, {found.refused} refused, at most {found.memory >> 20} MiB more")
    assert found.read == count
    assert not found.findings, json.dumps(found.findings[:5], indent=1)
    assert count < 50 or found.refused > count / 2
