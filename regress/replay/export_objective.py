"""``objective.json`` of an exported case: every number that its loss and its updates need, and the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from regress.dump.canonical_json import Json
from regress.engine.config.config_schema import Config
from regress.grpo.objective import Objective
from regress.grpo.objective_catalogue import ADVANTAGES, KL_ESTIMATORS
from regress.grpo.policy_losses import LOSSES
from regress.replay.replay_plan import PlannedUpdate

_WRITTEN = ("grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose formula is written out here."""
_NO_NUMBERS = ("preset", "loss_function")
GRAD_NORM_EPS = 1e-6
"""Added to the norm that divides ``max_grad_norm``, as in torch.nn.utils.clip_grad_norm_."""


def objective_of(config: Config, plan: Sequence[PlannedUpdate], rates: Sequence[float]) -> dict[str, Json]:
    """Return everything but the data: the objective, the optimizer, and the numbered updates.

    Args:
        config: the whole configuration of the case.
        plan: its updates, on one rank.
        rates: learning rate of each update.
    """
    algorithm = {key: value for key, value in asdict(config.algorithm).items() if key not in _NO_NUMBERS}
    low, high = config.algorithm.clip_range
    return {
        "algorithm": algorithm,
        "clip_range": [low, high],
        "norm_length": config.algorithm.norm_length or config.data.max_completion_length,
        "temperature": config.rollout_worker.temperature,
        "max_grad_norm": config.optimizer.max_grad_norm,
        "grad_norm_eps": GRAD_NORM_EPS,
        "optimizer": {
            "type": "AdamW",
            "betas": [float(beta) for beta in config.optimizer.betas],
            "eps": config.optimizer.eps,
            "weight_decay": config.optimizer.weight_decay,
        },
        "reference": _reference(config),
        "formulas": dict(formulas(config.algorithm)),
        "updates": [_update(number, plan, rates[number], config) for number in range(len(plan))],
    }


def _reference(config: Config) -> Json:
    if not config.algorithm.needs_reference:
        return None
    chosen = config.reference
    return {"sync_every_n_steps": chosen.sync_every_n_steps, "mixup_alpha": chosen.mixup_alpha}


def _update(number: int, plan: Sequence[PlannedUpdate], rate: float, config: Config) -> Json:
    one = plan[number]
    minis = sum(other.step == one.step for other in plan) // config.trainer.epochs
    own = one.update or 0
    return {
        "number": number,
        "name": one.where,
        "step": one.step,
        "epoch": own // minis,
        "mini_batch": own % minis,
        "learning_rate": rate,
        "samples": [list(key) for key in one.frame.samples],
        "microbatches": [_samples(one, micro) for micro in range(len(one.layouts[0]))],
    }


def _samples(update: PlannedUpdate, micro: int) -> list[Json]:
    segments = update.layouts[0][micro].tokens.segments
    return [list(update.frame.samples[sample]) for sample in dict.fromkeys(s.sample for s in segments)]


def formulas(objective: Objective) -> Mapping[str, str]:
    """Return the definition of each quantity under this objective, by name, in the order of computation."""
    found = {
        "logits": "output of the model at the position before the token, divided by temperature",
        "log_prob": "log softmax(logits)[token]",
        "entropy": "-sum(softmax(logits) * log softmax(logits)) over the vocabulary",
        "loss_token": _loss_token(objective),
        "old_log_prob": _OLD[objective.old_log_probs],
        "advantage": _advantage(objective),
        "log_ratio": _log_ratio(objective),
        "ratio": "exp(log_ratio)",
        "policy_loss": _policy_loss(objective),
    }
    if objective.kl_in_loss:
        found["kl"] = _kl(objective) + (" * ratio (differentiable)" if objective.kl_bias_correction else "")
    found["token_loss"] = _token_loss(objective)
    found["weight"] = _weight(objective)
    found["loss"] = "sum of weight * token_loss over the loss tokens of the mini-batch"
    found["grad_norm"] = "2-norm of the gradient of the loss over all parameters, tied ones once"
    found["clipping"] = "gradient * min(1, max_grad_norm / (grad_norm + grad_norm_eps)); none if null"
    found["update"] = (
        "t = step + 1; m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; p = p (1 - lr weight_decay); "
        "p = p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)"
    )
    return found


_OLD = {
    "recompute": "log_prob under the policy as it is before the first update of the step, no gradient",
    "sampler": "sampler_log_probs of the rollouts",
    "current": "log_prob of this very forward pass, no gradient: every ratio is 1",
}


def _loss_token(objective: Objective) -> str:
    dropped = (
        "; none of a completion with finish_reason length" if objective.mask_truncated_completions else ""
    )
    return f"tokens with loss_mask 1{dropped}"


def _advantage(objective: Objective) -> str:
    rule = objective.advantage
    if rule == "constant":
        return "1"
    if rule not in _WRITTEN:
        return f"{ADVANTAGES[rule].text}, by {ADVANTAGES[rule].source}"
    reward = "reward - sum of kl_coef * kl(old_log_prob, ref_log_prob) over the sample's loss tokens"
    if objective.kl_in_reward and rule == "reinforce_plus_plus":
        reward = "reward on the last loss token, minus kl_coef * kl(old_log_prob, ref_log_prob) on each"
    if not objective.kl_in_reward:
        reward = "reward"
    whiten = "; then (x - mean) / sqrt(var(ddof) + whiten_eps) over all loss tokens of the step, 0 if all are equal"
    if rule == "reinforce_plus_plus":
        return f"R = {reward}; return = sum of gamma^k R from the token on{whiten}"
    centred = "R - mean(R of the group)"
    if rule == "rloo":
        centred = "(R - mean(R of the group)) * n / (n - 1) in a group of n"
    if rule == "reinforce_plus_plus_baseline":
        return f"R = {reward}; {centred}; {_single(objective)}{whiten}"
    over = {"group": "group", "batch": "step"}.get(objective.scale)
    divided = "" if over is None else f" / (std(R of the {over}, ddof) + eps)"
    return (
        f"R = {reward}; {centred}{divided}; 0 where all rewards of the group are equal; {_single(objective)}"
    )


def _single(objective: Objective) -> str:
    value = "0" if objective.single_sample == "zero" else "R with mean 0 and deviation 1"
    return f"the only sample of a group gets {value}; every loss token of a sample has its sample's value"


def _log_ratio(objective: Objective) -> str:
    text = "log_prob - old_log_prob"
    if objective.importance_level == "sequence":
        text = f"mean of ({text}) over the loss tokens of the sample"
    elif objective.importance_level == "sequence_product":
        text = f"sum of ({text}) over the loss tokens of the sample"
    if objective.importance_level != "token" and objective.sequence_gradient == "token":
        text = f"log_prob - stop_gradient(log_prob) + stop_gradient({text})"
    if (objective.log_ratio_min, objective.log_ratio_max) != (None, None):
        text += ", clamped to [log_ratio_min, log_ratio_max]"
    return text


def _policy_loss(objective: Objective) -> str:
    loss = LOSSES[objective.loss]
    capped = "ratio" if objective.delta is None else "min(ratio, delta)"
    text = loss.pseudocode.replace("{ratio}", capped) or f"{loss.text}, by {loss.source}"
    if objective.dual_clip is not None:
        text += "; where advantage < 0 at most -dual_clip * advantage"
    if objective.sampler_correction == "none":
        return text
    level, _, rule = objective.sampler_correction.partition("_")
    gap = "old_log_prob - sampler_log_prob (0 where that is unknown)"
    gap = f"sum of {gap} over the sample" if level == "sequence" else gap
    bounds = "[correction_min, correction_max]"
    does = f"clamped to {bounds}" if rule == "truncate" else f"0 outside of {bounds}"
    return f"({text}) * w with w = exp({gap}), {does}, no gradient"


def _kl(objective: Objective) -> str:
    if objective.kl_estimator in ("abs", "k1+", "k3+", "abs+"):
        return f"{KL_ESTIMATORS[objective.kl_estimator].text} with x = log_prob - ref_log_prob, " + (
            "and the gradient of x^2 / 2" if objective.kl_estimator.endswith("+") else "by autograd"
        )
    if objective.kl_estimator == "k1":
        return "log_prob - ref_log_prob"
    if objective.kl_estimator == "k2":
        return "(log_prob - ref_log_prob)^2 / 2"
    gap = "d = ref_log_prob - log_prob"
    if objective.kl_log_ratio_clamp is not None:
        gap += " clamped to +-kl_log_ratio_clamp"
    clamp = "" if objective.kl_clamp is None else ", clamped to +-kl_clamp"
    return f"exp(d) - d - 1{clamp} with {gap}"


def _token_loss(objective: Objective) -> str:
    text = "policy_loss"
    if objective.kl_in_loss:
        text += " + kl_coef * kl"
    if objective.entropy_coef == 0.0:
        return text
    if objective.entropy_aggregation == "token-mean":
        over = "mini-batch" if objective.entropy_scope == "global" else "microbatch, and of these"
        return f"{text} - entropy_coef * entropy * s, s such that weight * s is the mean over the tokens of the {over}"
    return f"{text} - entropy_coef * entropy"


def _weight(objective: Objective) -> str:
    n, N = "loss tokens of the sample", "samples of the mini-batch"
    if not objective.count_empty_rows:
        N += " that have a loss token"
    text = {
        "token-mean": "1 / (loss tokens of the mini-batch)",
        "token-sum": "1",
        "seq-mean-token-mean": f"1 / ({N}) / ({n})",
        "seq-mean-token-sum": f"1 / ({N})",
        "seq-mean-token-sum-norm": f"1 / ({N}) / norm_length",
    }[objective.aggregation]
    if objective.norm_rule == "longest":
        text = text.replace("norm_length", "(longest completion of the microbatch)")
    if objective.denominator_scope == "microbatch_sum":
        return text.replace("mini-batch", "microbatch")
    if objective.denominator_scope == "microbatch":
        text = text.replace("mini-batch", "microbatch")
        return f"{text}, divided by the number of microbatches of the update (see updates[].microbatches)"
    return text
