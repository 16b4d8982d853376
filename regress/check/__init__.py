"""Checks that need neither a recording nor a golden case."""
