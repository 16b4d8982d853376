"""Putting a trainer under test: what its backward pass says about its loss."""
