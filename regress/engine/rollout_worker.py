"""Rollout workers: sources of the trajectories of a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from regress.dump.recorder import Recorder
from regress.dump.trajectory import Trajectory, to_record
from regress.engine import run_log
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.dialogue_rollouts import Conversation, Dialogue
from regress.engine.engine_ranks import World, raise_on_all_ranks
from regress.engine.sampling import Completion, SamplingParams, UndefinedDistribution, sample
from regress.engine.tokenizer import completion_text
from regress.errors import DumpError, RegressError
from regress.tasks.conversation_turns import Turn
from regress.tasks.portable_draws import generator
from regress.tasks.problem import Problem
from regress.tasks.reward_functions import Reward

TRAIN, VAL, SAMPLES = "train", "val", "val_samples"
"""Uses of a rollout: training, greedy evaluation, and the samples of an evaluation."""

UNSCORED = "unscored"
"""Key of a trajectory's ``extra``, True where every reward function left the completion out."""

Score = Callable[[Problem, str, Sequence[Turn]], Reward]


@dataclass(frozen=True)
class Prompt:
    """One group to roll out: a problem, its prompt tokens, and its number of completions."""

    group_id: str
    problem: Problem
    tokens: tuple[int, ...]
    group_size: int


class RolloutWorker(Protocol):
    """Source of the trajectories of a step, ordered by group and run."""

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return ``group_size`` trajectories for every prompt; ``split`` is `TRAIN`, `VAL` (greedy) or `SAMPLES`."""


StreamKey = tuple[object, ...]
"""Key of `regress.tasks.portable_draws.generator`, which decides what is drawn for a completion."""


class SampledRollouts(ABC):
    """Samples in batches, from whatever `complete` asks.

    Args:
        tokenizer: decodes completions for rewards and environment.
        params: sampling parameters; evaluation is greedy with the same limits.
        samples: parameters and seed of the samples of an evaluation; None: those of training.
        score: the reward of the last completion of a conversation, given with all its turns.
        batch_size: completions sampled at once.
        dialogue: writer of the environment's turns; without one every conversation has one turn.
        seed: with step, split, group, run and turn it determines every draw of a sample: no state is carried along,
            and neither the batch nor the rank that a sample falls into changes what is drawn.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        params: SamplingParams,
        score: Score,
        *,
        batch_size: int,
        seed: int,
        dialogue: Dialogue | None = None,
        samples: tuple[SamplingParams, int] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._of_split = {
            TRAIN: (params, seed),
            VAL: (replace(params, greedy=True), seed),
            SAMPLES: samples or (params, seed),
        }
        self._score = score
        self._batch_size = batch_size
        self._dialogue = dialogue

    @abstractmethod
    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        keys: Sequence[StreamKey],
        limits: Sequence[int],
    ) -> list[Completion]:
        """Return a completion of each prompt, no longer than its limit, drawn from the stream of its key.

        Raises:
            UndefinedDistribution: naming the row for which nothing can be drawn.
        """

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Sample ``group_size`` completions of every prompt.

        Raises:
            RegressError: naming the sample for which the policy has no finite logits.
        """
        params, seed = self._of_split[split]
        runs = [(prompt, run) for prompt in prompts for run in range(prompt.group_size)]
        trajectories: list[Trajectory] = []
        for start in range(0, len(runs), self._batch_size):
            chunk = runs[start : start + self._batch_size]
            keys = [(seed, step, split, prompt.group_id, run) for prompt, run in chunk]
            try:
                talks = self._converse([prompt for prompt, _ in chunk], params, keys)
            except UndefinedDistribution as error:
                prompt, run = chunk[error.row]
                raise RegressError(f"""nothing can be sampled for group {prompt.group_id!r} run {run} in {split} step
                {step}, because the policy's logits are not finite; check the weights of model.path, lower the learning
                rates, or raise optimizer.eps or rollout_worker.temperature""") from error
            trajectories += [
                self._trajectory(prompt, run, talk, split)
                for (prompt, run), talk in zip(chunk, talks, strict=True)
            ]
        return trajectories

    def _converse(
        self, prompts: Sequence[Prompt], params: SamplingParams, keys: Sequence[tuple[object, ...]]
    ) -> list[Conversation]:
        """Sample all conversations of a batch, turn by turn; a finished row takes no part in later turns.

        Each turn of a row draws from the generator of its key and the turn.
        """
        talks = [Conversation(prompt.tokens, params.max_new_tokens) for prompt in prompts]
        turns = 1 if self._dialogue is None else self._dialogue.max_turns
        for turn in range(turns):
            rows = [row for row, talk in enumerate(talks) if talk.open]
            if not rows:
                break
            streams: list[StreamKey] = [("sample", *keys[row], turn) for row in rows]
            self._turn([talks[row] for row in rows], rows, params, streams)
            if self._dialogue is not None and turn + 1 < turns:
                for row in rows:
                    talk = talks[row]
                    talk.answer(*self._dialogue.reply(prompts[row].problem, talk.text, talk.turns[:-1]))
        return talks

    def _turn(
        self,
        talks: Sequence[Conversation],
        rows: Sequence[int],
        params: SamplingParams,
        keys: Sequence[StreamKey],
    ) -> None:
        """Sample one completion in each of these conversations, the given rows of their batch."""
        try:
            completions = self.complete(
                [talk.tokens for talk in talks], params, keys, [talk.room for talk in talks]
            )
        except UndefinedDistribution as error:
            raise UndefinedDistribution(rows[error.row]) from error
        for talk, completion in zip(talks, completions, strict=True):
            talk.complete(completion, completion_text(self._tokenizer, completion.tokens))

    def _trajectory(self, prompt: Prompt, run: int, talk: Conversation, split: str) -> Trajectory:
        reward = self._score(prompt.problem, talk.text, talk.turns)
        prompt_length = len(prompt.tokens)
        params, _ = self._of_split[split]
        log_probs = torch.cat(talk.log_probs).numpy()
        extra: dict[str, Any] = {} if reward.parts else {UNSCORED: True}
        if self._dialogue:
            extra["turns"] = [[turn.completion, turn.reply] for turn in talk.turns]
        return Trajectory(
            group_id=prompt.group_id,
            run_id=run,
            tokens=talk.tokens,
            loss_mask=[0] * prompt_length + talk.mask,
            reward=reward.total,
            is_val=split != TRAIN,
            prompt_length=prompt_length,
            log_probs=np.concatenate([np.zeros(prompt_length, log_probs.dtype), log_probs]),
            finish_reason=talk.finish_reason,
            rewards=dict(reward.parts),
            task_id=prompt.problem.task_id,
            prompt=prompt.problem.prompt,
            response=talk.text,
            ground_truth=prompt.problem.answer,
            temperature=None if params.greedy else params.temperature,
            extra=extra,
        )


class HFRolloutWorker(SampledRollouts):
    """Samples from the policy's own model.

    Args:
        model: the policy's model; its current weights are used.

    The other arguments are those of `SampledRollouts`.
    """

    def __init__(self, model: PreTrainedModel, **settings: Any) -> None:
        super().__init__(**settings)
        self._model = model

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        keys: Sequence[StreamKey],
        limits: Sequence[int],
    ) -> list[Completion]:
        """Return a completion of each prompt, all of one batch."""
        generators = [generator(*key) for key in keys]
        return sample(self._model, prompts, params, generators=generators, limits=limits)


class SharedRollouts:
    """Rollouts of all ranks: each rank samples its own prompts from the whole policy, and receives all trajectories.

    Before sampling the weights of the policy are gathered into the model that the worker samples from.
    """

    def __init__(self, worker: RolloutWorker, policy: LocalPolicy, world: World) -> None:
        self._worker = worker
        self._policy = policy
        self._world = world

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the trajectories of all prompts, in their order, on every rank.

        Raises:
            RegressError: on every rank, if one of them cannot sample.
        """
        self._policy.whole_model()
        ranks = self._world.plan.mesh.world_size
        own = prompts[self._world.rank :: ranks]
        found = raise_on_all_ranks(self._world, lambda: self._worker.rollout(step, own, split) if own else [])
        by_group: dict[str, list[Trajectory]] = {}
        for part in self._world.gather(found):
            for trajectory in part:
                by_group.setdefault(trajectory.group_id, []).append(trajectory)
        return [trajectory for prompt in prompts for trajectory in by_group[prompt.group_id]]


class SplitRollouts:
    """Rollouts of training from one worker, those of evaluations from another."""

    def __init__(self, training: RolloutWorker, evaluation: RolloutWorker) -> None:
        self._training = training
        self._evaluation = evaluation

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the trajectories of the worker that serves this split."""
        return (self._training if split == TRAIN else self._evaluation).rollout(step, prompts, split)


class RecordingWorker(AbstractContextManager["RecordingWorker"]):
    """Returns another worker's trajectories and records them: ``<dump_dir>/{train,val}/step_000000.<ext>``.

    Leaving the context completes the recording, unless by an exception. With several ranks the first one
    records.
    """

    def __init__(
        self,
        worker: RolloutWorker,
        recorder: Recorder,
        meta: Callable[[int], Mapping[str, Any]],
        world: World,
    ) -> None:
        self._worker = worker
        self._recorder = recorder
        self._meta = meta
        self._world = world
        self._waiting: list[tuple[int, str, int]] = []

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the other worker's trajectories, and record them on the first rank."""
        trajectories = self._worker.rollout(step, prompts, split)
        if self._world.main:
            record = to_record(trajectories, step, self._meta(step))
            self._recorder.put(record, folder=split)
            self._waiting.append((step, f"{split}/{record.where.stem}.", len(trajectories)))
            self._report()
        raise_on_all_ranks(self._world, self._check)
        return trajectories

    def _report(self) -> None:
        """Log the steps that are on disk by now; the writer works in the background."""
        sizes = self._recorder.written()
        written = {f"{path.parent.name}/{path.stem}.": path for path in sizes}
        for waiting in [waiting for waiting in self._waiting if waiting[1] in written]:
            step, name, samples = waiting
            run_log.dumped(step, written[name], samples, sizes[written[name]])
            self._waiting.remove(waiting)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._recorder.close(complete=kind is None)
        self._report()

    def _check(self) -> None:
        if self._recorder.failure is not None:
            raise DumpError(str(self._recorder.failure))
