"""Training step over several ranks: one file per strategy, each a way to split the model or its batch."""
