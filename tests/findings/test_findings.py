"""The discrepancies of docs/findings.md: a script shows each of them by itself, and the document says what it shows."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from regress.errors import SystemsError
from regress.systems.known_findings import FINDINGS
from regress.systems.system_environments import environment_of
from regress.systems.system_registry import load, location_of

ROOT = Path(__file__).parents[2]
OVERVIEW = (ROOT / "docs" / "findings.md").read_text()
DOCUMENT = (ROOT / "docs" / "reference" / "finding-details.md").read_text()
SCRIPTS = sorted((ROOT / "examples" / "findings").glob("*.py"))
SYSTEM_SCRIPTS = sorted((ROOT / "examples" / "findings" / "systems").glob("*.py"))
TIMEOUT = 280  # seconds; an idle core needs 3 to 6, and 20 where code is compiled
FRAMEWORKS = ("torch", "transformers", "accelerate")

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
all_scripts = pytest.mark.parametrize(
    "script", [*SCRIPTS, *SYSTEM_SCRIPTS], ids=[script.stem for script in [*SCRIPTS, *SYSTEM_SCRIPTS]]
)
system_scripts = pytest.mark.parametrize("script", SYSTEM_SCRIPTS, ids=[one.stem for one in SYSTEM_SCRIPTS])


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of a short name: processes open sockets in it, whose paths have at most 107 characters."""
    with TemporaryDirectory(prefix="regress-") as name:
        yield Path(name)


@scripts
@pytest.mark.timeout(300)
@pytest.mark.extended
def test_the_discrepancy_is_there(script: Path, folder: Path) -> None:
    output, errors, status = run(script, folder)
    *_, verdict = output.splitlines() or [""]
    if status == 1 and "no AVX-512" in verdict and "AVX512" not in output:
        pytest.skip("needs a processor with AVX-512")
    if status == 1 and verdict == "fixed in this version" and not checked_versions():
        pytest.skip("gone in a version that docs/findings.md does not name; say there since when")
    assert (status, verdict) == (0, "reproduced"), output + errors
    assert "right" in output
    assert "actual" in output
    left_behind = {left.name for left in folder.iterdir()}
    assert not {
        name for name in left_behind if not name.startswith("torchinductor_")
    }  # torch makes that on import


@system_scripts
@pytest.mark.timeout(300)
@pytest.mark.extended
def test_the_discrepancy_is_there_in_the_environment_of_its_system(script: Path, folder: Path) -> None:
    system = load(location_of(script.stem.split("_")[0]))
    try:
        environment = environment_of(system)
    except SystemsError as error:
        pytest.skip(str(error))
    own = {**environment.variables, **system.environ}
    output, errors, status = run(script, folder, python=environment.python, environ=own)
    assert (status, output.splitlines()[-1:]) == (0, ["reproduced"]), output + errors


@all_scripts
def test_the_reproduction_is_short_and_stands_alone(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] in {"regress", "tests"}}


def test_the_document_names_every_script_and_no_other() -> None:
    named = set(re.findall(r"python examples/findings/((?:systems/)?\w+\.py)", DOCUMENT))
    assert named == {
        str(script.relative_to(ROOT / "examples" / "findings")) for script in [*SCRIPTS, *SYSTEM_SCRIPTS]
    }


def test_every_known_finding_of_a_system_has_its_section_and_its_cells() -> None:
    headings = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
    by_anchor = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-"): one for one in headings}
    assert len({finding.name for finding in FINDINGS}) == len(FINDINGS)
    for finding in FINDINGS:
        section = DOCUMENT.split(f"\n## {by_anchor[finding.anchor]}\n")[1].split("\n## ")[0]
        assert "python examples/findings/" in section, finding.name
        assert f"| {finding.name} |" in OVERVIEW
        cells = [cell.name for cell in load(location_of(finding.system)).cells()]
        for pattern in finding.cells:
            assert any(fnmatchcase(name, pattern) for name in cells), (finding.name, pattern)


def test_the_table_leads_to_every_finding() -> None:
    headings = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    first, second = (
        re.findall(r"\]\(reference/finding-details\.md#(.*?)\)", part)
        for part in OVERVIEW.split("\n## In trainers under test\n")
    )
    assert len(first) == len(set(first)) == len(SCRIPTS)
    assert len(set(second) - set(first)) == len(SYSTEM_SCRIPTS)
    assert {*first, *second} <= anchors


@all_scripts
def test_the_document_says_all_of_a_finding(script: Path) -> None:
    """Kind, effect on training, source and remedy of each finding."""
    name = script.relative_to(ROOT).as_posix()
    sections = [section for section in DOCUMENT.split("\n## ") if f"python {name}" in section]
    assert len(sections) == 1
    for part in ("**Kind.**", "**Training.**", "**Source.**", "**Upstream.**", "**Instead.**", "reproduced"):
        assert part in sections[0], part


def checked_versions() -> bool:
    return all(f"{name} {version(name).split('+')[0]}" in OVERVIEW for name in FRAMEWORKS)


def run(
    script: Path, folder: Path, python: Path | None = None, environ: Mapping[str, str] | None = None
) -> tuple[str, str, int]:
    """Output, errors and exit status. A rank that is left behind holds the pipe open until it is killed for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    environment |= environ or {}
    with subprocess.Popen(
        [str(python or sys.executable), script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return output, errors, process.returncode
