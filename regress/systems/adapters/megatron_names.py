"""Parameters of Megatron's GPT model and those of Hugging Face: names, fused weights, and parts on tensor ranks.

A parameter on a tensor-parallel rank of Megatron consists of `Piece`s, each a part of one Hugging Face tensor. The
rules go both ways: `fuse` makes the local parameter from whole Hugging Face tensors, `split` gives its pieces back as
shards of them. Queries, keys and values are fused by groups (for each key head its query heads, the key, the value),
gate and up projection one after the other on each rank. Source: megatron-core 0.16.1, ``transformer/attention.py``
(`get_query_key_value_tensors`) and ``transformer/mlp.py``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.errors import SystemsError
from regress.layout import ShardLayout

Rows = tuple[tuple[int, int], ...]

_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.linear_fc2.bias": "mlp.down_proj.bias",
    "mlp.router.weight": "mlp.gate.weight",
}
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_(fc[12])\.weight")
_EXPERTS = {"fc1": "mlp.experts.gate_up_proj", "fc2": "mlp.experts.down_proj"}
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True)
class Piece:
    """Part of a parameter on one rank.

    Attributes:
        name: Hugging Face parameter that it is from.
        rows: ranges of rows of Megatron's local parameter, in the order of the rows of the Hugging Face tensor.
        shard: part of the Hugging Face tensor that lies there.
        stacked: the tensor holds all experts, and the parameter is one of them without the first dimension.
    """

    name: str
    rows: Rows
    shard: ShardLayout
    stacked: bool = False


@dataclass(frozen=True)
class NameMap:
    """Map of the parameters of one model, as one tensor-parallel rank holds them.

    Args:
        shapes: Hugging Face parameters of the model, name -> shape; a tied output layer is not among them.
        heads: number of query heads.
        groups: number of key and value heads.
        rank, size: place among the tensor-parallel ranks.
        first_expert: number in the whole model of this rank's first expert.

    Raises:
        SystemsError: if the ranks cannot share the heads evenly.
    """

    shapes: Mapping[str, Sequence[int]]
    heads: int
    groups: int
    rank: int = 0
    size: int = 1
    first_expert: int = 0

    def __post_init__(self) -> None:
        if self.groups % self.size or self.heads % self.groups:
            raise SystemsError(f"""{self.size} tensor-parallel ranks cannot share {self.heads} query heads in
            {self.groups} groups evenly: choose a size that divides the number of groups""")

    def pieces(self, name: str) -> tuple[Piece, ...]:
        """Return the pieces of a parameter, in the order of their names in Megatron's own fusion.

        Args:
            name: Megatron's, with the number of the layer in the whole model.

        Raises:
            SystemsError: for a name without a rule, or if the model lacks the Hugging Face parameter of it.
        """
        if name == "embedding.word_embeddings.weight":
            return (self._rows_of(_EMBEDDING),)
        if name == "output_layer.weight":
            return (self._rows_of(_OUTPUT if _OUTPUT in self.shapes else _EMBEDDING),)
        if name == "decoder.final_layernorm.weight":
            return (self._whole("model.norm.weight"),)
        match = _LAYER.fullmatch(name)
        if match is not None:
            layer, rest = f"model.layers.{match[1]}.", match[2]
            if rest in _WHOLE:
                return (self._whole(layer + _WHOLE[rest]),)
            if rest in _BY_COLUMNS:
                return (self._columns_of(layer + _BY_COLUMNS[rest]),)
            expert = _EXPERT.fullmatch(rest)
            if expert is not None:
                return (self._expert(layer + _EXPERTS[expert[2]], self.first_expert + int(expert[1])),)
            stem, _, kind = rest.rpartition(".")
            if stem == "self_attention.linear_qkv":
                return self._attention(layer, kind)
            if stem == "mlp.linear_fc1":
                return self._gated(layer, kind)
        raise SystemsError(
            f"the map of names has no rule for Megatron's {name}: add one to megatron_names.py"
        )

    def fuse(self, name: str, tensors: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
        """Return Megatron's local parameter from whole Hugging Face tensors."""
        pieces = self.pieces(name)
        rows = sum(stop - start for piece in pieces for start, stop in piece.rows)
        first = tensors[pieces[0].name]
        inner = pieces[0].shard.local_shape[2 if pieces[0].stacked else 1 :]
        found = np.empty((rows, *inner), first.dtype)
        for piece in pieces:
            part = piece.shard.project(tensors[piece.name])
            found[_index(piece.rows)] = part[0] if piece.stacked else part
        return found

    def split(self, name: str, value: NDArray[Any]) -> dict[str, tuple[NDArray[Any], ShardLayout]]:
        """Return the pieces of Megatron's local parameter (or of its gradient) by their Hugging Face names."""
        found = {}
        for piece in self.pieces(name):
            part = value[_index(piece.rows)]
            found[piece.name] = (part[None] if piece.stacked else part, piece.shard)
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.shapes:
            raise SystemsError(f"the model has no {name}, which Megatron's layers have: build them to fit it")
        return tuple(self.shapes[name])

    def _share(self, extent: int, name: str) -> tuple[int, int]:
        if extent % self.size:
            raise SystemsError(f"""{self.size} tensor-parallel ranks cannot share the {extent} rows or columns of {name}
            evenly: choose a size that divides them""")
        step = extent // self.size
        return self.rank * step, (self.rank + 1) * step

    def _part(self, name: str, dim: int, rows: Rows | None = None) -> Piece:
        shape = self._shape(name)
        ranges = [((0, extent),) for extent in shape]
        ranges[dim] = (self._share(shape[dim], name),)
        shard = ShardLayout(shape, tuple(ranges))
        return Piece(name, rows or ((0, shard.local_shape[0]),), shard)

    def _whole(self, name: str) -> Piece:
        shape = self._shape(name)
        return Piece(name, ((0, shape[0]),), ShardLayout.whole(shape))

    def _expert(self, name: str, number: int) -> Piece:
        if self.size > 1:
            raise SystemsError(
                f"experts on {self.size} tensor-parallel ranks have no rule: add one for {name}"
            )
        shape = self._shape(name)
        ranges = (((number, number + 1),), *(((0, extent),) for extent in shape[1:]))
        return Piece(name, ((0, shape[1]),), ShardLayout(shape, ranges), stacked=True)

    def _rows_of(self, name: str) -> Piece:
        return self._part(name, 0)

    def _columns_of(self, name: str) -> Piece:
        return self._part(name, 1)

    def _attention(self, layer: str, kind: str) -> tuple[Piece, ...]:
        per_group = self.heads // self.groups
        depth = self._shape(f"{layer}self_attn.q_proj.{kind}")[0] // self.heads
        block = (per_group + 2) * depth
        inside = {
            "q": (0, per_group * depth),
            "k": (per_group * depth, (per_group + 1) * depth),
            "v": ((per_group + 1) * depth, block),
        }
        starts = [group * block for group in range(self.groups // self.size)]
        return tuple(
            self._part(
                f"{layer}self_attn.{which}_proj.{kind}", 0, tuple((at + low, at + high) for at in starts)
            )
            for which, (low, high) in inside.items()
        )

    def _gated(self, layer: str, kind: str) -> tuple[Piece, ...]:
        step = self._shape(f"{layer}mlp.gate_proj.{kind}")[0] // self.size
        return (
            self._part(f"{layer}mlp.gate_proj.{kind}", 0, ((0, step),)),
            self._part(f"{layer}mlp.up_proj.{kind}", 0, ((step, 2 * step),)),
        )


def joined(parts: Sequence[tuple[NDArray[Any], ShardLayout]]) -> tuple[NDArray[Any], ShardLayout]:
    """Return parts of one tensor that follow one another along the first dimension as one part."""
    if len(parts) == 1:
        return parts[0]
    ordered = sorted(parts, key=lambda part: part[1].ranges[0][0][0])
    first, last = ordered[0][1], ordered[-1][1]
    ranges = (((first.ranges[0][0][0], last.ranges[0][-1][1]),), *first.ranges[1:])
    return np.concatenate([values for values, _ in ordered]), ShardLayout(first.shape, ranges)


def _index(rows: Rows) -> NDArray[np.int64]:
    return np.concatenate([np.arange(*found) for found in rows])
