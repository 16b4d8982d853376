"""Checkpoints: the state of a run on disk, from which another process goes on bit for bit.

Names below load on first use and need no torch.
"""

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

if TYPE_CHECKING:
    from regress.engine.checkpoint.checkpoint_names import checkpoint_name as checkpoint_name
    from regress.engine.checkpoint.checkpoint_names import checkpoints as checkpoints
    from regress.engine.checkpoint.checkpoint_names import latest as latest
    from regress.engine.checkpoint.trainer_state import CheckpointState as CheckpointState
    from regress.engine.checkpoint.trainer_state import read_state as read_state

_HOMES = {
    "CheckpointState": "trainer_state",
    "checkpoint_name": "checkpoint_names",
    "checkpoints": "checkpoint_names",
    "latest": "checkpoint_names",
    "read_state": "trainer_state",
}
__all__ = sorted(_HOMES)

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)
