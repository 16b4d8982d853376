"""File names and the order of computation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.dump.coordinates import Coordinates, dataflow_key, parse_stem
from regress.dump.record_types import RECORD_TYPES, type_index, type_number
from regress.errors import DumpError

indices = st.none() | st.integers(0, 200)


@pytest.mark.parametrize(
    ("stem", "where"),
    [
        ("step_000000", Coordinates(0)),
        ("step_000007_rank0_micro1", Coordinates(7, rank=0, micro=1)),
        ("step_000007_update1_rank0_micro1", Coordinates(7, update=1, rank=0, micro=1)),
        ("step_-00001_rank0_micro0", Coordinates(-1, rank=0, micro=0)),
        ("step_1234567", Coordinates(1234567)),
    ],
)
def test_documented_names(stem: str, where: Coordinates) -> None:
    assert where.stem == stem
    assert parse_stem(stem) == where


@settings(deadline=None)
@given(st.integers(-9, 10**7), indices, indices, indices)
def test_names_round_trip(step: int, update: int | None, rank: int | None, micro: int | None) -> None:
    where = Coordinates(step, update=update, rank=rank, micro=micro)
    assert parse_stem(where.stem) == where


@pytest.mark.parametrize(
    "stem",
    ["", "step_", "step_1", "step_000000_", "step_000000_micro1_rank0", "step_000000_x1", "step_00000\u0660"],
)
def test_other_names(stem: str) -> None:
    assert parse_stem(stem) is None


def test_order_of_a_step_with_one_update() -> None:
    flow = [
        ("trajectory", Coordinates(0)),
        ("old_log_probs", Coordinates(0)),
        ("forward_data", Coordinates(0, rank=0, micro=0)),
        ("forward_data", Coordinates(0, rank=1, micro=0)),
        ("forward_data", Coordinates(0, rank=0, micro=1)),
        ("loss", Coordinates(0, rank=0, micro=0)),
        ("gradient", Coordinates(0, rank=0)),
        ("param", Coordinates(0, rank=0)),
        ("trajectory", Coordinates(1)),
    ]
    assert sorted(flow[1::2] + flow[::2], key=lambda item: dataflow_key(*item)) == flow


def test_order_of_a_step_with_several_updates() -> None:
    flow = [
        ("trajectory", Coordinates(0)),
        ("old_log_probs", Coordinates(0)),
        ("loss", Coordinates(0, update=0, micro=0)),
        ("param", Coordinates(0, update=0)),
        ("forward_data", Coordinates(0, update=1, micro=0)),
        ("loss", Coordinates(0, update=1, micro=0)),
        ("param", Coordinates(0, update=1)),
        ("param", Coordinates(0)),
    ]
    assert sorted(flow[1::2] + flow[::2], key=lambda item: dataflow_key(*item)) == flow


def test_numbers_of_types_in_files_stay_whatever_is_added() -> None:
    """They are part of what a record's checksum covers: another number would make every older file damaged."""
    first = ("trajectory", "batch_inputs", "old_log_probs", "ref_log_probs", "activations", "forward_data")
    first += ("is_loss_debug", "loss", "gradient", "param", "optimizer", "token_gradient")
    assert [type_number(name) for name in first] == list(range(12))
    assert sorted(type_number(record_type.name) for record_type in RECORD_TYPES) == list(
        range(len(RECORD_TYPES))
    )
    assert type_index("loss") < type_index("token_gradient") < type_index("gradient")


def test_unknown_type_suggests() -> None:
    with pytest.raises(
        DumpError, match=r"record type 'old_logprobs' does not exist: did you mean old_log_probs\?"
    ):
        type_index("old_logprobs")
    with pytest.raises(DumpError, match="did you mean trajectory, batch_inputs, "):
        type_index("zzz")
