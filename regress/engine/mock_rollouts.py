"""Mock mode: recorded trajectories in place of sampling. Strict: nothing is invented or left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from regress.dump.dump_inspection import spans
from regress.dump.dump_location import Location
from regress.dump.recorded_trajectories import RecordedStep, read_trajectories
from regress.dump.trajectory import Trajectory
from regress.engine import run_log
from regress.engine.config.config_schema import Config
from regress.engine.rollout_worker import SAMPLES, TRAIN, Prompt
from regress.errors import ReplayError
from regress.tasks.curriculum import CurriculumPosition

LOG_PROB_LIMIT = 1e-2
"""Tolerated excess of a log-prob over 0: half a unit of bfloat16 near 1 is 0.004."""


@dataclass(frozen=True)
class Foreign:
    """Sizes of a run whose prompts come from the recording, which the recording has to keep to."""

    config: Config

    def check(self, found: RecordedStep) -> None:
        """Refuse a step that the configuration's sizes do not describe.

        Raises:
            ReplayError: naming the size.
        """
        data, mini = self.config.data, self.config.trainer.mini_batch_size
        longest = max(found.trajectories, key=lambda trajectory: len(trajectory.tokens))
        if len(longest.tokens) > data.max_seq_length:
            raise ReplayError(f"""{found.path}: group {longest.group_id!r} run {longest.run_id} has
            {len(longest.tokens)} tokens but data.max_seq_length is {data.max_seq_length}; set it to at least
            {len(longest.tokens)}""")
        samples = data.prompts_per_step * data.group_size
        if mini is not None and len(found.trajectories) != samples:
            raise ReplayError(f"""{found.path} holds {len(found.trajectories)} trajectories, but
            trainer.mini_batch_size={mini} cuts the {samples} of data.prompts_per_step={data.prompts_per_step} and
            data.group_size={data.group_size}; set these two as in the recording, or trainer.mini_batch_size=null""")


@dataclass(frozen=True)
class Expectations:
    """Properties that a recording must share with the run that replays it.

    ``environment`` is compared unless it is ``None`` (mismatches explicitly allowed). ``log_probs`` and
    ``finish_reasons`` are True if the objective reads these optional parts of a recording. ``samples_temperature`` is
    that of the samples of an evaluation, ``stages`` names those of the curriculum, and ``foreign`` is there if the
    recording decides the prompts too.
    """

    tokenizer: str
    temperature: float
    max_completion_length: int
    vocabulary: int
    log_probs: bool
    finish_reasons: bool
    environment: Mapping[str, object] | None
    samples_temperature: float = 1.0
    foreign: Foreign | None = None
    stages: tuple[str, ...] = ()


class MockRolloutWorker:
    """Serves recorded trajectories, matched by ``(group_id, run_id)``.

    Args:
        paths: recording of each split: one file, a directory of ``step_*`` files, or a whole dump.
        format: the files' format, or ``auto``.
        expect: see :class:`Expectations`.

    Attributes:
        announce: log every step that is served.

    Raises:
        DumpError: if a recording is missing, incomplete or damaged.
    """

    def __init__(self, paths: Mapping[str, Location], format: str, expect: Expectations) -> None:
        self._paths = paths
        self._steps = {split: read_trajectories(path, format) for split, path in paths.items()}
        self._expect = expect
        self.announce = False

    def rollout(self, step: int, prompts: Sequence[Prompt], split: str) -> list[Trajectory]:
        """Return the recorded trajectories of these prompts, in their order.

        Raises:
            ReplayError: if the step is missing, or anything in it differs from what the run asks for.
        """
        found = self._recorded(step, split)
        path = found.path
        self._check_meta(found)
        self._check_curriculum(found, split)
        self._check_split(found, split)
        if not any(any(trajectory.loss_mask) for trajectory in found.trajectories):
            raise ReplayError(f"""{path}: not one token of the recording is in its loss_mask, so nothing could be
            learned or compared; record it again""")
        if self._expect.foreign is not None:
            self._expect.foreign.check(found)
            for trajectory in found.trajectories:
                where = f"{path}: group {trajectory.group_id!r} run {trajectory.run_id}"
                self._check_numbers(where, trajectory, split)
            return found.trajectories
        recorded = {trajectory.key: trajectory for trajectory in found.trajectories}
        expected = [(prompt, run) for prompt in prompts for run in range(prompt.group_size)]
        for prompt, run in expected:
            self._check(path, prompt, run, recorded.get((prompt.group_id, run)), split)
        unused = recorded.keys() - {(prompt.group_id, run) for prompt, run in expected}
        if unused:
            group, run = min(unused)
            raise ReplayError(f"""{path}: {len(unused)} of {len(recorded)} recorded trajectories are not asked for, such
            as group {group!r} run {run}; set data.prompts_per_step, data.group_size and seed as in the recorded run""")
        if self.announce:
            run_log.loaded(step, path, len(expected))
        return [recorded[prompt.group_id, run] for prompt, run in expected]

    def groups(self, step: int, split: str) -> list[str]:
        """Return the groups that were recorded of a step, in their order."""
        found = self._recorded(step, split).trajectories
        return list(dict.fromkeys(trajectory.group_id for trajectory in found))

    def place(self, step: int) -> CurriculumPosition:
        """Return the stage of the curriculum that a training step was sampled from.

        Raises:
            ReplayError: if the recording does not tell, or tells a stage that the run does not have.
        """
        found = self._recorded(step, TRAIN)
        recorded = found.meta.get("curriculum")
        if not isinstance(recorded, Mapping):
            raise ReplayError(
                f"{found.path} was recorded without a curriculum; set curriculum.enable=false, or record with it"
            )
        try:
            fields = {str(name): value for name, value in recorded.items()}
            place = CurriculumPosition(**fields)  # type: ignore[arg-type]  # what they are is checked below
        except TypeError:
            place = CurriculumPosition(-1)
        if any(type(value) is not int for value in vars(place).values()) or not (
            0 <= place.stage < len(self._expect.stages) and 0 <= place.start_step <= step
        ):
            raise ReplayError(f"""{found.path} was sampled from {dict(recorded)}, and curriculum.stages has
            {len(self._expect.stages)} stages; set them as in the recorded run""")
        return place

    def _check_curriculum(self, found: RecordedStep, split: str) -> None:
        """Refuse a recording made with a curriculum in a run without one; `place` refuses the reverse."""
        if (
            split == TRAIN
            and "curriculum" in found.meta
            and not (self._expect.stages or self._expect.foreign)
        ):
            raise ReplayError(f"""{found.path} was recorded with a curriculum, which decides its prompts; set curriculum
            as in the recorded run""")

    def _recorded(self, step: int, split: str) -> RecordedStep:
        steps = self._steps[split]
        if step not in steps:
            raise ReplayError(f"""[Rollout Mock] {self._paths[split]} holds no recording of {split} step {step} (it
            holds the steps {spans(steps)}); record that step first, lower max_steps, or check the path and that the
            recording was made in {split} mode""")
        return steps[step]

    def _check_meta(self, found: RecordedStep) -> None:
        recorded = found.meta.get("tokenizer")
        if recorded is not None and recorded != self._expect.tokenizer:
            raise ReplayError(f"""{found.path}: recorded with tokenizer {str(recorded)[:12]} but this run uses
            {self._expect.tokenizer[:12]}; give the recorded run's tokenizer.path or task""")
        environment = found.meta.get("environment")
        if self._expect.environment is None or not isinstance(environment, Mapping):
            return
        for name in sorted({*environment, *self._expect.environment}):
            then, now = environment.get(name), self._expect.environment.get(name)
            if then != now:
                raise ReplayError(f"""{found.path}: recorded with {name}={then!r} but it is {now!r} now, which may
                change arithmetic; set it as it was, or rollout_worker.allow_environment_mismatch=true to replay all the
                same""")

    def _check_split(self, found: RecordedStep, split: str) -> None:
        for trajectory in found.trajectories:
            if trajectory.is_val != (split != TRAIN):
                kind = "evaluation" if trajectory.is_val else "training"
                raise ReplayError(f"""{found.path}: group {trajectory.group_id!r} run {trajectory.run_id} was recorded
                in {kind} but {split} mode asks for it; give the other folder""")

    def _check(self, path: Location, prompt: Prompt, run: int, found: Trajectory | None, split: str) -> None:
        where = f"{path}: group {prompt.group_id!r} run {run}"
        if found is None:
            raise ReplayError(f"""{where} is asked for but was not recorded; set data.prompts_per_step, data.group_size,
            max_steps and seed as in the recorded run, or task.name=null to take the prompts from the recording""")
        if found.tokens[: found.prompt_length] != list(prompt.tokens):
            raise ReplayError(f"""{where} was recorded for another prompt than {prompt.problem.prompt!r}; set task, seed
            and tokenizer as in the recorded run""")
        self._check_numbers(where, found, split)

    def _check_numbers(self, where: str, found: Trajectory, split: str) -> None:
        """Refuse a trajectory that was sampled otherwise, or that the run's model or lengths cannot hold."""
        key, temperature = "rollout_worker.temperature", self._expect.temperature
        if split == SAMPLES:
            key, temperature = "evaluation.temperature", self._expect.samples_temperature
        if found.temperature is not None and found.temperature != temperature:
            raise ReplayError(f"""{where} was sampled at temperature {found.temperature} but {key} is {temperature}; set
            it as in the recorded run""")
        if max(found.tokens) >= self._expect.vocabulary:
            raise ReplayError(f"""{where} holds token {max(found.tokens)} but the model knows {self._expect.vocabulary}
            tokens; give the model of the recorded run""")
        self._check_content(where, found)
        length = len(found.tokens) - found.prompt_length
        if length > self._expect.max_completion_length:
            raise ReplayError(f"""{where} has {length} completion tokens but data.max_completion_length is
            {self._expect.max_completion_length}; set it as in the recorded run""")

    def _check_content(self, where: str, found: Trajectory) -> None:
        if len(found.tokens) == found.prompt_length:
            raise ReplayError(f"{where} has no completion; record the step again")
        if self._expect.log_probs and found.log_probs is None:
            raise ReplayError(f"""{where} has no sampler log-probs, which algorithm.old_log_probs=sampler and
            algorithm.sampler_correction need; set them to recompute and none, or record with regress""")
        if found.log_probs is not None and float(found.log_probs.max()) > LOG_PROB_LIMIT:
            raise ReplayError(f"""{where} has the sampler log-prob {float(found.log_probs.max()):.3g}, more than a
            probability of 1; record the step again""")
        if self._expect.finish_reasons and found.finish_reason is None:
            raise ReplayError(f"""{where} does not say whether it was truncated, which
            algorithm.mask_truncated_completions needs; set that to false, or record with regress""")
