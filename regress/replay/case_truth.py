"""Golden values of a case: the base variant in true float64, gathered into canonical form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from regress.compare.alignment.canonical_tensors import canonicalize
from regress.compare.diagnosis.token_formulas import TokenFormulas
from regress.compare.quantities import quantity_named
from regress.dump.bitwise_difference import compare_bitwise
from regress.dump.canonical_json import Json
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.engine.config import to_plain
from regress.errors import ReplayError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_provenance import collect
from regress.replay.case_run import replay
from regress.replay.case_signal import SignalError, by_group, require_signal
from regress.replay.replay_configuration import replay_config
from regress.replay.replay_judge import invariants_of, records_of
from regress.replay.replay_plan import PlannedUpdate
from regress.replay.rollout_judge import RolloutJudge
from regress.replay.temporary_workspace import Workspace
from regress.replay.test_matrix import Replay
from regress.replay.update_facts import related_values_of
from regress.replay.variant import Precision
from regress.replay.variant_table import BASE

Truth = dict[str, dict[str, dict[str, Array]]]
"""``where -> quantity -> name -> array``."""


def compute_truth(case: GoldenCase, workspace: Path) -> Truth:
    """Compute the values of every quantity of every update, twice.

    Raises:
        ReplayError: if the two runs differ in a bit: such values are not a baseline.
    """
    dumps = [replay(case, BASE, Precision.FLOAT64, workspace / name) for name in ("first", "second")]
    found = compare_bitwise(dumps[0].folder, dumps[1].folder)
    if found.differences:
        first = found.differences[0]
        raise ReplayError(f"""case {case.name}: two runs of the same computation differ ({first.file}, {first.what}), so
        neither can be golden; look for a source of randomness or for threads, and set threads=1""")
    require_rollouts(case, dumps[0])
    require_invariants(case, dumps[0])
    return canonical(case, dumps[0])


def require_invariants(case: GoldenCase, dump: DumpReader) -> None:
    """Refuse golden values that break an invariant; raises `ReplayError` listing all of them."""
    updates = Replay(case, BASE, Precision.FLOAT64).plan
    found = [verdict for one in updates for verdict in invariants_of(dump, one, records_of(dump, one))]
    wrong = [verdict for verdict in found if not verdict.ok]
    if wrong:
        listed = "; ".join(f"{v.name} at {v.place}: {v.detail}" for v in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ReplayError(f"""case {case.name} cannot become golden, because what is true of every correct update is not
        true of this one ({listed}{more}): correct the engine""")


def require_rollouts(case: GoldenCase, dump: DumpReader) -> None:
    """Refuse other rollouts than the recorded ones of a sampled case; raises `ReplayError` for the first."""
    if not case.sampled:
        return
    judge = RolloutJudge(case, dump, Precision.FLOAT64, (), lambda _: None, case.truth)
    found = (verdict for step in case.trajectories() for verdict in judge.verdicts(step))
    first = next((verdict for verdict in found if not verdict.ok), None)
    if first is not None:
        raise ReplayError(f"""case {case.name} samples other rollouts than were recorded (step {first.place.step},
        {first.name}: {first.detail or first.status}), so its updates are those of other samples; if that is right,
        record the case again: regress golden record {case.name}""")


def canonical(case: GoldenCase, dump: DumpReader, plan: Sequence[PlannedUpdate] | None = None) -> Truth:
    """Return the content of a dump, free of its layout, without what the case leaves out."""
    updates = plan or Replay(case, BASE, Precision.FLOAT64).plan
    for quantity in case.leaves_out:
        quantity_named(quantity)
    found = {
        update.where: canonicalize(records_of(dump, update), update.frame, update.records)
        for update in updates
    }
    return {
        where: {name: tensors for name, tensors in row.items() if name not in case.leaves_out}
        for where, row in found.items()
    }


def require_case_signal(case: GoldenCase, truth: Truth) -> None:
    """Refuse golden values in which some faults could not show; see `regress.replay.case_signal`.

    Of a sampled case, whose updates need not show more than others do, the rollouts must: see
    `regress.replay.case_signal`.
    """
    if case.sampled:
        require_rollout_signal(case)
        return
    with Workspace() as folder:
        steps = len(case.trajectories())
        config = replay_config(case, BASE, Precision.FLOAT64, steps, folder)
    plan = Replay(case, BASE, Precision.FLOAT64).plan
    require_signal(
        case.name,
        frames={update.where: update.frame for update in plan},
        trajectories=case.trajectories(),
        truth=truth,
        config=to_plain(config),
        claims=case.claims,
        formulas={
            update.where: formulas_of(case, update, truth[update.where], to_plain(config)) for update in plan
        },
    )


def formulas_of(
    case: GoldenCase,
    update: PlannedUpdate,
    values: Mapping[str, Mapping[str, Array]],
    config: Mapping[str, Any],
) -> TokenFormulas:
    """Return the formulas of the token quantities of an update.

    Args:
        values: its golden values.
        config: the whole configuration, defaults included.
    """
    mask = values.get("batch_inputs", {}).get("response_mask", update.loss_mask)
    return TokenFormulas(
        values,
        update.frame,
        np.asarray(mask, bool),
        config["algorithm"],
        related_values_of(case, update, None, own=False),
        length=config["data"]["max_completion_length"],
    )


def flat(truth: Mapping[str, Mapping[str, Mapping[str, Array]]]) -> dict[tuple[str, str, str], Array]:
    """Return the tensors by ``(where, quantity, name)``."""
    return {
        (where, quantity, name): array
        for where, quantities in truth.items()
        for quantity, tensors in quantities.items()
        for name, array in tensors.items()
    }


def provenance_of(case: GoldenCase) -> dict[str, Json]:
    """Return configuration hash, versions and determinism environment of a recording made now."""
    threads: Any = case.config.get("threads", 1)
    return collect(
        case.config,
        threads=threads,
        processor=torch.backends.cpu.get_cpu_capability(),
    )


def require_rollout_signal(case: GoldenCase) -> None:
    """Raise `SignalError` listing what the rollouts of a case lack."""
    missing = [*check_rollouts(case.trajectories(), case.greedy(), _max_turns(case))]
    if missing:
        raise SignalError(
            f"""case {case.name!r} cannot become golden, because some faults of the sampler could not show in it:
            {"; ".join(missing)}: change its seed, its recipe or its configuration""",
            ["recipe.warm_steps", "data.max_completion_length"],
        )


def check_rollouts(
    drawn: dict[int, list[Trajectory]], greedy: dict[int, list[Trajectory]], turns: int
) -> Iterator[str]:
    """Yield a sentence for each missing signal.

    Args:
        drawn, greedy: completions by step.
        turns: completions that a conversation may have.
    """
    samples = [one for found in drawn.values() for one in found]
    best = [one for found in greedy.values() for one in found]
    for reason in ("stop", "length"):
        if all(one.finish_reason != reason for one in samples):
            yield f"no completion ends with finish_reason {reason!r}"
    if len({len(one.tokens) for one in samples}) < 2:
        yield "all samples are of equal length"
    if len({one.prompt_length for one in samples}) < 2:
        yield "all prompts are of equal length, so nothing is padded"
    if [one.tokens for one in samples] == [one.tokens for one in best]:
        yield "what is drawn is what is most probable"
    if len(drawn) < 2:
        yield "it has one step, so no rollout is sampled from updated weights"
    for found in drawn.values():
        if all(len({tuple(one.tokens) for one in group}) == 1 for group in by_group(found).values()):
            yield "the runs of each group are the same, so a shared stream would not show"
    if turns > 1 and not any(_inner(one) for one in samples):
        yield "no conversation has masked tokens of the environment between sampled ones"


def _inner(one: Trajectory) -> bool:
    """Return True if masked tokens lie between sampled ones."""
    return len([value for value, _ in groupby(one.loss_mask) if value]) > 1


def _max_turns(case: GoldenCase) -> int:
    task = case.config.get("task")
    turns = task.get("max_turns", 1) if isinstance(task, dict) else 1
    return turns if isinstance(turns, int) else 1
