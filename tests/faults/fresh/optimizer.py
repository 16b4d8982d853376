"""Faults of the optimizer and of the parameters that it moves."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from regress.engine import optimizer as optim
from regress.engine import run_construction
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.local_tensor import local
from regress.replay.fault_injection import around, by
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import EVERY_CHECK, fault, met_in
from tests.faults.optimizer import EMBEDDING, around_the_update, with_direction
from tests.faults.ranks.helpers import on_rank


# the second one names moments that are changed after they were made
@fault(
    "M",
    "optimizer",
    "state-of-a-rank state-of-a-rank-unclipped rounded precision",
    kind="precision",
    on="dense/fsdp2-tp2-mbs3",
    names=r".*/exp_avg_sq",
    ranks=(1,),
)
@met_in("Megatron#1359: a part of the optimizer that one rank keeps in half precision")
@by(around_the_update)
@torch.no_grad()
def second_moments_of_a_rank_in_bfloat16(optimizer, update):
    """One rank keeps its parts of the second moments in half precision, behind each update."""
    update()
    if on_rank(1):
        for state in optimizer.state.values():
            own = local(state["exp_avg_sq"])
            own.copy_(rounded(own))


# the first one names what is done to the gradient that enters the moments
@fault(
    "M", f"optimizer {EMBEDDING}/exp_avg_sq", "state-of-a-rank-unclipped inputs-hold", names=r".*/exp_avg_sq"
)
@met_in("a second moment that is fed behind each microbatch")
def second_moment_of_microbatches(patch):
    """The second moment takes the squares of the gradients of microbatches, summed, not the square of their sum."""
    squares = {}

    def noted(right, self, share):
        found = [parameter for _, parameter in self.named_parameters()]
        before = [None if one.grad is None else one.grad.clone() for one in found]
        right(self, share)
        for one, known in zip(found, before, strict=True):
            own = (one.grad if known is None else one.grad - known).square()
            squares[one] = own if one not in squares else squares[one] + own

    @torch.no_grad()
    def wrong(optimizer, update):
        for group in optimizer.param_groups:
            beta = group["betas"][1]
            for parameter in group["params"]:  # so that the update makes the wrong moment, and uses it
                surplus = squares[parameter] - parameter.grad.square()
                optimizer.state[parameter]["exp_avg_sq"].add_(surplus * ((1.0 - beta) / beta))
        squares.clear()
        update()

    patch.around(LocalPolicy, "_backward", noted)
    around_the_update(patch, wrong)


def _embedding(optimizer):
    """Return the weight of the token embeddings."""
    found = [
        parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["param_names"], group["params"], strict=True)
        if name == EMBEDDING
    ]
    return found[0]


# these rows would only decay, and are as they were; the last one names a fault of the update
@fault(
    "M",
    f"param {EMBEDDING}",
    "weight-decay no-update optimizer-settings undecided-update",
    names=r"model\.embed_tokens\.weight",
)
@met_in("SparseAdam: rows of embeddings without a gradient are not updated")
@by(around_the_update)
@torch.no_grad()
def rows_without_gradient_left_alone(optimizer, update):
    """Embeddings of tokens that the batch lacks keep their values and moments, and do not decay."""
    weight = _embedding(optimizer)
    still = weight.grad.abs().sum(1) == 0
    state = optimizer.state[weight]
    kept = [(values, values[still].clone()) for values in (weight, state["exp_avg"], state["exp_avg_sq"])]
    update()
    for values, before in kept:
        values[still] = before


# the first names an average with those from before
@fault("M", "param", "learning-rate optimizer-settings", on="tied/fsdp2-tp2-sp")
@met_in("an average of weights that is trained on in place of them")
@by(around_the_update)
@torch.no_grad()
def parameters_averaged_with_those_before(optimizer, update):
    """Behind each update a tenth of every parameter is what it was before."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [local(p.detach()).clone() for p in parameters]
    update()
    for parameter, known in zip(parameters, before, strict=True):
        local(parameter.detach()).lerp_(known, 0.1)


@fault("M", f"param {EMBEDDING}", "bias-correction optimizer-settings inputs-hold")
@met_in("starVLA PR#210: a counter that accumulation raises in every microbatch")
def bias_corrected_for_every_microbatch(patch):
    """Moments are corrected for as many updates as there were microbatches; their own counter is right."""
    count = [1]

    def noted(passes, self, microbatches, *rest):
        count[0] = len(microbatches)
        return passes(self, microbatches, *rest)

    def wrong(moments):
        counted = replace(moments, number=moments.number * count[0])
        mean = counted.first / (1 - counted.beta1**counted.number)
        return mean, (counted.second / (1 - counted.beta2**counted.number)).sqrt() + counted.eps

    patch.around(LocalPolicy, "forward_backward", noted)
    with_direction(patch, wrong)


# optimizer-settings: names what is done to parameters afterwards
# of 14 rows ranks hold 4, 4, 4 and 2, and an equal share is 3
@fault(
    "M",
    f"param {EMBEDDING}",
    "no-update state-of-a-rank optimizer-settings inputs-hold",
    on="dense/fsdp4-mbs2",
    names=r"model\.embed_tokens\.weight|lm_head\.weight",
    ranks=(0, 1, 2),
)
@met_in("a distributed optimizer that copies back as many rows as divide equally")
@by(around_the_update)
@torch.no_grad()
def rows_beyond_an_equal_share_not_updated(optimizer, update):
    """Update no more rows of a rank's part of a weight than all ranks could have alike; moments are right."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [local(p.detach()).clone() for p in params]
    update()
    for parameter, known in zip(params, before, strict=True):
        share = parameter.shape[0] // dist.get_world_size()
        local(parameter.detach())[share:].copy_(known[share:])


# the rate of the first update is 0, and stays so on this rank
@fault(
    "M",
    "param",
    "learning-rate state-of-a-rank step-left-out optimizer-settings inputs-hold",
    on="on_policy/dp2",
    ranks=(1,),
    steps=None,
)
@met_in("accelerate PR#999: a schedule that the first process alone steps")
@around(Trainer, "_schedule")
def schedule_of_a_rank_not_stepped(right, self, outcome):
    """One rank never goes on with its learning rate, which rises from 0 on the others."""
    if not on_rank(1):
        right(self, outcome)


@fault("M", "param", "learning-rate", on="on_policy/dp2", steps=None)
@met_in("accelerate PR#999, transformers PR#24088")
@around(optim, "get_scheduler")
def schedule_stepped_by_every_rank(right, *args, **rest):
    """The schedule makes as many steps after an update as there are ranks."""
    found = right(*args, **rest)
    one = found.step

    def several():
        for _ in range(dist.get_world_size()):
            one()

    found.step = several
    return found


# names how the update is made of the moments
@fault("M", f"param {EMBEDDING}", "optimizer-settings", blind=EVERY_CHECK)
@met_in("NAdam in place of AdamW")
@by(with_direction)
def update_looks_ahead(moments):
    """The update takes the first moment one step ahead, as Nesterov's does; the moments are right."""
    ahead = moments.beta1 * moments.first / (1 - moments.beta1 ** (moments.number + 1))
    ahead = ahead + (1 - moments.beta1) * moments.gradient / (1 - moments.beta1**moments.number)
    root = (moments.second / (1 - moments.beta2**moments.number)).sqrt() + moments.eps
    return ahead, root


# the last one names weight decay
@fault(
    "M",
    f"param {EMBEDDING}",
    "weight-decay optimizer-settings",
    on="on_policy/base",
    steps=None,
    blind=("loss 5 %", "loss 1 %", "norm 3 %", "cosine 0.99", "L2 8.3 %", "mean 1e-3"),
)
@met_in("weight decay of the configured rate, whatever the schedule says")
@by(around_the_update)
@torch.no_grad()
def decay_at_the_full_rate(optimizer, update):
    """Weights decay by the rate that the schedule began with, and are updated by its present one."""
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(1.0 - group["initial_lr"] * group["weight_decay"])
        group["weight_decay"] = 0.0
    update()
    for group, decay in zip(optimizer.param_groups, decays, strict=True):
        group["weight_decay"] = decay


def _next_rates(schedule):
    """Return the rates of the update behind the present one."""
    number = schedule.last_epoch + 1
    return [base * rule(number) for base, rule in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]


@fault("M", f"param {EMBEDDING}", "learning-rate", on="on_policy/base")
@met_in("lightning#1772")
def rate_of_the_next_update(patch):
    """The schedule goes on before the optimizer, so that every update has the rate of the next one."""

    def wrong(optimizer, update):
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, next_one in zip(optimizer.param_groups, _next_rates(schedules[-1]), strict=True):
            group["lr"] = next_one
        update()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    schedules = []

    def kept(right, *args, **rest):
        schedules.append(right(*args, **rest))
        return schedules[-1]

    patch.around(run_construction, "build_scheduler", kept)
    around_the_update(patch, wrong)


@fault("M", f"param {EMBEDDING}", "learning-rate", on="cispo_kl/base", steps=None)
@met_in("accelerate PR#999")
@around(optim, "get_scheduler")
def one_more_update_of_warm_up(right, *args, num_warmup_steps, **rest):
    """The learning rate rises over one update more than it should."""
    return right(*args, num_warmup_steps=num_warmup_steps + 1, **rest)


# the weight is updated once under each name
@fault(
    "M",
    "optimizer",
    "update-sign step-counter update-made-twice",
    on="tied/mbs4",
    names=r"model\.embed_tokens\.weight/.*",
    blind=EVERY_CHECK,
)
@met_in("a tied weight that is in two lists of parameters")
@by(around_the_update)
def tied_weight_updated_twice(optimizer, update):
    """The optimizer knows the tied weight under both of its names, and updates it for each."""
    update()
    (group,) = optimizer.param_groups
    params, names = group["params"], group["param_names"]
    kept = [(p, n) for p, n in zip(params, names, strict=True) if "embed" in n]
    group["params"], group["param_names"] = [p for p, _ in kept], [n for _, n in kept]
    update()
    group["params"], group["param_names"] = params, names


@fault("M", f"param {EMBEDDING}", "optimizer-eps optimizer-settings", blind=EVERY_CHECK)
@met_in("optimizers that add eps below the root")
@by(with_direction)
def epsilon_below_the_root(moments):
    """The root is taken of the second moment and eps together."""
    mean = moments.first / (1 - moments.beta1**moments.number)
    return mean, (moments.second / (1 - moments.beta2**moments.number) + moments.eps).sqrt()


def _second_moments(optimizer):
    """Return copies of the second moments that are known."""
    return {p: state["exp_avg_sq"].clone() for p, state in optimizer.state.items() if "exp_avg_sq" in state}


@fault(
    "M",
    f"optimizer {EMBEDDING}/exp_avg_sq",
    "state-of-a-rank-unclipped clip-of-gradients-left-out clip-of-gradients",
    steps=None,
    blind=EVERY_CHECK,
)
@met_in("clipping of a copy of the gradients")
def second_moment_of_unclipped_gradients(patch):
    """The second moment is made of the gradient as it was before it was clipped."""
    kept = {}

    def noted(right, self, limit):
        kept.clear()
        kept.update({p: p.grad.clone() for _, p in self.named_parameters() if p.grad is not None})
        return right(self, limit)

    @torch.no_grad()
    def wrong(optimizer, update):
        before = _second_moments(optimizer)
        update()
        for group in optimizer.param_groups:
            beta2 = group["betas"][1]
            for p in group["params"]:
                known = before.get(p, torch.zeros_like(p))
                optimizer.state[p]["exp_avg_sq"].copy_(beta2 * known + (1 - beta2) * kept[p].square())

    patch.around(LocalPolicy, "clip_grad_norm", noted)
    around_the_update(patch, wrong)


@fault("M", "optimizer", "no-update", on="dapo/mbs4", steps=None, blind=EVERY_CHECK)
@met_in("OpenRLHF: an update for every mini-batch but the last of an epoch")
def last_update_of_a_step_skipped(patch):
    """The optimizer makes all updates of a step but the last one."""
    due = [0]

    def counted(update, self, work, after):
        due[0] = self.config.trainer.epochs * len(work.minis) - len(work.outcomes)
        update(self, work, after)

    def wrong(_, made):
        due[0] -= 1
        if due[0]:
            made()

    patch.around(Trainer, "_update", counted)
    around_the_update(patch, wrong)


@fault("M", "optimizer model.embed_tokens.weight/step", "step-counter", place="step0/rank0")
@met_in("Megatron PR#5976, lightning#1772")
def counter_one_behind(run):
    """The last update before a checkpoint was not counted."""
    for state in run.trainer.optimizer.state.values():
        state["step"] -= 1


@fault("M", "param model.embed_tokens.weight", "weight-decay", names=r"model\.embed_tokens\.weight")
@met_in("verl#5070, verl PR#7215")
@around(optim, "update")
def embeddings_do_not_decay(right, optimizer):
    """Embeddings are among the parameters that do not decay."""
    (group,) = optimizer.param_groups
    with torch.no_grad():
        for parameter, name in zip(group["params"], group["param_names"], strict=True):
            if "embed" in name:
                parameter.div_(1.0 - group["lr"] * group["weight_decay"])
    right(optimizer)
