"""What is trained on: seeded problem generators, the train/evaluation split, rewards."""
