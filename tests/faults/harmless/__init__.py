"""Refactorings that change how it is computed, and not what: none of them may be flagged, in any precision."""
