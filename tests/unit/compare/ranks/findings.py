"""Lengths of the samples that ranks share, and what is said of their records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from regress.compare.alignment.canonical_tensors import canonicalize
from regress.compare.verdicts.verdict import Verdict
from regress.errors import CompareError

LENGTHS = (5, 2, 6, 3, 4, 3)


def brief(verdicts: Sequence[Verdict]) -> list[tuple[str, str, str, str]]:
    return [(str(v.status), v.quantity, v.name, str(v.place)) for v in verdicts]


def refusal(ranks: Any) -> str:
    with pytest.raises(CompareError) as caught:
        canonicalize(ranks.records, ranks.world.frame, ranks.plan)
    return str(caught.value)
