"""Replaying golden cases under other computations. Variants and plans load without torch."""
