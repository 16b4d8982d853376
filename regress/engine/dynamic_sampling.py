"""Dynamic sampling: groups whose rewards do not differ are replaced by groups of further prompts.

Source: DAPO, arXiv 2503.14476, eq. 11; verl 0.9 ``algorithm.filter_groups``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from regress.dump.canonical_json import Json
from regress.dump.trajectory import Trajectory
from regress.engine.config.config_schema import Config
from regress.engine.mock_rollouts import MockRolloutWorker
from regress.engine.prompt_tokens import Prompts
from regress.engine.rollout_worker import TRAIN, UNSCORED, Prompt, RolloutWorker
from regress.errors import ReplayError, TaskError
from regress.grpo.batch_resampling import varied_groups

REWARD = "reward"
"""Value of ``data.filter_metric`` that stands for the whole reward, before any KL is subtracted."""
NOTE = "dynamic_sampling"
"""Key of a trajectory's ``extra`` under which the counts of its step are kept."""


def varied(trajectories: Sequence[Trajectory], config: Config) -> dict[str, bool]:
    """Return of each group, in order, whether ``data.filter_metric`` differs among its samples.

    A group of one sample counts as varied. Samples that the reward left out are not compared, and a group of nothing
    else does not vary.

    Raises:
        ReplayError: if a trajectory has not the reward that ``data.filter_metric`` names.
    """
    found = dict.fromkeys((one.group_id for one in trajectories), False)
    number = {group: index for index, group in enumerate(found)}
    values = [(one.group_id, _metric(one, config)) for one in trajectories]
    scored = [(group, value) for group, value in values if value is not None]
    if not scored:
        return found
    rewards = torch.tensor([value for _, value in scored], dtype=torch.float64)
    kept = varied_groups(rewards, torch.tensor([number[group] for group, _ in scored]))
    for (group, _), differs in zip(scored, kept.tolist(), strict=True):
        found[group] |= differs
    return found


def _metric(trajectory: Trajectory, config: Config) -> float | None:
    name = config.data.filter_metric
    if UNSCORED in trajectory.extra:
        return None
    if name == REWARD:
        return float(trajectory.reward)
    if name in trajectory.rewards:
        return float(trajectory.rewards[name])
    if name in config.task.rewards and any(other in trajectory.rewards for other in config.task.rewards):
        return None  # its function left the sample out
    raise ReplayError(
        f"sample {trajectory.key} has no reward {name!r}, which data.filter_metric names; set it to reward"
    )


@dataclass
class FilteredRollouts:
    """Worker that samples further prompts until it has as many groups with differing rewards as it was asked for.

    Attributes:
        worker: samples; every rank gets the same trajectories from it.
        prompts: tells which prompts follow those of a step.
    """

    worker: RolloutWorker
    prompts: Prompts
    config: Config

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the first groups that vary, as many as there are prompts; evaluations are not filtered.

        Raises:
            TaskError: if they are too few after ``data.max_generation_batches`` batches.
        """
        if split != TRAIN:
            return self.worker.rollout(step, prompts, split)
        data = self.config.data
        kept: list[Trajectory] = []
        batches, constant, asked = 0, 0, prompts
        while True:
            found = self.worker.rollout(step, asked, split)
            differs = varied(found, self.config)
            batches, constant = batches + 1, constant + sum(not one for one in differs.values())
            kept += [one for one in found if differs[one.group_id]]
            groups = list(dict.fromkeys(one.group_id for one in kept))
            if len(groups) >= len(prompts):
                chosen = set(groups[: len(prompts)])
                note: dict[str, Json] = {"generation_batches": batches, "constant_groups": constant}
                return [
                    replace(one, extra={**one.extra, NOTE: note}) for one in kept if one.group_id in chosen
                ]
            if batches == data.max_generation_batches:
                raise TaskError(f"""data.max_generation_batches={batches}: of {len(prompts)} groups of step {step} only
                {len(groups)} have different rewards of {data.filter_metric!r} after that many batches; raise it, take
                prompts that are sometimes solved, or set data.filter_groups=false""")
            asked = self.prompts.further(step, batches)


@dataclass
class ReplayedGroups:
    """Worker that serves the groups that dynamic sampling kept when they were recorded."""

    worker: MockRolloutWorker
    prompts: Prompts
    config: Config

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the recorded groups, of whichever generation batch they are.

        Raises:
            ReplayError: if a recorded group has equal rewards, so that it was recorded otherwise.
        """
        if split == TRAIN and prompts:
            prompts = self._recorded(step, prompts)
        found = self.worker.rollout(step, prompts, split)
        if split == TRAIN:
            for group, differs in varied(found, self.config).items():
                if not differs:
                    raise ReplayError(f"""group {group!r} of step {step} was recorded with equal rewards of
                    {self.config.data.filter_metric!r}, which data.filter_groups=true leaves out; set it to false, or
                    record with it""")
        return found

    def _recorded(self, step: int, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of the recorded groups, as far as the run has them; the worker refuses others."""
        recorded = self.worker.groups(step, TRAIN)
        known = {prompt.group_id: prompt for prompt in prompts}
        batch, last = 0, max(recorded)
        while max(known) < last and len(known) < len(prompts) * (1 + self._most):
            batch += 1
            known |= {prompt.group_id: prompt for prompt in self.prompts.further(step, batch)}
        found = [known[group] for group in recorded if group in known]
        return found if len(found) == len(prompts) else list(prompts)

    @property
    def _most(self) -> int:
        return self.config.data.max_generation_batches or MOST_BATCHES


MOST_BATCHES = 1000
"""Generation batches among which the groups of a recording are looked for where there is no limit."""


def sampling_counts(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of dynamic sampling of a step; none where there was none."""
    note = trajectories[0].extra.get(NOTE) if trajectories else None
    if not isinstance(note, dict):
        return {}
    return {f"rollouts/{name}": float(str(note[name])) for name in ("generation_batches", "constant_groups")}
