"""Map of names between Hugging Face and Megatron: both ways, for every split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from regress.errors import SystemsError
from regress.systems.adapters.megatron_names import NameMap, joined

LAYER, THERE = "decoder.layers.3.", "model.layers.3."
QKV, FC1 = f"{LAYER}self_attention.linear_qkv.", f"{LAYER}mlp.linear_fc1."
WEIGHTS = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "decoder.final_layernorm.weight",
    f"{LAYER}input_layernorm.weight",
    f"{LAYER}pre_mlp_layernorm.weight",
    f"{QKV}weight",
    f"{QKV}bias",
    f"{LAYER}self_attention.linear_proj.weight",
    f"{LAYER}self_attention.q_layernorm.weight",
    f"{LAYER}self_attention.k_layernorm.weight",
    f"{FC1}weight",
    f"{LAYER}mlp.linear_fc2.weight",
)


def model(
    heads: int, groups: int, depth: int, inner: int, *, tied: bool = False
) -> dict[str, NDArray[np.float64]]:
    """Return tensors of a model in which no two elements are equal."""
    H, shapes = 6, {"model.embed_tokens.weight": (8, 6), "model.norm.weight": (6,)}
    if not tied:
        shapes["lm_head.weight"] = (8, H)
    for which, count in (("q", heads), ("k", groups), ("v", groups)):
        shapes[f"{THERE}self_attn.{which}_proj.weight"] = (count * depth, H)
        shapes[f"{THERE}self_attn.{which}_proj.bias"] = (count * depth,)
    shapes[f"{THERE}self_attn.o_proj.weight"] = (H, heads * depth)
    shapes[f"{THERE}mlp.gate_proj.weight"] = shapes[f"{THERE}mlp.up_proj.weight"] = (inner, H)
    shapes[f"{THERE}mlp.down_proj.weight"] = (H, inner)
    shapes |= {f"{THERE}self_attn.{which}_norm.weight": (depth,) for which in "qk"}
    shapes |= {f"{THERE}{name}_layernorm.weight": (H,) for name in ("input", "post_attention")}
    count, found = 0, {}
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        found[name] = np.arange(count, count + size, dtype=np.float64).reshape(shape)
        count += size
    return found


def maps(tensors: dict[str, NDArray[Any]], heads: int, groups: int, size: int) -> list[NameMap]:
    shapes = {name: value.shape for name, value in tensors.items()}
    return [NameMap(shapes, heads, groups, rank, size) for rank in range(size)]


sizes = st.tuples(
    st.sampled_from([1, 2, 4]), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)
)


@given(sizes)
def test_the_parts_of_all_ranks_make_the_whole(sizes: tuple[int, int, int, int, int]) -> None:
    size, groups_each, per_group, depth, inner = sizes
    groups = size * groups_each
    tensors = model(groups * per_group, groups, depth, inner * size)
    whole = {name: np.full_like(value, np.nan) for name, value in tensors.items()}
    for one in maps(tensors, groups * per_group, groups, size):
        for name in WEIGHTS:
            local = one.fuse(name, tensors)
            pieces = one.split(name, local)
            assert sum(piece.size for piece, _ in pieces.values()) == local.size
            for label, (piece, shard) in pieces.items():
                shard.gather(piece, whole[label])
    for name, value in tensors.items():
        np.testing.assert_array_equal(whole[name], value, err_msg=name)


@given(sizes)
def test_queries_keys_and_values_lie_by_groups(sizes: tuple[int, int, int, int, int]) -> None:
    """Megatron views the fused rows as [groups, heads of a group + 2, depth], on each rank its own groups."""
    size, groups_each, per_group, depth, inner = sizes
    groups = size * groups_each
    tensors = model(groups * per_group, groups, depth, inner * size)
    q, k, v = (tensors[f"{THERE}self_attn.{which}_proj.weight"] for which in "qkv")
    by_group = [part.reshape(groups, -1, depth, part.shape[-1]) for part in (q, k, v)]
    wanted = np.concatenate(by_group, 1).reshape(-1, q.shape[-1])
    for one, part in zip(
        maps(tensors, groups * per_group, groups, size), np.split(wanted, size), strict=True
    ):
        np.testing.assert_array_equal(one.fuse(f"{QKV}weight", tensors), part)


def test_gate_and_up_projection_lie_one_after_the_other_on_each_rank() -> None:
    tensors = model(4, 2, 2, 6)
    gate, up = tensors[f"{THERE}mlp.gate_proj.weight"], tensors[f"{THERE}mlp.up_proj.weight"]
    found = maps(tensors, 4, 2, 2)[1].fuse(f"{FC1}weight", tensors)
    np.testing.assert_array_equal(found, np.concatenate([gate[3:], up[3:]]))


def test_a_tied_output_layer_is_the_embedding() -> None:
    tensors = model(4, 2, 2, 6, tied=True)
    (piece,) = maps(tensors, 4, 2, 2)[1].pieces("output_layer.weight")
    assert piece.name == "model.embed_tokens.weight"
    assert piece.shard.ranges[0] == ((4, 8),)


def test_what_cannot_be_shared_evenly_is_refused() -> None:
    tensors = model(4, 2, 2, 6)
    with pytest.raises(SystemsError, match="4 tensor-parallel ranks cannot share 4 query heads in 2 groups"):
        maps(tensors, 4, 2, 4)
    odd = model(4, 2, 2, 5)
    with pytest.raises(SystemsError, match=r"cannot share the 5 rows or columns of .*down_proj\.weight"):
        maps(odd, 4, 2, 2)[0].pieces(f"{LAYER}mlp.linear_fc2.weight")
    with pytest.raises(SystemsError, match=r"cannot share the 5 rows or columns of .*gate_proj\.weight"):
        maps(odd, 4, 2, 2)[0].pieces(f"{FC1}weight")


def test_unknown_parameters_are_refused() -> None:
    one = maps(model(4, 2, 2, 6), 4, 2, 1)[0]
    with pytest.raises(SystemsError, match=r"no rule for Megatron's decoder\.layers\.3\.mlp\.router\.bias"):
        one.pieces(f"{LAYER}mlp.router.bias")
    with pytest.raises(SystemsError, match=r"the model has no model\.layers\.3\.mlp\.down_proj\.bias"):
        one.pieces(f"{LAYER}mlp.linear_fc2.bias")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_experts_are_slices_of_one_tensor_and_join_again(ranks: int) -> None:
    name = f"{THERE}mlp.experts.gate_up_proj"
    whole = {name: np.arange(4 * 6 * 3, dtype=np.float64).reshape(4, 6, 3)}
    found = np.full((4, 6, 3), np.nan)
    for rank in range(ranks):
        local = 4 // ranks
        own = NameMap({name: (4, 6, 3)}, 4, 2, first_expert=rank * local)
        labels = [f"{LAYER}mlp.experts.local_experts.{i}.linear_fc1.weight" for i in range(local)]
        values = [own.fuse(label, whole) for label in labels]
        assert [value.shape for value in values] == [(6, 3)] * local
        parts = [own.split(label, value)[name] for label, value in zip(labels, values, strict=True)]
        joint, shard = joined(parts[::-1])
        assert shard.local_shape == (local, 6, 3)
        np.testing.assert_array_equal(joint, shard.project(whole[name]))
        found[rank * local : (rank + 1) * local] = joint
    np.testing.assert_array_equal(found, whole[name])


def test_experts_on_tensor_ranks_are_refused() -> None:
    shared = NameMap({f"{THERE}mlp.experts.down_proj": (4, 3, 6)}, 4, 2, 0, 2)
    with pytest.raises(SystemsError, match="experts on 2 tensor-parallel ranks have no rule"):
        shared.pieces(f"{LAYER}mlp.experts.local_experts.0.linear_fc2.weight")
