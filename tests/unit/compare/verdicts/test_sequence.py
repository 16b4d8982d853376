"""Many verdicts as a DataFrame."""

from __future__ import annotations

import math

import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.diagnosis.layer_names import layer_of, layer_order, multiples_by_layer
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.compare.verdicts.verdict_sequence import Verdicts
from regress.dump.coordinates import Place

COORDINATES = st.none() | st.integers(0, 2**40)
PLACES = st.builds(Place, COORDINATES, COORDINATES, COORDINATES, COORDINATES)
WORST = st.builds(
    Worst, st.just((0, 3)), st.text(), st.floats(), st.floats(), st.floats(), st.none() | st.floats()
)
VERDICTS = st.builds(
    Verdict,
    st.sampled_from(Status),
    st.sampled_from(["log_probs", "kl", "mine"]),
    st.text(),
    PLACES,
    worst=st.none() | WORST,
    multiple=st.floats(0),
    over=st.integers(0, 2**40),
    basis=st.just({"seeds": 5, "floor": math.inf}),
)


@settings(deadline=None)
@given(st.lists(VERDICTS, max_size=5))
def test_a_frame_tells_status_place_and_figures(verdicts: list[Verdict]) -> None:
    frame = Verdicts(verdicts).to_frame()
    assert [Status(text) for text in frame.status] == [verdict.status for verdict in verdicts]
    columns = ["step", "update", "rank", "micro"]
    rows = frame[columns].astype(object).where(frame[columns].notna(), None).values.tolist()
    assert [Place(*row) for row in rows] == [verdict.place for verdict in verdicts]
    pd.testing.assert_series_equal(
        frame.multiple,
        pd.Series([verdict.multiple for verdict in verdicts], name="multiple", dtype="float64"),
    )
    assert frame.over.tolist() == [verdict.over for verdict in verdicts]
    assert frame.name.tolist() == [verdict.name for verdict in verdicts]
    assert [pd.isna(where) for where in frame.worst_where] == [verdict.worst is None for verdict in verdicts]


@settings(deadline=None)
@given(st.lists(VERDICTS, max_size=3))
def test_the_types_of_columns_do_not_depend_on_the_values(verdicts: list[Verdict]) -> None:
    empty, frame = Verdicts().to_frame(), Verdicts(verdicts).to_frame()
    assert [*empty.columns] == [*frame.columns]
    assert empty.drop(columns="quantity").dtypes.equals(frame.drop(columns="quantity").dtypes)
    assert str(frame.dtypes["worst_index"]) == "string"
    assert str(frame.dtypes["worst_ulp"]) == str(frame.dtypes["tolerance"]) == "float64"


def test_statuses_and_quantities_are_ordered() -> None:
    verdicts = [
        Verdict(status, name, name, Place(0)) for status, name in [("ok", "kl"), ("shape", "log_probs")]
    ]  # type: ignore[arg-type]  # a text is what a file has
    frame = Verdicts(verdicts).to_frame()
    assert frame.status.min() == "shape"
    assert frame.quantity.min() == "log_probs"


def test_it_is_a_sequence() -> None:
    found = Verdicts(Verdict(status, "kl", "kl", Place(0)) for status in (Status.OK, Status.DRIFT))
    assert (len(found), found[1].status, len(found[:1])) == (2, Status.DRIFT, 1)
    assert [verdict.status for verdict in found.failed] == [Status.DRIFT]
    assert repr(found) == "<2 verdicts, 1 not ok>"


def test_layers_by_the_names_of_models() -> None:
    names = {
        "model.embed_tokens.weight": "embedding",
        "transformer.wpe.weight": "embedding",
        "model.layers.11.mlp.down_proj.weight": "11",
        "transformer.h.0.ln_1.bias": "0",
        "model.layers.2.input_layernorm.weight": "2",
        "model.norm.weight": "head",
        "transformer.ln_f.weight": "head",
        "lm_head.weight": "head",
        "logits": "head",
        "exp_avg/model.layers.3.self_attn.q_proj.weight": "3",
        "log_probs": None,
    }
    assert {name: layer_of(name) for name in names} == names
    assert sorted(["head", "10", "2", "embedding"], key=layer_order) == ["embedding", "2", "10", "head"]


def test_a_layer_is_as_far_off_as_its_worst_tensor() -> None:
    verdicts = [
        Verdict(Status.OK, "param", f"model.layers.{layer}.x{multiple}", Place(0), multiple=multiple)
        for layer, multiple in [(10, 0.5), (2, 0.25), (2, 7.0)]
    ]
    assert [*multiples_by_layer(verdicts).items()] == [("2", 7.0), ("10", 0.5)]
