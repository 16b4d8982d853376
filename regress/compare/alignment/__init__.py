"""Where elements of local tensors lie in canonical ones, and the reverse."""
