"""A baseline that does not agree with itself: what is no further off than that is neither equal nor wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import regress
from regress.cli import main


def weights(folder: Path, *, by: float = 0.0, first: float = 0.0, extra: bool = False) -> str:
    """A model whose second tensor is off by a part of its scale; the first by another."""
    drawn = np.random.default_rng(0)
    values = {name: drawn.standard_normal((8, 8)).astype(np.float32) for name in ("a.weight", "b.weight")}
    values["a.weight"][1, 2] += np.float32(first * np.abs(values["a.weight"]).max())
    values["b.weight"][3, 4] += np.float32(by * np.abs(values["b.weight"]).max())
    if extra:
        values["c.weight"] = values["a.weight"]
    folder.mkdir()
    save_file(values, folder / "model.safetensors")
    return str(folder)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["compare", *arguments])


@pytest.fixture
def baseline(tmp_path: Path) -> tuple[str, str]:
    return weights(tmp_path / "a"), weights(tmp_path / "a2", by=0.02)


def test_a_difference_below_the_noise_cannot_be_judged(baseline: tuple[str, str], tmp_path: Path) -> None:
    golden, again = baseline
    actual = weights(tmp_path / "b", by=0.01)
    assert run(golden, actual).exit_code == 1
    done = run(golden, actual, "--noise", again)
    assert done.exit_code == 2, done.output
    said = " ".join(done.output.split())
    assert (
        "cannot be judged: it differs by up to 0.01 of its scale, and two recordings of the baseline by 0.02"
        in said
    )
    assert "✗" not in done.output
    found = regress.compare_sources(golden, actual, noise=again)
    assert (found.exit_code, found.failed) == (2, [])


def test_a_difference_above_the_noise_is_one(baseline: tuple[str, str], tmp_path: Path) -> None:
    golden, again = baseline
    done = run(golden, weights(tmp_path / "b", by=0.01, first=0.05), "--noise", again)
    assert done.exit_code == 1
    assert "a.weight" in done.output
    assert "noise of the baseline, relative to the scale of each tensor" in " ".join(done.output.split())


def test_what_is_equal_is_equal(baseline: tuple[str, str], tmp_path: Path) -> None:
    golden, again = baseline
    assert run(golden, weights(tmp_path / "b"), "--noise", again).exit_code == 0


def test_noise_within_the_tolerance_changes_nothing(baseline: tuple[str, str], tmp_path: Path) -> None:
    golden, again = baseline
    done = run(golden, weights(tmp_path / "b", by=0.01), "--noise", again, "--rtol", "0.05")
    assert done.exit_code == 0


def test_a_baseline_that_agrees_with_itself_is_said_to(baseline: tuple[str, str], tmp_path: Path) -> None:
    golden, _ = baseline
    done = run(golden, weights(tmp_path / "b", by=0.01), "--noise", weights(tmp_path / "same"))
    assert done.exit_code == 1
    assert "two recordings of the baseline are the same" in done.output


def test_what_only_the_second_recording_has_cannot_be_judged(
    baseline: tuple[str, str], tmp_path: Path
) -> None:
    golden, _ = baseline
    actual, again = weights(tmp_path / "b", extra=True), weights(tmp_path / "a3", extra=True)
    assert run(golden, actual).exit_code == 1
    done = run(golden, actual, "--noise", again)
    assert done.exit_code == 2
    assert "c.weight cannot be judged: two recordings of the baseline differ in it, too" in " ".join(
        done.output.split()
    )


def test_a_second_recording_that_is_not_there_is_refused(baseline: tuple[str, str]) -> None:
    golden, again = baseline
    done = run(golden, again, "--noise", "nowhere")
    assert done.exit_code == 2
    assert "nowhere" in done.output
