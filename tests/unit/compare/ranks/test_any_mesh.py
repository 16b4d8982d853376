"""Whatever the mesh, what its ranks hold of canonical values passes, and comes back as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from regress.compare.alignment.canonical_tensors import canonicalize
from regress.layout import DIMENSIONS, BatchPlan

lengths_st = st.lists(st.integers(1, 6), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1)
slow = settings(max_examples=20, deadline=None)


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, Any]:
    sizes = {name: draw(st.sampled_from([1, 1, 1, 2, 3, 4])) for name in draw(st.permutations(DIMENSIONS))}
    assume(np.prod([*sizes.values()]) <= 12)
    return {
        **sizes,
        "sample_split": draw(st.sampled_from(["contiguous", "interleaved"])),
        "sequence_split": draw(st.sampled_from(["contiguous", "zigzag"])),
        "sequence_parallel": draw(st.booleans()),
    }


@st.composite
def batches(draw: st.DrawFn) -> BatchPlan:
    return BatchPlan(
        layout=draw(st.sampled_from(["padded", "packed"])),
        padding_side=draw(st.sampled_from(["left", "right"])),
        micro_batch_size=draw(st.none() | st.integers(1, 3)),
    )


@slow
@given(lengths_st, batches(), meshes())
def test_every_rank_passes(
    make_ranks: Any, lengths: list[int], batch: BatchPlan, mesh: dict[str, Any]
) -> None:
    ranks = make_ranks(lengths, batch, **mesh)
    verdicts = ranks.judge()
    assert [v for v in verdicts if not v.ok] == []
    several = ranks.mesh.world_size > 1
    assert {v.quantity for v in verdicts} == {
        *ranks.world.truth,
        "coverage",
        *(["replicas"] if several else []),
    }
    places = {(v.place.rank, v.place.micro, v.quantity) for v in verdicts}
    for rank, layouts in enumerate(ranks.layouts):
        loss = {} if rank in ranks.plan.without_loss else {"log_probs", "token_loss", "loss"}
        assert places >= {
            (rank, micro, q) for micro in range(len(layouts)) for q in ("batch_inputs", "activations", *loss)
        }
        assert places >= {(rank, None, q) for q in ("gradient", "grad_norm", "param", "optimizer")}


@slow
@given(lengths_st, batches(), meshes())
def test_canonical_form_is_free_of_the_mesh(
    make_ranks: Any, lengths: list[int], batch: BatchPlan, mesh: dict[str, Any]
) -> None:
    ranks = make_ranks(lengths, batch, **mesh)
    found = canonicalize(ranks.records, ranks.world.frame, ranks.plan)
    assert found.keys() == ranks.world.truth.keys()
    for quantity, tensors in ranks.world.truth.items():
        assert found[quantity].keys() == tensors.keys()
        for name, values in tensors.items():
            assert found[quantity][name].dtype == values.dtype
            close = np.testing.assert_allclose if quantity == "loss" else np.testing.assert_array_equal
            close(found[quantity][name], values)


@slow
@given(lengths_st, batches(), meshes(), st.data())
def test_one_changed_bit_of_any_tensor_on_any_rank_is_found(
    make_ranks: Any, lengths: list[int], batch: BatchPlan, mesh: dict[str, Any], data: st.DataObject
) -> None:
    """On its rank if it is large enough, and among the replicas however small it is."""
    ranks = make_ranks(lengths, batch, **mesh)
    whole = [
        r for r in ranks.records if r.micro is None and any(a.ndim and a.size for a in r.tensors.values())
    ]
    record = data.draw(st.sampled_from(whole))
    name = data.draw(st.sampled_from([n for n, a in record.tensors.items() if a.ndim and a.size]))
    array = ranks.edit(record.type, record.rank, None, name)
    index = data.draw(st.integers(0, array.size - 1))
    array.view(np.uint64).reshape(-1)[index] ^= np.uint64(1)
    layout = ranks.layout_of(record.rank, name.split("/")[0])
    element = layout.indices()[index]
    holders = [
        rank
        for rank in range(ranks.mesh.world_size)
        if ranks.holds(rank, name.split("/")[0])
        and element in ranks.layout_of(rank, name.split("/")[0]).indices()
    ]
    found = ranks.faults()
    if len(holders) == 1:
        assert found == []
        return
    (verdict,) = found
    assert (verdict.quantity, verdict.name) == ("replicas", f"{record.type}/{name}")
    assert (verdict.place.rank, verdict.over) == (None, 1)
    assert verdict.worst is not None
    index_words = [int(i) for i in np.unravel_index(element, layout.shape)]
    assert verdict.worst.where == f"element {index_words} of {name}"
    assert f"rank {record.rank} " in verdict.detail or f"rank {record.rank}," in verdict.detail
