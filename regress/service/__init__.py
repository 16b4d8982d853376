"""The remote training service: one core behind several wire protocols, and the client that trains through it."""
