"""Names, pins, cells, rows and batches of systems under test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regress.errors import GoldenError, SystemsError
from regress.golden.store import GoldenStore
from regress.systems import environments
from regress.systems.environments import environment_of, lacking
from regress.systems.exported import ExportedCase
from regress.systems.page import page_of
from regress.systems.protocol import Cell, Declared, Layout, Shim, System
from regress.systems.recut import recut
from regress.systems.registry import load, location_of, locations
from regress.systems.row import Error, Result, Row
from regress.systems.run import Workspace, chosen
from regress.systems.table import exit_code, line_of, read_rows, write_rows

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
        SystemsError, match=r"the requirement 'torch>=2' is no exact pin: write NAME==VERSION"
    ):
        lacking(["torch>=2"])


def test_what_is_not_installed_is_told_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environments.VARIABLE, str(tmp_path))
    with pytest.raises(SystemsError, match="few is not installed: run regress systems install few"):
        environment_of(Twice())  # type: ignore[arg-type]


def test_a_declared_difference_has_one_size() -> None:
    with pytest.raises(ValueError, match="needs either a factor or an amount"):
        Declared("loss", "why")


def row(result: Result, **values: object) -> Row:
    errors = {"loss": Error(1e-7, 0.1, 2, 0), "gradient": Error(2e-7, 0.4, 5, 0)}
    return Row("few", "1.0", CELL, result, errors, shims=["!x"], listed=["y"], **values)  # type: ignore[arg-type]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = [row(Result.EXACT), row(Result.WRONG, told="drift: loss", cause="a | b")]
    write_rows(tmp_path / "rows.json", rows)
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


def test_batches_are_cut_anew(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path, GoldenStore(GOLDEN))
    whole = ExportedCase(workspace.export("dense"))
    cut = ExportedCase(workspace.export("dense", (7, 3)))
    assert [len(step) for step in cut.steps] == [7, 3]
    assert cut.samples(2) == whole.samples(1)[:10]
    assert workspace.export("dense", (7, 3)) is workspace.export("dense", (7, 3))
    with pytest.raises(SystemsError, match="samples, not 999: ask for smaller batches"):
        recut(workspace.export("dense"), (999,), tmp_path / "other")
    with pytest.raises(GoldenError, match="so a cell of 3 updates is not possible"):
        cut.samples(3)


def test_a_folder_without_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GoldenError, match="is no exported case"):
        ExportedCase(tmp_path)
