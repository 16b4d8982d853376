"""regress: the numerical regression harness for GRPO and RL post-training."""

__version__ = "0.1.0"
