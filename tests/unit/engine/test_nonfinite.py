"""Updates whose loss or gradient is not finite: the run stops, or leaves them out and counts them."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from regress.dump.dump_reader import DumpReader
from regress.engine import causal_lm_policy
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.training_run import train
from regress.errors import NotFinite

MakeConfig = Callable[..., Config]
PLAIN = ("warm_start.steps=0",)  # its passes are training passes, too
TWO = (*PLAIN, "trainer.epochs=2", "max_steps=2")


def poison(patch: pytest.MonkeyPatch, kind: str, *which: int) -> None:
    """Let some of the training passes, by number, give a loss or a gradient that is not finite."""
    forward, clip = causal_lm_policy.LocalPolicy._forward, LocalPolicy.clip_grad_norm
    made = {"loss": -1, "gradient": -1}

    def forwarding(self: Any, *args: Any, entropy: Any, **kwargs: Any) -> Any:
        out = forward(self, *args, entropy=entropy, **kwargs)
        made["loss"] += entropy is not False
        wrong = kind == "loss" and entropy is not False and made["loss"] in which
        return replace(out, log_probs=out.log_probs * math.nan) if wrong else out

    def clipping(self: Any, limit: float | None) -> Any:
        made["gradient"] += 1
        wrong = kind == "gradient" and made["gradient"] in which
        return clip(self, limit) * (math.nan if wrong else 1.0)

    patch.setattr(causal_lm_policy.LocalPolicy, "_forward", forwarding)
    patch.setattr(LocalPolicy, "clip_grad_norm", clipping)


def column(config: Config, name: str) -> list[float | None]:
    """The values of a metric in the file, row by row."""
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_lost_update_changes_nothing_and_is_counted(
    kind: str, config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose second update is lost is one that made it with a learning rate of zero."""
    dump = (
        "debug.enable_data_dump=true",
        "debug.dump_options.param=true",
        "debug.dump_options.optimizer=true",
    )
    asked = config(*TWO, "trainer.on_nonfinite=skip", *dump)
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        poison(patch, kind, 1)
        train(asked, console)
    assert column(asked, "training/invalid_loss_count") == [1, 0]
    losses = column(asked, "training_step/loss")
    assert [loss is None for loss in losses] == [False, True, False, False], "no number is null in the file"
    reader = DumpReader(Path(asked.output_dir) / "debug_dump")
    for type in ("param", "optimizer"):
        before, after = (
            next(r for r in reader.records(type, 0) if r.where.update == update) for update in (0, 1)
        )
        for name, value in before.tensors.items():
            assert (after.tensors[name] == value).all(), name


def test_a_first_update_that_is_lost_leaves_the_start(
    config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(*PLAIN, "max_steps=1", "trainer.on_nonfinite=skip")
    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        poison(patch, "loss", 0)
        result = train(asked, console)
    assert math.isnan(result.metrics["training_step/loss"])
    assert column(asked, "training_step/loss") == [None]
    lost = load_file(Path(asked.output_dir) / "final" / "model.safetensors")
    train(config(*PLAIN, "max_steps=0"), console)
    for name, value in load_file(Path(asked.output_dir) / "final" / "model.safetensors").items():
        torch.testing.assert_close(lost[name], value, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "says"), [("loss", "has no loss"), ("gradient", "the gradient norm is nan")]
)
def test_by_default_the_run_stops(
    kind: str, says: str, config: MakeConfig, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, kind, 1)
    with pytest.raises(NotFinite, match=says):
        train(config(*TWO), console)
