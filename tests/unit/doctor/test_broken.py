"""Every prepared broken checkpoint: what is said of it, what is repaired, and that nothing else is touched."""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from tests.unit.doctor.broken import ASIDE, BROKEN, HEALTHY, LEFT, REPAIRED, Broken
from tests.unit.doctor.builder import CONFIG, Run

BY_NAME = [pytest.param(case, id=case.name) for case in BROKEN]


def doctor(run: Run, case: Broken, *options: str) -> Result:
    overrides = [*CONFIG, f"output_dir={run.folder}", *case.overrides] if case.overrides else []
    arguments = ["doctor", str(run.folder), *overrides, *options, "--json"]
    result = CliRunner().invoke(main, arguments, env=dict(case.environ))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def found(result: Result) -> dict[str, str]:
    issues = json.loads(result.stdout)["issues"]
    for issue in issues:
        assert issue["message"].count("\n") == 0
        assert ";" in issue["message"] or issue["fix_suggestion"], "names no remedy"
    return {issue["type"]: issue["severity"] for issue in issues}


def prepared(folder: Path, case: Broken) -> Run:
    run = Run(folder / "run", lora=case.lora)
    case.damage(run)
    return run


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in HEALTHY])
def test_nothing_is_found_in_a_healthy_run(tmp_path: Path, case: Broken) -> None:
    run = prepared(tmp_path, case)
    before = run.files()
    result = doctor(run, case)
    assert found(result) == {}
    assert result.exit_code == 0
    assert json.loads(doctor(run, case, "--auto-fix").stdout)["applied_fixes"] == []
    assert run.files() == before
    assert not (run.folder / ".regress-doctor").exists()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("case", BY_NAME)
def test_the_defect_is_named_with_its_severity(tmp_path: Path, case: Broken) -> None:
    run = prepared(tmp_path, case)
    before = run.files()
    result = doctor(run, case)
    assert found(result) == case.finds
    assert result.exit_code == int(any(severity != "low" for severity in case.finds.values()))
    assert run.files() == before, "an examination changed something"
    assert not (run.folder / ".regress-doctor").exists()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("case", BY_NAME)
def test_a_repair_leaves_all_else_as_it_was(tmp_path: Path, case: Broken) -> None:
    run = prepared(tmp_path, case)
    before = run.files()
    repaired = doctor(run, case, "--auto-fix")
    after = run.files()

    if case.after == LEFT:
        assert after == before
        assert found(repaired) == case.finds
        return
    assert after != before
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    allowed = case.changed if case.after == REPAIRED else ("checkpoint-4", "broken-checkpoint-4")
    strangers = [
        name for name in changed if not any(fnmatch(name, p) or fnmatch(name, f"{p}/*") for p in allowed)
    ]
    assert not strangers, "a repair touched what it does not concern"
    left = found(repaired)
    assert left == ({} if case.after == REPAIRED else {"tracking_step_offset": "low"})
    assert repaired.exit_code == 0

    assert found(doctor(run, case)) == left
    assert json.loads(doctor(run, case, "--auto-fix").stdout)["applied_fixes"] == []
    assert run.files() == after, "a second repair changed something"

    undone = CliRunner().invoke(main, ["doctor", str(run.folder), "--restore"])
    assert undone.exit_code == 0, undone.output
    assert run.files() == before, "undoing does not restore every byte"


def test_every_case_is_listed_once() -> None:
    names = [case.name for case in BROKEN]
    assert len(names) == len(set(names)) >= 30
    assert {case.after for case in BROKEN} == {REPAIRED, ASIDE, LEFT}
