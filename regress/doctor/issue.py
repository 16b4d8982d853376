"""Findings of the doctor: each names the culprit, the rule and the remedy, and how bad it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from regress.printed import printable
from regress.redaction import redacted, redacted_tree

SCRUBBED = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Control characters of names and values in files, which a terminal would obey."""


class Severity(StrEnum):
    """High: the run cannot be continued, or not as the same run. Medium: it can, with wrong or lost records.
    Low: nothing has to be done.
    """

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"


@dataclass(frozen=True)
class Write:
    """Replace a file by other bytes, or create it.

    Attributes:
        seal: the file is in a checkpoint whose manifest must follow, because the bytes are not those that were written.
    """

    path: str
    data: bytes = field(repr=False)
    seal: bool = False


@dataclass(frozen=True)
class Move:
    """Rename a file or folder; `to` does not exist yet."""

    path: str
    to: str


@dataclass(frozen=True)
class Store:
    """Move a file or folder into the backup, from which `--restore` brings it back."""

    path: str


Action: TypeAlias = Write | Move | Store


@dataclass(frozen=True)
class Fix:
    """Automatic repair.

    Attributes:
        summary: half a sentence, beginning with a verb.
        actions: changes of files, by their path in the output directory.
    """

    summary: str
    actions: tuple[Action, ...]


@dataclass(frozen=True)
class Issue:
    """One finding.

    Attributes:
        type: name of the rule, see `regress.doctor.types`.
        severity: see `Severity`.
        group: part of the run that it concerns.
        message: one sentence: culprit, rule, remedy.
        path: the file or folder, or None.
        evidence: values that prove it, as plain JSON.
        command: what to type where no repair is automatic.
        fix: the automatic repair, or None.
    """

    type: str
    severity: Severity
    group: str
    message: str
    path: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    command: str | None = None
    fix: Fix | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data, without credentials."""
        return {
            "type": self.type,
            "severity": str(self.severity),
            "group": self.group,
            "message": self.message,
            "path": self.path,
            "evidence": redacted_tree(dict(self.evidence)),
            "fix": None if self.fix is None else self.fix.summary,
            "automatic": self.fix is not None,
            "fix_suggestion": self.command or (None if self.fix is None else AUTOMATIC),
        }


AUTOMATIC = "regress doctor --auto-fix"


def clean(text: str, limit: int = 120) -> str:
    """Return a text of a file or a variable fit for a sentence: no control characters, no credentials, not long."""
    text = printable(redacted(text).translate(SCRUBBED))
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown(value: Any, limit: int = 80) -> str:
    """Return a value of a file as it may stand in a sentence."""
    return clean(repr(value), limit)
