"""Changed values that other comparators miss: one test for each of their weaknesses, and for each change one missed.

The test ids name the row (``w4``: the largest error counts, not a mean) or the change. Dumps lie on disk, and are
compared as ``regress compare`` does.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.verdicts.tolerance import BITWISE
from regress.compare.verdicts.verdict import Status
from regress.dump.record import Record
from regress.report.comparison_report import report_of
from tests.unit.compare.updates.pairs import PACKED, Pair, Write, at, loss_place, on, quantities


def test_masks_are_compared_first_and_exactly_w3(pair: Any) -> None:
    healthy = pair()
    row, column = loss_place(healthy)
    found = healthy.compared(on("forward_data", "response_mask", at((row, column), 0)))
    assert found.failed[0].status is Status.MASK
    assert found.failed[0].name == "forward_data/response_mask"


def padding_of(pair: Pair) -> tuple[int, int]:
    (layout, *_) = pair.world.layouts(pair.other)
    row, column = np.argwhere(~layout.attention_mask)[0]
    return int(row), int(column)


@pytest.mark.parametrize(
    ("junk", "status"), [(1e30, None), (np.nan, Status.NONFINITE)], ids=["w3-junk", "w3-NaN"]
)
def test_padding_is_ignored_but_for_what_is_no_number(pair: Any, junk: float, status: Status | None) -> None:
    healthy = pair()
    found = healthy.compared(on("forward_data", "log_probs", at(padding_of(healthy), junk)))
    assert [verdict.status for verdict in found.failed] == ([] if status is None else [status])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_token_off_by_1_in_8192_w4(write: Write, make_world: Any, dtype: str) -> None:
    lengths = [1024] * 8
    pair = Pair(write, make_world(lengths), dtype=dtype)
    row, column = loss_place(pair, 1000)
    found = pair.compared(on("forward_data", "log_probs", at((row, column), lambda x: x + 1.0)))
    (verdict,) = found.failed
    assert (verdict.over, verdict.quantity) == (1, "log_probs")
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(f"sample 00{row // 2}/{row % 2}, position {column}")


def test_every_token_scaled_by_4_percent_w4(pair: Any) -> None:
    found = pair(other=PACKED).compared(on("forward_data", "log_probs", lambda array: array * 1.04))
    (verdict,) = found.failed
    assert verdict.alpha == pytest.approx(1.04)
    assert verdict.residual == pytest.approx(0, abs=1e-9)


def test_off_by_one_shift_w4(pair: Any) -> None:
    found = pair().compared(on("forward_data", "log_probs", lambda array: np.roll(array, 1, axis=1)))
    assert quantities(found) == {"log_probs"}


def test_swapped_rows_of_the_same_shape_w4(write: Write, make_world: Any) -> None:
    pair = Pair(write, make_world([6, 6, 6, 6]))
    found = pair.compared(on("forward_data", "log_probs", lambda array: array[[1, 0, 2, 3]]))
    assert quantities(found) == {"log_probs"}
    assert found.failed[0].worst is not None
    assert found.failed[0].worst.where.startswith(("sample 000/0", "sample 000/1"))


def test_not_a_number_on_both_sides_at_different_positions_w5(pair: Any) -> None:
    healthy = pair()
    first, second = loss_place(healthy, 2), loss_place(healthy, 3)
    values = healthy.world.truth["log_probs"]["log_probs"]
    offsets = healthy.world.frame.offsets
    values[offsets[first[0]] + first[1]] = np.nan
    same = healthy.compared()
    assert same.failed == []
    moved = on("forward_data", "log_probs", at(first, 0.0))
    found = healthy.compared(lambda r: on("forward_data", "log_probs", at(second, np.nan))(moved(r)))
    (verdict,) = found.failed
    assert verdict.status is Status.NONFINITE
    assert verdict.over == 2
    text = json.dumps(report_of({"compare": found}).to_json(), allow_nan=False)
    assert "NaN" in text


def test_all_zero_and_all_zero_w5(pair: Any) -> None:
    healthy = pair()
    healthy.world.truth["advantages"]["advantages"][:] = 0.0
    for record_type in ("gradient", "param"):
        for array in healthy.world.truth[record_type].values():
            array[:] = 0.0
    assert healthy.compared().exit_code == 0


def test_empty_tensors_w5(pair: Any) -> None:
    healthy = pair()
    healthy.world.truth["gradient"]["empty"] = np.zeros((0, 3))
    found = healthy.compared()
    assert found.exit_code == 0
    assert any(v.name == "empty" and v.ok for v in found.verdicts)
    assert (
        healthy.compared(on("gradient", "empty", lambda _: np.zeros((0, 4)))).failed[0].status is Status.SHAPE
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_one_ulp_in_bitwise_mode_w6(pair: Any, dtype: str) -> None:
    healthy = pair(other=PACKED, dtype=dtype)
    strict = Bounds(BITWISE)
    assert [v for v in healthy.compared(bounds=strict).failed if v.quantity != "loss"] == []
    nudged = on("param", "model.norm.weight", at(1, lambda x: np.nextafter(x, np.inf, dtype=x.dtype)))
    assert healthy.compared(nudged).failed == []
    found = [v for v in healthy.compared(nudged, bounds=strict).failed if v.quantity != "loss"]
    (verdict,) = found
    assert (verdict.over, verdict.max_ulp, verdict.name) == (1, 1.0, "model.norm.weight")


def test_other_dtypes_in_bitwise_mode_w6(pair: Any) -> None:
    wide = on("param", "model.norm.weight", lambda array: array.astype(np.float32))
    found = pair().compared(wide, bounds=Bounds(BITWISE))
    assert [(v.status, v.name) for v in found.failed] == [(Status.DTYPE, "model.norm.weight")]


def test_gradients_by_name_and_element_w8(pair: Any) -> None:
    found = pair().compared(on("gradient", "model.embed_tokens.weight", at((3, 1), lambda x: x * 1.001)))
    (verdict,) = found.failed
    assert (verdict.name, verdict.over) == ("model.embed_tokens.weight", 1)
    assert verdict.worst is not None
    assert verdict.worst.where == "element [3, 1] of model.embed_tokens.weight"


def test_what_broke_first_comes_first_w12(pair: Any) -> None:
    def edit(record: Record) -> Record:
        for record_type, name in (
            ("gradient", "model.norm.weight"),
            ("loss", "loss"),
            ("forward_data", "log_probs"),
        ):
            record = on(record_type, name, lambda array: array * 1.5)(record)
        return record

    found = pair().compared(edit)
    assert [v.quantity for v in found.failed] == ["log_probs", "loss", "gradient", "invariants"]


def test_negative_divergence(pair: Any) -> None:
    found = pair().compared(on("is_loss_debug", "kl", lambda array: -np.abs(array) - 1e-6))
    assert "kl" in quantities(found)
