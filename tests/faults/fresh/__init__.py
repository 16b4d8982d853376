"""Faults written from descriptions of bugs and the engine alone; what is expected was written before the first run."""
