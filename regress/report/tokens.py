"""What a step computed at its tokens, golden and actual side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from regress.compare.verdict import Place

LIMIT = 20_000
"""Tokens of one table; what is beyond is left out, and said to be."""


@dataclass(frozen=True)
class TokenValues:
    """One quantity at every token of a table.

    Attributes:
        quantity: such as ``log_probs``.
        golden, actual: ``[tokens]``; None where there is no value: at other than loss tokens, or not recorded.
        tolerance: the bound on ``|actual - golden|``.
    """

    quantity: str
    golden: Sequence[float | None]
    actual: Sequence[float | None]
    tolerance: float


@dataclass(frozen=True)
class TokenTable:
    """The samples of one optimizer update, laid end to end.

    Attributes:
        where: replay or comparison.
        place: step and update.
        samples: names, such as ``000001-0002/3``; ``lengths`` their tokens.
        ids: ``[tokens]`` token ids.
        text: ``[tokens]`` what each reads as; empty without a tokenizer.
        mask: ``[tokens]`` whether it enters the loss.
        values: by quantity, in the order of computation.
        left_out: samples that there was no room for.
    """

    where: str
    place: Place
    samples: Sequence[str]
    lengths: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[bool]
    values: Sequence[TokenValues]
    text: Sequence[str] = field(default_factory=tuple)
    left_out: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict, the inverse of `from_json`; floats need not be finite."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenTable:
        """Rebuild a table written by `to_json`."""
        values = [TokenValues(**row) for row in data["values"]]
        return cls(**{**data, "place": Place(**data["place"]), "values": values})
