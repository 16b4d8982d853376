"""Plan of repairs: the actions of all findings, once each, with the manifests that must follow."""

from __future__ import annotations

from collections.abc import Iterable

from regress.doctor.commit import read_commit, resealed
from regress.doctor.issue import Action, Issue, Move, Write
from regress.doctor.tree import Tree, Unreadable
from regress.dump.files import Stamp, stamp_of
from regress.dump.manifest import MANIFEST


def planned(tree: Tree, issues: Iterable[Issue]) -> list[Action]:
    """Return the changes that repair what can be repaired, moves last.

    Nothing is changed below a folder that is moved aside; a checkpoint that gets its right name is repaired first.
    """
    actions = list(
        dict.fromkeys(action for issue in issues if issue.fix is not None for action in issue.fix.actions)
    )
    moves = [action for action in actions if not isinstance(action, Write)]
    aside = [move.path for move in moves if isinstance(move, Move) and move.to.startswith("broken-")]
    writes: dict[str, Write] = {}
    for action in actions:
        if isinstance(action, Write) and not action.path.startswith(tuple(f"{path}/" for path in aside)):
            writes.setdefault(action.path, action)
    return [*writes.values(), *_seals(tree, writes.values()), *moves]


def _seals(tree: Tree, writes: Iterable[Write]) -> list[Write]:
    """Return the manifests of checkpoints that get other bytes than were written when they were made."""
    changed: dict[str, dict[str, Stamp]] = {}
    for write in writes:
        if write.seal:
            checkpoint, _, name = write.path.partition("/")
            changed.setdefault(checkpoint, {})[name] = stamp_of(write.data)
    seals = []
    for checkpoint, stamps in changed.items():
        try:
            commit = read_commit(tree, checkpoint)
        except Unreadable:
            continue
        seals.append(Write(f"{checkpoint}/{MANIFEST}", resealed(commit, stamps)))
    return seals
