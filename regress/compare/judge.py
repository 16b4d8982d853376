"""The judge's three questions: an update against golden values, byte for byte against its twin, and its rollouts."""

from regress.compare.bitwise import judge_bitwise
from regress.compare.tolerance import Tolerances
from regress.compare.trajectories import judge_trajectories
from regress.compare.update import Dtype, in_order, judge_update

__all__ = ["Dtype", "Tolerances", "in_order", "judge_bitwise", "judge_trajectories", "judge_update"]
