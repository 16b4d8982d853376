"""Tolerances that a project sets by hand: ``[[tool.regress.tolerances]]`` in its pyproject.toml, each with a reason.

```toml
[[tool.regress.tolerances]]
quantity = "gradient"
tensor = "*.k_proj.bias"
precision = "bfloat16"
absolute = 2e-3
reason = "our attention kernel sums keys in half precision; see issue 812"
```
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from regress.compare.quantities import QUANTITIES, quantity_named
from regress.compare.verdicts.tolerance import Tolerance, Tolerances
from regress.errors import ConfigError
from regress.golden.golden_case import GoldenCase
from regress.project_settings import project_section

EVERY = "*"
PRECISIONS = ("float64", "float32", "bfloat16", "mixed")
_PATTERNS = ("quantity", "tensor", "case", "precision")
_BOUNDS = ("relative", "absolute")


@dataclass(frozen=True)
class Override:
    """One row.

    Attributes:
        origin: its location, such as ``pyproject.toml: [[tool.regress.tolerances]] row 2``.
        quantity, tensor, case, precision: patterns (``fnmatch``) of the tensors that it applies to.
        relative, absolute: the bound, in place of the measured one: ``relative * scale + absolute``.
    """

    origin: str
    reason: str
    relative: float = 0.0
    absolute: float = 0.0
    quantity: str = EVERY
    tensor: str = EVERY
    case: str = EVERY
    precision: str = EVERY

    def covers(self, quantity: str, case: str, precision: str) -> bool:
        """Return True if the row applies to any of these tensors of a quantity; exact comparisons have no tolerance."""
        given = ((quantity, self.quantity), (case, self.case), (precision, self.precision))
        return all(fnmatchcase(*pair) for pair in given) and not quantity_named(quantity).exact

    def over(self, measured: Tolerance | None) -> Tolerance:
        """Return the tolerance of a quantity with this row applied."""
        basis: dict[str, Any] = {"override": self.origin}
        if measured is not None and self.tensor == EVERY:
            basis |= {"measured_relative": measured.relative, "measured_absolute": measured.absolute}
        own = Tolerance(self.relative, self.absolute, basis=basis, reason=f"set by hand: {self.reason}")
        if self.tensor == EVERY:
            return own
        rest = measured or Tolerance(
            math.inf, reason="not judged, but for tensors with a tolerance set by hand"
        )
        return replace(rest, tensors={self.tensor: own, **rest.tensors})


@dataclass(frozen=True)
class Overrides:
    """The rows of a project; the last one that matches counts."""

    rows: Sequence[Override] = ()

    def over(self, bounds: Tolerances, *, case: str = "", precision: str = "") -> Tolerances:
        """Return the tolerances of a case at a precision with the rows applied; without a case, those of no case.

        Two compared dumps belong to no case, so rows that name cases do not apply to them.
        """

        def of(quantity: str) -> Tolerance | None:
            found = bounds(quantity)
            for row in self.rows:
                if row.covers(quantity, case, precision):
                    found = row.over(found)
            return found

        return of if self.rows else bounds

    def check(self, cases: Iterable[GoldenCase]) -> None:
        """Raise `ConfigError` for a row that matches nothing that was recorded."""
        recorded = {case.name: _tensors(case) for case in cases} if self.rows else {}
        for row in self.rows:
            _check_row(row, recorded)


def read_overrides(root: Path | None) -> Overrides:
    """Read the rows of ``root/pyproject.toml``.

    Raises:
        ConfigError: naming the row and its fault.
    """
    rows = None if root is None else project_section(root, "tolerances")
    if rows is None:
        return Overrides()
    origin = f"{root / 'pyproject.toml' if root is not None else ''}: [[tool.regress.tolerances]]"
    if not isinstance(rows, list):
        raise ConfigError(f"{origin} must be an array of tables; write each row below a line of its own")
    return Overrides([_parse(row, f"{origin} row {number}") for number, row in enumerate(rows, 1)])


def _parse(row: Any, origin: str) -> Override:
    known = [spec.name for spec in fields(Override) if spec.name != "origin"]
    if not isinstance(row, Mapping):
        raise ConfigError(f"{origin} is {row!r}; give a table with keys of {', '.join(known)}")
    for key in row:
        if key not in known:
            raise ConfigError(f"{origin} has the key {key!r}; choose from {', '.join(known)}")
    if not isinstance(row.get("reason"), str) or not row["reason"].strip():
        raise ConfigError(f'{origin} has no reason; add reason = "why the measured tolerance does not hold"')
    for key in _PATTERNS:
        if not isinstance(row.get(key, EVERY), str) or not row.get(key, EVERY):
            raise ConfigError(f"{origin} has {key} = {row[key]!r}; give a name, or a pattern such as 'grad*'")
    if not any(key in row for key in _BOUNDS):
        raise ConfigError(f"{origin} sets no bound; add relative = 1e-6, absolute = 1e-9, or both")
    for key in _BOUNDS:
        value = row.get(key, 0.0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"{origin} has {key} = {value!r}; a bound is a finite number of at least 0")
    found = Override(origin, **row)
    _check_names(found)
    return found


def _check_names(row: Override) -> None:
    """Raise `ConfigError` for a pattern that matches no possible name."""
    matching = [quantity for quantity in QUANTITIES if fnmatchcase(quantity.name, row.quantity)]
    if not matching:
        names = ", ".join(quantity.name for quantity in QUANTITIES if not quantity.exact)
        raise ConfigError(f"{row.origin}: no quantity matches {row.quantity!r}; choose from {names}")
    if all(quantity.exact for quantity in matching):
        raise ConfigError(
            f"{row.origin}: {row.quantity} is compared exactly, so it has no tolerance; remove the row"
        )
    if not any(fnmatchcase(name, row.precision) for name in PRECISIONS):
        raise ConfigError(
            f"{row.origin}: no precision matches {row.precision!r}; choose from {', '.join(PRECISIONS)}"
        )


def _check_row(row: Override, recorded: Mapping[str, Mapping[str, set[str]]]) -> None:
    cases = [name for name in recorded if fnmatchcase(name, row.case)]
    if not cases:
        raise ConfigError(
            f"{row.origin}: no case matches {row.case!r}; recorded are {', '.join(recorded) or 'none'}"
        )
    tensors = {
        (quantity, name)
        for case in cases
        for quantity, names in recorded[case].items()
        if row.covers(quantity, case, _precision(row))
        for name in names
    }
    if not tensors:
        raise ConfigError(f"""{row.origin}: no quantity that matches {row.quantity!r} was recorded in
        {", ".join(cases)}; remove the row""")
    if not any(fnmatchcase(name, row.tensor) for _, name in tensors):
        raise ConfigError(f"""{row.origin}: no tensor of {row.quantity} matches {row.tensor!r} in {", ".join(cases)};
        regress golden show CASE QUANTITY lists their names""")


def _precision(row: Override) -> str:
    """Return a precision that the row applies to."""
    return next(name for name in PRECISIONS if fnmatchcase(name, row.precision))


def _tensors(case: GoldenCase) -> dict[str, set[str]]:
    """Return the names of the recorded tensors of each quantity."""
    found: dict[str, set[str]] = {}
    truth = {} if case.manifest is None else case.manifest.truth
    for row in truth.values():
        for quantity, entry in row.items():
            found.setdefault(quantity, set()).update(entry.tensors)
    return found
