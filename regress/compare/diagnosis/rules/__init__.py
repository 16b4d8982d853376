"""The rules of the diagnosis, theme by theme."""
