"""Diagnosis: the first divergence of a run, patterns of its failures, and the probable cause."""
