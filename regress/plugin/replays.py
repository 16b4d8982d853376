"""Golden cases as tests: enumerated at collection, each replay run once per session, each test one verdict.

    def test_golden(regress_record):
        regress_record.check()

becomes one test for every case, variant, step, microbatch and quantity. ``@pytest.mark.regress(cases="dense*",
variants="packed*")`` narrows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from regress.errors import RegressError

if TYPE_CHECKING:
    from regress.compare.verdict import Verdict
    from regress.golden.case import GoldenCase
    from regress.replay.cache import ReplayCache
    from regress.replay.matrix import Item
    from regress.replay.variants import Variant

FIXTURE = "regress_record"


@dataclass(frozen=True)
class Broken:
    """A case that cannot be replayed, as a test that says why."""

    id: str
    problem: str
