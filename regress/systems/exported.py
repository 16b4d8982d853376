"""Exported golden case, by the name that adapters import it by."""

from __future__ import annotations

from regress.replay.exported_case import ExportedCase, Sample

__all__ = ["ExportedCase", "Sample"]
