"""Combinations of values that cannot work, each a small function that says why and what to do instead."""

from collections.abc import Callable, Iterator

from regress.engine.config.origins import DEFAULT, Origin
from regress.engine.config.schema import Config, DumpOptions
from regress.errors import ConfigError

Origins = Callable[[tuple[str, ...]], Origin]


def check_rules(config: Config, origins: Origins) -> None:
    """Raise `ConfigError` with the first rule that ``config`` breaks."""
    for rule in RULES:
        for sentence in rule(config):
            raise ConfigError(sentence)
    for sentence in _path_beside_family(config, origins):
        raise ConfigError(sentence)


def _lengths(c: Config) -> Iterator[str]:
    d = c.data
    if d.max_prompt_length + d.max_completion_length > d.max_seq_length:
        total = d.max_prompt_length + d.max_completion_length
        yield (
            f"data.max_prompt_length={d.max_prompt_length} and data.max_completion_length={d.max_completion_length} "
            f"add up to {total}, more than data.max_seq_length={d.max_seq_length}; "
            f"shorten one of them or set data.max_seq_length={total}."
        )


def _mini_batch(c: Config) -> Iterator[str]:
    samples, size = c.data.prompts_per_step * c.data.group_size, c.trainer.mini_batch_size
    if size is not None and samples % size:
        yield (
            f"trainer.mini_batch_size={size} does not divide the rollout batch of data.prompts_per_step="
            f"{c.data.prompts_per_step} times data.group_size={c.data.group_size} = {samples} samples; "
            f"choose a divisor such as {_nearest_divisor(samples, size)}."
        )


def _nearest_divisor(samples: int, size: int) -> int:
    divisors = [d for d in range(1, samples + 1) if samples % d == 0]
    return min(divisors, key=lambda d: (abs(d - size), d))


def _groups(c: Config) -> Iterator[str]:
    a = c.algorithm
    if c.data.group_size > 1:
        return
    if a.advantage == "rloo" or (a.advantage == "grpo" and a.single_sample == "zero"):
        yield (
            f"data.group_size=1 leaves algorithm.advantage={a.advantage} nothing to compare a completion with, so that "
            "every advantage is zero; set data.group_size to at least 2 or algorithm.advantage=reinforce_plus_plus."
        )


def _prompts(c: Config) -> Iterator[str]:
    if c.data.prompts_per_step > c.task.train_size:
        yield (
            f"data.prompts_per_step={c.data.prompts_per_step} is more than task.train_size={c.task.train_size}, so that "
            "a step would hold a prompt twice; raise task.train_size or lower data.prompts_per_step."
        )


def _evaluation(c: Config) -> Iterator[str]:
    if c.evaluation.every_n_steps and not c.task.eval_size:
        yield (
            f"evaluation.every_n_steps={c.evaluation.every_n_steps} with task.eval_size=0 has no prompts to evaluate; "
            "set task.eval_size to at least 1 or evaluation.every_n_steps=0."
        )


def _rewards(c: Config) -> Iterator[str]:
    if not any(c.task.rewards.values()):
        yield (
            "task.rewards names no reward with a weight other than 0, so that every advantage is zero; "
            "give one, for example task.rewards.exact_match=1.0."
        )


def _mock_worker(c: Config) -> Iterator[str]:
    w = c.rollout_worker
    if w.type != "mock":
        return
    if w.need_llm_inference:
        yield (
            "rollout_worker.type=mock replays recorded completions, but rollout_worker.need_llm_inference=true asks for "
            "new ones; set rollout_worker.need_llm_inference=false."
        )
    if not w.trajectory_load_path:
        yield (
            "rollout_worker.type=mock has nothing to replay while rollout_worker.trajectory_load_path=null; set it to "
            "a trajectory file or to the directory that holds the step_* files."
        )
    if c.rollout_mock.enable:
        yield (
            "rollout_worker.type=mock and rollout_mock.enable=true both decide where rollouts come from; "
            "set rollout_worker.type=hf or rollout_mock.enable=false."
        )


def _sampling_worker(c: Config) -> Iterator[str]:
    w = c.rollout_worker
    if w.type != "hf":
        return
    if not w.need_llm_inference:
        yield (
            "rollout_worker.type=hf generates completions, but rollout_worker.need_llm_inference=false forbids it; "
            "set rollout_worker.need_llm_inference=true or rollout_worker.type=mock."
        )
    if w.trajectory_load_path:
        yield (
            f"rollout_worker.trajectory_load_path={w.trajectory_load_path} is never read by rollout_worker.type=hf; "
            "set rollout_worker.type=mock or leave the path away."
        )


def _rollout_mock(c: Config) -> Iterator[str]:
    if c.rollout_mock.enable and not c.rollout_mock.dump_dir:
        yield (
            f"rollout_mock.mode={c.rollout_mock.mode} with an empty rollout_mock.dump_dir has no place for rollouts; "
            "set rollout_mock.dump_dir to a directory."
        )


def _microbatches(c: Config) -> Iterator[str]:
    b = c.batching
    if b.micro_batch_size is not None and b.max_tokens_per_microbatch is not None:
        yield (
            f"batching.micro_batch_size={b.micro_batch_size} and batching.max_tokens_per_microbatch="
            f"{b.max_tokens_per_microbatch} both size the microbatches; set one of them to null."
        )


def _token_budget(c: Config) -> Iterator[str]:
    b = c.batching
    least = max(c.data.max_seq_length, b.pad_to_length or 1)
    row = -(-least // b.pad_to_multiple_of) * b.pad_to_multiple_of
    if b.max_tokens_per_microbatch is not None and b.max_tokens_per_microbatch < row:
        yield (
            f"batching.max_tokens_per_microbatch={b.max_tokens_per_microbatch} cannot hold the longest row of {row} tokens "
            f"(data.max_seq_length={c.data.max_seq_length}, padded); set it to at least {row}."
        )


def _pad_to_length(c: Config) -> Iterator[str]:
    length = c.batching.pad_to_length
    if length is not None and length < c.data.max_seq_length:
        yield (
            f"batching.pad_to_length={length} is shorter than data.max_seq_length={c.data.max_seq_length}, so that rows "
            f"would differ in length after all; set it to at least {c.data.max_seq_length} or to null."
        )


def _packed_side(c: Config) -> Iterator[str]:
    if c.batching.layout == "packed" and c.batching.padding_side == "left":
        yield (
            "batching.padding_side=left has no meaning in batching.layout=packed, whose rows start with a sample; "
            "set batching.padding_side=right or batching.layout=padded."
        )


def _warmup(c: Config) -> Iterator[str]:
    samples = c.data.prompts_per_step * c.data.group_size
    updates = c.max_steps * c.trainer.epochs * (samples // (c.trainer.mini_batch_size or samples))
    if c.optimizer.warmup_steps > updates:
        yield (
            f"optimizer.warmup_steps={c.optimizer.warmup_steps} is more than the {updates} updates of the run "
            f"(max_steps={c.max_steps}), so that the learning rate is never reached; lower it or raise max_steps."
        )


def _reference(c: Config) -> Iterator[str]:
    every = c.reference.sync_every_n_steps
    if every is not None and not c.algorithm.needs_reference:
        yield (
            f"reference.sync_every_n_steps={every} with algorithm.kl_coef=0 has no reference model to synchronize; "
            "set algorithm.kl_coef above 0 or reference.sync_every_n_steps=null."
        )


def _dump(c: Config) -> Iterator[str]:
    options = vars(c.debug.dump_options)
    if c.debug.enable_data_dump and not any(options.values()):
        names = ", ".join(vars(DumpOptions()))
        yield (
            "debug.enable_data_dump=true while every option of debug.dump_options is false dumps nothing; "
            f"set at least one of {names} to true."
        )
    if c.debug.enable_data_dump and not c.debug.dump_dir:
        yield "debug.dump_dir is empty while debug.enable_data_dump=true; set it to a directory."


def _path_beside_family(c: Config, origins: Origins) -> Iterator[str]:
    """A checkpoint wins over a family that somebody else chose, but one author cannot mean both."""
    family, path = origins(("model", "family")), origins(("model", "path"))
    if c.model.path is not None and family.layer != DEFAULT and _author(family) == _author(path):
        yield (
            f"model.path={c.model.path} and model.family={c.model.family} are given together ({family.layer}), but the "
            "checkpoint in path decides the family; leave model.family away or set model.path=null."
        )


def _author(origin: Origin) -> str:
    """The file without its line, or the layer."""
    return origin.name.rpartition(":")[0] if origin.layer == "file" else origin.layer


RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _lengths,
    _mini_batch,
    _groups,
    _prompts,
    _evaluation,
    _rewards,
    _mock_worker,
    _sampling_worker,
    _rollout_mock,
    _microbatches,
    _token_budget,
    _pad_to_length,
    _packed_side,
    _warmup,
    _reference,
    _dump,
)
