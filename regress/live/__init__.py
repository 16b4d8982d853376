"""Live contract: rules that hold in every healthy RL training step, checked while somebody's trainer runs."""
