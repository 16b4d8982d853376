"""Bugs of real training systems, to be put into the running engine: what a tolerance has to see."""
