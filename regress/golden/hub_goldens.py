"""Golden directories on the Hugging Face hub: a dataset at a revision, which is only read.

``hf://datasets/org/name@REVISION`` is the dataset, ``hf://datasets/org/name@REVISION/folder`` a folder of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from regress.errors import GoldenError, reason
from regress.hub_cache import hub_cache, offline_variable

PREFIX = "hf://"
_ADDRESS = re.compile(
    r"hf://datasets/(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)@(?P<revision>[^/@\s]+)(?:/(?P<folder>.+))?",
    re.ASCII,
)
_SNAPSHOT = re.compile(r"datasets--(?P<owner>.+?)--(?P<name>.+)")


def hub_directory(address: str) -> Path:
    """Return the directory in the hub's cache that an address names, downloaded if need be.

    Raises:
        GoldenError: for what is not such an address, or a dataset that neither the cache nor the hub has.
    """
    match = _ADDRESS.fullmatch(address)
    folder = "" if match is None else match["folder"] or ""
    if match is None or ".." in Path(folder).parts:
        raise GoldenError(f"""{address} is not an address of goldens on the hub: write hf://datasets/ORG/NAME@REVISION,
        where the revision is a commit, a tag or a branch""")
    from huggingface_hub import snapshot_download

    offline = offline_variable()
    try:
        found = Path(
            snapshot_download(
                match["name"],
                repo_type="dataset",
                revision=match["revision"],
                cache_dir=hub_cache(),
                local_files_only=offline is not None,
                allow_patterns=f"{folder}/**" if folder else None,
            )
        )
    except Exception as error:  # the hub's client raises its own errors, those of its transport and of files
        why = reason(error) if offline is None else f"{offline} is set"
        raise GoldenError(f"""{address} is not in the hub's cache ({hub_cache()}) and cannot be downloaded ({why}): run
        hf download {match["name"]} --repo-type dataset --revision {match["revision"]} where there is a
        network""") from None
    return found / folder


def hub_address(root: Path) -> str | None:
    """Return the address of a directory in the hub's cache, with the commit for a revision; None for any other."""
    parts = root.parts
    for number, part in enumerate(parts[:-2]):
        match = _SNAPSHOT.fullmatch(part)
        if match is not None and parts[number + 1] == "snapshots":
            folder = "/".join(parts[number + 3 :])
            return f"hf://datasets/{match['owner']}/{match['name']}@{parts[number + 2]}" + (
                f"/{folder}" if folder else ""
            )
    return None


def refuse_writing(root: Path) -> None:
    """Refuse to write goldens that lie on the hub.

    Raises:
        GoldenError: if they do.
    """
    address = hub_address(root)
    if address is not None:
        raise GoldenError(f"""{address} is only read: download it with hf download --repo-type dataset --local-dir
        golden, change it there, and upload it as a new revision""")
