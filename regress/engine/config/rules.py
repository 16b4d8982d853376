"""Combinations of values that cannot work: each rule returns one sentence with the remedy, or ``None``."""

from collections.abc import Callable

from regress.engine.config.adapter_rules import ADAPTER_RULES
from regress.engine.config.leaves import KeyPath
from regress.engine.config.objective_rules import OBJECTIVE_RULES
from regress.engine.config.origins import Origin, author
from regress.engine.config.parallel_rules import PARALLEL_RULES
from regress.engine.config.rollout_rules import ROLLOUT_RULES, Rule
from regress.engine.config.schema import Config
from regress.engine.config.service_rules import SERVICE_RULES
from regress.engine.config.system_envs import refused_variable
from regress.engine.config.task_rules import TASK_RULES, file_beside_task
from regress.engine.config.text import in_yaml
from regress.errors import ConfigError
from regress.tasks.dataset import TRAIN_SIZE


def check_rules(config: Config, origin: Callable[[KeyPath], Origin]) -> None:
    """Raise `ConfigError` with the first rule that ``config`` breaks; ``origin`` returns the origin of a key."""
    for rule in (
        *RULES,
        *OBJECTIVE_RULES,
        *TASK_RULES,
        *ROLLOUT_RULES,
        *PARALLEL_RULES,
        *ADAPTER_RULES,
        *SERVICE_RULES,
    ):
        sentence = rule(config)
        if sentence is not None:
            raise ConfigError(sentence)
    for beside in (refused_variable, _path_beside_family, _tie_beside_path, file_beside_task):
        sentence = beside(config, origin)
        if sentence is not None:
            raise ConfigError(sentence)


def _lengths(c: Config) -> str | None:
    prompt, completion, longest = (
        c.data.max_prompt_length,
        c.data.max_completion_length,
        c.data.max_seq_length,
    )
    if prompt + completion <= longest:
        return None
    return (
        f"data.max_prompt_length={prompt} and data.max_completion_length={completion} add up to "
        f"{prompt + completion}, more than data.max_seq_length={longest}; shorten one of them or set "
        f"data.max_seq_length={prompt + completion}."
    )


def _mini_batch(c: Config) -> str | None:
    prompts, group, size = c.data.prompts_per_step, c.data.group_size, c.trainer.mini_batch_size
    samples = prompts * group
    if size is None or samples % size == 0:
        return None
    return (
        f"trainer.mini_batch_size={size} does not divide the rollout batch of data.prompts_per_step="
        f"{prompts} times data.group_size={group} = {samples} samples; choose a divisor such as "
        f"{_nearest_divisor(samples, size)}."
    )


def _nearest_divisor(number: int, wanted: int) -> int:
    divisors = [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))


def _group_size(c: Config) -> str | None:
    estimator = c.algorithm.advantage
    alone = c.data.group_size == 1 and c.algorithm.single_sample == "zero"
    if not alone or estimator in ("reinforce_plus_plus", "constant"):
        return None
    return (
        f"data.group_size=1 leaves algorithm.advantage={estimator} nothing to compare a completion with, so "
        "that every advantage is zero; set data.group_size to at least 2, algorithm.single_sample=raw or "
        "algorithm.advantage=reinforce_plus_plus."
    )


def _train_size(c: Config) -> str | None:
    prompts, size = c.data.prompts_per_step, c.task.train_size
    if size is None and c.task.dataset_path is None:
        size = TRAIN_SIZE
    if size is None or prompts <= size:
        return None
    return (
        f"data.prompts_per_step={prompts} is more than task.train_size={size}, so that a step would hold a "
        f"prompt twice; set task.train_size to at least {prompts} or lower data.prompts_per_step."
    )


def _eval_size(c: Config) -> str | None:
    if not c.evaluation.every_n_steps or c.task.eval_size or c.task.eval_path is not None:
        return None
    return (
        f"evaluation.every_n_steps={c.evaluation.every_n_steps} finds no prompts while task.eval_size=0; set "
        "task.eval_size to at least 1 or evaluation.every_n_steps=0."
    )


def _rewards(c: Config) -> str | None:
    if any(c.task.rewards.values()):
        return None
    return (
        "task.rewards names no reward with a weight other than 0, so that every advantage is zero; give one, "
        "for example task.rewards.exact_match=1.0."
    )


def _environment(c: Config) -> str | None:
    turns, environment = c.task.max_turns, c.task.environment
    if turns > 1 and environment is None:
        return (
            f"task.max_turns={turns} needs somebody to answer the completions before the last; set "
            "task.environment, for example to checker, or task.max_turns=1."
        )
    if turns == 1 and environment is not None:
        return (
            f"task.environment={environment} never has its turn while task.max_turns=1; set task.max_turns to "
            "at least 2 or task.environment=null."
        )
    return None


def _microbatch_sizes(c: Config) -> str | None:
    samples, tokens = c.batching.micro_batch_size, c.batching.max_tokens_per_microbatch
    if samples is None or tokens is None:
        return None
    return (
        f"batching.micro_batch_size={samples} and batching.max_tokens_per_microbatch={tokens} both decide "
        "how large a microbatch is; set one of them to null."
    )


def _token_budget(c: Config) -> str | None:
    budget, multiple = c.batching.max_tokens_per_microbatch, c.batching.pad_to_multiple_of
    longest = max(c.data.max_seq_length, c.batching.pad_to_length or 1)
    row = -(-longest // multiple) * multiple
    if budget is None or budget >= row:
        return None
    return (
        f"batching.max_tokens_per_microbatch={budget} cannot hold one row of {row} tokens, which is what "
        f"data.max_seq_length={c.data.max_seq_length} and the padding may ask for; set it to at least {row}."
    )


def _pad_to_length(c: Config) -> str | None:
    length, longest = c.batching.pad_to_length, c.data.max_seq_length
    if length is None or length >= longest:
        return None
    return (
        f"batching.pad_to_length={length} is shorter than data.max_seq_length={longest}, so that rows would "
        f"differ in length after all; set it to null or to at least {longest}."
    )


def _packed_side(c: Config) -> str | None:
    if c.batching.layout != "packed" or c.batching.padding_side == "right":
        return None
    return (
        "batching.padding_side=left means nothing to batching.layout=packed, whose rows begin with a sample; "
        "set batching.padding_side=right or batching.layout=padded."
    )


def _warmup(c: Config) -> str | None:
    updates = c.max_steps * updates_per_rollout(c)
    if c.optimizer.warmup_steps == 0 or c.optimizer.warmup_steps < updates:
        return None
    return (
        f"optimizer.warmup_steps={c.optimizer.warmup_steps} is not less than the {updates} optimizer updates "
        f"of max_steps={c.max_steps}, so that the learning rate is never reached; lower it or raise "
        "max_steps."
    )


def updates_per_rollout(c: Config) -> int:
    """Return the number of optimizer updates on one rollout batch."""
    samples = c.data.prompts_per_step * c.data.group_size
    return c.trainer.epochs * (samples // (c.trainer.mini_batch_size or samples))


def _current_log_probs(c: Config) -> str | None:
    updates = updates_per_rollout(c)
    if c.algorithm.old_log_probs != "current" or updates == 1:
        return None
    return (
        f"algorithm.old_log_probs=current makes every ratio 1, but a rollout gets {updates} updates (trainer.epochs="
        f"{c.trainer.epochs}, trainer.mini_batch_size={in_yaml(c.trainer.mini_batch_size)}) and the policy has moved "
        "after the first; set algorithm.old_log_probs=recompute, or trainer.epochs=1 and trainer.mini_batch_size=null."
    )


def _current_dump(c: Config) -> str | None:
    dumped = c.debug.enable_data_dump and c.debug.dump_options.old_log_probs
    if c.algorithm.old_log_probs != "current" or not dumped:
        return None
    return (
        "debug.dump_options.old_log_probs=true finds no log-probs from before the update while algorithm."
        "old_log_probs=current; set it to false (is_loss_debug holds those used) or "
        "algorithm.old_log_probs=recompute."
    )


def _reference(c: Config) -> str | None:
    if c.algorithm.needs_reference:
        return None
    for key, value in (
        ("path", c.reference.path),
        ("sync_every_n_steps", c.reference.sync_every_n_steps),
    ):
        if value is not None:
            return (
                f"reference.{key}={value} finds no reference model while algorithm.kl_coef=0; give "
                f"algorithm.kl_coef a value or set reference.{key}=null."
            )
    return None


def _dump_options(c: Config) -> str | None:
    options = vars(c.debug.dump_options)
    if c.trainer.type == "remote":
        return None  # it has options of its own
    chosen = [name for name, value in options.items() if value]
    if not c.debug.enable_data_dump:
        return None
    if chosen == ["ref_log_probs"] and not c.algorithm.needs_reference:
        return (
            "debug.dump_options.ref_log_probs=true alone dumps nothing while algorithm.kl_coef=0 needs no reference "
            "model; give algorithm.kl_coef a value or dump something else."
        )
    if chosen:
        return None
    return (
        "debug.enable_data_dump=true dumps nothing while every one of debug.dump_options is false; set at "
        f"least one of {', '.join(options)} to true."
    )


def _path_beside_family(c: Config, origin: Callable[[KeyPath], Origin]) -> str | None:
    """Refuse a path and a family from one author; a checkpoint wins only over a family from another layer."""
    family, path = origin(("model", "family")), origin(("model", "path"))
    if c.model.path is None or author(family) != author(path):
        return None
    return (
        f"model.path={c.model.path} and model.family={c.model.family} are both given ({author(path)}), and "
        "the checkpoint already decides the family; leave model.family away or set model.path=null."
    )


def _tie_beside_path(c: Config, origin: Callable[[KeyPath], Origin]) -> str | None:
    """Refuse ``tie_word_embeddings`` beside a path: the checkpoint's own config.json decides on the weights."""
    same = author(origin(("model", "tie_word_embeddings"))) == author(origin(("model", "path")))
    if c.model.path is None or not c.model.tie_word_embeddings or not same:
        return None
    return (
        f"model.tie_word_embeddings=true is not read beside model.path={c.model.path}, whose config.json decides it; "
        "leave it away or edit config.json."
    )


def _compile(c: Config) -> str | None:
    if c.model.compile is None:
        return None
    if c.model.attn_implementation == "varlen":
        return (
            f"model.compile={c.model.compile} would compile model.attn_implementation=varlen anew for every layout; "
            "set model.attn_implementation=sdpa or model.compile=null."
        )
    if c.model.gradient_checkpointing:
        return (
            f"model.compile={c.model.compile} decides by itself what the backward pass computes again, so that "
            "model.gradient_checkpointing=true cannot; set one of them to its default."
        )
    return None


def _own_attention(c: Config) -> str | None:
    if c.model.attention is None or c.model.attn_implementation == "sdpa":
        return None
    return (
        f"model.attention={c.model.attention} takes the place of model.attn_implementation="
        f"{c.model.attn_implementation}; set one of them to its default."
    )


RULES: tuple[Rule, ...] = (
    _own_attention,
    _lengths,
    _mini_batch,
    _group_size,
    _train_size,
    _eval_size,
    _rewards,
    _environment,
    _microbatch_sizes,
    _pad_to_length,
    _token_budget,
    _packed_side,
    _compile,
    _warmup,
    _current_log_probs,
    _current_dump,
    _reference,
    _dump_options,
)
