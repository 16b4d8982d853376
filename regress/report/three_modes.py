"""Comparison of the three modes of one training: pairs of dumps, and the discrepancies between all of them."""

from __future__ import annotations

from dataclasses import replace

from regress.compare.dumps.options import Options
from regress.compare.dumps.sent import ACTIVE, RECORDED, flags_of, is_sent, sent
from regress.compare.dumps.sides import open_side
from regress.compare.modes.find import Found, discrepancies
from regress.compare.modes.form import flags_for
from regress.compare.modes.scene import is_indexed
from regress.errors import RegressError
from regress.report.documented import Directories, steps_in

REMOTE, WEAVER, BETWEEN = "remote API", "weaver", "client and service"


def comparable(dirs: Directories, options: Options) -> Directories:
    """Return the directories with the view of the self-hosted dump that the others can be compared with.

    Damaged dumps are left to the comparison, which names the damage.
    """
    try:
        known = [open_side(path) if path is not None else None for path in (dirs.remote_api, dirs.weaver)]
        whole = open_side(dirs.self_hosted)
        flags = flags_for(whole, known[0], known[1], steps_in(dirs, options))
        flags |= {RECORDED} if whole.system == "regress" else set()
    except RegressError:
        return dirs
    return replace(dirs, self_hosted=sent(dirs.self_hosted, flags))


def pairs_of(dirs: Directories) -> dict[str, tuple[str, str]]:
    """Return the pairs of golden and actual dumps, by name; client and service where requests tell whose datums."""
    flags, whole = (
        flags_of(dirs.self_hosted) if is_sent(dirs.self_hosted) else (frozenset(), dirs.self_hosted)
    )
    found = {}
    if dirs.remote_api is not None:  # a client dumps masks, whether its wire has them or not
        found[REMOTE] = sent(whole, flags - {ACTIVE}), dirs.remote_api
    if dirs.weaver is not None:
        found[WEAVER] = dirs.self_hosted, dirs.weaver
    if dirs.remote_api is not None and dirs.weaver is not None and is_indexed(dirs.weaver):
        found[BETWEEN] = sent(dirs.remote_api, flags & {ACTIVE}), dirs.weaver
    return found


def found_between(dirs: Directories, options: Options) -> Found:
    """Return the discrepancies between the modes; none where a part was asked for that they do not belong to."""
    if options.only.patterns:
        return Found(notes=["--only was given, so discrepancies between the three modes were not looked for"])
    return discrepancies(dirs.self_hosted, dirs.remote_api, dirs.weaver, steps_in(dirs, options))
