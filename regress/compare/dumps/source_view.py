"""A source seen through another: some of its records are changed, everything else is passed on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from regress.dump.chunk_checksums import Span
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.source_readers import Source, spans_of, verify_span


class SourceView(Source):
    """View of a source, the same as the source itself but for what a subclass changes.

    Attributes:
        whole: the source.
    """

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.folder, self.system, self.mesh, self.config = (
            whole.folder,
            whole.system,
            whole.mesh,
            whole.config,
        )
        self.unsealed = getattr(whole, "unsealed", False)

    @property
    def precision(self) -> str | None:
        """Dtype that the model computed in."""
        return self.whole.precision

    @property
    def notes(self) -> Sequence[str]:
        """Notes of the source."""
        return self.whole.notes

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Records of the source."""
        return self.whole.entries

    def read(self, name: str) -> Record:
        """Read one record."""
        return self.whole.read(name)

    def raw(self, type: str, step: int) -> Mapping[str, Any] | None:
        """Return an unrecorded file of the source."""
        return self.whole.raw(type, step)

    def spans(self, name: str, tensors: Collection[str] | None = None) -> Sequence[Span] | None:
        """Return the parts of a record's file that are left to `verify`."""
        return spans_of(self.whole, name, tensors)

    def verify(self, name: str, span: Span | None = None) -> None:
        """Verify a record of the source."""
        verify_span(self.whole, name, span)

    def root(self, rank: int) -> int:
        """Return the rank whose tokens a rank repeats."""
        return self.whole.root(rank)

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True if the source could have a record type, or a tensor of it."""
        return self.whole.writes(record_type, tensor)
