"""The judge: alignment, tolerances and verdicts. Knows nothing of any trainer, and loads no torch."""
