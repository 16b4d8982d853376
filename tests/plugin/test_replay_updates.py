"""Updates of golden cases: what is selected, what is refused, and what is written at the end of a session."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from regress.golden.case_update import commit
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_verification import verify
from tests.plugin.conftest import GoldenProject, failed_quantities, judged

CASE, TESTS, QUANTITIES = GoldenProject.CASE, GoldenProject.TESTS, GoldenProject.QUANTITIES
GOLDEN = Path(__file__).parents[2] / "golden"
SEMANTICS = "--regress-tier=semantics"
GRADIENT = {"type": "gradient", "tensor": "model.norm.weight", "factor": 0.999}
"""A fault that breaks no invariant, so that its values can become golden."""
DRIFT = {"type": "is_loss_debug", "tensor": "advantages", "factor": 1.001}
"""A fault that only the advantages show, and those of step 0 are all zero."""


def changed_truth(before: Any, after: Any) -> set[tuple[str, str]]:
    """Updates and quantities that differ between two manifests."""
    rows = [
        {(where, q): entry for where, row in m.truth.items() for q, entry in row.items()}
        for m in (before, after)
    ]
    return {key for key in rows[0].keys() | rows[1].keys() if rows[0].get(key) != rows[1].get(key)}


@pytest.mark.extended
def test_a_quantity_that_was_not_recorded_fails_the_coverage_until_it_is_added(stubbed: Any) -> None:
    recorded = stubbed.manifest()
    gone = {where: {"ratio": None} for where in recorded.truth}
    commit(stubbed.folder / "golden" / CASE, truth=gone, provenance=recorded.provenance)
    result = stubbed.run(SEMANTICS)
    assert failed_quantities(result) == [f"step{step}/coverage" for step in range(3)]
    assert judged(result) == f"{QUANTITIES - 3} quantities judged in {TESTS} tests"
    result.stdout.fnmatch_lines([f"extra: ratio prob_ratio: *({CASE}/base/step0/rank0/micro0)"])
    assert stubbed.run(SEMANTICS, "--update-golden").ret == 0
    found = {where: set(row) for where, row in stubbed.manifest().truth.items()}
    assert found == {where: set(row) for where, row in recorded.truth.items()}
    stubbed.passes(SEMANTICS, count=TESTS)


@pytest.mark.extended
def test_a_tensor_that_is_gone_fails_until_it_is_removed(stubbed: Any) -> None:
    import numpy as np

    recorded = stubbed.manifest()
    ghost = {"step_000001": {"gradient": {"model.ghost.weight": np.ones(3)}}}
    commit(stubbed.folder / "golden" / CASE, truth=ghost, provenance=recorded.provenance)
    result = stubbed.run(SEMANTICS)
    assert failed_quantities(result) == ["step1/rank0/gradient"]
    assert judged(result) == f"{QUANTITIES} quantities judged in {TESTS} tests"
    result.stdout.fnmatch_lines([f"missing: gradient model.ghost.weight: *({CASE}/base/step1/rank0)"])
    assert stubbed.run(SEMANTICS, "--update-golden").ret == 0
    assert stubbed.manifest().truth == recorded.truth


ID = f"test_suite.py::test_golden[{CASE}/base/rank0/micro0]"


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        (["-k", "step1 and advantages"], [1]),
        (["-k", "advantages or entropy"], [0, 1, 2]),
        ([ID], [0, 1, 2]),
        ([ID, "-k", "step1/"], [1]),
        ([ID.replace("/micro0", "")], []),
        (["--lf", "-k", "step2"], [2]),
        (["-k", "log_probs"], []),
        (["-k", "nothing_at_all"], []),
        ([], [0, 1, 2]),
    ],
    ids=["k", "k-or", "id", "id-k", "other-id", "lf", "other", "nothing", "all"],
)
def test_an_update_changes_what_the_selected_tests_are_about(
    stubbed: Any, selection: list[str], steps: list[int]
) -> None:
    if "--lf" in selection:
        stubbed.fault(base=DRIFT | {"from": 2})
        stubbed.run(SEMANTICS)
    stubbed.fault(base=DRIFT)
    before = stubbed.manifest()
    result = stubbed.run(SEMANTICS, "--update-golden", *selection)
    assert result.ret in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    expected = {(f"step_00000{step}", "advantages") for step in steps}
    assert changed_truth(before, stubbed.manifest()) == expected


@pytest.mark.extended
def test_the_update_that_a_failure_advises_is_the_one_that_mends_it(stubbed: Any) -> None:
    import shlex

    stubbed.fault(base=GRADIENT)
    result = stubbed.run(SEMANTICS, "--golden-dir=golden", "-k", "step0 and /gradient]")
    assert failed_quantities(result) == ["step0/rank0/gradient"]
    test = f"'test_suite.py::test_golden?{CASE}/base/rank0?'"
    result.stdout.fnmatch_lines(
        [f"reproduce: pytest --golden-dir=golden {SEMANTICS} {test} -k '/step0/rank0/gradient?'"]
    )
    (line,) = (line for line in result.outlines if line.startswith("update: "))
    assert line == (
        f"update: pytest --golden-dir=golden {SEMANTICS} --update-golden -k '[{CASE}/base/ and /gradient]'"
    )
    before = stubbed.manifest()
    assert judged(stubbed.run(*shlex.split(line)[2:])) == "3 quantities judged in 1 test"
    assert changed_truth(before, stubbed.manifest()) == {(f"step_00000{n}", "gradient") for n in range(3)}
    assert judged(stubbed.run("-k", f"[{CASE}/base/ and /entropy]")) == "3 quantities judged in 1 test"


def test_no_update_is_advised_where_none_would_help(stubbed: Any) -> None:
    stubbed.write("stub.json", json.dumps({"checkpointing": DRIFT}))
    stubbed.suite('variants="checkpointing"')
    result = stubbed.run("--regress-tier=bitwise", "-k", "step1 and advantages")
    assert failed_quantities(result) == ["step1/rank0/micro0/advantages"]
    result.stdout.fnmatch_lines(["drift: advantages:*", "reproduce: pytest *"])
    result.stdout.no_fnmatch_line("update: *")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("quantity", ["entropy", "invariants"])
def test_no_update_is_advised_that_would_be_refused(stubbed: Any, quantity: str) -> None:
    """An entropy that is not that of the recorded logits, which no update makes golden."""
    stubbed.fault(base={"type": "forward_data", "tensor": "entropy", "factor": 0.999})
    selection = (SEMANTICS, "-k", f"step0 and /{quantity}]")
    result = stubbed.run(*selection)
    assert len(failed_quantities(result)) == 1
    result.stdout.fnmatch_lines(["reproduce: pytest *"])
    result.stdout.no_fnmatch_line("update: *")
    before = stubbed.goldens()
    result = stubbed.run(*selection, "--update-golden")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        f"{CASE}/base cannot be replayed: the update is refused: case {CASE} cannot become golden, because what is "
        "true of every correct update is not true of this one (given_logits at step0: *"
    ])  # fmt: skip
    assert stubbed.goldens() == before


@pytest.mark.extended
def test_a_case_that_changed_under_an_update_is_told_and_nothing_is_lost(stubbed: Any) -> None:
    shutil.copytree(GOLDEN / CASE, stubbed.folder / "golden" / "zzz")
    stubbed.fault(base=DRIFT)
    stubbed.write(
        "test_z.py",
        f"def test_edits():\n    with open('golden/{CASE}/case.yaml', 'a') as file:\n        file.write('# edited')\n",
    )
    before = stubbed.manifest()
    result = stubbed.run(SEMANTICS, "--update-golden")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=2 * TESTS + 1)
    result.stdout.fnmatch_lines([
        f"regress: the update of {CASE} was not written: *case.yaml is not the file that was recorded*",
        "*golden update*",
        "*zzz*advantages*drift*3 of 3*",
    ])  # fmt: skip
    (stubbed.folder / "golden" / CASE / "case.yaml").write_bytes((GOLDEN / CASE / "case.yaml").read_bytes())
    assert stubbed.manifest() == before


@pytest.mark.one_in(2)
@pytest.mark.parametrize("end", ["pytest.exit('enough')", "pytest.exit('enough', returncode=7)"])
def test_a_session_that_is_ended_writes_no_case(stubbed: Any, end: str) -> None:
    stubbed.fault(base=DRIFT)
    stubbed.write("test_z.py", f"import pytest\ndef test_stop():\n    {end}\n")
    before = stubbed.goldens()
    result = stubbed.run(SEMANTICS, "--update-golden")
    if "7" in end:
        assert result.ret == 7  # for which pytest prints no summary
    else:
        result.stdout.fnmatch_lines(
            ["regress: no golden was written, because the session was interrupted: *"]
        )
    assert stubbed.goldens() == before


def test_an_update_that_fails_is_tried_once(stubbed: Any) -> None:
    stubbed.suite('variants="base,adamw-fused"')
    stubbed.fault(base="break")
    before = stubbed.goldens()
    result = stubbed.run(SEMANTICS, "--update-golden")
    result.assert_outcomes(failed=2 * TESTS)
    result.stdout.fnmatch_lines([
        "dr_grpo/adamw-fused cannot be replayed: the update is refused: ZeroDivisionError: no tokens*"
    ])  # fmt: skip
    # the replay itself, and the first of the two that would become golden
    assert Counter(stubbed.replayed()) == {f"{CASE}/adamw-fused": 1, f"{CASE}/base": 2}
    assert stubbed.goldens() == before


@pytest.mark.extended
def test_an_update_measures_with_the_scaled_tolerance(stubbed: Any) -> None:
    stubbed.fault(base=DRIFT)
    before = stubbed.manifest()
    only = (SEMANTICS, "--update-golden", "-k", "advantages")
    stubbed.passes(*only, "--regress-tolerance-scale=1e10", count=1)
    assert stubbed.manifest() == before
    assert stubbed.run(*only, "--regress-tolerance-scale=1e8").ret == 0
    assert stubbed.manifest() != before


def test_an_update_that_is_committed_is_whole_in_a_clone(
    stubbed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``git commit -am`` takes every file that an update changed, as it has the name that it had."""
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", *who, *command],
            cwd=stubbed.folder,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    checked = 'def test_value(regress):\n    regress.check("x", {value})\n'
    stubbed.write("test_value.py", checked.format(value=1.0))
    assert stubbed.run(SEMANTICS, "--update-golden").ret == 0
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "golden")):
        git(*command)
    stubbed.fault(base=GRADIENT)
    stubbed.write("test_value.py", checked.format(value=2.0))
    assert stubbed.run(SEMANTICS, "--update-golden").ret == 0
    state = git("status", "--porcelain", "golden").splitlines()
    assert {line[:2] for line in state} == {" M"}
    assert {line.rpartition("/")[2].rpartition(".")[2] for line in state} == {"json", "safetensors", "check"}
    git("commit", "-qam", "the gradient of the norm is smaller")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(stubbed.folder), str(clone)], check=True, timeout=60)
    assert verify(GoldenStore(clone / "golden")) == []
    shutil.rmtree(stubbed.folder / "golden")
    shutil.copytree(clone / "golden", stubbed.folder / "golden")
    stubbed.passes(SEMANTICS, count=TESTS + 1)
