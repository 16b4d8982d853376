"""The training engine: configuration, policy, rollout workers, batching, training step and trainer."""
