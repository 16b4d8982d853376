"""A golden case of one's own: a copy that a test may change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore

GOLDEN = Path(__file__).parents[3] / "golden"


@pytest.fixture
def store(tmp_path: Path) -> GoldenStore:
    """The case `dense`, alone in a golden directory."""
    shutil.copytree(GOLDEN / "dense", tmp_path / "golden" / "dense")
    return GoldenStore(tmp_path / "golden")


@pytest.fixture
def case(store: GoldenStore) -> GoldenCase:
    return store.case("dense")


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., GoldenCase]:
    """``tiny(algorithm={...}, lag=1)``: a case that has nothing but its case.yaml, as Dr. GRPO's but smaller."""

    def make(name: str = "tiny", algorithm: Mapping[str, Any] | None = None, **recipe: Any) -> GoldenCase:
        tree = yaml.safe_load((GOLDEN / "dr_grpo" / "case.yaml").read_text())
        tree["config"]["algorithm"] |= algorithm or {}
        tree["config"]["data"] |= {"prompts_per_step": 2, "group_size": 2}
        tree["recipe"]["model"]["config"] |= {"num_hidden_layers": 1, "hidden_size": 8}
        tree["recipe"]["overrides"] = {"warm_start.steps": 2, "optimizer.learning_rate": 0.05}
        tree["recipe"] |= {"warm_steps": 3, "lag": 1, "steps": 1, **recipe}
        folder = tmp_path / "made" / name
        folder.mkdir(parents=True)
        (folder / "case.yaml").write_text(yaml.safe_dump(tree))
        return GoldenCase(folder)

    return make
