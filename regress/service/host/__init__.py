"""Engine's side of the training service: models and their steps, on every rank."""
