"""Canonical coordinates of tokens and elements, and the layouts that map them to local tensors."""

from regress.layout.canonical_frame import SampleKey, TokenFrame
from regress.layout.layout_planner import ROW_ORDERS, BatchPlan, plan_microbatches
from regress.layout.rank_layout_planner import (
    SAMPLE_SPLITS,
    SEQUENCE_SPLITS,
    RankLayout,
    RankPlan,
    plan_ranks,
)
from regress.layout.rank_mesh import DIMENSIONS, Mesh
from regress.layout.shard_layout import Range, ShardLayout
from regress.layout.token_layout import Segment, TokenLayout, offsets_of

__all__ = [
    "DIMENSIONS",
    "ROW_ORDERS",
    "SAMPLE_SPLITS",
    "SEQUENCE_SPLITS",
    "BatchPlan",
    "Mesh",
    "Range",
    "RankLayout",
    "RankPlan",
    "SampleKey",
    "Segment",
    "ShardLayout",
    "TokenFrame",
    "TokenLayout",
    "offsets_of",
    "plan_microbatches",
    "plan_ranks",
]
