"""The training step over several ranks: one file a strategy, each a way to split the model or its batch."""
