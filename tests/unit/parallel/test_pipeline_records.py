"""Records of a step of a pipeline lie on the ranks where their values are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from pipelines import group_of, loss, microbatches_of, model_of, pipeline_of, project
from torch import Tensor, nn

from regress.dump import Recorder, at, recording, tap
from regress.dump.dump_reader import read
from regress.dump.module_selection import record_modules
from regress.engine import step_taps
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.mini_batch import Microbatch
from regress.grpo.selective_log_softmax import TokenLogProbs

pytestmark = pytest.mark.one_in(6)  # replays of golden cases meet the same combinations


def records(folder: str, schedule: str, per_rank: int, checkpointing: bool) -> dict[str, Any]:
    """Return the records of a step by type, microbatch and name, of one process and of this rank."""
    micros = microbatches_of(4)
    group = group_of(2)
    case: dict[str, Any] = {"family": "qwen3", "tied": True, "checkpointing": checkpointing}

    def tapped(micro: Microbatch, out: TokenLogProbs) -> tuple[Tensor, None]:
        value, _ = loss(micro, out)
        tap("loss", loss=value)
        return value, None

    plain = LocalPolicy(model_of(**case), entropy_gradient=True)
    modules = {name: module for name, module in plain.model.named_modules() if name}
    found: dict[str, Any] = {}
    with recorded(modules, f"{folder}/plain{dist.get_rank()}", found, "plain"):
        plain.forward_backward(micros, tapped)
    pipeline = pipeline_of(model_of(**case), schedule, 2, per_rank)
    with recorded(pipeline.stages.modules(), f"{folder}/{dist.get_rank()}", found, "own"):
        pipeline.forward_backward(micros, tapped, project, step_taps.inputs)
    return {**found, "place": group.rank(), "last": pipeline.is_last}


@contextmanager
def recorded(modules: dict[str, nn.Module], folder: str, found: dict[str, Any], key: str) -> Iterator[None]:
    types = ("batch_inputs", "activations", "loss")
    recorder = Recorder(folder, options=dict.fromkeys(types, True))
    with recording(recorder), record_modules(modules), at(step=0, rank=dist.get_rank()):
        yield
    files = [read(file) for type in types for file in Path(folder, type).glob("*")]
    found[key] = {
        (record.type, record.micro): (record.tensors, record.meta.get("layout")) for record in files
    }


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zbv_zero_bubble", 2)]
)
def test_what_a_step_records_lies_on_the_ranks_where_it_is_made(
    ranks: Any, tmp_path: Path, schedule: str, per_rank: int, checkpointing: bool
) -> None:
    pair = ranks.run(records, str(tmp_path), schedule, per_rank, checkpointing)[:2]
    expected = pair[0]["plain"]
    assert {kind for kind, _ in expected} == {"batch_inputs", "activations", "loss"}
    for (kind, micro), (tensors, layout) in expected.items():
        found = [rank["own"][kind, micro] for rank in pair if (kind, micro) in rank["own"]]
        assert len(found) == (1 if kind == "loss" else 2)
        assert all(own[1] == layout for own in found)
        names = [name for own, _ in found for name in own]
        assert sorted(names) == sorted([*tensors] * (2 if kind == "batch_inputs" else 1))
        for own, _ in found:
            for name, values in own.items():
                np.testing.assert_allclose(values, tensors[name], rtol=1e-12, atol=1e-14)
    assert all(key in expected for rank in pair for key in rank["own"])
