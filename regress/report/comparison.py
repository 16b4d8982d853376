"""What comparing dumps came to, as a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from regress.compare.session import Comparison
from regress.report.call import Call
from regress.report.model import Report


def report_of(found: Mapping[str, Comparison], sections: Mapping[str, Any] | None = None) -> Report:
    """The report on comparisons, by name.

    Args:
        sections: the keys of the report that NexRL's script documents.
    """
    several = len(found) > 1
    calls = [
        Call(name, str(verdict.basis.get("dtype", "")), verdict)
        for name, comparison in found.items()
        for verdict in comparison.verdicts
    ]
    errors = {
        f"{name} {number}" if number else name: problem
        for name, comparison in found.items()
        for number, problem in enumerate(comparison.problems)
    }
    notes = []
    for name, comparison in found.items():
        mark = f"{name}: " if several else ""
        notes += [f"{mark}{note}" for note in comparison.notes]
        for side, samples in (("golden", comparison.golden_only), ("actual", comparison.actual_only)):
            notes += [f"{mark}{sample} is in the {side} dump only" for sample in samples]
    first = next(iter(found.values()))
    environment = {"golden": first.golden} | {
        f"actual ({name})" if several else "actual": comparison.actual for name, comparison in found.items()
    }
    return Report(
        "regress compare",
        calls,
        errors=errors,
        environment=environment,
        notes=notes,
        tensors=sum(v.count > 0 for comparison in found.values() for v in comparison.verdicts),
        sections=sections or {},
    )
