"""Ground floor: canonical coordinates of tokens and of elements, and the layouts that map them to local tensors."""

from regress.layout.frame import SampleKey, TokenFrame
from regress.layout.planner import ROW_ORDERS, BatchPlan, plan_microbatches
from regress.layout.shards import ShardLayout
from regress.layout.tokens import Segment, TokenLayout, offsets_of

__all__ = [
    "ROW_ORDERS",
    "BatchPlan",
    "SampleKey",
    "Segment",
    "ShardLayout",
    "TokenFrame",
    "TokenLayout",
    "offsets_of",
    "plan_microbatches",
]
