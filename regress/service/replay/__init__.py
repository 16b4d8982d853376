"""Replays through a service of this machine, and how they are judged."""
