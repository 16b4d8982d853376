"""Canonical coordinates of tokens and elements, and the layouts that map them to local tensors."""

from regress.layout.frame import SampleKey, TokenFrame
from regress.layout.mesh import DIMENSIONS, Mesh
from regress.layout.planner import ROW_ORDERS, BatchPlan, plan_microbatches
from regress.layout.ranks import (
    SAMPLE_SPLITS,
    SEQUENCE_SPLITS,
    RankLayout,
    RankPlan,
    plan_ranks,
)
from regress.layout.shards import Range, ShardLayout
from regress.layout.tokens import Segment, TokenLayout, offsets_of

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
