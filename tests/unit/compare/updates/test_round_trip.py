"""Canonical values seen through any layout come back as they were, and any layout of them passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.alignment.aligned_tensor import TokenRows
from regress.compare.alignment.canonical_projection import Projection
from regress.compare.alignment.canonical_tensors import canonicalize
from regress.compare.alignment.local_shard import whole_layout
from regress.compare.alignment.record_keys import key_of
from regress.compare.alignment.token_overlap import token_part
from regress.compare.alignment.token_places import Places
from regress.compare.quantities import source_of
from regress.compare.update_judge import judge_bitwise, judge_update
from regress.compare.verdicts.verdict import Status
from regress.dump.coordinates import Place
from regress.dump.record import Record, replace_tensors
from regress.layout import BatchPlan

lengths_st = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1)
orders_st = st.randoms(use_true_random=False)
slow = settings(max_examples=20, deadline=None)


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    dynamic = draw(st.booleans())
    return BatchPlan(
        layout=draw(st.sampled_from(["padded", "packed"])),
        padding_side=draw(st.sampled_from(["left", "right"])),
        pad_to_multiple_of=draw(st.integers(1, 3)),
        pad_to_length=draw(st.none() | st.integers(1, 8)),
        micro_batch_size=None if dynamic else draw(st.none() | st.integers(1, 4)),
        max_tokens_per_microbatch=draw(st.integers(9, 24)) if dynamic else None,
    )


def shuffled(lengths: list[int], random: Any) -> list[int]:
    """The samples in any order."""
    order: list[int] = random.sample(range(len(lengths)), len(lengths))
    return order


@slow
@given(lengths_st, plans(), st.integers(1, 3), orders_st)
def test_canonical_form_is_free_of_the_layout(
    make_world: Any, lengths: list[int], plan: BatchPlan, ranks: int, random: Any
) -> None:
    world = make_world(lengths, order=shuffled(lengths, random))
    found = canonicalize(world.records(plan, ranks), world.frame)
    assert found.keys() == world.truth.keys()
    for quantity, tensors in world.truth.items():
        assert found[quantity].keys() == tensors.keys()
        for name, values in tensors.items():
            assert found[quantity][name].dtype == values.dtype
            close = np.testing.assert_allclose if quantity == "loss" else np.testing.assert_array_equal
            close(found[quantity][name], values)


@slow
@given(lengths_st, plans(), orders_st)
def test_projection_gives_the_local_tensors_back(
    make_world: Any, lengths: list[int], plan: BatchPlan, random: Any
) -> None:
    world = make_world(lengths, order=shuffled(lengths, random))
    golden = Projection(world.truth, world.frame)
    for micro, layout in enumerate(world.layouts(plan)):
        places = Places.of(layout, layout, world.frame.offsets)
        for record in world.micro_records(layout, 0, micro):
            assert {source.tensor for source in golden.record_type(record.type)} == record.tensors.keys()
            for name, array in record.tensors.items():
                source = source_of(record.type, name)
                assert source is not None
                if source.quantity == "loss":
                    expected, _, _ = golden.share(source.name, layout.indices(world.frame.offsets)[0])
                    np.testing.assert_allclose(expected, array, rtol=1e-14, atol=1e-14)
                    continue
                part = golden.part(source)
                by_loss = part.rows.size != world.frame.size
                where = name, key_of(record)
                tokens, lead = places.rows(array.shape, world.loss_mask, rows_only=by_loss, name=where)
                local = token_part(array, whole_layout(array.shape), tokens, lead)
                count = 0
                for block in TokenRows(local, [part], np.flatnonzero(local.rows >= 0)).blocks():
                    np.testing.assert_array_equal(block.actual, block.golden)
                    count += block.actual.size
                assert count == int((tokens >= 0).sum()) * local.width


@slow
@given(lengths_st, plans(), st.integers(1, 3), orders_st)
def test_every_layout_passes_in_any_order_of_records(
    make_world: Any, tolerances: Any, lengths: list[int], plan: BatchPlan, ranks: int, random: Any
) -> None:
    world = make_world(lengths, order=shuffled(lengths, random))
    records, planned = world.records(plan, ranks), world.planned(plan, ranks)
    first = judge_update(records, world.truth, world.frame, tolerances, place=Place(0), planned=planned)
    assert [v for v in first if not v.ok] == []
    assert {v.quantity for v in first} == {*world.truth, "coverage", *replicas_of(planned)}
    mixed = random.sample(records, len(records))
    again = judge_update(mixed, world.truth, world.frame, tolerances, place=Place(0), planned=planned)
    order = [(v.quantity, str(v.place), v.name) for v in first]
    assert sorted(order) == sorted((v.quantity, str(v.place), v.name) for v in again)
    assert [q for q, _, _ in order] == [v.quantity for v in again]


@slow
@given(lengths_st, plans(), st.integers(1, 2), st.data())
def test_any_change_of_one_element_is_found_where_it_is(
    make_world: Any, tolerances: Any, lengths: list[int], plan: BatchPlan, ranks: int, data: st.DataObject
) -> None:
    world = make_world(lengths)
    records, planned = world.records(plan, ranks), world.planned(plan, ranks)
    changed, expected = _change_one_token(world, records, plan, data)
    verdicts = judge_update(changed, world.truth, world.frame, tolerances, place=Place(0), planned=planned)
    (verdict,) = [v for v in verdicts if not v.ok]
    where, place, name = expected
    assert verdict.status is Status.DRIFT
    assert (verdict.name, verdict.over) == (name, 1)
    assert (verdict.place.rank, verdict.place.micro) == place
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(where)
    assert verdict.worst.error > verdict.tolerance > 0


def _change_one_token(
    world: Any, records: list[Record], plan: BatchPlan, data: st.DataObject
) -> tuple[list[Record], tuple[str, tuple[int | None, int | None], str]]:
    """One token of one tensor moved by a 100 000th of the tensor's scale; and where that is."""
    loss_tokens = np.flatnonzero(world.loss_mask)
    token = int(data.draw(st.sampled_from(list(loss_tokens))))
    record_type, name = data.draw(
        st.sampled_from(
            [("forward_data", "log_probs"), ("is_loss_debug", "kl"), ("activations", "model.layers.0")]
        )
    )
    sample = int(np.searchsorted(world.frame.offsets, token, side="right")) - 1
    position = token - int(world.frame.offsets[sample])
    for i, layout in enumerate(world.layouts(plan)):
        for s in layout.segments:
            if s.sample == sample:
                micro, row, col = i, s.row, s.col + position
    rank_micro = [(r.rank, r.micro) for r in records if r.type == record_type][micro]
    index = next(
        i for i, r in enumerate(records) if r.type == record_type and (r.rank, r.micro) == rank_micro
    )
    array = records[index].tensors[name].copy()
    element = (row, col) if array.ndim == 2 else (row, col, 1)
    array[element] += 1e-5 * max(abs(values).max() for values in [world.truth[_quantity(name)][name]])
    changed = [*records]
    changed[index] = replace_tensors(records[index], {name: array})
    group, run = world.frame.samples[sample]
    token_id = world.truth["batch_inputs"]["input_ids"][token]
    return changed, (f"sample {group}/{run}, position {position}, token {token_id}", rank_micro, name)


def _quantity(name: str) -> str:
    return "activations" if "." in name else name


@slow
@given(lengths_st, plans())
def test_what_lies_in_padding_is_not_compared(
    make_world: Any, tolerances: Any, lengths: list[int], plan: BatchPlan
) -> None:
    world = make_world(lengths)
    layouts = world.layouts(plan)
    records = []
    for record in world.records(plan):
        if record.type in ("forward_data", "batch_inputs") and record.micro is not None:
            padding = ~layouts[record.micro].attention_mask
            junk = {
                n: np.where(padding, 77, a).astype(a.dtype)
                for n, a in record.tensors.items()
                if "mask" not in n
            }
            record = replace_tensors(record, junk)
        records.append(record)
    planned = world.planned(plan)
    verdicts = judge_update(records, world.truth, world.frame, tolerances, place=Place(0), planned=planned)
    assert all(v.ok for v in verdicts)


@slow
@given(lengths_st, plans(), st.integers(1, 2))
def test_a_twin_passes_byte_for_byte(
    make_world: Any, lengths: list[int], plan: BatchPlan, ranks: int
) -> None:
    world = make_world(lengths)
    verdicts = judge_bitwise(
        world.records(plan, ranks), reversed(world.records(plan, ranks)), world.frame, place=Place(0)
    )
    assert all(v.ok for v in verdicts)
    assert {v.quantity for v in verdicts} == {
        *world.truth,
        "coverage",
        *replicas_of(world.planned(plan, ranks)),
    }


def replicas_of(planned: list[tuple[int, int]]) -> set[str]:
    """Several ranks that hold the same parameters are compared with each other."""
    return {"replicas"} if len({rank for rank, _ in planned}) > 1 else set()


def test_the_scale_of_a_share_is_that_of_its_terms(make_world: Callable[..., Any]) -> None:
    """A sum whose terms cancel is judged by their size, and few small ones by that of the largest of the update."""
    world = make_world([3, 4])
    flat = np.flatnonzero(world.loss_mask)
    for quantity in ("weights", "policy_loss"):
        world.token(quantity)[:] = 0.0
    world.token("weights")[flat[:2]] = 1.0
    world.token("policy_loss")[flat[:2]] = 5.0, -5.0 + 1e-9
    (layout,) = world.layouts(BatchPlan())
    golden = Projection(world.truth, world.frame)
    (source,) = [s for s in golden.record_type("loss") if s.name == "pg_loss"]
    expected, scale, _ = golden.share(source.name, layout.indices(world.frame.offsets)[0])
    assert float(expected) == 5.0 + (-5.0 + 1e-9)
    assert scale == golden.share_scale("pg_loss") == 10.0
