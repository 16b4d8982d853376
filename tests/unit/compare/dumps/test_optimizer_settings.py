"""A foreign trainer's optimizer that was set otherwise is named, though no configuration tells how it is set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import regress
from regress.cli import main

RIGHT: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}
NOTE = "the optimizers have other settings, as records of their states tell: "


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 16), nn.Linear(16, 17, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.embed(ids))))


def trained(folder: Path, *, limit: float = 0.3, coupled: float = 0.0, **settings: Any) -> Path:
    """Record three steps of a loop of plain PyTorch.

    Args:
        limit: norm that gradients are clipped to.
        coupled: weight decay that is added to the gradient.
    """
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), **{**RIGHT, **settings})
    ids = torch.randint(0, 17, (4, 12))
    with regress.record(folder, model):
        for _ in range(3):
            chosen = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            (-chosen[:, 4:].mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(parameter.detach(), alpha=coupled)
            optimizer.step()
            optimizer.zero_grad()
    return folder


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("change", "rule", "note"),
    [
        ({"betas": (0.8, 0.999)}, "betas", "betas [0.9, 0.999] and [0.8, 0.999]"),
        ({"betas": (0.9, 0.99)}, "betas", "betas [0.9, 0.999] and [0.9, 0.99]"),
        ({"limit": 1e9}, "clip-of-gradients-left-out", "max_grad_norm 0.3 and 1000000000.0"),
        ({"coupled": 0.1, "weight_decay": 0.0}, "weight-decay-in-the-gradient", "weight_decay 0.1 and 0.0"),
        ({"lr": 1.5e-3}, "learning-rate", "learning_rates 0.001 of embed.weight and 0.0015 of embed.weight"),
    ],
    ids=["first decay", "second decay", "no clip", "coupled decay", "rate"],
)
def test_what_is_set_otherwise_is_named(change: dict[str, Any], rule: str, note: str, tmp_path: Path) -> None:
    golden, actual = trained(tmp_path / "golden"), trained(tmp_path / "actual", **change)
    done = CliRunner().invoke(main, ["compare", str(golden), str(actual)])
    text = " ".join(done.output.split())
    assert done.exit_code == 1, text
    assert f"(rule {rule};" in text[text.find("probably") :].partition("next:")[0], text
    assert NOTE + note in text


def test_the_same_settings_need_no_note(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["compare", str(trained(tmp_path / "golden")), str(trained(tmp_path / "actual"))]
    )
    assert done.exit_code == 0, done.output
    assert "other settings" not in done.output


def test_what_gives_the_values_is_asked_of_the_tensor_that_fails_first(tmp_path: Path) -> None:
    golden, actual = trained(tmp_path / "golden"), trained(tmp_path / "actual", limit=0.15)
    failed = regress.compare_sources(golden, actual).failed
    told = [v for v in failed if v.affected is not None]
    asked = [(v.name, v.place.step) for v in told if v.affected is not None and v.affected.held]
    assert asked == [("embed.weight/exp_avg", 0)]
    assert len(told) == len(failed) > 1
