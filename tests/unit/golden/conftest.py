"""A small case made by hand, and what can be seen of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.dump.dump_files import write_atomically
from regress.dump.formats import FORMATS
from regress.dump.trajectory import Trajectory, to_record
from regress.golden.case_update import commit

PROVENANCE = {"versions": {"torch": "2.13.0"}}
YAML = """\
reason: The smallest case there can be.
claims: [kl]
config:
  seed: 3
  algorithm: {kl_coef: 1e-3}
recipe: {made: by hand}
"""
Make = Callable[..., Any]


def _trajectories(step: int) -> list[Trajectory]:
    return [
        Trajectory("g0", run, [5, 6, 7, 8 + step], [0, 0, 1, 1], 0.5 * run, 2, log_probs=np.zeros(4))
        for run in range(2)
    ]


def _make_inputs(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "case.yaml").write_text(YAML)
    for name in ("model", "reference"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"hidden_size": 16}')
        (folder / name / "model.safetensors").write_bytes(name.encode() * 50)
    (folder / "optimizer.safetensors").write_bytes(b"moments" * 9)
    for step in range(2):
        record = to_record(_trajectories(step), step)
        path = folder / "trajectories" / f"step_{step:06d}.safetensors"
        write_atomically(path, FORMATS["safetensors"].encode(record))
    return folder


def _truth(scale: float = 1.0) -> dict[str, dict[str, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    updates = ("step_000000_update0", "step_000000_update1", "step_000001")
    return {
        where: {
            "log_probs": {"log_probs": rng.standard_normal(8) * scale},
            "gradient": {
                "model.norm.weight": rng.standard_normal(5),
                "lm_head.weight": rng.standard_normal((4, 3)) * scale,
            },
            "grad_norm": {"grad_norm": np.float64(1.5 * scale)},
            "optimizer": {"lm_head.weight/step": np.float32(3.0)},
        }
        for where in updates
    }


def _content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="session")
def make_inputs() -> Make:
    """Make the folder of a case that is not recorded yet."""
    return _make_inputs


@pytest.fixture(scope="session")
def make_truth() -> Make:
    return _truth


@pytest.fixture(scope="session")
def content() -> Make:
    """All files under a folder, by relative path."""
    return _content


@pytest.fixture
def provenance() -> dict[str, Any]:
    return dict(PROVENANCE)


@pytest.fixture
def unrecorded(tmp_path: Path) -> Path:
    return _make_inputs(tmp_path / "golden" / "tiny")


@pytest.fixture
def recorded(unrecorded: Path) -> Path:
    """The folder of a case with truth, no tolerances."""
    commit(unrecorded, truth=_truth(), provenance=PROVENANCE)
    return unrecorded
