"""Wire protocols of the training service: the application, and a file for each protocol."""
