"""`regress golden`: what it prints without a terminal, for people and programs, and its exit codes."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from regress.dump.coordinates import Coordinates
from regress.dump.formats import FORMATS
from regress.dump.record import Record
from regress.durable_files import write
from regress.errors import GoldenError
from regress.golden import GoldenStore, ToleranceEntry
from regress.golden.case_update import commit
from regress.golden.stored_checks import StoredCheck
from regress.golden.value_tree import Tree
from tests.unit.golden.schema_1 import downgrade

MEASURED = {
    "log_probs": {"float32": ToleranceEntry(2e-6, 0.0, {"kappa": 4}, "4 times the response to one ulp")}
}


@pytest.fixture
def store(recorded: Path, provenance: Any, monkeypatch: pytest.MonkeyPatch) -> GoldenStore:
    commit(recorded, tolerances=MEASURED, provenance=provenance)
    monkeypatch.chdir(recorded.parent.parent)
    return GoldenStore("golden")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["golden", *arguments])


def says(code: int, *arguments: str) -> list[str]:
    result = run(*arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    assert "Traceback" not in result.output
    return result.stdout.splitlines()


def refusal(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output + repr(result.exception)
    return result.stderr.splitlines()[-1]


def parsed(code: int, *arguments: str) -> Any:
    return json.loads("\n".join(says(code, *arguments, "--json")))


def test_help_and_its_examples() -> None:
    """Every example in a help text is a command with that name and those options."""
    shown = ["list", "show", "verify", "prune"]
    text = "\n".join(says(0, "--help"))
    assert all(name in text for name in shown)
    for name in shown:
        examples = [shlex.split(x, comments=True) for x in says(0, name, "-h") if x.startswith("  regress ")]
        assert examples, name
        for example in examples:
            assert example[:3] == ["regress", "golden", example[2]]
            assert example[2] in shown


def test_list(store: GoldenStore, make_inputs: Any) -> None:
    make_inputs(store.root / "young")
    lines = says(0, "list")
    assert lines[0].split() == ["case", "updates", "bytes", "state", "reason"]
    assert lines[2].split()[:2] == ["tiny", "3"]
    assert lines[2].split()[3:] == ["recorded", "The", "smallest", "case", "there", "can", "be."]
    assert "not recorded" in lines[3]
    rows = parsed(0, "list")
    assert [row["case"] for row in rows] == ["tiny", "young"]
    assert rows[0]["bytes"] > rows[1]["bytes"] == 0


def test_list_with_a_damaged_case(store: GoldenStore, make_inputs: Any) -> None:
    (make_inputs(store.root / "broken") / "manifest.json").write_text("{}")
    lines = says(1, "list")
    assert lines[2].split()[:4] == ["broken", "-", "-", "damaged"]
    assert "golden/broken/manifest.json is damaged" in lines[2]
    assert lines[3].startswith("tiny")


def test_list_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        refusal("list")
        == "error: golden is not a golden directory: give --golden-dir, or make one with pytest "
        "--update-golden or with golden/CASE/case.yaml"
    )
    (tmp_path / "golden").mkdir()
    assert says(0, "list") == ["golden holds no cases"]
    assert parsed(0, "list") == []


def test_show(store: GoldenStore) -> None:
    text = "\n".join(" ".join(line.split()) for line in says(0, "show", "tiny"))
    for words in (
        "tiny: The smallest case there can be.",
        "claims: kl",
        "config.algorithm.kl_coef: 0.001",
        "provenance.versions.torch: 2.13.0",
        "step_000000_update1 gradient 2 float64",
        "log_probs float32 2e-06 0 4 times the response to one ulp",
    ):
        assert words in text
    found = parsed(0, "show", "tiny")
    assert found["recipe"] == {"made": "by hand"}
    assert len(found["quantities"]) == 12
    assert found["tolerances"][0]["relative"] == 2e-6


def test_show_a_quantity(store: GoldenStore) -> None:
    lines = says(0, "show", "tiny", "gradient")
    assert lines[0].split() == ["update", "tensor", "dtype", "shape", "min", "max", "mean", "absmax", "l2"]
    assert len(lines) == 8
    assert parsed(0, "show", "tiny", "gradient")[0]["tensor"] == "lm_head.weight"
    assert refusal("show", "tiny", "kl") == (
        "error: golden/tiny has no 'kl': recorded is grad_norm, gradient, log_probs, optimizer"
    )


def test_show_an_unrecorded_case(store: GoldenStore, make_inputs: Any) -> None:
    make_inputs(store.root / "young")
    assert "not recorded yet: run regress golden record young" in says(0, "show", "young")


def test_verify(store: GoldenStore) -> None:
    assert says(0, "verify") == ["1 case: intact"]
    assert says(0, "verify", "tiny") == ["1 case: intact"]
    victim = next((store.root / "tiny" / "truth" / "step_000001").glob("gradient.*"))
    left = store.root / "tiny" / "truth" / "step_000001" / "loss.safetensors"
    left.touch()
    (store.root / "tiny" / "truth" / "notes.txt").touch()
    assert says(0, "verify")[-1] == "1 case: intact"
    size = victim.stat().st_size
    victim.write_bytes(b"")
    lines = says(1, "verify")
    assert lines == [
        f"damaged: tiny: {victim} has 0 bytes, but {size} were recorded: restore it from version control, or record "
        "the case again with regress golden record",
        f"note: tiny: {left} is left over from an update that was taken back or interrupted (a file of the case that "
        "its manifest does not name): remove what is left over with regress golden prune",
        "note: tiny: golden/tiny/truth/notes.txt is not a file of the case: move it away",
        "1 case: 1 damaged file",
    ]
    assert [row["damage"] for row in parsed(1, "verify")] == [True, False, False]
    assert "so there is no case 'moe'" in refusal("verify", "moe")


def test_an_update_that_git_took_back_is_one_line(store: GoldenStore) -> None:
    """``git restore golden`` leaves new quantities behind: a line for each of them hid everything else."""
    folder = store.root / "tiny" / "truth" / "step_000001"
    for number in range(43):
        (folder / f"loss_{number}.safetensors").touch()
    lines = says(0, "verify")
    assert len(lines) == 2
    assert lines[0].startswith(f"note: tiny: {folder / 'loss_0.safetensors'} is left over from an update ")
    assert "(43 files of the case that its manifest does not name)" in lines[0]
    says(0, "prune")
    assert says(0, "verify") == ["1 case: intact"]


def test_a_clone_with_other_line_endings_is_told_so(
    store: GoldenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git rewrites every text on checkout under core.autocrlf, unless .gitattributes forbids it."""
    case = store.root.resolve() / "tiny" / "case.yaml"
    before = case.read_bytes()
    case.write_bytes(before.replace(b"\n", b"\r\n"))
    told = (
        "golden/tiny/case.yaml has other line endings than it was recorded with, as git makes them where core.autocrlf "
        "is set: add the line '* -text' to .gitattributes of the golden directory, remove the case, and check it out "
        "again"
    )
    assert says(1, "verify")[0] == f"damaged: tiny: {told}"
    with pytest.raises(GoldenError, match=re.escape(told)):
        store.case("tiny")
    case.write_bytes(before.replace(b"\n", b"\r\n").replace(b"reason", b"leaves_out: []\r\nreason"))
    assert "is not the file that was recorded" in says(1, "verify")[0]
    case.write_bytes(before)

    origin = tmp_path / "origin"
    shutil.copytree(store.root.resolve(), origin / "golden")
    shutil.copy(Path(__file__).parents[3] / ".gitattributes", origin)
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    for command in (("init", "-q"), ("add", "-A"), (*who, "commit", "-qm", "golden")):
        subprocess.run(["git", *command], cwd=origin, check=True, timeout=60)
    clone = ["git", "clone", "-q", "-c", "core.autocrlf=true", str(origin), str(tmp_path / "clone")]
    subprocess.run(clone, check=True, timeout=60)
    monkeypatch.chdir(tmp_path / "clone")
    assert says(0, "verify") == ["1 case: intact"]


@pytest.mark.parametrize("name", ["diff", "review", "accept", "reject"])
def test_what_git_does_is_said(store: GoldenStore, name: str) -> None:
    assert refusal(name, "tiny", "grad*").startswith(
        "error: an update is in force once it is written, and nothing waits beside it: say git "
    )
    assert f"  {name} " not in run("--help").output


def test_cases_of_schema_1_are_migrated(store: GoldenStore, content: Any) -> None:
    """Truth files were named by their content, and compressed where that saved a block."""
    folder = store.root.resolve() / "tiny"
    before = content(folder)
    downgrade(folder)
    told = "golden/tiny/manifest.json is of schema 1, this release reads 2: run regress golden migrate"
    assert refusal("show", "tiny") == f"error: {told}"
    damaged = next(folder.rglob("gradient.*.gz"))
    whole = damaged.read_bytes()
    for broken in (whole[:-9], gzip.compress(bytes(2**20)), b"x"):
        damaged.write_bytes(broken)
        assert str(damaged.relative_to(folder)) in refusal("migrate")
    damaged.write_bytes(whole)
    assert says(0, "migrate") == ["migrated: tiny"]
    assert content(folder) == before
    assert says(0, "migrate") == ["nothing to migrate"]
    assert says(0, "verify") == ["1 case: intact"]


def check_file(value: float) -> Any:
    record = Record.of("loss", Coordinates(0), {"value": np.float64(value)})
    return FORMATS["safetensors"].encode(record)


def test_checks(store: GoldenStore) -> None:
    check = stored("test_a.py::test_it", "x", 1.0)
    write(store.root / check.file, [check.encode()])
    assert says(0, "verify") == ["1 case, 1 stored check: intact"]
    (store.root / check.file).write_bytes(b"rubbish")
    assert says(1, "verify")[0].startswith(f"damaged: checks: golden/{check.file}")


def stored(test: str, name: str, value: object) -> StoredCheck:
    return StoredCheck(test, name, Tree.of(value), 1e-3, 0.0, "float32 sums", {})


def test_checks_go_by_test_and_name(store: GoldenStore) -> None:
    """Nobody has to know what a stored file is called."""
    one = stored("test_a.py::test_it[x]", "loss", {"a": np.arange(3.0), "b": "text"})
    two = stored("test_a.py::test_it[y]", "loss", 1.5)
    for check in (one, two):
        write(store.root / check.file, [check.encode()])
    assert says(0, "list")[-1] == "golden holds 1 case and 2 stored checks"
    assert says(0, "verify") == ["1 case, 2 stored checks: intact"]
    rows = parsed(0, "show", "checks", one.test)
    assert [(row["value"], row["shape"], row["max"], row["text"]) for row in rows] == [
        ("value['a']", "3", 2.0, None),
        ("value['b']", None, None, "the text 'text'"),
    ]
    assert len(says(0, "show", "checks")) == 5
    assert refusal("show", "checks", "nothing") == (
        "error: no stored check matches 'nothing': give a test or a name"
    )


def test_prune(store: GoldenStore) -> None:
    left = store.root / "tiny" / "truth" / "step_000001" / "loss.safetensors"
    left.touch()
    orphan = store.root / "checks" / "test_a" / "x.safetensors"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"".join(check_file(1.0)))
    listed = Path(".pytest_cache/v/regress/orphans")
    listed.parent.mkdir(parents=True)
    listed.write_text(json.dumps(["checks/test_a/x.safetensors"]))
    assert says(0, "prune", "--dry-run") == [f"would be removed: {left}", f"would be removed: {orphan}"]
    assert left.exists()
    assert orphan.exists()
    assert says(0, "prune") == [f"removed: {left}", f"removed: {orphan}"]
    assert not left.exists()
    assert not orphan.exists()
    assert says(0, "prune") == ["nothing to remove"]
    assert says(0, "verify") == ["1 case: intact"]


def test_the_directory_of_the_project(store: GoldenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path.cwd()
    store.root.rename(root / "baselines")
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nregress_golden_dir = "baselines"\n')
    assert says(0, "verify") == ["1 case: intact"]
    (root / "below").mkdir()
    monkeypatch.chdir(root / "below")
    assert says(0, "verify") == ["1 case: intact"]
    assert says(0, "verify", "--golden-dir", "../baselines") == ["1 case: intact"]
    assert refusal("verify", "--golden-dir", "nowhere").startswith("error: nowhere is not a golden directory")
