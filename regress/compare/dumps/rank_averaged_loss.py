"""A dump whose shares of the loss add up to the ranks times the loss, as each rank's mean does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from regress.compare.dumps.source_view import SourceView
from regress.dump.numpy_arrays import is_float
from regress.dump.record import Record

PREFIX = "ranks-average:"
SHARES: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "pg_loss", "kl_loss", "entropy_loss"),
    "token_gradient": ("token_gradient", "entropy_gradient"),
}
"""Record type -> its tensors that are shares of the loss of the whole mini-batch, or derivatives of it."""


def is_averaged(source: str) -> bool:
    """Distinguish such a view from a folder or URL."""
    return source.startswith(PREFIX)


def averaged(source: str) -> str:
    """Return the name of the view of a source."""
    return f"{PREFIX}{source}"


class AveragedSide(SourceView):
    """View of a dump whose losses and token gradients are divided by the number of ranks that share the samples."""

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that hold tokens of their own."""
        ranks = {where.rank or 0 for type, where in self.whole.entries.values() if type == "forward_data"}
        return max(1, len({self.whole.root(rank) for rank in ranks}))

    @property
    def notes(self) -> Sequence[str]:
        """Notes of the dump, and what was divided."""
        return (*self.whole.notes, f"losses and token gradients were divided by its {self.ranks} ranks")

    def read(self, name: str) -> Record:
        """Read one record."""
        record = self.whole.read(name)
        shares = SHARES.get(record.type, ())
        if not shares:
            return record
        divided = {
            key: np.asarray(array / array.dtype.type(self.ranks))
            for key, array in record.tensors.items()
            if key in shares and is_float(array.dtype)
        }
        return replace(record, tensors={**record.tensors, **divided})
