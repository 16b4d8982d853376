"""Parallel strategies over a mesh of ranks, one module each; every one computes what a single process computes."""
