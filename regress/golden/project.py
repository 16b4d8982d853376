"""Project settings, for the rooms that read goldens."""

from regress.project import project_section

__all__ = ["project_section"]
