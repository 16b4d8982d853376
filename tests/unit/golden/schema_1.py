"""Golden cases as releases before schema 2 wrote them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from regress.golden.case_manifest import checksum


def downgrade(folder: Path) -> None:
    """Give a recorded case schema 1: truth files named by their content, one of them compressed."""
    tree = json.loads((folder / "manifest.json").read_text())
    del tree["sha256"]
    for where, row in tree["truth"].items():
        for quantity, entry in row.items():
            file = folder / "truth" / where / f"{quantity}.safetensors"
            entry["file"] = f"truth/{where}/{quantity}.{entry['sha256'][:12]}.safetensors"
            if quantity == "gradient":
                (folder / f"{entry['file']}.gz").write_bytes(gzip.compress(file.read_bytes(), mtime=0))
                file.unlink()
            else:
                file.rename(folder / entry["file"])
    tree |= {"schema_version": 1, "provenance": tree["provenance"] | {"source": {"dirty": True}}}
    (folder / "manifest.json").write_text(json.dumps(tree | {"sha256": checksum(tree)}))
