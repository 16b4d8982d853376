"""Diagnosis and repair of what a run must continue from. Imports no torch."""
