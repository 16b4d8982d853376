"""Benchmarks: ratios of step times and peak memory, measured side by side in one run (`python -m benchmarks`)."""
