"""All plants of the named systems (of all without a name), what was found of each, and the score."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from plants.catalogue import FAULTS, HARMLESS, Plant
from plants.runs import run
from regress.systems.conformance_row import ConformanceRow
from regress.systems.conformance_table import write_rows


def main(arguments: list[str]) -> None:
    """Run ``[--json FILE] [SYSTEM]...``."""
    file = Path(arguments.pop(1)) if arguments[:1] == ["--json"] else None
    names = arguments[1:] if file else arguments
    found: list[tuple[Plant, ConformanceRow]] = []
    with TemporaryDirectory(prefix="regress-plants-") as folder:
        for name in names or list(dict.fromkeys(plant.system for plant in FAULTS)):
            own = [plant for plant in (*FAULTS, *HARMLESS) if plant.system == name]
            found += run(
                name, own, Path(folder) / name, told=lambda plant, row: print(line(plant, row), flush=True)
            )
    faults = [(plant, row) for plant, row in found if plant.kind]
    harmless = [row for plant, row in found if not plant.kind]
    print(
        f"{len(faults)} faults: {sum(row.result == 'wrong' for _, row in faults)} caught, "
        f"{sum(plant.located(row.first) for plant, row in faults)} with the right first divergence; "
        f"{len(harmless)} harmless changes: {sum(row.result != 'exact' for row in harmless)} flagged"
    )
    if file is not None:
        write_rows(file, [row for _, row in found])


def line(plant: Plant, row: ConformanceRow) -> str:
    """Return what was found of a plant."""
    if not plant.kind:
        told = "exact" if row.result == "exact" else f"FLAGGED: {row.told}"
        return f"{plant.system} {plant.name} (harmless): {told}"
    place = "" if plant.located(row.first) else f" BUT EXPECTED {plant.first} {plant.where}".rstrip()
    cause = f"; {row.cause}" if row.cause else ""
    return f"{plant.system} {plant.name} ({plant.kind}): {row.result}{place}: {row.told}{cause}"


if __name__ == "__main__":
    main(sys.argv[1:])
