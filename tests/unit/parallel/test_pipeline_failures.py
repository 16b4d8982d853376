"""A failure on one stage of a pipeline ends all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pipelines import VOCABULARY, group_of, loss, microbatches_of, model_of, pipeline_of, project
from torch import Tensor
from transformers import PreTrainedModel

from regress.dump.trajectory import Trajectory
from regress.engine.mini_batch import Microbatch, TokenBatch
from regress.errors import ConfigError, RegressError
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import BatchPlan

pytestmark = pytest.mark.one_in(6)  # replays of golden cases meet the same combinations


def trajectory(length: int, run: int) -> Trajectory:
    return Trajectory(
        group_id="0",
        run_id=run,
        tokens=np.random.default_rng(run).integers(2, VOCABULARY, length).tolist(),
        loss_mask=[0, 0] + [1] * (length - 2),
        reward=0.0,
        prompt_length=2,
    )


def fails(schedule: str, per_rank: int, where: str) -> tuple[str, str, bool]:
    """Return the error that a rank raises when something goes wrong on the last stage, with microbatch 1."""
    group = group_of(2, patience=2, use=f"{schedule}-{where}")
    micros = microbatches_of(4)

    def refuse(micro: Microbatch) -> None:
        if micro is micros[1]:
            raise RegressError("microbatch 1 has no loss")

    def failing(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, None]:
        if where == "loss":
            refuse(micro)
        return out.log_probs.sum(), None

    def projecting(model: PreTrainedModel, micro: Microbatch, hidden: Tensor | None) -> TokenLogProbs:
        if where == "project":
            refuse(micro)
        return project(model, micro, hidden)

    pipeline = pipeline_of(model_of(), schedule, 2, per_rank, group)
    try:
        pipeline.forward_backward(micros, failing, projecting)
    except Exception as error:
        return type(error).__name__, str(error), pipeline.is_last
    return "", "nothing was raised", pipeline.is_last


@pytest.mark.parametrize(
    ("schedule", "per_rank", "where"),
    [
        ("gpipe", 1, "loss"),
        ("1f1b", 1, "project"),
        ("zbv_zero_bubble", 2, "loss"),
        ("looped_bfs", 2, "project"),
    ],
)
def test_a_failure_on_the_last_stage_ends_all_ranks(
    ranks: Any, schedule: str, per_rank: int, where: str
) -> None:
    for kind, text, last in ranks.run(fails, schedule, per_rank, where):
        assert kind
        if last:
            assert (kind, text) == ("RegressError", "microbatch 1 has no loss")
        else:
            assert "imed out" in text or "timeout" in text


def refused(schedule: str, per_rank: int, count: int, ragged: bool) -> tuple[str, str]:
    micros = microbatches_of(count)
    if ragged:
        micros[1:2] = TokenBatch([trajectory(20, 0)]).microbatches(BatchPlan())
    try:
        pipeline_of(model_of(), schedule, 2, per_rank).forward_backward(micros, loss, project)
    except (ConfigError, ValueError) as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_mini_batch_that_no_stage_can_begin_is_refused_on_all_ranks(ranks: Any) -> None:
    message = (
        "parallel.pp_schedule=1f1b needs at least 2, one for each stage, and the mini-batch has 1 microbatches on each "
        "rank; change batching.micro_batch_size (of a warm start: warm_start.batch_size), or choose "
        "parallel.pp_schedule=gpipe or looped_bfs"
    )
    assert ranks.run(refused, "1f1b", 1, 1, False) == [("ConfigError", message)] * 4
    message = (
        "microbatch 1 has hidden states (1, 20, 16) and microbatch 0 (2, 12, 16): stages exchange tensors of one "
        "shape, so pad all microbatches to it"
    )
    assert ranks.run(refused, "gpipe", 1, 3, True) == [("ValueError", message)] * 4
