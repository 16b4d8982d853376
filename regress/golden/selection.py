"""Selection among the changes of a pending update, by item: one quantity of one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from regress.errors import GoldenError
from regress.golden.entries import TruthEntry
from regress.golden.manifest import Manifest
from regress.golden.tolerance import ToleranceEntry

TOLERANCES = "tolerances"
Item = tuple[str, str]
"""`(update, quantity)`, or `("tolerances", quantity)`."""


def items(base: Manifest | None, new: Manifest) -> set[Item]:
    """Return the items that differ between two manifests, inputs aside."""
    old = base or Manifest()
    found = {
        (where, quantity)
        for where in {*old.truth, *new.truth}
        for quantity in {*old.truth.get(where, {}), *new.truth.get(where, {})}
        if old.truth.get(where, {}).get(quantity) != new.truth.get(where, {}).get(quantity)
    }
    names = {*old.tolerances, *new.tolerances}
    return found | {(TOLERANCES, n) for n in names if old.tolerances.get(n) != new.tolerances.get(n)}


def select(case: str, base: Manifest | None, new: Manifest, patterns: Sequence[str]) -> set[Item]:
    """Return the items that match one of the patterns; all of them without patterns.

    Raises `GoldenError` for a pattern that matches nothing, and when a part was asked for although the inputs
    changed: truth from different inputs does not belong together.
    """
    found = items(base, new)
    if not patterns:
        return found
    picked: set[Item] = set()
    for pattern in patterns:
        matches = {i for i in found if fnmatchcase(i[1], pattern) or fnmatchcase("/".join(i), pattern)}
        if not matches:
            known = ", ".join("/".join(item) for item in sorted(found)) or "inputs only"
            raise GoldenError(
                f"nothing in the pending update of {case!r} matches {pattern!r}: it changes {known}"
            )
        picked |= matches
    if picked != found and new.inputs != (base or Manifest()).inputs:
        raise GoldenError(
            f"the pending update of {case!r} changes the inputs, so all of it belongs together: accept or reject it "
            "as a whole"
        )
    return picked


def blend(base: Manifest | None, new: Manifest, picked: set[Item]) -> Manifest:
    """Return a manifest with the picked items of `new` and all others of `base`; inputs and provenance are
    those of `new`.
    """
    old = base or Manifest()
    truth: dict[str, dict[str, TruthEntry]] = {}
    for where in {*old.truth, *new.truth}:
        for quantity in {*old.truth.get(where, {}), *new.truth.get(where, {})}:
            source = new if (where, quantity) in picked else old
            if (entry := source.truth.get(where, {}).get(quantity)) is not None:
                truth.setdefault(where, {})[quantity] = entry
    tolerances: dict[str, Mapping[str, ToleranceEntry]] = {}
    for quantity in {*old.tolerances, *new.tolerances}:
        source = new if (TOLERANCES, quantity) in picked else old
        if quantity in source.tolerances:
            tolerances[quantity] = source.tolerances[quantity]
    return Manifest(new.inputs, truth, tolerances, new.provenance)
