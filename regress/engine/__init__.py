"""The program: configuration, policy, rollout workers, batching, the training step, the trainer."""
