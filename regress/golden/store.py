"""Golden directory: one folder per case."""

from __future__ import annotations

from pathlib import Path

from regress.errors import GoldenError, meant
from regress.golden.case import GoldenCase
from regress.golden.journal import settle
from regress.golden.names import CASE_FILE, MANIFEST, check_case_name


class GoldenStore:
    """All cases under `root`, which need not exist yet.

    Opening it finishes or discards an interrupted update; see `regress.golden.journal.settle`.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        settle(self.root)

    def names(self) -> list[str]:
        """Return the names of the cases, recorded or not: folders that hold a `case.yaml` or a manifest."""
        settle(self.root)
        if not self.root.is_dir():
            return []
        found = (path.parent for file in (CASE_FILE, MANIFEST) for path in self.root.glob(f"*/{file}"))
        return sorted({folder.name for folder in found if not folder.name.startswith(".")})

    def folder(self, name: str) -> Path:
        """Return the folder of a case, existing or not; raises `GoldenError` for a name that no case can
        have, such as `../x`.
        """
        return self.root / check_case_name(name)

    def case(self, name: str, *, allow_changed_inputs: bool = False) -> GoldenCase:
        """Open a case; see `GoldenCase`. Raises `GoldenError` naming the path when it is missing or damaged."""
        folder = self.folder(name)
        settle(self.root)
        if not folder.is_dir():
            names = self.names()
            raise GoldenError(
                f"{folder} does not exist, so there is no case {name!r}: {meant(name, names)}cases here are "
                f"{', '.join(names) or 'none'}"
            )
        return GoldenCase(folder, allow_changed_inputs=allow_changed_inputs)
