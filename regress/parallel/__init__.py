"""Strategies that split a training step over processes, one module each."""
