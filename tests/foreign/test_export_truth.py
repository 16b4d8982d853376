"""The export says all that a trainer needs: an independent script of its files reproduces the golden values."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from regress.replay.case_export import export_case
from tests.golden_cases import cases, opened

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "foreign_trainer.py"
DEFAULT = ("dense", "cispo")
SAID = [case.name for case in cases() if not case.leaves_out]  # by the objectives of the script
CASES = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.extended) for name in SAID]


def foreign_trainer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("foreign_trainer", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def canonical(found: dict[str, Any], name: str) -> np.ndarray:
    """``[frame.size]`` one value a token of the mini-batch, 0 where it is not a loss token."""
    rows = []
    for sample, tokens in zip(found["samples"], found["tokens"], strict=True):
        row = np.zeros(len(sample["prompt_ids"]) + len(sample["mask"]))
        row[len(sample["prompt_ids"]) :][sample["mask"].numpy()] = tokens[name].numpy()
        rows.append(row)
    return np.concatenate(rows)


def compared(truth: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, golden and actual values of everything that the script computes."""
    names = {"prob_ratio": "ratio", "elementwise_loss": "token_loss"}
    for name in ("log_probs", "entropy", "prob_ratio", "elementwise_loss", "advantages", "weights"):
        yield name, truth[names.get(name, name)][name], canonical(found, name)
    for quantity in ("gradient", "param", "optimizer"):
        assert truth[quantity].keys() == found[quantity].keys()
        for name, golden in truth[quantity].items():
            yield f"{quantity} {name}", golden, found[quantity][name].numpy()
    yield "loss", truth["loss"]["loss"], np.array(found["loss"])
    yield "grad_norm", truth["grad_norm"]["grad_norm"], np.array(found["grad_norm"])


def test_the_script_has_at_most_150_lines() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 150


@pytest.mark.parametrize("name", CASES)
def test_a_script_of_the_exported_files_reproduces_the_golden_values(name: str, tmp_path: Path) -> None:
    case = opened(name)
    folder = export_case(case, tmp_path / "export", derived=False)
    assert not (folder / "derived").exists()
    updates = []

    def observe(update: dict[str, Any], found: dict[str, Any]) -> None:
        updates.append(update["name"])
        truth = case.truth(update["name"])
        terms = float(np.abs(truth["token_loss"]["elementwise_loss"]).max())
        for what, golden, actual in compared(truth, found):
            size = terms if what == "loss" else 1e-30  # on policy, terms of a loss add up to nearly nothing
            error = np.abs(actual - golden).max(initial=0.0) / max(np.abs(golden).max(initial=0.0), size)
            assert error <= 1e-12, f"{update['name']} {what}: {error:.3g}"

    foreign_trainer().train(folder, observe=observe)
    assert updates == case.wheres()
