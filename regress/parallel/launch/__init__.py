"""Launching of ranks: a pool of cheap ranks forked on this machine, and the launchers of a cluster."""
