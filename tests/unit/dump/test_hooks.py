"""Activations and parameters by pattern."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from regress.dump import DumpReader, Recorder, at, matching_parameters, record_activations, recording
from regress.dump.module_selection import joined
from regress.errors import ConfigError


class Block(nn.Module):
    """Returns a tuple, as transformer layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.out = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return ({"hidden": self.out(self.linear(x).tanh())}, None)


class Model(nn.Module):
    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.shared = nn.Linear(3, 3)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            out = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
            x = out[0]["hidden"]
        result: torch.Tensor = self.shared(self.shared(x))
        return result


def _record(folder: Path, model: Model, pattern: str) -> Any:
    x = torch.arange(6.0).reshape(2, 3)
    with (
        recording(Recorder(folder, options={"activations": True})),
        record_activations(model, pattern) as names,
    ):
        model(x)  # outside of at(): not recorded
        for micro in range(2):
            with at(step=0, micro=micro):
                model(x + micro).sum().backward()
    model(x)
    return names, list(DumpReader(folder))


def test_outputs_of_matching_modules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    names, records = _record(tmp_path, model, r"layers\.\d$|linear")
    assert names == ["layers.0", "layers.0.linear", "layers.1", "layers.1.linear"]
    assert [record.micro for record in records] == [0, 1]
    tensors = records[1].tensors
    assert sorted(tensors) == names
    x = torch.arange(6.0).reshape(2, 3) + 1
    assert (tensors["layers.0.linear"] == model.layers[0].linear(x).detach().numpy()).all()
    assert (tensors["layers.0"] == model.layers[0](x)[0]["hidden"].detach().numpy()).all()


def test_module_that_runs_twice(tmp_path: Path) -> None:
    _, records = _record(tmp_path, Model(), "shared")
    assert [list(record.tensors) for record in records] == [["shared", "shared#1"]] * 2


def test_a_module_that_runs_piece_by_piece_is_recorded_once(tmp_path: Path) -> None:
    """A copy of each piece is kept: what the caller does to it afterwards is not recorded."""
    model = Model()
    x = torch.arange(12.0).reshape(4, 3)
    expected = model.shared(x).detach().numpy()
    with recording(Recorder(tmp_path, options={"activations": True})), record_activations(model, "shared"):
        for micro in range(2):
            with at(step=0, micro=micro), joined(dim=0):
                for piece in x.split([1, 0, 3]):
                    model.shared(piece).detach().zero_()
        with at(step=0, micro=2), joined(dim=0):
            pass
    records = list(DumpReader(tmp_path))
    assert [record.micro for record in records] == [0, 1]
    for record in records:
        assert list(record.tensors) == ["shared"]
        np.testing.assert_allclose(record.tensors["shared"], expected, rtol=1e-6)


def test_recomputation_is_not_recorded(tmp_path: Path) -> None:
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        _, records = _record(tmp_path / str(recompute), Model(recompute), ".*")
        found.append([record.checksum() for record in records])
    assert found[0] == found[1]


def test_hooks_are_removed(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(RuntimeError), record_activations(model, "shared"):
        raise RuntimeError
    assert not model.shared._forward_hooks


def test_pattern_without_match_suggests() -> None:
    with (
        pytest.raises(
            ConfigError,
            match=r"target_module_pattern .* matches none of the 8 names: .* layers\.[01]\.linear",
        ),
        record_activations(Model(), r"layers\.7\.linear"),
    ):
        pass


def test_parameters() -> None:
    model = Model()
    found = matching_parameters(model.named_parameters(), r"layers\.\d\.linear\.weight")
    assert list(found) == ["layers.0.linear.weight", "layers.1.linear.weight"]
    assert found["layers.0.linear.weight"] is model.layers[0].linear.weight
    with pytest.raises(
        ConfigError, match=r"target_param_pattern 'q_proj' matches none .*, and \.\* matches all"
    ):
        matching_parameters(model.named_parameters(), "q_proj")
    with pytest.raises(ConfigError, match=r"target_param_pattern '\(' is not a regular expression"):
        matching_parameters(model.named_parameters(), "(")
