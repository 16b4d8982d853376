"""AdamW, its schedules, and what an optimizer refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from regress.engine.config.training_config import OptimizerConfig
from regress.engine.optimizer import adamw, build_scheduler
from regress.engine.optimizer import update as update_once
from regress.errors import RegressError


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=torch.float64))


def test_implementations_of_adamw() -> None:
    flags = {
        name: (group["foreach"], group["fused"])
        for name in ("auto", "for_loop", "foreach", "fused")
        for group in adamw([("theta", parameter())], 0.1, implementation=name).param_groups
    }
    assert flags == {
        "auto": (None, None),
        "for_loop": (False, False),
        "foreach": (True, False),
        "fused": (False, True),
    }
    assert adamw([], 0.1).param_groups[0]["params"] == []


def test_settings_that_torch_cannot_take_are_named() -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never returns
            raise RuntimeError("no float32")

    optimizer = Refusing([parameter()], lr=0.5, weight_decay=0.25)
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.add_param_group({"params": [parameter()], "lr": 7.0, "eps": 7.0})
    with pytest.raises(RegressError, match=r"lr 0\.5, eps 1e-08, weight_decay 0\.25"):
        update_once(optimizer)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("constant", [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]), ("linear", [0.0, 0.5, 1.0, 0.75, 0.5, 0.25])],
)
def test_schedules(name: str, wanted: list[float]) -> None:
    optimizer = adamw([("theta", parameter())], 1.0)
    scheduler = build_scheduler(optimizer, OptimizerConfig(lr_scheduler=name, warmup_steps=2), updates=6)
    rates = []
    for _ in wanted:
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == wanted
