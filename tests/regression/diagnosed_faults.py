"""Changes of the engine that a diagnosis is tried on, by what they change."""

from __future__ import annotations

from tests.regression.changes import batches, losses, outputs, updates

CHANGES = (*losses.CHANGES, *outputs.CHANGES, *batches.CHANGES, *updates.CHANGES)
"""All changes, with the rules that may be said first."""
