"""The judge: alignment, tolerances and verdicts. It knows no trainer and loads no torch."""
