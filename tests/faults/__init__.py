"""Bugs of real training systems, injected into the running engine: the size of error that a tolerance must detect."""
