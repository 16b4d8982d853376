"""A packed row that is taken for one sample is said to be that, and what was not checked is said, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from regress.cli import main
from regress.dump import Recorder, at, recording, tap
from regress.layout import Segment, TokenLayout

SAMPLES = {"a": [5, 6, 7, 8], "b": [5, 6, 9], "c": [1, 2, 3, 4, 5]}
TYPES = dict.fromkeys(("batch_inputs", "forward_data", "is_loss_debug"), True)


def recorded(folder: Path, names: tuple[str, ...], *, joined: bool, **more: Any) -> Path:
    """Record one packed row of samples, as them or as one sample."""
    ids = [token for name in names for token in SAMPLES[name]]
    sizes = [len(SAMPLES[name]) for name in names]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    segments = [Segment(i, 0, n, 0, start) for i, (n, start) in enumerate(zip(sizes, starts, strict=True))]
    segments = [Segment(0, 0, len(ids), 0, 0)] if joined else segments
    keys = [["row", 0]] if joined else [[name, 0] for name in names]
    where: dict[str, Any] = {
        "layout": TokenLayout((1, len(ids)), tuple(segments)),
        "meta": {"samples": keys},
    }
    row = torch.tensor([ids])
    with recording(Recorder(folder, options=TYPES)), at(step=0, rank=0, micro=0):
        tap("batch_inputs", input_ids=row, response_mask=torch.ones_like(row), **where)
        tap("forward_data", log_probs=-row.double() / 10, input_ids=row, **where)
        if more:
            tap("is_loss_debug", effective_valid=torch.ones_like(row), **more, **where)
    return folder


def ran(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, " ".join(done.output.split())


@pytest.mark.parametrize("golden_joined", [False, True], ids=["actual", "golden"])
def test_an_unknown_sample_is_said_to_be_known_ones_one_behind_the_other(
    tmp_path: Path, golden_joined: bool
) -> None:
    right = recorded(tmp_path / "right", ("a", "b", "c"), joined=False)
    wrong = recorded(tmp_path / "wrong", ("b", "a", "c"), joined=True)
    pair = (wrong, right) if golden_joined else (right, wrong)
    told = tmp_path / "told.json"
    code, said = ran("compare", *pair, "--json", told)
    has = "golden" if golden_joined else "actual"
    assert code == 1
    assert f"sample row/0 of the {has} dump is 3 samples, one behind the other (b/0, a/0, c/0)" in said
    assert "rule samples-in-one" in said
    assert json.loads(told.read_text())["diagnoses"]["compare"][0]["of"] == has
    assert "let them begin again at each sample, or pass cu_seq_lens" in said
    assert "another batch or seed" not in said
    assert "two different runs" not in said


def test_other_samples_are_another_batch(tmp_path: Path) -> None:
    first = recorded(tmp_path / "first", ("a",), joined=False)
    code, said = ran("compare", first, recorded(tmp_path / "other", ("b", "c"), joined=True))
    assert code == 1
    assert "two batches or seeds" in said
    assert "one behind the other" not in said


def test_what_a_dump_does_not_tell_is_listed_as_not_checked(tmp_path: Path) -> None:
    """Advantages that no group of this dump can be asked for: their sum is not said to hold."""
    advantages = torch.full((1, 7), -1.45, dtype=torch.float64)
    code, said = ran(
        "dump", "check", recorded(tmp_path / "a", ("a", "b"), joined=False, advantages=advantages)
    )
    assert code == 0, said
    assert "not checked: advantages of a group add up to 0 (advantages; it needs" in said
    assert "not checked: the ratio is exp(log p - log p_old) (ratio; it needs" in said
    assert "not checked: no log-prob is above 0" not in said
