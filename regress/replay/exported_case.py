"""Exported golden case as a trainer reads it: checkpoint, rollouts, numbers of the loss, state of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.numpy_arrays import Array
from regress.dump.trajectory import Trajectory
from regress.dump.weight_files import tensors_in
from regress.errors import DumpError, GoldenError, reason
from regress.replay.export_documents import read_index, read_objective, read_rollouts

FORMAT = 1


@dataclass(frozen=True)
class Sample:
    """One recorded rollout.

    Attributes:
        key: ``(group_id, run_id)``, by which the judge finds it.
        prompt, completion: token ids.
        mask: 1 at tokens of the completion that enter the loss.
        old, sampler, reference: log-probs of the completion's tokens, None outside of the mask; None if not recorded.
        text, response: prompt and completion as text.
        rewards: value of each reward function, of which `reward` is the sum.
    """

    key: tuple[str, int]
    prompt: list[int]
    completion: list[int]
    mask: list[int]
    reward: float
    finish_reason: str
    old: list[float | None] | None
    sampler: list[float | None] | None
    reference: list[float | None] | None
    text: str = ""
    response: str | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt + self.completion

    @property
    def labels(self) -> list[int]:
        """Tokens that enter the loss, -100 elsewhere."""
        return [-100] * len(self.prompt) + [
            token if kept else -100 for token, kept in zip(self.completion, self.mask, strict=True)
        ]

    @property
    def trajectory(self) -> Trajectory:
        """The rollout as dumps have it, with the sampler's log-probs if those of all loss tokens are known."""
        group, run = self.key
        start = len(self.prompt)
        known = self.sampler is not None and all(
            value is not None for value, kept in zip(self.sampler, self.mask, strict=True) if kept
        )
        values = [0.0] * start + [0.0 if value is None else value for value in self.sampler or ()]
        return Trajectory(
            group,
            run,
            self.tokens,
            [0] * start + self.mask,
            self.reward,
            start,
            log_probs=np.asarray(values) if known else None,
            finish_reason=self.finish_reason,
            rewards=dict(self.rewards),
            prompt=self.text,
            response=self.response,
        )


class ExportedCase:
    """Reads the folder that ``regress golden export`` wrote.

    Args:
        folder: folder of the export.

    Raises:
        GoldenError: if it holds no export, or one of another format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = read_index(folder)
        if index.get("format") != FORMAT:
            raise GoldenError(f"""{folder} has the format {index.get("format")!r} and this version reads {FORMAT};
            export the case again with regress golden export""")
        self.numbers: dict[str, Any] = read_objective(folder)
        self.name = str(self.numbers["case"])

    @property
    def model(self) -> Path:
        """Folder of the initial checkpoint and the tokenizer."""
        return self.folder / "model"

    @property
    def reference(self) -> Path | None:
        """Folder of the reference model, None where the case has none."""
        found = self.folder / "reference"
        return found if found.is_dir() else None

    @property
    def temperature(self) -> float:
        """Divisor of the logits."""
        return float(self.numbers["temperature"])

    @property
    def optimizer(self) -> Mapping[str, Any]:
        """Settings of AdamW: ``betas``, ``eps``, ``weight_decay``."""
        found: Mapping[str, Any] = self.numbers["optimizer"]
        return found

    @property
    def optimizer_steps(self) -> Mapping[str, int]:
        """Number of earlier updates of each parameter; empty where the optimizer starts without a state."""
        return self.numbers["optimizer_steps"] or {}

    def optimizer_state(self) -> dict[str, Array] | None:
        """Return ``PARAMETER/exp_avg``, ``PARAMETER/exp_avg_sq`` and ``PARAMETER/step`` by name; None without any."""
        if self.numbers["optimizer_steps"] is None:
            return None
        try:
            tensors = tensors_in(self.folder / "optimizer.safetensors")
        except DumpError as error:
            raise GoldenError(f"{error}; export the case again") from error
        moments = {name: np.array(array) for name, array in tensors.items()}
        counts = {f"{name}/step": np.asarray(float(count)) for name, count in self.optimizer_steps.items()}
        return {**moments, **counts}

    @property
    def updates(self) -> Sequence[Mapping[str, Any]]:
        """Numbered optimizer updates, in order."""
        found: Sequence[Mapping[str, Any]] = self.numbers["updates"]
        return found

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update."""
        return float(self.updates[update]["learning_rate"])

    @cached_property
    def steps(self) -> tuple[tuple[Sample, ...], ...]:
        """The samples of each recorded rollout batch, in canonical order."""
        return tuple(self._rollouts(path) for path in sorted((self.folder / "rollouts").glob("step_*.jsonl")))

    def trajectories(self, step: int) -> list[Trajectory]:
        """Return the samples of the rollout batch of a step, in canonical order."""
        path = self.folder / "rollouts" / f"step_{step:06d}.jsonl"
        try:
            found = [sample.trajectory for sample in self._rollouts(path)]
            for trajectory in found:
                trajectory.validate()
        except (ValueError, DumpError) as error:
            raise GoldenError(
                f"{path} cannot be read as rollouts ({error}); export the case again"
            ) from error
        return found

    def samples(self, updates: int) -> list[Sample]:
        """Return the samples of the first rollout batches, one after another.

        Raises:
            GoldenError: if fewer are recorded.
        """
        if updates > len(self.steps):
            raise GoldenError(f"""{self.name} has {len(self.steps)} recorded rollout batches, so a cell of {updates}
            updates is not possible: lower Cell.updates""")
        return [sample for step in self.steps[:updates] for sample in step]

    def tokens_of_loss(self, step: int) -> int:
        """Return the number of tokens of a rollout batch that enter the loss."""
        return sum(sum(sample.mask) for sample in self.steps[step])

    def keys_of(self, rows: Sequence[Sequence[int]], mine: Sequence[Sample]) -> list[tuple[str, int]]:
        """Return the key of each row of tokens, found among some samples; equal ones are taken in turn.

        Args:
            rows: token ids of each sample, without padding.
            mine: samples that the rows are from.

        Raises:
            GoldenError: for a row that is none of them.
        """
        free = list(mine)
        found = []
        for row in rows:
            match = next((one for one in free if one.tokens == list(row)), None)
            again = match or next((one for one in mine if one.tokens == list(row)), None)
            if again is None:
                raise GoldenError(
                    f"the system trains on the tokens {list(row)}, which {self.name} does not hold"
                )
            if match is not None:
                free.remove(match)
            found.append(again.key)
        return found

    def _rollouts(self, path: Path) -> tuple[Sample, ...]:
        try:
            return tuple(_sample(row) for row in read_rollouts(path))
        except (KeyError, TypeError, ValueError) as error:
            raise GoldenError(
                f"{path} cannot be read as rollouts ({reason(error)}); export the case again"
            ) from error


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        key=(str(row["group_id"]), int(row["run_id"])),
        prompt=[int(token) for token in row["prompt_ids"]],
        completion=[int(token) for token in row["completion_ids"]],
        mask=[int(value) for value in row["loss_mask"]],
        reward=float(row["reward"]),
        finish_reason=row["finish_reason"],
        old=row["old_log_probs"],
        sampler=row["sampler_log_probs"],
        reference=row["ref_log_probs"],
        text=row["prompt"],
        response=row["response"],
        rewards={name: float(value) for name, value in row["rewards"].items()},
    )
