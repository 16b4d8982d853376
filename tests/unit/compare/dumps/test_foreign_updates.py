"""Updates of trainers whose configuration nobody knows: what the dumps of a run tell of one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from regress import Recorder, Segment, TokenLayout, at, recording, tap
from regress.cli import main
from regress.dump.manifest import Provenance

LAYOUT = TokenLayout((1, 12), (Segment(0, 0, 12, 0, 0),))


def gradients(folder: Path, carried: float, *, skipped: bool = False) -> str:
    """Write gradients of two steps, of which the second holds so much of the first one's."""
    rng = np.random.default_rng(0)
    options = {"gradient": True, "param": True}
    first, second = (
        {n: torch.from_numpy(rng.standard_normal((4, 5))) for n in ("a.weight", "b.weight")} for _ in range(2)
    )
    with recording(Recorder(str(folder), options=options)):
        for step, values in ((0, first), (2 if skipped else 1, second)):
            with at(step=step, rank=0):
                tap("param", {name: torch.ones(4, 5, dtype=torch.float64) for name in values})
                left = {n: v + carried * first[n] if step else v for n, v in values.items()}
                tap("gradient", left, meta={"grad_norm": 1.0})
    return str(folder)


def token_gradient(folder: Path, *temperatures: float, rest: float = 1e-7) -> str:
    """Write the derivative of a loss by each log-prob, solved at a temperature."""
    values = torch.linspace(-1.0, 1.0, 12, dtype=torch.float64)[None]
    meta: dict[str, Any] = {"samples": [["g", 0]], "temperatures": list(temperatures)}
    with recording(Recorder(str(folder), options={"token_gradient": True})), at(step=0, rank=0, micro=0):
        tensors = {"token_gradient": values, "token_residual": torch.full_like(values, rest)}
        tap("token_gradient", tensors, layout=LAYOUT, meta=meta)
    return str(folder)


def told(golden: str, actual: str, code: int) -> str:
    """Return what the command line says of two dumps, and require its exit code."""
    found = CliRunner().invoke(main, ["compare", golden, actual])
    assert found.exit_code == code, found.output
    return " ".join(found.output.split())


@pytest.mark.parametrize("carried", [1.0, 0.0393])
def test_gradients_that_hold_what_is_left_of_the_last_update(tmp_path: Path, carried: float) -> None:
    text = told(gradients(tmp_path / "golden", 0.0), gradients(tmp_path / "actual", carried), 1)
    assert "rule gradient-of-the-last-update" in text


def test_an_update_that_was_not_recorded_is_none_before(tmp_path: Path) -> None:
    golden = gradients(tmp_path / "golden", 0.0, skipped=True)
    text = told(golden, gradients(tmp_path / "actual", 0.5, skipped=True), 1)
    assert "rule gradient-of-the-last-update" not in text


def test_the_same_derivatives_at_another_temperature(tmp_path: Path) -> None:
    golden = token_gradient(tmp_path / "golden", 0.9)
    text = told(golden, token_gradient(tmp_path / "actual", 1.0), 1)
    assert "divisor of the logits: golden 0.9, actual 1" in text
    assert "rule token-gradient-temperature" in text


def test_a_temperature_of_gradients_that_nothing_explains_is_no_difference(tmp_path: Path) -> None:
    """A value head, or rounding to bfloat16, leaves a rest that any temperature fits about as well."""
    golden = token_gradient(tmp_path / "golden", 0.97, rest=0.2)
    told(golden, token_gradient(tmp_path / "actual", 1.0, rest=0.2), 0)


@pytest.mark.parametrize("temperatures", [(), (0.90001,), (0.9, 0.90001)])
def test_temperatures_that_are_the_same_or_not_told(tmp_path: Path, temperatures: tuple[float, ...]) -> None:
    golden = token_gradient(tmp_path / "golden", 0.9)
    told(golden, token_gradient(tmp_path / "actual", *temperatures), 0)


def states(folder: Path, *names: str, unused: str = "-") -> str:
    """Write the states of an optimizer as they are captured of a foreign trainer."""
    told = Provenance(config={"capture": {"system": "a trainer"}})
    with (
        recording(Recorder(str(folder), options={"optimizer": True}, provenance=told)),
        at(step=0, rank=0),
    ):
        tap("optimizer", {name: torch.full((3, 4), float(unused not in name)) for name in names})
    return str(folder)


def test_a_parameter_that_the_optimizer_of_one_side_does_not_have(tmp_path: Path) -> None:
    """The optimizer has moments of other parameters, so it lacks those of this one: no other kind of optimizer."""
    golden = states(tmp_path / "golden", "a/exp_avg", "b/exp_avg")
    assert "optimizer b/exp_avg: only in the golden dump" in told(
        golden, states(tmp_path / "one", "a/exp_avg"), 1
    )
    idle = states(tmp_path / "idle", "a/exp_avg", "b/exp_avg", unused="b/")
    assert "b/exp_avg is in the golden dump only" in told(idle, str(tmp_path / "one"), 0)
    plain = states(tmp_path / "plain", "a/momentum", "b/momentum", "a/step")
    other = states(tmp_path / "other", "a/step")
    assert "a/momentum is in the golden dump only" in told(plain, other, 0)


def test_a_version_that_is_a_text_is_told_as_one(tmp_path: Path) -> None:
    path = Path(token_gradient(tmp_path / "golden", 0.9)) / "manifest.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": "1"'))
    assert "schema version '1', this release reads 1" in told(str(path.parent), str(path.parent), 2)
