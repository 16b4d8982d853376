"""Damage of a file, described by a clause about it."""

from __future__ import annotations

from typing import Final

CUT_OFF: Final = "it was cut off or changed after it was written: copy it again or record again"


_LONGEST = 500


class Damage(Exception):  # noqa: N818 - it never reaches people; the reader turns it into a DumpError
    """A file does not hold the recorded bytes; `remedy` names the likely cause and the way out."""

    def __init__(self, clause: str, remedy: str = CUT_OFF) -> None:
        super().__init__(clause if len(clause) <= _LONGEST else f"{clause[: _LONGEST - 3]}...")
        self.remedy = remedy
