"""A pipeline computes what one process computes: every schedule, family and cut."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from pipelines import (
    FAMILIES,
    TOLERANCE,
    difference,
    loss,
    microbatches_of,
    model_of,
    pipeline_of,
    project,
    worst,
)

from regress.engine.causal_lm_policy import LocalPolicy

pytestmark = pytest.mark.one_in(6)  # replays of golden cases meet the same combinations


def errors(case: dict[str, Any], schedule: str, ranks: int, per_rank: int, count: int) -> dict[str, Any]:
    """Largest relative differences from one process: of gradients by name, of results of the loss, of log-probs."""
    plain = LocalPolicy(model_of(**case), entropy_gradient=True)
    micros = microbatches_of(count)
    expected = plain.forward_backward(micros, loss)
    whole = dict(plain.named_parameters())
    pipeline = pipeline_of(model_of(**case), schedule, ranks, per_rank)
    before = plain.log_probs(micros)
    after = [one.log_probs for one in pipeline.values(micros, functools.partial(project, entropy=False))]
    results = pipeline.forward_backward(micros, loss, project)
    pipeline.sum_tied()
    found: dict[str, Any] = {
        "names": set(whole),
        "gradients": {
            name: difference(p.grad, whole[name].grad) for name, p in pipeline.stages.named_parameters()
        },
    }
    if not pipeline.is_last:
        shapes = [(value.shape, value.dtype, bool(value.any())) for value in after]
        return {**found, "none": results, "zeros": shapes == [(v.shape, v.dtype, False) for v in before]}
    assert [index for index, _ in results] == [index for index, _ in expected]
    values = [difference(a, b) for (_, a), (_, b) in zip(results, expected, strict=True)]
    return {**found, "values": values + [difference(a, b) for a, b in zip(after, before, strict=True)]}


CASES = [
    # schedule, ranks, stages per rank, layers, microbatches
    ("gpipe", 2, 1, 2, 3),
    ("gpipe", 4, 1, 2, 1),  # embedding, two blocks, projection
    ("1f1b", 2, 1, 3, 3),
    ("1f1b", 4, 1, 2, 5),
    ("interleaved_1f1b", 2, 2, 2, 4),
    ("interleaved_1f1b", 4, 2, 6, 3),
    ("looped_bfs", 2, 3, 4, 3),
    ("looped_bfs", 4, 2, 7, 2),
    ("interleaved_zero_bubble", 2, 2, 2, 4),
    ("interleaved_zero_bubble", 4, 2, 6, 3),
    ("zbv_zero_bubble", 2, 2, 2, 2),
    ("zbv_zero_bubble", 4, 2, 6, 3),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("schedule", "size", "per_rank", "layers", "count"), CASES, ids=str)
def test_a_pipeline_computes_what_one_process_computes(
    ranks: Any, schedule: str, size: int, per_rank: int, layers: int, count: int, family: str
) -> None:
    tied = (list(FAMILIES).index(family) + size // 2) % 2 == 0  # each family once tied, once not
    case = {"family": family, "layers": layers, "tied": tied}
    assert worst(ranks.run(errors, case, schedule, size, per_rank, count)) < TOLERANCE


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_is_that_of_one_process(ranks: Any, schedule: str, dtype: str) -> None:
    """Where microbatches are added up in the same order."""
    assert worst(ranks.run(errors, {"family": "llama", "dtype": dtype}, schedule, 2, 1, 4)) == 0


@pytest.mark.parametrize(
    ("schedule", "per_rank"),
    [("1f1b", 1), ("looped_bfs", 2), ("interleaved_zero_bubble", 2), ("zbv_zero_bubble", 2)],
)
def test_blocks_that_are_computed_again_in_the_backward_pass(
    ranks: Any, schedule: str, per_rank: int
) -> None:
    case = {"family": "qwen3_moe", "checkpointing": True}
    assert worst(ranks.run(errors, case, schedule, 2, per_rank, 4)) < TOLERANCE
