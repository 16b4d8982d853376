"""Golden cases as tests: what is collected, what runs once, and what a session says that cannot compare."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.conftest import GoldenProject, failed_quantities, judged

CASE, TESTS, QUANTITIES = GoldenProject.CASE, GoldenProject.TESTS, GoldenProject.QUANTITIES
GOLDEN = Path(__file__).parents[2] / "golden"
SEMANTICS = "--regress-tier=semantics"
DRIFT = {"type": "is_loss_debug", "tensor": "advantages", "factor": 1.001}
"""A fault that only the advantages show, and those of step 0 are all zero."""


def test_a_replay_runs_once_for_all_of_its_tests(everywhere: Any) -> None:
    everywhere.suite('variants="base,pad8"')
    result = everywhere.passes(SEMANTICS, "-k", "base", count=TESTS)
    assert judged(result) == f"{QUANTITIES} quantities judged in {TESTS} tests"
    assert everywhere.replayed() == [f"{CASE}/base"]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("refuse", "dr_grpo/base cannot be replayed: the policy is gone; bring it back"),
        (
            "break",
            "dr_grpo/base cannot be replayed: ZeroDivisionError: no tokens, raised at *conftest.py:* in",
        ),
    ],
)
def test_a_replay_that_fails_fails_once(stubbed: Any, how: str, says: str) -> None:
    stubbed.suite('variants="base,adamw-fused"')
    stubbed.fault(base=how)
    result = stubbed.run(SEMANTICS)
    result.assert_outcomes(failed=TESTS, passed=TESTS)
    result.stdout.fnmatch_lines([f"*{says}*"])
    result.stdout.no_fnmatch_line("*Traceback*")
    assert stubbed.replayed() == [f"{CASE}/adamw-fused", f"{CASE}/base"]


def test_a_damaged_case_is_one_failing_test(stubbed: Any) -> None:
    path = stubbed.folder / "golden" / CASE / "model" / "config.json"
    path.write_text(path.read_text() + " ")
    stubbed.suite(f'cases="{CASE}", variants="base"')
    result = stubbed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [f"* test_golden?{CASE}/damaged? *", f"{path} is not the file that was recorded: restore it *"]
    )


@pytest.mark.parametrize("update", [(), ("--update-golden",)], ids=["compared", "updated"])
def test_damaged_golden_values_are_named_by_every_test_that_needs_them(stubbed: Any, update: Any) -> None:
    path = stubbed.folder / "golden" / CASE / "truth" / "step_000001" / "gradient.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = stubbed.goldens()
    result = stubbed.run(SEMANTICS, *update)
    result.assert_outcomes(failed=TESTS)
    result.stdout.fnmatch_lines(
        [f"{CASE}/base cannot be replayed: *{path} has * bytes, but * were recorded: restore *"]
    )
    assert stubbed.goldens() == before


def test_a_damaged_case_is_no_matter_of_tests_of_others(stubbed: Any) -> None:
    shutil.copytree(GOLDEN / CASE, stubbed.folder / "golden" / "other")
    (stubbed.folder / "golden" / "other" / "case.yaml").write_text("reason: [")
    stubbed.suite(f'cases="{CASE}", variants="base"')
    stubbed.passes(SEMANTICS, count=TESTS)
    stubbed.suite('cases="other", variants="base"')
    stubbed.run(SEMANTICS).assert_outcomes(failed=1)


def test_a_case_without_a_recording_fails(stubbed: Any) -> None:
    (stubbed.folder / "golden" / CASE / "manifest.json").unlink()
    result = stubbed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"* is not recorded yet: run regress golden record {CASE}"])


def test_no_case_at_all_fails(stubbed: Any) -> None:
    result = stubbed.run("--golden-dir=nowhere")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([
        f"{stubbed.folder}/nowhere holds no golden case, so nothing would be compared: correct --golden-dir, or record "
        "a case with regress golden record"
    ])  # fmt: skip


@pytest.mark.parametrize(
    ("mark", "says"),
    [
        ('"base"', "the marker regress takes cases= and variants=, each a pattern or several with commas"),
        ('variant="base"', "the marker regress takes cases= and variants=, each a pattern or several with commas"),
        ('variants=["base"]', "the marker regress takes cases= and variants=, each a pattern or several with commas"),
        ('variants="bse"', "did you mean base? 'bse' matches none of base, left"),
        ('cases="dense"', f"'dense' matches none of {CASE}; give a name, or a pattern"),
        (
            'variants="ep2"',
            "no variant of 'ep2' is replayed on a case of '*', so nothing would be compared; ep2 have",
        ),
    ],
)  # fmt: skip
def test_a_marker_that_cannot_be_meant_stops_the_collection(stubbed: Any, mark: str, says: str) -> None:
    stubbed.suite(mark)
    result = stubbed.run()
    result.assert_outcomes(errors=1)
    assert f"test_suite.py::test_golden: {says}" in result.stdout.str()
    result.stdout.no_fnmatch_line("*regress/plugin*")  # our own frames tell nobody anything


@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("[3]", "pytest_regress_variants gave 3; give a list of regress.replay.variant.Variant"),
        ("Variant('mine', 'x')", "gave [*Variant(name='mine'*]; give a list of regress.replay.variant.Variant"),
        ("[Variant('a/b', 'x')]", "pytest_regress_variants: variant 'a/b' cannot stand in a test id"),
        ("[Variant('base-fp32', 'x')]", "variant 'base-fp32' ends with -fp32, which test ids add for the precision"),
        ("[Variant('a', 'x'), Variant('a', 'y')]", "two variants are called 'a'; rename one"),
        ("[Variant('a', 'x', precisions=('bitwise',), bitwise_reference='b')]", "'b', which is not a variant"),
    ],
)  # fmt: skip
def test_variants_that_cannot_be_meant_stop_the_collection(stubbed: Any, hook: str, says: str) -> None:
    stubbed.write(
        "conftest.py",
        "from regress.replay.variant import Variant\n"
        f"def pytest_regress_variants(config):\n    return {hook}\n",
    )
    result = stubbed.run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [f"*{says}*".replace("[", "[[]", 1) if says.startswith("gave [") else f"*{says}*"]
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"batching.micro_batch_size": "four"}, "batching={'micro_batch_size': 'four'} with trainer={}"),
        ({"batching.pad_to_multiple_of": 0}, "cannot be planned (ZeroDivisionError"),
        ({"batching.row_order": "random"}, "row_order='random' is none of given"),
        ({"batching": {}, "trainer.epochs": 2}, "leave trainer.epochs and trainer.mini_batch_size to the case"),
    ],
)  # fmt: skip
def test_overrides_that_cannot_be_planned_are_one_failing_test(
    stubbed: Any, overrides: dict[str, object], says: str
) -> None:
    stubbed.write(
        "conftest.py",
        "from regress.replay.variant import Variant\n"
        f"def pytest_regress_variants(config):\n    return [Variant('mine', 'x', {overrides!r})]\n",
    )
    stubbed.suite('variants="mine"')
    result = stubbed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*test_golden?{CASE}/mine/unplanned?*"])
    assert says in result.stdout.str()


def test_overrides_that_the_engine_refuses_fail_every_test_with_its_words(stubbed: Any) -> None:
    stubbed.write("conftest.py", "")
    stubbed.write(
        "pyproject.toml", '[tool.regress.variants.mine]\nwhy = "x"\noverrides.batching.layot = "packed"\n'
    )
    stubbed.suite('variants="mine"')
    result = stubbed.run()
    result.assert_outcomes(failed=TESTS)
    result.stdout.fnmatch_lines(
        [f"{CASE}/mine cannot be replayed: *batching.layot*nearest valid key*layout*"]
    )


def test_dumps_are_kept_below_the_name_of_their_replay(stubbed: Any) -> None:
    stale = stubbed.write("kept/dr_grpo/base-fp32/dump/of_an_earlier_run.txt", "")
    other = stubbed.write("kept/dr_grpo/packed/dump/of_an_earlier_run.txt", "")
    result = stubbed.run("--regress-tier=bitwise", "--regress-keep-dumps=kept", "-k", "trajectory")
    result.assert_outcomes(passed=1, deselected=2)
    assert judged(result) == "3 quantities judged in 1 test"
    for name in ("base-fp32", "base-bitwise"):  # the bitwise reference, too
        assert (stubbed.folder / "kept" / CASE / name / "dump" / "manifest.json").is_file()
    assert not stale.exists()
    assert other.exists()


def test_dumps_are_not_kept_among_goldens(stubbed: Any) -> None:
    stubbed.refuses(
        "--regress-keep-dumps=golden/dumps",
        says="dumps cannot be kept in FOLDER/golden/dumps, because that is of the golden directory FOLDER/golden: "
        "choose another folder",
    )


def test_a_failing_replay_reaches_the_report(everywhere: Any) -> None:
    """Integers, and what has no tolerance, fail by an infinite multiple, which JSON does not know."""
    everywhere.fault(base={"type": "batch_inputs", "tensor": "position_ids", "factor": 2})
    result = everywhere.run(SEMANTICS, "--regress-report=out", "-k", "step0")
    assert failed_quantities(result) == ["step0/rank0/micro0/batch_inputs"]
    assert judged(result) == f"{QUANTITIES // 3} quantities judged in {TESTS} tests"
    rows = json.loads((everywhere.folder / "out" / "report.json").read_text())["headroom"]
    counts = {row["quantity"]: (row["passed"], row["failed"]) for row in rows}
    assert counts["batch_inputs"] == (1, 1)
    assert counts["log_probs"] == (1, 0)
    assert "mask: batch_inputs position_ids" in (everywhere.folder / "out" / "index.html").read_text()


def test_the_environment_is_looked_at_once_for_all_failures(
    stubbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regress.replay import case_truth

    calls: list[str] = []

    def counted(case: Any) -> Any:
        calls.append(case.name)
        return case.manifest.provenance | {"versions": {}}

    monkeypatch.setattr(case_truth, "provenance_of", counted)
    stubbed.fault(base=DRIFT)
    result = stubbed.run(SEMANTICS, "-k", "advantages")
    assert failed_quantities(result) == [f"step{step}/rank0/micro0/advantages" for step in range(3)]
    result.stdout.fnmatch_lines(["environment: recorded with torch *, now (not installed)"])
    assert calls == [CASE]


def test_a_damaged_case_is_not_replayed_for_anybody(stubbed: Any) -> None:
    path = stubbed.folder / "golden" / CASE / "model" / "config.json"
    path.write_text(path.read_text() + " ")
    stubbed.write("test_suite.py", f"def test_own(regress):\n    regress.replay('{CASE}', 'base')\n")
    result = stubbed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*config.json is not the file that was recorded*"])
    assert stubbed.replayed() == []
