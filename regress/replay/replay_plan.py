"""Plan of a replay, known before anything runs: updates, ranks, microbatches. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.record_plan import Plan
from regress.dump.coordinates import Coordinates, Place
from regress.dump.trajectory import Trajectory
from regress.errors import ConfigError, reason
from regress.grpo.fields import ObjectiveFields
from regress.grpo.objective_presets import preset_values
from regress.layout import (
    DIMENSIONS,
    BatchPlan,
    Mesh,
    RankLayout,
    RankPlan,
    SampleKey,
    TokenFrame,
    TokenLayout,
    plan_ranks,
)


def mesh_sizes(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimensions of the mesh that are larger than one; raises `ConfigError` for an invalid size."""
    values = section(config, overrides, "parallel")
    found = {}
    for name in DIMENSIONS:
        size = values.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"parallel.{name} is {size!r}, but a dimension has a whole number of ranks; give 1 or more"
            )
        if size > 1:
            found[name] = size
    return found


def world_size(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> int:
    """Return the number of ranks of a case's configuration under overrides by dotted key."""
    return math.prod(mesh_sizes(config, overrides).values())


Samples = frozenset[int]


def depends_on_microbatches(algorithm: Mapping[str, Any]) -> bool:
    """Return True if an objective has denominators or statistics of each microbatch.

    Args:
        algorithm: fields of the objective that are not left to their defaults.
    """
    known = ObjectiveFields.__dataclass_fields__
    objective = ObjectiveFields(**{key: value for key, value in algorithm.items() if key in known})
    entropies = objective.has_entropy_term and objective.entropy_aggregation == "token-mean"
    return (
        objective.denominator_scope != "global"
        or (entropies and objective.entropy_scope == "microbatch")
        or (objective.aggregation == "seq-mean-token-sum-norm" and objective.norm_rule == "longest")
        or (objective.compares_tokens and objective.statistics_scope == "microbatch")
    )


def depends_on_ranks(algorithm: Mapping[str, Any]) -> bool:
    """Return True if a loss is the mean over data-parallel ranks of sums over their microbatches."""
    return algorithm.get("denominator_scope") == "microbatch_sum"


def same_microbatches(one: Sequence[PlannedUpdate], other: Sequence[PlannedUpdate]) -> bool:
    """Return True if the microbatches of all ranks together hold the same samples in both plans of a case."""
    return [_parts(update) for update in one] == [_parts(update) for update in other]


def _parts(update: PlannedUpdate) -> set[Samples]:
    """Return the samples of each microbatch."""
    layouts = (layout for own in update.layouts for layout in own)
    parts = {frozenset(segment.sample for segment in layout.whole.segments) for layout in layouts}
    return parts - {frozenset()}


Layouts = tuple[tuple[RankLayout, ...], ...]
"""``[rank][microbatch]``."""

FOLDED = ("zbv_zero_bubble",)
"""Pipeline schedules that end on the first ranks, which then hold the last stage, too, and so the loss."""


@dataclass(frozen=True)
class PlannedUpdate:
    """One optimizer update.

    Attributes:
        frame: its samples in canonical order.
        layouts: layouts of their tokens, by rank and microbatch.
        loss_mask: ``[frame.size]`` tokens that may enter the loss, as the rollouts say; an algorithm may drop more.
        ranks: the mesh, and the split of samples and tokens over it.
        loss_stage: index along the mesh's ``pp`` of the ranks that compute the loss.
    """

    step: int
    update: int | None
    frame: TokenFrame
    layouts: Layouts
    loss_mask: NDArray[np.bool_] = field(repr=False, compare=False)
    ranks: RankPlan = field(default_factory=RankPlan)
    loss_stage: int = 0

    @property
    def place(self) -> Place:
        """Step and update."""
        return Place(self.step, self.update)

    @property
    def where(self) -> str:
        """Name ``step_000000``, or ``step_000000_update1`` in a step of several updates."""
        return Coordinates(self.step, update=self.update).stem

    @cached_property
    def records(self) -> Plan:
        """Expected records, and the ranks that hold the same tokens or tensors of the same names."""
        micros = ((rank, micro) for rank, own in enumerate(self.layouts) for micro in range(len(own)))
        return Plan(tuple(micros), *_shared(self.ranks.mesh, self.loss_stage))

    def loss_tokens(self, layout: TokenLayout) -> int:
        """Return the number of tokens of a layout that may enter the loss."""
        return sum(
            int(self._before[self.frame.offsets[s.sample] + s.stop])
            - int(self._before[self.frame.offsets[s.sample] + s.start])
            for s in layout.segments
        )

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """``[frame.size + 1]`` loss tokens before each token."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.loss_mask)])


def frame_of(trajectories: Sequence[Trajectory]) -> TokenFrame:
    """Return the canonical frame of a step's samples."""
    keys: tuple[SampleKey, ...] = tuple(trajectory.key for trajectory in trajectories)
    return TokenFrame(keys, tuple(len(trajectory.tokens) for trajectory in trajectories))


def plan_replay(
    trajectories: Mapping[int, Sequence[Trajectory]], config: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[PlannedUpdate]:
    """Return the updates of a case under a variant, on every rank of its mesh.

    Args:
        trajectories: the recorded samples of each step.
        config: the case's configuration, nested.
        overrides: overrides of the variant, by dotted key.

    Raises:
        ConfigError: if a value of ``batching``, ``parallel`` or ``trainer`` is none, or a sample exceeds the token
            budget.
    """
    batching, parallel, trainer = (
        section(config, overrides, name) for name in ("batching", "parallel", "trainer")
    )
    try:
        plan, ranks = _batch_plan(batching), _rank_plan(parallel)
        cuts = trainer.get("epochs", 1), trainer.get("mini_batch_size")
        stage = 0 if parallel.get("pp_schedule") in FOLDED else ranks.mesh.pp - 1
        return [
            PlannedUpdate(
                step,
                update,
                frame,
                _layouts(step, frame.lengths, plan, ranks),
                _mask(frame, samples),
                ranks,
                stage,
            )
            for step, samples in sorted(trajectories.items())
            for update, frame in frame_of(samples).updates(*cuts)
        ]
    except (TypeError, ValueError, ArithmeticError) as error:  # values that the engine would refuse, too
        mesh = f"parallel={parallel} with " if parallel else ""
        raise ConfigError(f"""{mesh}batching={batching} with trainer={trainer} cannot be planned ({reason(error)});
        correct the case or the variant""") from None


def _mask(frame: TokenFrame, trajectories: Sequence[Trajectory]) -> NDArray[np.bool_]:
    masks = {trajectory.key: trajectory.loss_mask for trajectory in trajectories}
    return np.concatenate([np.asarray(masks[key], bool) for key in frame.samples])


def section(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a section of the configuration with the overrides applied."""
    given = {
        key.removeprefix(f"{name}."): value for key, value in overrides.items() if key.startswith(f"{name}.")
    }
    return {**(config.get(name) or {}), **given}


def section_values(config: Mapping[str, Any], overrides: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the values of a section that a configuration sets, by itself or by a preset."""
    given = section(config, overrides, name)
    preset = given.pop("preset", None)
    return {**(preset_values(preset) if preset else {}), **given}


def _batch_plan(values: Mapping[str, Any]) -> BatchPlan:
    known = {spec.name for spec in fields(BatchPlan)}
    return BatchPlan(**{key: value for key, value in values.items() if key in known})


def _rank_plan(values: Mapping[str, Any]) -> RankPlan:
    mesh = Mesh(**{name: values[name] for name in DIMENSIONS if name in values})
    given = {
        "sample_split": values.get("sample_split"),
        "sequence_split": values.get("cp_split"),
        "sequence_parallel": values.get("sequence_parallel"),
    }
    return RankPlan(mesh, **{name: value for name, value in given.items() if value is not None})


@lru_cache(maxsize=4096)
def _layouts(step: int, lengths: tuple[int, ...], plan: BatchPlan, ranks: RankPlan) -> Layouts:
    """Return the layouts of a step, cached: many variants, and all precisions, share them."""
    try:
        return tuple(map(tuple, plan_ranks(lengths, plan, ranks)))
    except ValueError as error:
        raise ConfigError(f"step {step} cannot be batched: {error}") from None


@lru_cache(maxsize=256)
def _shared(mesh: Mesh, loss_stage: int) -> tuple[dict[int, int], dict[int, int], frozenset[int]]:
    """Return rank -> rank whose tokens it repeats, rank -> pipeline stage, and ranks without loss values."""
    ranks = range(mesh.world_size)
    stages = {rank: mesh.coordinates(rank)["pp"] for rank in ranks}
    roots = {rank: mesh.group(rank, "pp", "tp")[0] for rank in ranks}
    return roots, stages, frozenset(rank for rank in ranks if stages[rank] != loss_stage)
