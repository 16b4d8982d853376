"""Client side of the training service: training through a remote service in place of this process's own ranks."""
