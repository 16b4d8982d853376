"""Objectives that this engine has not what it takes for, or not under the other settings."""

from __future__ import annotations

from regress.engine.config.rollout_rules import Rule
from regress.engine.config.schema import Config
from regress.grpo.catalogue import ADVANTAGES
from regress.grpo.criteria import criteria


def _inputs(c: Config) -> str | None:
    needs = ADVANTAGES[c.algorithm.advantage].needs
    if not needs:
        return None
    return (
        f"algorithm.advantage={c.algorithm.advantage} needs {' and '.join(needs)}, which the trainer does not compute; "
        "choose another one, or call regress.grpo.token_advantages with yours."
    )


def _statistics(c: Config) -> str | None:
    ranks = c.parallel.dp * c.parallel.fsdp * c.parallel.ep * c.parallel.cp
    o = c.algorithm
    if ranks == 1 or not o.compares_tokens or o.statistics_scope == "global":
        return None
    return (
        f"algorithm.statistics_scope=microbatch compares the tokens of each microbatch, and the {ranks} ranks that "
        "share the tokens would each have others; set algorithm.statistics_scope=global."
    )


def _whole_samples(c: Config) -> str | None:
    o = c.algorithm
    if c.parallel.cp == 1 or o.rejection is None or o.correction_policy == "old":
        return None
    if all(criterion.level != "seq_max" for criterion in criteria(o.rejection)):
        return None
    return (
        f"algorithm.rejection={o.rejection} looks for the greatest value of a sample, whose tokens parallel.cp="
        f"{c.parallel.cp} splits over ranks; set parallel.cp=1 or algorithm.correction_policy=old."
    )


def _own_loss(c: Config) -> str | None:
    o = c.algorithm
    if o.loss_function is None:
        return None
    beyond = {
        "algorithm.statistics_scope=microbatch": o.compares_tokens and o.statistics_scope == "global",
        "algorithm.entropy_aggregation=loss": o.has_entropy_term and o.entropy_aggregation == "token-mean",
        "algorithm.correction_normalize=false": o.correction_normalize,
        "algorithm.rejection=null": o.rejection is not None,
    }
    for remedy, wanted in beyond.items():
        if wanted:
            return (
                f"algorithm.loss_function={o.loss_function} is not told what the trainer finds out for the loss of the "
                f"objective beforehand; set {remedy}."
            )
    return None


def _remote(c: Config) -> str | None:
    o = c.algorithm
    if c.trainer.type != "remote":
        return None
    beyond = {
        "algorithm.top_entropy_quantile=1": o.top_entropy_quantile < 1.0,
        "algorithm.statistics_scope=microbatch": o.compares_tokens and o.statistics_scope == "global",
        "algorithm.entropy_controller=fixed": o.entropy_controller == "adaptive",
        "algorithm.kl_controller=fixed": o.kl_controller == "adaptive",
    }
    for remedy, wanted in beyond.items():
        if wanted:
            name = remedy.partition("=")[0]
            stated = f"{name}={getattr(o, name.partition('.')[2])}"
            return (
                f"{stated} needs entropies or a further pass, which the service of trainer.type=remote does not give; "
                f"set {remedy}."
            )
    return None


def _resampling(c: Config) -> str | None:
    t, o = c.trainer, c.algorithm
    if t.resampling != "pow" and t.resampling_power != 2.0:
        return (
            f"trainer.resampling_power={t.resampling_power:g} is not read while trainer.resampling={t.resampling}; set "
            "it to 2 or trainer.resampling=pow."
        )
    if t.resampling == "none":
        return None
    stated = f"trainer.resampling={t.resampling}"
    samples = c.data.prompts_per_step * c.data.group_size
    if t.mini_batch_size not in (None, samples):
        return (
            f"{stated} draws from the whole rollout, of which trainer.mini_batch_size={t.mini_batch_size} updates on "
            "parts; set trainer.mini_batch_size=null."
        )
    if o.has_entropy_term and o.entropy_aggregation == "token-mean":
        return (
            f"{stated} counts a sample as often as it is drawn, and algorithm.entropy_aggregation=token-mean counts "
            "its tokens once; set algorithm.entropy_aggregation=loss."
        )
    if o.missing_rewards == "exclude":
        return f"{stated} draws by rewards, which each sample needs; set algorithm.missing_rewards=refuse."
    return None


OBJECTIVE_RULES: tuple[Rule, ...] = (_inputs, _statistics, _whole_samples, _own_loss, _remote, _resampling)
