"""An exported golden case as a trainer reads it: checkpoint, rollouts and numbers of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from regress.errors import GoldenError, SystemsError
from regress.golden.exported import read_index, read_objective, read_rollouts


@dataclass(frozen=True)
class Sample:
    """One recorded rollout.

    Attributes:
        key: ``(group_id, run_id)``, by which the judge finds it.
        prompt, completion: token ids.
        mask: 1 at tokens of the completion that enter the loss.
        old, sampler, reference: log-probs of the completion's tokens, None outside of the mask; None if not recorded.
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


class ExportedCase:
    """Reads the folder that ``regress golden export`` wrote.

    Args:
        folder: folder of the export.

    Raises:
        SystemsError: if it holds no export.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.name = str(read_index(folder)["case"])
            self.numbers: dict[str, Any] = read_objective(folder)
        except GoldenError as error:
            raise SystemsError(
                f"{folder} holds no exported case ({error}): write one with regress golden export CASE {folder}"
            ) from error

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

    def learning_rate(self, update: int) -> float:
        """Return the learning rate of an update."""
        return float(self.numbers["updates"][update]["learning_rate"])

    @cached_property
    def steps(self) -> tuple[tuple[Sample, ...], ...]:
        """The samples of each recorded rollout batch."""
        return tuple(
            tuple(_sample(row) for row in read_rollouts(path))
            for path in sorted((self.folder / "rollouts").glob("step_*.jsonl"))
        )

    def samples(self, updates: int) -> list[Sample]:
        """Return the samples of the first rollout batches, one after another.

        Raises:
            SystemsError: if fewer are recorded.
        """
        if updates > len(self.steps):
            raise SystemsError(
                f"{self.name} has {len(self.steps)} recorded rollout batches, so a cell of {updates} updates is not "
                "possible: lower Cell.updates"
            )
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
            SystemsError: for a row that is none of them.
        """
        free = list(mine)
        found = []
        for row in rows:
            match = next((one for one in free if one.tokens == list(row)), None)
            again = match or next((one for one in mine if one.tokens == list(row)), None)
            if again is None:
                raise SystemsError(
                    f"the system trains on the tokens {list(row)}, which {self.name} does not hold"
                )
            if match is not None:
                free.remove(match)
            found.append(again.key)
        return found


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(
        key=(row["group_id"], row["run_id"]),
        prompt=row["prompt_ids"],
        completion=row["completion_ids"],
        mask=row["loss_mask"],
        reward=row["reward"],
        finish_reason=row["finish_reason"],
        old=row["old_log_probs"],
        sampler=row["sampler_log_probs"],
        reference=row["ref_log_probs"],
        text=row["prompt"],
    )
