"""`regress dump check` adds up the advantages of each group that the rollouts or the configuration tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from regress import Trajectory
from regress.cli import main
from regress.dump import Recorder, at, recording, tap, tap_trajectories
from regress.dump.dump_manifest import Provenance
from regress.layout import Segment, TokenLayout

GRPO = {"algorithm": {"advantage": "grpo"}}
SIZED = {**GRPO, "data": {"group_size": 3}}
BATCH = {"algorithm": {"advantage": "grpo", "normalize_advantages": True}}
RIGHT = (1.0, -0.25, -0.75)
LENGTH = 4


def recorded(
    folder: Path,
    *groups: tuple[float, ...],
    config: dict[str, Any] | None = None,
    tapped: bool = True,
    named: bool = True,
    there: int | None = None,
    masked: bool = True,
    prompt: float | None = None,
) -> Path:
    """Record one update on groups of samples with these advantages, one microbatch for each group.

    Args:
        tapped: the rollouts are recorded.
        named: samples go by the ids of their rollouts, and not by names of the recorder.
        there: number of samples of a group that the update holds; None for all.
        masked: the loss mask is recorded.
        prompt: advantage at prompts; None for that of the completion.
    """
    rollouts = [
        Trajectory(f"g{g}", run, [2 + g, 3 + run, 4, 5], [0, 0, 1, 1], 0.0, 2)
        for g, own in enumerate(groups)
        for run in range(len(own))
    ]
    types = dict.fromkeys(("trajectory", "forward_data", "is_loss_debug"), True)
    provenance = Provenance(config=config or {})
    with recording(Recorder(folder, options=types, provenance=provenance)), at(step=0, rank=0):
        if tapped:
            tap_trajectories(rollouts)
        for g, own in enumerate(groups):
            rows = own[:there]
            ids = torch.tensor([[2 + g, 3 + run, 4, 5] for run in range(len(rows))])
            segments = tuple(Segment(row, 0, LENGTH, row, 0) for row in range(len(rows)))
            keys = [
                [f"g{g}" if named else f"{g}-{run}-made-up", run if named else 0] for run in range(len(rows))
            ]
            where: dict[str, Any] = {
                "layout": TokenLayout((len(rows), LENGTH), segments),
                "meta": {"samples": keys},
            }
            mask = torch.tensor([[0, 0, 1, 1]] * len(rows))
            values = torch.tensor(rows, dtype=torch.float64)[:, None].expand(-1, LENGTH).clone()
            if prompt is not None:
                values[:, :2] = prompt
            with at(micro=g):
                tap("forward_data", input_ids=ids, log_probs=-torch.ones(ids.shape), **where)
                told: dict[str, Any] = {"effective_valid": mask} if masked else {}
                tap("is_loss_debug", advantages=values, **told, **where)
    return folder


def checked(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["dump", "check", str(folder)], catch_exceptions=False)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("config", [GRPO, SIZED])
@pytest.mark.parametrize("named", [True, False])
def test_a_group_that_the_rollouts_tell_adds_up_to_0(tmp_path: Path, config: Any, named: bool) -> None:
    code, said = checked(recorded(tmp_path / "right", RIGHT, RIGHT, config=config, named=named))
    assert code == 0
    assert "advantages" in said.rsplit("elements", 1)[1]

    wrong = (1.0, -1.45, -1.0)
    code, said = checked(recorded(tmp_path / "wrong", RIGHT, wrong, config=config, named=named))
    assert code == 1
    assert "advantages of a group add up to 0: the sum over group g1 is -1.45, not 0" in said


def test_groups_of_a_known_size_need_no_rollouts(tmp_path: Path) -> None:
    code, said = checked(recorded(tmp_path / "wrong", (1.0, 0.0, 1.0), config=SIZED, tapped=False))
    assert code == 1
    assert "the sum over group g0 is 2, not 0" in said

    code, said = checked(recorded(tmp_path / "unknown", (1.0, 0.0, 1.0), config=GRPO, tapped=False))
    assert code != 1
    assert "not checked: advantages of a group add up to 0 (advantages; it needs" in said


def test_a_group_that_is_not_whole_is_listed_as_not_checked(tmp_path: Path) -> None:
    code, said = checked(recorded(tmp_path / "a", RIGHT, RIGHT, config=GRPO, there=2))
    assert code == 0
    assert "advantages of 2 of the 3 samples of group g0 only, as of 1 more" in said

    code, said = checked(recorded(tmp_path / "b", RIGHT, RIGHT[:2], config=SIZED))
    assert code == 0
    assert (
        "add up to 0 (in part, advantages; step0: the update holds advantages of 2 of the 3 samples of group g1"
        in said
    )


@pytest.mark.parametrize("config", [{}, BATCH])
def test_sums_that_no_objective_makes_0_are_told_and_are_no_fault(tmp_path: Path, config: Any) -> None:
    code, said = checked(recorded(tmp_path / "a", RIGHT, (1.0, -1.45, -1.0), config=config))
    assert code == 0
    assert "not checked: advantages of a group add up to 0" in said
    assert ("those of group g1 add up to -1.45" in said) == (not config)


@pytest.mark.parametrize("prompt", [None, 0.0])
def test_values_at_prompts_are_no_advantages(tmp_path: Path, prompt: float | None) -> None:
    code, said = checked(recorded(tmp_path / "a", (1.0, 0.0, 1.0), masked=False, prompt=prompt))
    assert code == 0
    assert "those of group g0 add up to 2;" in said
