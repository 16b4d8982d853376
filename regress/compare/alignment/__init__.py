"""Mapping between elements of local tensors and canonical ones."""
