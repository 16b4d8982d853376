"""Damaged, malicious and foreign files: an error of one sentence, and nothing in them is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regress.compare.dumps.comparison import compare_dumps
from regress.errors import DumpError, RegressError

Setup = Callable[..., Any]
FILE = "forward_data/step_000000_rank0_micro0.pt"


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "executed")


def cut(path: Path, _: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path, _: Path) -> None:
    path.write_bytes(b"")


def bomb(path: Path, target: Path) -> None:
    torch.save({"step": 0, "log_probs": Bomb(target)}, path)


def bare(path: Path, target: Path) -> None:
    path.write_bytes(pickle.dumps(Bomb(target)))


def no_dict(path: Path, _: Path) -> None:
    torch.save([1, 2], path)


def without_mask(path: Path, _: Path) -> None:
    payload = torch.load(path, weights_only=True)
    del payload["response_mask"]
    torch.save(payload, path)


def other_rows(path: Path, _: Path) -> None:
    payload = torch.load(path, weights_only=True)
    payload["input_ids"] = payload["input_ids"][:1]
    torch.save(payload, path)


@pytest.mark.parametrize("harm", [cut, empty, bomb, bare, no_dict, without_mask, other_rows])
def test_what_cannot_be_read_is_named(
    nexrl: Setup, tmp_path: Path, harm: Callable[[Path, Path], None]
) -> None:
    golden, actual = nexrl("golden").self_hosted(), nexrl("actual").self_hosted()
    target = tmp_path / "executed"
    harm(actual.folder / FILE, target)
    with pytest.raises(DumpError) as caught:
        compare_dumps(str(golden.folder), str(actual.folder))
    assert str(actual.folder) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not target.exists()


def test_text_that_is_no_json(nexrl: Setup) -> None:
    golden = nexrl("golden", format="jsonl").self_hosted()
    path = golden.folder / "loss" / "step_000000_rank0_micro0.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DumpError, match=r"its last line is not valid JSON"):
        compare_dumps(str(golden.folder), str(golden.folder))


@pytest.mark.parametrize("what", ["missing", "file", "empty"])
def test_what_is_no_dump(nexrl: Setup, tmp_path: Path, what: str) -> None:
    golden, other = nexrl("golden").self_hosted(), tmp_path / "other"
    if what == "file":
        other.write_text("x")
    elif what == "empty":
        other.mkdir()
    with pytest.raises(
        RegressError, match=r"does not exist|is not a complete dump|cannot be read as tensors"
    ):
        compare_dumps(str(golden.folder), str(other))


def test_steps_that_do_not_meet(nexrl: Setup) -> None:
    golden, actual = nexrl("golden").self_hosted(), nexrl("actual", step=3).self_hosted()
    with pytest.raises(RegressError, match=r"have no step in common \(golden: step 0; actual: step 3\)"):
        compare_dumps(str(golden.folder), str(actual.folder))


def test_bare_nan_is_read_and_must_be_on_both_sides(nexrl: Setup, sampled: Setup) -> None:
    samples = sampled()
    samples[1].values["entropy"][samples[1].prompt] = float("nan")
    golden = nexrl("golden", samples, format="jsonl").self_hosted()
    (path,) = (golden.folder / "forward_data").glob("*rank0*")
    assert "NaN" in path.read_text()
    with pytest.raises(ValueError, match="bare"):
        json.loads(path.read_text(), parse_constant=_refuse)
    assert compare_dumps(str(golden.folder), str(golden.folder)).exit_code == 0
    found = compare_dumps(str(golden.folder), str(nexrl("actual").self_hosted().folder))
    (verdict,) = [v for v in found.failed if v.quantity == "entropy"]
    assert verdict.detail.startswith("golden NaN, actual finite")


def _refuse(name: str) -> None:
    raise ValueError(f"bare {name}")
