"""Options that dumps of other trainers need: what both have, a declared precision, shares of ranks' means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from regress import Recorder, at, compare_sources, recording, tap, tap_batch
from regress.cli import main
from regress.dump.dump_manifest import Provenance
from regress.errors import CompareError, ConfigError
from regress.layout import Segment, TokenLayout

TYPES = ("batch_inputs", "forward_data", "is_loss_debug", "loss", "token_gradient", "gradient", "param")
IDS = torch.arange(2, 34).reshape(4, 8)
VALUES = -torch.linspace(0.1, 3.0, 32, dtype=torch.float64).reshape(4, 8)
LOSSES = torch.tensor([0.2, 0.3], dtype=torch.float64)
WEIGHT = np.linspace(-1.0, 1.0, 12).reshape(3, 4)


def write(
    folder: Path,
    *,
    ranks: int = 1,
    factor: float = 1.0,
    gradient: float = 1.0,
    error: float = 0.0,
    parameter: str = "w",
    extra: bool = False,
) -> Path:
    """One update on one rank or two; ``factor`` on losses and token gradients, ``error`` on log-probs."""
    provenance = Provenance(mesh={"world_size": ranks, **({"dp": ranks} if ranks > 1 else {})})
    recorder = Recorder(folder, options=dict.fromkeys(TYPES, True), provenance=provenance)
    with recording(recorder), at(step=0):
        for micro, rows in enumerate(((0, 1), (2, 3))):
            own = list(rows)
            given = {"input_ids": IDS[own], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
            with at(micro=0, rank=1) if ranks > 1 and micro else at(micro=micro, rank=0):
                names = [("s", row) for row in own]
                told: dict[str, Any] = {"advantages": VALUES[own]} if extra else {}
                loss = LOSSES[micro] * factor
                tap_batch(**given, samples=names, log_probs=VALUES[own] * (1 + error), loss=loss, **told)
        for rank in range(ranks):
            with at(rank=rank):
                tap("gradient", {parameter: WEIGHT * gradient})
                tap("param", {parameter: WEIGHT, **({"more": WEIGHT} if extra else {})})
    return folder


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return write(tmp_path / "golden")


def test_what_one_side_has_is_listed_and_no_difference(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", extra=True)

    assert compare_sources(golden, actual).exit_code == 1
    found = compare_sources(golden, actual, common=True)
    assert found.exit_code == 0
    assert any(note.startswith("param/more is in the actual dump only") for note in found.notes)
    assert any(note.startswith("is_loss_debug is in the actual dump only") for note in found.notes)


def test_common_does_not_pass_other_names(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", parameter="v")

    found = compare_sources(golden, actual, common=True)
    assert found.exit_code == 2
    assert (
        "gradient has no tensor of the same name in both dumps (w in the golden, v in the actual one)"
        in str(found.problems)
    )


def test_common_does_not_pass_lost_samples(golden: Path, tmp_path: Path) -> None:
    actual = tmp_path / "actual"
    with recording(Recorder(actual, options=dict.fromkeys(TYPES, True))), at(step=0, micro=0, rank=0):
        given = {"input_ids": IDS[:2], "attention_mask": torch.ones(2, 8, dtype=torch.long)}
        tap_batch(**given, samples=[("s", 0), ("s", 1)], log_probs=VALUES[:2])

    assert compare_sources(golden, actual, common=True).exit_code == 1


def test_declared_precision_replaces_the_recorded_one(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", error=1e-3)

    assert compare_sources(golden, actual).exit_code == 1
    assert compare_sources(golden, actual, precision="bfloat16").exit_code == 0
    wrong = write(tmp_path / "wrong", error=0.5)
    assert compare_sources(golden, wrong, precision="bfloat16").exit_code == 1
    with pytest.raises(ConfigError, match="precision='int8' is none of"):
        compare_sources(golden, actual, precision="int8")
    with pytest.raises(ConfigError, match="give one of them"):
        compare_sources(golden, actual, precision="float32", rtol=0.1)


def test_several_patterns(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", gradient=2.0)

    assert compare_sources(golden, actual, only=["param/*", "log_probs"]).exit_code == 0
    assert compare_sources(golden, actual, only=["param/*", "gradient"]).exit_code == 1
    arguments = ["compare", str(golden), str(actual), "--only", "param/*", "--only", "log_probs"]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    with pytest.raises(CompareError, match="nothing matches --only no --only such"):
        compare_sources(golden, actual, only=["no", "such"])


def test_shares_of_ranks_means(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", ranks=2, factor=2.0)

    found = CliRunner().invoke(main, ["compare", str(golden), str(actual)])
    assert found.exit_code == 1
    assert "a factor equal to the number of ranks while gradients agree" in found.output
    assert compare_sources(golden, actual, ranks_average=True).exit_code == 0
    assert CliRunner().invoke(main, ["compare", str(golden), str(actual), "--ranks-average"]).exit_code == 0


def test_gradients_that_are_doubled_are_no_matter_of_what_is_reported(golden: Path, tmp_path: Path) -> None:
    actual = write(tmp_path / "actual", ranks=2, factor=2.0, gradient=2.0)

    found = CliRunner().invoke(main, ["compare", str(golden), str(actual)])
    assert found.exit_code == 1
    assert "while gradients agree" not in found.output


@pytest.mark.parametrize(("hidden", "code"), [(True, 0), (False, 1)])
def test_derivatives_that_rounding_hides_are_not_compared(tmp_path: Path, hidden: bool, code: int) -> None:
    """They are recorded as 0, whatever they were; any other 0 in place of a derivative is a difference."""
    layout = TokenLayout((1, 8), (Segment(0, 0, 8, 0, 0),))
    folders = []
    for name in ("golden", "actual"):
        lost = np.zeros((1, 8), bool)
        lost[0, 3] = name == "actual"
        with recording(Recorder(tmp_path / name, options=dict.fromkeys(TYPES, True))):
            tensors: dict[str, Any] = {"token_gradient": np.where(lost, 0.0, 0.5)}
            if name == "actual":
                tensors["recoverable"] = ~lost if hidden else np.ones_like(lost)
            with at(step=0, micro=0, rank=0):
                tap("token_gradient", tensors, layout=layout, meta={"samples": [["s", 0]]})
        folders.append(tmp_path / name)

    found = compare_sources(*folders, common=True, only=["token_gradient"])
    assert found.exit_code == code
    assert any("rounding hides" in note for note in found.notes) is hidden


def test_what_means_something_on_its_own_rank_only_goes_rank_to_rank(tmp_path: Path) -> None:
    """Flat shards of another engine: nothing says which part of a parameter a rank holds."""

    def flat(name: str, *values: float, told: bool = True) -> Path:
        folder = tmp_path / name
        with recording(Recorder(folder, options={"param": True})), at(step=0):
            for rank, value in enumerate(values):
                with at(rank=rank):
                    meta = {"rank_local": "it is a flat shard"} if told else {}
                    tap("param", {"flat": np.full(6, value)}, meta=meta)
        return folder

    golden = flat("golden", 1.0, 2.0)
    equal = compare_sources(golden, flat("same", 1.0, 2.0))
    assert (equal.exit_code, equal.compared) == (0, 12)
    exchanged = compare_sources(golden, flat("exchanged", 2.0, 1.0))
    assert [verdict.place.rank for verdict in exchanged.failed if verdict.quantity == "param"] == [0, 1]
    with pytest.raises(CompareError, match="param cannot be compared: it is a flat shard"):
        compare_sources(golden, flat("unknown", 1.0, 2.0, told=False))
