"""The verdict on one tensor, and the tolerance behind it."""
