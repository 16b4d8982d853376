"""A dump whose shares of the loss add up to the ranks times the loss, as each rank's mean does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from regress.dump.arrays import Array, is_float
from regress.dump.coordinates import Coordinates
from regress.dump.record import Record
from regress.dump.sums import Span
from regress.interop.readers import Source, spans_of, verify_span

PREFIX = "ranks-average:"
SHARES: Mapping[str, tuple[str, ...]] = {
    "loss": ("loss", "pg_loss", "kl_loss", "entropy_loss"),
    "token_gradient": ("token_gradient", "entropy_gradient"),
}
"""Record type -> its tensors that are shares of the loss of the whole mini-batch, or derivatives of it."""


def is_averaged(source: str) -> bool:
    """Tell such a view from a folder or URL."""
    return source.startswith(PREFIX)


def averaged(source: str) -> str:
    """Return the name of the view of a source."""
    return f"{PREFIX}{source}"


class AveragedSide(Source):
    """View of a dump whose losses and token gradients are divided by the number of ranks that share the samples."""

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.folder, self.system, self.mesh, self.config = (
            whole.folder,
            whole.system,
            whole.mesh,
            whole.config,
        )
        self.unsealed = getattr(whole, "unsealed", False)

    @cached_property
    def ranks(self) -> int:
        """Number of ranks that hold tokens of their own."""
        ranks = {where.rank or 0 for type, where in self.whole.entries.values() if type == "forward_data"}
        return max(1, len({self.whole.root(rank) for rank in ranks}))

    @property
    def precision(self) -> str | None:
        """Dtype that the model computed in."""
        return self.whole.precision

    @property
    def notes(self) -> Sequence[str]:
        """Notes of the dump, and what was divided."""
        return (*self.whole.notes, f"losses and token gradients were divided by its {self.ranks} ranks")

    @property
    def entries(self) -> Mapping[str, tuple[str, Coordinates]]:
        """Records of the dump."""
        return self.whole.entries

    def read(self, name: str) -> Record:
        """Read one record."""
        record = self.whole.read(name)
        shares = SHARES.get(record.type, ())
        if not shares:
            return record
        tensors = {
            key: self._share(array) if key in shares else array for key, array in record.tensors.items()
        }
        return replace(record, tensors=tensors)

    def _share(self, array: Array) -> Array:
        return np.asarray(array / array.dtype.type(self.ranks)) if is_float(array.dtype) else array

    def raw(self, type: str, step: int) -> Mapping[str, Any] | None:
        """Return an unrecorded file of the dump."""
        return self.whole.raw(type, step)

    def spans(self, name: str, tensors: Collection[str] | None = None) -> Sequence[Span] | None:
        """Return the parts of a record's file that are left to `verify`."""
        return spans_of(self.whole, name, tensors)

    def verify(self, name: str, span: Span | None = None) -> None:
        """Verify a record of the dump."""
        verify_span(self.whole, name, span)

    def root(self, rank: int) -> int:
        """Return the rank whose tokens a rank repeats."""
        return self.whole.root(rank)

    def writes(self, stage: str, tensor: str | None = None) -> bool:
        """Return True if the dump could have a stage, or a tensor of it."""
        return self.whole.writes(stage, tensor)
