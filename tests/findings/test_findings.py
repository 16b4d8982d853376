"""The discrepancies of docs/findings.md: a script shows each of them by itself, and the document says what it shows."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "findings.md").read_text()
SCRIPTS = sorted((ROOT / "examples" / "findings").glob("*.py"))
TIMEOUT = 280  # seconds; an idle core needs 3 to 6, and 20 where code is compiled
FRAMEWORKS = ("torch", "transformers", "accelerate")

scripts = pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])


@scripts
@pytest.mark.timeout(300)
@pytest.mark.extended
def test_the_discrepancy_is_there(script: Path, tmp_path: Path) -> None:
    output, errors, status = run(script, tmp_path)
    *_, verdict = output.splitlines() or [""]
    if status == 1 and "no AVX-512" in verdict and "AVX512" not in output:
        pytest.skip("needs a processor with AVX-512")
    if status == 1 and verdict == "fixed in this version" and not checked_versions():
        pytest.skip("gone in a version that docs/findings.md does not name; say there since when")
    assert (status, verdict) == (0, "reproduced"), output + errors
    assert "right" in output
    assert "actual" in output
    left_behind = {left.name for left in tmp_path.iterdir()}
    assert not {
        name for name in left_behind if not name.startswith("torchinductor_")
    }  # torch makes that on import


@scripts
def test_the_reproduction_is_short_and_stands_alone(script: Path) -> None:
    text = script.read_text()
    assert len(text.splitlines()) < 60
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {name for name in imported if name.split(".")[0] in {"regress", "tests"}}


def test_the_document_names_every_script_and_no_other() -> None:
    named = set(re.findall(r"examples/findings/(\w+\.py)", DOCUMENT))
    assert named == {script.name for script in SCRIPTS}


def test_the_table_leads_to_every_finding() -> None:
    headings = re.findall(r"^## (.*)$", DOCUMENT, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    linked = re.findall(r"\]\(#(.*?)\)", DOCUMENT)
    assert len(linked) == len(set(linked)) == len(SCRIPTS)
    assert set(linked) <= anchors


@scripts
def test_the_document_says_all_of_a_finding(script: Path) -> None:
    """Kind, effect on training, source and remedy of each finding."""
    sections = [
        section for section in DOCUMENT.split("\n## ") if f"python examples/findings/{script.name}" in section
    ]
    assert len(sections) == 1
    for part in ("**Kind.**", "**Training.**", "**Source.**", "**Upstream.**", "**Instead.**", "reproduced"):
        assert part in sections[0], part


def checked_versions() -> bool:
    return all(f"{name} {version(name).split('+')[0]}" in DOCUMENT for name in FRAMEWORKS)


def run(script: Path, folder: Path) -> tuple[str, str, int]:
    """Output, errors and exit status. A rank that is left behind holds the pipe open until it is killed for it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, script],
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
