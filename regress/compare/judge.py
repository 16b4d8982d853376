"""The judge's three questions: an update against golden values, against its bitwise reference, and its rollouts."""

from regress.compare.updates.bitwise_reference import judge_bitwise
from regress.compare.updates.golden import Dtype, in_order, judge_update
from regress.compare.updates.trajectories import judge_trajectories
from regress.compare.verdicts.tolerance import Tolerances

__all__ = ["Dtype", "Tolerances", "in_order", "judge_bitwise", "judge_trajectories", "judge_update"]
