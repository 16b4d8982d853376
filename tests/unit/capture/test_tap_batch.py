"""`tap_batch`: the explicit form builds layouts like the hooks do, and adds to what they see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from capture_loops import batch, compare, failed, loss_mask, make_samples, mean_loss, tiny_model
from torch import Tensor

from regress import Recorder, at, record, recording, tap_batch
from regress.dump.dump_reader import DumpReader
from regress.errors import CaptureError

OPTIONS = dict.fromkeys(("batch_inputs", "forward_data", "is_loss_debug", "loss"), True)


def own_places(values: Tensor) -> Tensor:
    """Values of targets ``[B, T - 1]`` at the tokens they belong to."""
    return torch.cat([torch.zeros_like(values[:, :1]), values], 1)


def explicit(folder: Path, layout: str, micros: int, wrong: bool = False) -> None:
    rows = make_samples()
    size = len(rows) // micros
    with recording(Recorder(str(folder), options=OPTIONS)), torch.no_grad():
        for number in range(micros):
            own = rows[number * size : (number + 1) * size]
            inputs = batch(own, layout)
            log_probs = -own_places(inputs["input_ids"][:, 1:] * 0.01)
            if wrong and number == 0:
                log_probs[0, 2] *= 1.5
            mask = own_places(loss_mask(inputs))
            with at(step=0, rank=0, micro=number):
                tap_batch(
                    **inputs,
                    loss_mask=mask,
                    log_probs=log_probs * mask,
                    advantages=torch.tensor([float(len(row)) for row in own]),
                    loss=torch.tensor(size / len(rows)),
                )


def test_layouts_of_one_batch_are_equal(tmp_path: Path) -> None:
    explicit(tmp_path / "a", "right", 1)
    explicit(tmp_path / "b", "packed", 2)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    assert {"log_probs", "advantages", "loss"} <= {verdict.quantity for verdict in report.verdicts}


def test_a_wrong_value_is_named_with_its_position(tmp_path: Path) -> None:
    explicit(tmp_path / "a", "right", 1)
    explicit(tmp_path / "b", "left", 1)
    explicit(tmp_path / "c", "right", 2, wrong=True)
    assert compare(tmp_path / "a", tmp_path / "b").exit_code == 0
    found = failed(compare(tmp_path / "a", tmp_path / "c"))
    assert list(found) == ["log_probs"]
    assert "position 2" in found["log_probs"]


def under_hooks(folder: Path, layout: str, **values: Any) -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = batch(make_samples(), layout)
    with record(folder, model, token_gradient=True):
        for _ in range(2):
            loss = mean_loss(model(**inputs).logits, inputs, 45)
            tap_batch(loss_mask=own_places(loss_mask(inputs)), **values)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_values_join_the_forward_pass_that_hooks_see(tmp_path: Path) -> None:
    numbers = [float(len(sample)) for sample in make_samples()]
    values = {"advantages": torch.tensor(numbers), "rewards": numbers, "samples": [f"s{i}" for i in range(8)]}
    under_hooks(tmp_path / "a", "right", **values)
    under_hooks(tmp_path / "b", "packed", **values)
    report = compare(tmp_path / "a", tmp_path / "b")
    assert report.exit_code == 0, failed(report)
    assert {"advantages", "trajectory", "batch_inputs"} <= {verdict.quantity for verdict in report.verdicts}
    reader = DumpReader(tmp_path / "a")
    record_of = reader.read("forward_data/step_000001_rank0_micro0.safetensors")
    samples: Any = record_of.meta["samples"]
    assert samples[0] == ["s0", 0]
    assert int(record_of.tensors["response_mask"].sum()) == 45
    assert np.array_equal(reader.read("trajectory/step_000000_rank0.safetensors").tensors["reward"], numbers)


def test_values_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"advantages has the shape \[3\], but the batch has 8 rows of 10 tokens"
    ):
        under_hooks(tmp_path / "a", "right", advantages=torch.zeros(3))
    with pytest.raises(CaptureError, match=r"samples= tells 2 ids, but the batch holds 8 samples"):
        under_hooks(tmp_path / "b", "right", samples=["a", "b"])
    with pytest.raises(CaptureError, match=r"tap_batch\(log_probs=...\) would contradict"):
        under_hooks(tmp_path / "c", "right", log_probs=torch.zeros(8, 10))


def test_without_a_recorder_nothing_happens() -> None:
    tap_batch(input_ids=torch.zeros(1, 3, dtype=torch.long))
    tap_batch(advantages=[1.0])
