"""Trials of faults: what is noticed of each, as a command, a table and a page."""
