"""Records in memory as a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regress.compare.alignment.element_names import TokenText
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.source_readers import Source


class Memory(Source):
    """Records of an update.

    Args:
        text: text of a token id, if it is known.
    """

    system = "regress"
    folder = Path("records in memory")

    def __init__(
        self,
        records: Sequence[Record],
        config: Mapping[str, Any] | None = None,
        text: TokenText | None = None,
    ) -> None:
        self.config, self.text = config or {}, text
        self._records = {f"{record.type}/{number}": record for number, record in enumerate(records)}

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Type and place of each record."""
        return {name: (record.type, record.where) for name, record in self._records.items()}

    def read(self, name: str) -> Record:
        """Return one record."""
        return self._records[name]

    def writes(self, record_type: str, tensor: str | None = None) -> bool:
        """Return True: nothing limits what is recorded."""
        return True
