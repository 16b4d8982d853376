"""Golden values over several data-parallel ranks, of objectives whose values depend on the microbatches of all ranks.

The stored values are those of one rank's microbatches. Where several ranks cut a batch otherwise, or the loss is a mean
over ranks, one process that computes the shares of all of them, one after the other, computes what they must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from regress.dump.dump_files import remove_tree
from regress.dump.numpy_arrays import Array
from regress.layout import Mesh, RankPlan
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.replay_request import Replay
from regress.replay.variant import Precision
from regress.replay.variant_requirements import has_other_values, planned, shares
from regress.replay.variant_table import BASE

if TYPE_CHECKING:
    from regress.engine.run_construction import Run

Truth = Mapping[str, Mapping[str, Array]]


def truth_of_ranks(replay: Replay, folder: Path) -> Callable[[str], Truth] | None:
    """Return the golden values by update, computed in a folder that is then removed; None for the stored ones."""
    if not has_other_values(replay):
        return None
    from regress.replay.case_run import replay as run
    from regress.replay.case_truth import canonical

    dealt = shares(replay)
    ranks = RankPlan(Mesh(dp=dealt["parallel.dp"]), dealt["parallel.sample_split"])
    dump = run(replay.case, BASE, Precision.FLOAT64, folder, prepare=partial(_take, ranks))
    try:
        return canonical(
            replay.case, dump, [_on_one(update) for update in planned(replay, dealt)]
        ).__getitem__
    finally:
        remove_tree(folder)


def _on_one(update: PlannedUpdate) -> PlannedUpdate:
    """Return the update with the microbatches of all ranks on one."""
    return replace(update, layouts=(tuple(chain.from_iterable(update.layouts)),), ranks=RankPlan())


def _take(ranks: RankPlan, run: Run) -> None:
    run.trainer.shares = ranks
