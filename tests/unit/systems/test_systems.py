"""Names, pins, cells, rows and batches of systems under test."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest
from click.testing import CliRunner

from regress import systems
from regress.cli import main
from regress.errors import GoldenError, SystemsError
from regress.golden.golden_directory import GoldenStore
from regress.systems import conformance_session, system_environments
from regress.systems.adapters.transformers_trainer import Trainer
from regress.systems.conformance_page import page_of
from regress.systems.conformance_row import ConformanceRow, Error, Result
from regress.systems.conformance_run import Workspace, chosen
from regress.systems.conformance_table import exit_code, line_of, read_rows, together, write_rows
from regress.systems.exported import ExportedCase
from regress.systems.known_findings import FINDINGS, Finding, finding_named, gone, marked
from regress.systems.protocol import Cell, Declared, Layout, Shim, System
from regress.systems.rebatched_case import recut
from regress.systems.system_environments import environment_of, lacking
from regress.systems.system_registry import load, location_of, locations

GOLDEN = Path(__file__).parents[3] / "golden"
CELL = Cell(
    Layout("ddp2", 2, {"a": 1}),
    "sft",
    declared=(Declared("loss", "by definition", factor=2.0),),
    batches=(7,),
)


class Few(System):
    name, version_of = "few", "torch"


class Twice(Few):
    requirements = ("nothing-of-this-name==1.0",)
    shims = (Shim("a | b", 3, "it does not run", touches_numerics=True),)

    def cells(self) -> list[Cell]:
        return [CELL, CELL]

    objective = prepare = step = engaged = lambda self, *_: None


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(SystemsError, match=r"there is no system 'trainr' among .*: did you mean trainer"):
        location_of("trainr")


@pytest.mark.parametrize("name", locations())
def test_adapters_of_the_package_load_without_their_systems(name: str) -> None:
    system = load(location_of(name))
    assert system.name == name
    cells = chosen(system)
    assert len(cells) >= 20
    assert len({cell.layout.name for cell in cells}) >= 8
    for cell in cells:
        assert system.objective(cell)
        assert Cell.from_json(json.loads(json.dumps(cell.to_json()))) == cell


def test_an_adapter_without_a_member_is_refused() -> None:
    with pytest.raises(
        SystemsError, match="has no cells, objective, prepare, step, engaged: give it the members"
    ):
        load(f"{__name__}:Few")


def test_cells_of_one_name_are_refused() -> None:
    with pytest.raises(SystemsError, match="few has two cells called ddp2/sft/dense"):
        chosen(Twice())  # type: ignore[arg-type]


def test_pins_are_exact() -> None:
    assert lacking(["nothing-of-this-name==1.0"]) == ["nothing-of-this-name==1.0"]
    assert lacking([f"pytest=={pytest.__version__}"]) == []
    with pytest.raises(
        SystemsError, match=r"the requirement 'torch>=2' is not an exact pin: write NAME==VERSION"
    ):
        lacking(["torch>=2"])


def test_what_is_not_installed_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(system_environments.VARIABLE, str(tmp_path))
    with pytest.raises(SystemsError, match="few is not installed: run regress systems install few"):
        environment_of(Twice())  # type: ignore[arg-type]


def test_a_declared_difference_has_one_size() -> None:
    with pytest.raises(ValueError, match="needs either a factor or an amount"):
        Declared("loss", "why")


def row(result: Result, **values: object) -> ConformanceRow:
    errors = {"loss": Error(1e-7, 0.1, 2, 0), "gradient": Error(2e-7, 0.4, 5, 0)}
    return ConformanceRow("few", "1.0", CELL, result, errors, shims=["!x"], listed=["y"], **values)  # type: ignore[arg-type]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = [row(Result.EXACT), row(Result.WRONG, told="drift: loss", cause="a | b")]
    write_rows(tmp_path / "rows.json", rows)
    schema = json.loads((Path(systems.__file__).parent / "systems.schema.json").read_text())
    jsonschema.validate(json.loads((tmp_path / "rows.json").read_text()), schema)
    assert [found.to_json() for found in read_rows(tmp_path / "rows.json")] == [
        json.loads(json.dumps(one.to_json())) | {"cell": one.to_json()["cell"]} for one in rows
    ]
    assert line_of(rows[0]) == "few 1.0 ddp2/sft/dense: exact (gradient 2.0e-07, 0.4 x tolerance)"
    page = page_of(rows, [Twice()])  # type: ignore[list-item]
    assert r"drift: loss (probably: a \| b)" in page
    assert r"| a \| b | 3 | it does not run | yes |" in page


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text("[]")
    with pytest.raises(SystemsError, match=r"rows\.json holds no rows of a conformance table"):
        read_rows(tmp_path / "rows.json")


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([Result.EXACT, Result.DECLARED], 0),
        ([Result.EXACT, Result.UNDECLARED], 1),
        ([Result.ERROR, Result.WRONG], 1),
        ([Result.EXACT, Result.ERROR], 2),
        ([], 2),
    ],
)
def test_exit_codes(results: list[Result], code: int) -> None:
    assert exit_code([row(result) for result in results]) == code


FINDING = Finding("bent", "few", ("ddp2/sft/*",), ("1.0",), "loss is bent", "bent", "drift: loss*")


def test_a_known_finding_is_no_failure_until_it_is_gone() -> None:
    known = marked(row(Result.WRONG, told="drift: loss: twice"), [FINDING])
    other = marked(row(Result.WRONG, told="drift: gradient: twice"), [FINDING])
    mended = marked(row(Result.EXACT), [FINDING])
    assert (known.known, known.fixed, exit_code([known])) == (True, False, 0)
    assert (other.known, other.fixed, exit_code([known, other])) == (False, False, 1)
    assert (mended.known, mended.fixed, exit_code([known, mended])) == (False, True, 1)
    assert marked(known, []).finding == marked(mended, []).finding == ""
    assert line_of(known).startswith("few 1.0 ddp2/sft/dense: wrong, known finding bent: drift")
    assert exit_code([marked(row(Result.ERROR, told="drift: loss"), [FINDING])]) == 0


def test_findings_are_of_their_system_and_cells() -> None:
    assert not FINDING.meets(replace(row(Result.WRONG), system="other"))
    assert not replace(FINDING, cells=("ddp4/*",)).meets(row(Result.WRONG))
    assert finding_named("nobody-found-this") is None
    told = finding_named(FINDINGS[0].name)
    assert told is not None
    assert "is not there any more: say so in docs/reference/finding-details.md" in gone(told)


def test_the_page_names_known_findings_and_the_disk() -> None:
    own = FINDINGS[0]
    cell = Cell(Layout(own.cells[0].split("/")[0], 2), "sft")
    wrong = replace(row(Result.WRONG), system=own.system, cell=cell, disk=21_000_000)
    page = page_of([replace(wrong, finding=own.name)], [], 700_000_000)
    assert f"**wrong** [{own.name}](reference/finding-details.md#{own.anchor})" in page
    assert "| trainer | 1.0 | 1 | 0 | 0 | 1 | 0 | 0 | 0 |" in page
    assert "trainer 21 MB; the packages that they share, torch among them, take 0.7 GB: 0.7 GB in all" in page
    assert "| trainer | 1.0 | 1 | 0 | 0 | 0 | 1 | 0 | 0 |" in page_of([wrong], [])


def test_the_picture_has_a_dot_for_each_measured_cell(tmp_path: Path) -> None:
    wrong = replace(row(Result.WRONG, finding="bent"), errors={"gradient": Error(1.0, None, 5, 5)})
    zero = replace(row(Result.EXACT), errors={"loss": Error(3.0, 0.1, 1, 0)})  # of a truth that is rounding
    rows = [row(Result.EXACT), row(Result.EXACT), zero, wrong, row(Result.ERROR)]
    cells = [replace(one, cell=replace(CELL, case=f"case{number}")) for number, one in enumerate(rows, 1)]
    write_rows(tmp_path / "rows.json", cells)
    to = tmp_path / "systems.svg"
    done = CliRunner().invoke(main, ["systems", "table", str(tmp_path / "rows.json"), "--picture", str(to)])
    assert done.exit_code in (0, 1, 2), done.output
    svg = to.read_text()
    ElementTree.fromstring(svg)
    assert "5 recorded steps of 1 released trainer: " in svg
    assert "3 right, 1 wrong, 1 refused" in svg
    drawn = {kind: re.findall(rf'<path class="{kind}" d="([^"]*)"/>\n', svg) for kind in ("right", "wrong")}
    assert [path.count("M") for path in drawn["right"]] == [2, 2], "loss and gradient of the two exact cells"
    assert [path.count("M") for path in drawn["wrong"]] == [1]
    assert float(drawn["wrong"][0][1:].split()[0]) > float(drawn["right"][1][1:].split()[0]), (
        "farther to the right"
    )


def test_the_picture_of_the_readme_is_of_the_table_of_the_page() -> None:
    docs = Path(__file__).parents[3] / "docs"
    cells = re.search(r"^\| all \| \| (\d+) \|", (docs / "conformance.md").read_text(), re.M)
    assert cells is not None
    assert f"<title>{cells[1]} recorded steps of 6 released trainers" in (docs / "systems.svg").read_text()


def test_of_a_cell_in_several_files_the_last_row_counts() -> None:
    first, second = row(Result.EXACT), row(Result.WRONG)
    other = replace(first, system="other")
    assert together([first, other, second]) == [second, other]


def test_a_run_writes_rows_as_they_come_and_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(Layout(name), "sft") for name in ("one", "two", "three")]
    monkeypatch.setattr(Trainer, "cells", lambda self: cells)
    told: list[list[str]] = []

    def run_system(name: str, workspace: Workspace, **given: Any) -> None:
        left = [cell for cell in cells if cell.identity not in given["leave_out"]]
        told.append([cell.layout.name for cell in left])
        for cell in left:
            if len(told) == 1 and cell.layout.name == "three":
                raise SystemsError("interrupted")
            result = Result.ERROR if cell.layout.name == "two" and len(told) == 1 else Result.EXACT
            given["on_row"](replace(row(result), system=name, cell=cell, stamp=given["environment"].stamp))

    monkeypatch.setattr(conformance_session, "run_system", run_system)
    path = tmp_path / "rows.json"
    with pytest.raises(SystemsError, match="interrupted"):
        conformance_session.run_systems(["trainer"], json_file=path, echo=lambda _: None)
    assert [one.cell.layout.name for one in read_rows(path)] == ["one", "two"]
    code = conformance_session.run_systems(["trainer"], json_file=path, resume=True, echo=lambda _: None)
    assert (code, told) == (0, [["one", "two", "three"], ["two", "three"]])
    assert [one.cell.layout.name for one in read_rows(path)] == ["one", "two", "three"]
    conformance_session.run_systems(
        ["trainer"], json_file=path, resume=True, plant="a:b", echo=lambda _: None
    )
    assert told[-1] == ["one", "two", "three"]
    with pytest.raises(SystemsError, match="name it with --json"):
        conformance_session.run_systems(["trainer"], resume=True, echo=lambda _: None)


def test_batches_are_cut_anew(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, GoldenStore(GOLDEN))
    whole = ExportedCase(workspace.export("dense"))
    cut = ExportedCase(workspace.export("dense", (7, 3)))
    assert [len(step) for step in cut.steps] == [7, 3]
    assert cut.samples(2) == whole.samples(1)[:10]
    assert workspace.export("dense", (7, 3)) is workspace.export("dense", (7, 3))
    token = whole.steps[0][0].completion[0]
    apart = ExportedCase(workspace.export("dense", (2,), (token,)))
    assert all(token not in sample.tokens for sample in apart.samples(1))
    with pytest.raises(SystemsError, match="samples, not 999: ask for smaller batches"):
        recut(workspace.export("dense"), (999,), tmp_path / "other")
    with pytest.raises(GoldenError, match="so a cell of 3 updates is not possible"):
        cut.samples(3)


def test_a_folder_without_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="is not an exported case"):
        ExportedCase(tmp_path)
