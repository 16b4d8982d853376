"""The index of a training service's dump: what is written is read back, and damage is named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regress.dump.request_index import (
    INDEX,
    DumpedDatum,
    DumpedRequest,
    Operation,
    Part,
    read_requests,
    requested,
)
from regress.errors import DumpError

NUMBERS = st.floats(allow_nan=False)
DATUMS = st.lists(
    st.builds(
        DumpedDatum,
        st.lists(st.integers(0, 2**31), min_size=1, max_size=4).map(tuple),
        st.none() | st.text(max_size=5),
    ),
    max_size=3,
).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> DumpedRequest:
    datums = draw(DATUMS)
    parts = tuple(Part(0, micro, (micro,)) for micro in range(len(datums)))
    return DumpedRequest(
        model_id=draw(st.text(max_size=9)),
        operation=draw(st.sampled_from([*Operation])),
        step=draw(st.integers(0, 9)),
        seq_id=draw(st.none() | st.integers(1, 99)),
        request_id=draw(st.none() | st.text(max_size=5)),
        config=draw(st.dictionaries(st.text(max_size=3), NUMBERS | st.booleans(), max_size=2)),
        types=("loss",),
        datums=datums,
        parts=parts,
        adam=draw(st.none() | st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)),
        metrics=draw(st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2)),
    )


@given(requests())
def test_a_line_is_read_back(request_: DumpedRequest) -> None:
    assert request_.line().count(b"\n") == 1
    assert DumpedRequest.parse(request_.line()) == request_


def test_a_number_that_is_none_is_kept() -> None:
    one = DumpedRequest("m", "optim_step", 0, metrics={"grad_norm": math.nan})
    assert math.isnan(DumpedRequest.parse(one.line()).metrics["grad_norm"])


def test_a_killed_service_leaves_its_whole_lines(tmp_path: Path) -> None:
    lines = [DumpedRequest("m", "forward", 0, number).line() for number in (1, 2)]
    (tmp_path / INDEX).write_bytes(lines[0] + lines[1][:-5])
    assert [one.seq_id for one in read_requests(tmp_path)] == [1]


@pytest.mark.parametrize(
    "damaged",
    [
        b"{}\n",
        b"[]\n",
        b"\n",
        DumpedRequest("m", "forward", 0).line().replace(b'"forward"', b'"backward"'),
        DumpedRequest("m", "forward", 0, parts=(Part(0, 0, (3,)),)).line(),
    ],
)
def test_damage_is_named_by_its_line(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / INDEX).write_bytes(DumpedRequest("m", "forward", 0).line() + damaged)
    with pytest.raises(DumpError, match=r"requests.jsonl, line 2 is not a request of a training service"):
        read_requests(tmp_path)


def test_what_a_client_asked_for_is_plain() -> None:
    found = requested(loss="ppo", config={"entropy_coeff": 0}, adam={"eps": 1e-8}, seq_ids=(1, 2))
    assert found["seq_ids"] == [1, 2]
    assert found["adam_params"] == {"eps": 1e-8}
    with pytest.raises(DumpError, match=r"requested\.loss_fn_config"):
        requested(loss="ppo", config={"x": object()}, adam={})
