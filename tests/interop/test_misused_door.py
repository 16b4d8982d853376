"""Names of the public API that are called with what they cannot take: one plain sentence of an error of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regress
from regress.errors import CaptureError, ConfigError, GoldenError

GOLDEN = Path(__file__).parents[2] / "golden"
Call = Callable[[Any, Path], Any]


def compared(**options: Any) -> Call:
    return lambda door, folder: door.compare_sources(folder, folder, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (compared(steps=0), ConfigError, "steps=0 is no range"),
        (compared(steps="0"), ConfigError, "steps='0' is no range"),
        (compared(steps=(3, 1)), ConfigError, r"steps=\(3, 1\) is no range"),
        (compared(only=[3]), ConfigError, "is no pattern"),
        (compared(only=None), ConfigError, "only=None is no pattern"),
        (compared(rtol="1e-3"), ConfigError, "rtol=1e-3 is no bound"),
        (compared(rtol=float("nan")), ConfigError, "rtol=nan is no bound"),
        (lambda door, folder: door.Tolerance(float("nan")), ConfigError, "relative=nan is no bound"),
        (lambda door, folder: door.Tolerance(0.0, -1.0), ConfigError, "absolute=-1.0 is no bound"),
        (lambda door, folder: door.export_case("dense", folder), GoldenError, "'dense' is no GoldenCase"),
        (lambda door, folder: door.record(folder, "gpt2").__enter__(), CaptureError, "is no torch.nn.Module"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, call: Call, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call(regress, tmp_path)


def test_the_golden_directory_may_be_a_text(tmp_path: Path) -> None:
    door: Any = regress
    with pytest.raises(GoldenError, match="there is no case 'none'"):
        door.compare_sources("golden:none", tmp_path, golden_dir=str(GOLDEN))


@pytest.mark.parametrize("state", ["", "foo"])
def test_a_state_that_no_case_has(tmp_path: Path, state: str) -> None:
    with pytest.raises(ConfigError, match=f"asks for the state '{state}' of a case"):
        regress.compare_sources(f"golden:dense@{state}", tmp_path, golden_dir=GOLDEN)
