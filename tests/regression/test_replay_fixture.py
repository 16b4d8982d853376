"""``regress.replay``: the dump of a golden case under a variant, for tests of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import ConfigError, GoldenError

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.yaml"))


def test_a_replay_is_a_dump_with_the_golden_values(regress: Any) -> None:
    dump = regress.replay("dr_grpo", "packed", "float64")
    (record,) = dump.records("loss", 1)
    again = regress.replay("dr_grpo", "base", "float64")
    (base,) = again.records("loss", 1)
    np.testing.assert_allclose(record.tensors["loss"], base.tensors["loss"], rtol=1e-12)
    assert record.meta["layout"] != base.meta["layout"]


@pytest.mark.parametrize(
    ("case", "variant", "precision", "error", "message"),
    [
        pytest.param(
            "nothing",
            "base",
            "float64",
            GoldenError,
            f"there is no case 'nothing': cases here are {', '.join(CASES)}$",
            id="case",
        ),
        ("dense", "bas", "float64", ConfigError, "there is no variant 'bas'; choose one of base, left"),
        (
            "dense",
            "base",
            "fp32",
            ConfigError,
            "there is no precision 'fp32'; choose one of float64, float32",
        ),
    ],
)
def test_what_does_not_exist_is_named(
    regress: Any, case: str, variant: str, precision: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        regress.replay(case, variant, precision)
