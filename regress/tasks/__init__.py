"""Training tasks: seeded problem generators, the split into training and evaluation, and rewards."""
