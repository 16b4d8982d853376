"""Where a run first went wrong, what is common to all that is wrong, and why."""
