"""Replays of golden cases under variants. Variants and plans load without torch."""
