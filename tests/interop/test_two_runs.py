"""Check what a user meets first: runs of another model or batch, the folder of a run, and misspelt names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from regress.cli import main
from regress.dump import Recorder, at, recording, tap
from regress.layout import Segment, TokenLayout

TYPES = dict.fromkeys(("batch_inputs", "forward_data", "param"), True)
GOLDEN = Path(__file__).parents[2] / "golden"


def recorded(folder: Path, *, batch: int = 1, weights: int = 1, width: int = 4, moved: float = 0.0) -> Path:
    """Record two samples and, after the update, the four parameters of a model."""
    draw = torch.Generator().manual_seed(weights)
    ids = torch.arange(12).reshape(2, 6) + 100 * batch
    where: dict[str, Any] = {
        "layout": TokenLayout((2, 6), (Segment(0, 0, 6, 0, 0), Segment(1, 0, 6, 1, 0))),
        "meta": {"samples": [[f"{batch}", 0], [f"{batch}", 1]]},
    }
    log_probs = -torch.rand(2, 6, generator=draw, dtype=torch.float64) - 0.1
    parameters: dict[str, Any] = {
        f"layers.{i}.weight": torch.randn(4, width, generator=draw) + moved for i in range(4)
    }
    with recording(Recorder(folder, options=TYPES)), at(step=0, rank=0):
        with at(micro=0):
            tap("batch_inputs", input_ids=ids, response_mask=torch.ones_like(ids), **where)
            tap("forward_data", log_probs=log_probs + moved, input_ids=ids, **where)
        tap("param", **parameters)
    return folder


def ran(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"batch": 2}, "two batches or seeds (2 of 2 samples are in the golden dump only"),
        ({"weights": 2}, "one model with other weights (all 4 parameters after the first update"),
        ({"width": 5}, "two models (4 of 4 tensors of parameters are of other shapes"),
    ],
    ids=["batch", "weights", "model"],
)
def test_two_runs_are_said_to_be_two_before_anything_else(
    tmp_path: Path, change: dict[str, int], says: str
) -> None:
    code, said = ran("compare", recorded(tmp_path / "a"), recorded(tmp_path / "b", **change))
    assert code == 1
    first = said.splitlines()[2]  # behind the two paths
    assert first.startswith("these are dumps of two different runs: ")
    assert says in first


def test_one_run_that_differs_is_not_said_to_be_two(tmp_path: Path) -> None:
    code, said = ran("compare", recorded(tmp_path / "a"), recorded(tmp_path / "b", moved=1e-2))
    assert code == 1
    assert "two different runs" not in said


@pytest.mark.parametrize(
    "command", [("compare", "RUN", "RUN"), ("dump", "check", "RUN"), ("dump", "show", "RUN")]
)
def test_the_folder_of_a_run_points_at_the_dump_inside(tmp_path: Path, command: tuple[str, ...]) -> None:
    inside = recorded(tmp_path / "demo" / "debug_dump")
    code, said = ran(*(str(tmp_path / "demo") if word == "RUN" else word for word in command))
    assert code == 2
    assert f"give {inside}, the dump inside of it" in said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("replay", "dnese", "--golden-dir", GOLDEN), "did you mean dense?"),
        (("replay", "dense", "--variants", "base,pakced", "--golden-dir", GOLDEN), "did you mean packed"),
        (("replay", "dense", "--variants", "tp2-pakced", "--golden-dir", GOLDEN), "did you mean tp2-packed?"),
        (("replay", "dense", "--variants", "tp2 and pakced", "--golden-dir", GOLDEN), "did you mean packed"),
        (("golden", "verify", "dnese", "--golden-dir", GOLDEN), "did you mean dense?"),
        (("compare", "DUMP", "DUMP", "--only", "log_prbs"), "did you mean log_probs"),
        (("compare", "DUMP", "DUMP", "--only", "param/*weigth"), "did you mean weight"),
    ],
    ids=["case", "one of several variants", "parts", "expression", "verify", "quantity", "tensor"],
)
def test_a_misspelt_name_is_refused_with_the_nearest(
    tmp_path: Path, command: tuple[object, ...], says: str
) -> None:
    dump = recorded(tmp_path / "dump")
    code, said = ran(*(dump if word == "DUMP" else word for word in command))
    assert code == 2
    assert says in said
