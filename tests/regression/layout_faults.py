"""Bugs of parallel training, put into the ranks of a replay; a module of its own, because ranks import it.

Each function is called on every rank before anything is built. It breaks the engine there; what it returns, if
anything, then breaks the run that was built. A rank lives for one replay, so nothing is undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.functional import linear

from regress.engine import optim, step, trainer
from regress.engine.attention import visible
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.build import Run
from regress.engine.config import Config, load_config
from regress.engine.local import local
from regress.engine.policy import LocalPolicy
from regress.faults import adapter
from regress.grpo.objective import Objective
from regress.parallel import (
    embedding,
    exchange,
    expert,
    pipeline,
    policy,
    reduction,
    ring,
    sequence,
    sharded,
    stages,
    vocabulary,
)
from regress.parallel.factors import OutputFactor
from regress.parallel.families import Family
from regress.parallel.pipeline import Pipeline
from regress.parallel.policy import ParallelPolicy
from regress.parallel.segments import ContextSegments
from regress.parallel.world import ProcessWorld
from regress.replay.pool import shared_pool
from regress.replay.run import Prepare, run_steps

Fault = Callable[[], Prepare | None]


class Broken:
    """Starts the ranks of a replay like the pool, each with the fault."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def run(self, config: Path, world_size: int, folder: Path, what: str) -> None:
        loaded = load_config(config_path=str(config), environ={}).config
        arguments = {"config": loaded, "fault": self._fault}
        shared_pool().run(run_broken, arguments, world_size, folder=folder, what=what)


def run_broken(config: Config, fault: Fault) -> None:
    """Run all steps on a rank, with the fault."""
    run_steps(config, fault())


def none() -> None:
    """No fault."""


def on_rank(number: int) -> bool:
    return dist.get_rank() == number


def of_others(value: Any) -> list[Any]:
    """The value of every rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def sums_of(run: Run) -> list[tuple[list[str], ProcessGroup]]:
    """Return the groups of gradients that the policy sums over ranks, as a list that may be changed."""
    model = run.trainer.policy
    assert isinstance(model, ParallelPolicy)
    assert model._summed
    return model._summed


def without(run: Run, *parts: str) -> None:
    """Leave the parameters whose names have one of these parts out of all sums of gradients."""
    found = sums_of(run)
    kept = [([n for n in names if not any(p in n for p in parts)], group) for names, group in found]
    assert [len(names) for names, _ in kept] != [len(names) for names, _ in found]
    found[:] = [(names, group) for names, group in kept if names]


# samples and denominators


def same_samples_on_every_rank() -> None:
    """All ranks read the first one's samples."""
    right = TokenBatch.microbatches
    TokenBatch.microbatches = lambda self, plan, ranks, _: right(self, plan, ranks, 0)


def incomplete_microbatch_dropped() -> None:
    """The samples that fill no whole microbatch are left out, on every rank."""
    right = TokenBatch.microbatches
    TokenBatch.microbatches = lambda *args: right(*args)[:-1]


def denominator_of_own_rank() -> None:
    """Each rank divides by its own tokens, and the ranks are averaged."""
    right = trainer.weigh

    def wrong(tokens: LossTokens, micros: Sequence[Microbatch], objective: Objective, **rest: Any) -> Tensor:
        own = sum(len(micro.select) for micro in micros)
        return right(tokens, micros, objective, **rest) * len(tokens) / (own * dist.get_world_size())

    trainer.weigh = wrong


def advantages_of_own_samples() -> None:
    """A group whose samples lie on several ranks is compared on each of them with its own part."""
    right = trainer.token_advantages

    def wrong(rewards: Tensor, groups: Tensor, *args: Any) -> Tensor:
        ranks = dist.get_world_size()
        return right(rewards, groups * ranks + torch.arange(len(groups)) % ranks, *args)

    trainer.token_advantages = wrong


def log_probs_summed_over_all_ranks() -> None:
    """Ranks that hold the same tokens are summed, too."""

    def wrong(self: ProcessWorld, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

    ProcessWorld.sum = wrong


# weights and replicas


def other_weights_on_a_rank() -> Prepare:
    """The initial weights were not broadcast."""

    def change(run: Run) -> None:
        if on_rank(1):
            for _, parameter in run.trainer.policy.named_parameters():
                local(parameter.data).mul_(1.01)

    return change


def last_bit_on_a_rank() -> Prepare:
    """A replicated weight drifts apart, by a rounding error so far."""

    def change(run: Run) -> None:
        if on_rank(1):
            weight = dict(run.trainer.policy.named_parameters())["model.norm.weight"].data
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, torch.inf)))

    return change


# sums of gradients


def averaged_over_ranks() -> None:
    """Shares of the loss whose sum is the whole are averaged."""
    right = policy.sum_gradients

    def wrong(
        parameters: Mapping[str, nn.Parameter], groups: Iterable[tuple[Sequence[str], ProcessGroup]]
    ) -> None:
        right(parameters, groups)
        for names, group in groups:
            for name in names:
                local(parameters[name].grad).div_(group.size())

    policy.sum_gradients = wrong


def averaged_over_shards() -> None:
    """FSDP as it comes: it divides by the number of ranks."""
    FSDPModule.set_gradient_divide_factor = lambda *_: None
    FSDPModule.set_force_sum_reduction_for_comms = lambda *_: None


def averaged_by_ddp() -> None:
    """DDP averages, and nobody multiplies."""
    ParallelPolicy._backward = lambda self, share: self._replicas.backward(share)


def loss_times_ranks() -> None:
    """A factor against an average that nobody takes."""
    right = ParallelPolicy._backward
    ParallelPolicy._backward = lambda self, share: right(self, share * dist.get_world_size())


def sums_left_out() -> Prepare:
    """No gradient is summed over ranks after the backward pass."""
    return lambda run: sums_of(run).clear()


def summed_twice() -> Prepare:
    """Once by a hook, and once more by the step."""

    def change(run: Run) -> None:
        found = sums_of(run)
        found += list(found)

    return change


def summed_in_every_microbatch() -> Prepare:
    """The gradients accumulated so far are summed after each backward pass: earlier ones again and again."""

    def change(run: Run) -> None:
        model = run.trainer.policy
        groups = [*sums_of(run)]
        sums_of(run).clear()
        right = model._backward

        def wrong(share: Tensor) -> None:
            right(share)
            reduction.sum_gradients(dict(model.named_parameters()), groups)

        model._backward = wrong

    return change


def ddp_bypassed() -> Prepare:
    """The model inside the wrapper is called, so that no hook is armed."""

    def change(run: Run) -> None:
        assert run.trainer.policy._callable is not run.trainer.policy.model
        run.trainer.policy._callable = run.trainer.policy.model

    return change


def synchronized_first_instead_of_last() -> None:
    """DDP synchronizes the first microbatch, and no other."""
    begun: list[bool] = []

    def wrong(self: ParallelPolicy, *, last: bool) -> Any:
        begun.append(last)
        return nullcontext() if len(begun) == 1 else self._replicas.no_sync()

    ParallelPolicy._accumulating = wrong


def synchronized_in_every_microbatch() -> None:
    """DDP averages what is accumulated, and an average is its own average."""
    ParallelPolicy._accumulating = lambda self, *, last: nullcontext()


def rank_without_samples_stays_away() -> Prepare:
    """It has nothing to add, so it takes no part in the sums."""

    def change(run: Run) -> None:
        last = dist.get_world_size() - 1
        others = dist.new_group(list(range(last)))
        found = sums_of(run)
        found[:] = [] if on_rank(last) else [(names, others) for names, _ in found]

    return change


def divided_twice_by_torch() -> None:
    """torch 2.13: a divide factor counts twice where the mesh has one shard, and the dtype is neither float32 nor
    bfloat16."""
    split = ParallelPolicy._split_stage

    def wrong(self: ParallelPolicy, stage: Any) -> None:
        split(self, stage)
        sharded.apply(stage, self._world.device_mesh["dp", "fsdp"])
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)
                module.set_force_sum_reduction_for_comms(False)

    ParallelPolicy._split_stage = wrong
    ParallelPolicy._sums = lambda self: []
    ParallelPolicy._backward = lambda self, share: (2.0 * share).backward()
    ParallelPolicy.backward_scale = property(lambda self: 2.0)  # against the mean over both


# the norm of the gradient


def precision_policy_ignored() -> None:
    policy = sharded.MixedPrecisionPolicy
    sharded.MixedPrecisionPolicy = lambda **_: policy()  # type: ignore[assignment,misc]


def norm_of_own_shard() -> None:
    ParallelPolicy._total_norm = LocalPolicy._total_norm


def clipped_by_own_norm() -> None:
    """The norm is right where it is reported, and that of the rank's own part where it is used."""
    right = ParallelPolicy.clip_grad_norm

    def wrong(self: ParallelPolicy, max_norm: float | None) -> Tensor:
        norm = right(self, None)
        grads = [local(p.grad) for _, p in self.named_parameters() if p.grad is not None]
        own = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in grads]))
        for grad in grads:
            grad.mul_((max_norm / own).clamp(max=1.0))
        return norm

    ParallelPolicy.clip_grad_norm = wrong


def replicas_counted_each() -> Prepare:
    """Parameters on several ranks enter the norm once for each of them."""

    def change(run: Run) -> None:
        model = run.trainer.policy
        model._owned = frozenset(name for name, _ in model.named_parameters())

    return change


def experts_left_out_of_the_norm() -> Prepare:
    def change(run: Run) -> None:
        model = run.trainer.policy
        model._owned = frozenset(name for name in model._owned if name not in model._experts)

    return change


def epsilon_of_every_rank() -> None:
    """norm + 1e-6 on a partial sum adds it once for each rank."""
    right = ParallelPolicy.clip_grad_norm

    def wrong(self: ParallelPolicy, max_norm: float | None) -> Tensor:
        return right(self, max_norm - 1e-6 * max_norm / right(self, None).item())

    ParallelPolicy.clip_grad_norm = wrong


# parameters and optimizer


def update_lost_on_a_rank() -> None:
    """One rank does not see what the optimizer has made of its part."""
    if on_rank(1):
        optim.update = lambda _: None


def decay_on_one_rank_only() -> Prepare:
    def change(run: Run) -> None:
        if on_rank(1):
            for group in run.trainer.optimizer.param_groups:
                group["weight_decay"] = 0.0

    return change


def counter_ahead_on_a_rank() -> Prepare:
    def change(run: Run) -> None:
        if on_rank(1):
            for state in run.trainer.optimizer.state.values():
                state["step"] += 1

    return change


def exchanged(tensors: Mapping[str, Tensor]) -> None:
    """Give each of two ranks the other's tensors, where they fit."""
    found = of_others({name: local(tensor).detach().clone() for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        other = found[1 - dist.get_rank()][name]
        if other.shape == local(tensor).shape:
            local(tensor.detach()).copy_(other)


def state_of_another_shard() -> Prepare:
    """Each rank resumes from the optimizer state of the other."""

    def change(run: Run) -> None:
        states = run.trainer.optimizer.state
        named = run.trainer.policy.named_parameters()
        exchanged({name: states[parameter]["exp_avg"] for name, parameter in named})

    return change


def shards_exchanged() -> Prepare:
    """Two ranks hold each other's part of a weight."""

    def change(run: Run) -> None:
        name = "model.layers.0.self_attn.v_proj.weight"
        exchanged({name: dict(run.trainer.policy.named_parameters())[name]})

    return change


def stale_part_on_a_rank() -> None:
    """Forward and backward passes gather what one rank had before the last update."""
    right = ParallelPolicy.forward_backward
    before: dict[str, Tensor] = {}

    def wrong(self: ParallelPolicy, *args: Any) -> Any:
        parts = {name: local(parameter.data) for name, parameter in self.named_parameters()}
        now = {name: part.clone() for name, part in parts.items()}
        if on_rank(1) and before:
            for name, part in parts.items():
                part.copy_(before[name])
        before.update(now)
        results = right(self, *args)
        for name, parameter in self.named_parameters():
            local(parameter.data).copy_(now[name])
        return results

    ParallelPolicy.forward_backward = wrong


def gradients_begin_with_something() -> None:
    """The buffer of gradients on one rank holds what was gathered in it before."""
    right = ParallelPolicy.zero_grad

    def wrong(self: ParallelPolicy) -> None:
        right(self)
        if on_rank(1):
            for _, parameter in self.named_parameters():
                parameter.grad = parameter.detach().clone()

    ParallelPolicy.zero_grad = wrong


def metrics_of_own_rank() -> None:
    """Loss and metrics are reported without a sum over the ranks."""
    step._combined = lambda _, own, norm: step.StepOutcome(own.loss, norm.item(), own.metrics)


# tensor and sequence parallelism


def norms_of_columns_not_summed() -> Prepare:
    """Norms that see a part of the tokens have a part of the gradient."""
    return lambda run: without(run, "layernorm", "model.norm")


def router_not_summed() -> Prepare:
    """So has a router."""
    return lambda run: without(run, "mlp.gate.")


def untied() -> Prepare:
    """The output projection gets a parameter of its own."""

    def change(run: Run) -> None:
        head = run.trainer.policy.model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())

    return change


def gradient_taken_for_whole() -> None:
    """A part of the gradient of hidden states enters the backward pass as if it were replicated."""

    def wrong(module: nn.Linear, mesh: Any, hidden: Tensor) -> Tensor:
        mine = DTensor.from_local(hidden, mesh, [Replicate()], run_check=False).to_local()
        return linear(mine, local(module.weight))

    embedding._project = wrong


def columns_of_the_other_rank() -> None:
    """Hidden states are scattered in the wrong order."""

    def wrong(whole: Tensor, group: ProcessGroup) -> Tensor:
        return whole.chunk(group.size(), dim=1)[group.size() - 1 - group.rank()].contiguous()

    sequence._own_columns = wrong


# a vocabulary in parts


def offset_one_too_high() -> None:
    """Ids are counted from the wrong first one on all ranks but the first, unchecked."""
    vocabulary._check_holders = lambda *_: None
    offset_checked()


def offset_checked() -> None:
    """The same, in the engine as it is."""
    right = policy.vocab_parallel_log_probs
    policy.vocab_parallel_log_probs = lambda *args, start, **rest: right(
        *args, start=start + (start > 0), **rest
    )


def maximum_of_own_part() -> None:
    """Sums of exponentials are added that are relative to different maxima."""

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        sums = sums.clone()
        dist.all_reduce(sums, group=group)
        return maximum, sums

    vocabulary._joined = wrong


def padding_ids_counted() -> None:
    """Two ids that only fill up the last part, with logits of 0, count in the denominator."""
    right = vocabulary._local_sums

    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        maximum, sums = right(*args)
        if on_rank(dist.get_world_size() - 1):
            sums[0] += 2 * (-maximum).exp()
        return maximum, sums

    vocabulary._local_sums = wrong


def whole_logits_in_parallel() -> None:
    """Every rank has all logits, and the sum over the ranks is taken nevertheless: log-probs less log(tp)."""
    right = vocabulary._joined

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        highest, (total, moment, target, holders) = right(maximum, sums, group)
        return highest, torch.stack([total * group.size(), moment * group.size(), target, holders])

    vocabulary._joined = wrong


def sum_without_gradient() -> None:
    """Log-probs are summed without autograd: logits of parts that do not hold the target get no gradient."""
    right = vocabulary.logits_gradient

    def wrong(logits: Tensor, columns: Tensor, *args: Any) -> Tensor:
        here = (columns >= 0) & (columns < logits.shape[-1])
        return right(logits, columns, *args) * here.view(*logits.shape[:-1], 1)

    vocabulary.logits_gradient = wrong


def entropy_of_changed_logits() -> None:
    """The logits of a part were shifted in place before its entropy was taken."""
    right = vocabulary._joined

    def wrong(maximum: Tensor, sums: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
        highest, (total, _, target, holders) = right(maximum, sums, group)
        moment = sums[1] * (maximum - highest).exp()
        dist.all_reduce(moment, group=group)
        return highest, torch.stack([total, moment, target, holders])

    vocabulary._joined = wrong


# pipelines


def tied_gradient_not_summed() -> None:
    Pipeline.sum_tied = lambda self: None


def tied_gradient_summed_twice() -> None:
    right = Pipeline.sum_tied

    def wrong(self: Pipeline) -> None:
        right(self)
        right(self)

    Pipeline.sum_tied = wrong


def averaged_over_microbatches() -> None:
    """``scale_grads=True``, as torch has it by default."""
    right = pipeline.runner

    def wrong(*args: Any) -> Any:
        made = right(*args)
        made.scale_grads = True
        return made

    pipeline.runner = wrong


def last_microbatch_survives_on_a_stage() -> Prepare:
    """Gradients of the first stage are overwritten, not added to."""

    def keep(parameter: nn.Parameter) -> None:
        before = kept.get(parameter)
        grad = parameter.grad
        assert grad is not None
        own = grad.clone() if before is None else grad - before
        grad.copy_(own)
        kept[parameter] = own

    kept: dict[nn.Parameter, Tensor] = {}

    def change(run: Run) -> None:
        if on_rank(0):
            for _, parameter in run.trainer.policy.named_parameters():
                parameter.register_post_accumulate_grad_hook(keep)

    return change


def microbatches_swapped_at_the_end() -> None:
    """The last stage takes the first two microbatches for each other."""
    right = Pipeline.forward_backward

    def wrong(self: Pipeline, micros: Sequence[Microbatch], loss: Any, project: Any, visit: Any) -> Any:
        first, second, *rest = micros
        taken = {id(micro): other for micro, other in zip(micros, (second, first, *rest), strict=True)}
        return right(
            self,
            micros,
            lambda micro, out: loss(taken[id(micro)], out),
            lambda model, micro, hidden: project(model, taken[id(micro)], hidden),
            visit,
        )

    Pipeline.forward_backward = wrong


def layer_on_two_stages() -> None:
    """Stages begin one layer too early."""
    right = stages.blocks_of_stage

    def wrong(blocks: int, stage: int, count: int) -> range:
        found = right(blocks, stage, count)
        return range(max(found.start - 1, 0), found.stop)

    stages.blocks_of_stage = wrong


def layer_on_no_stage() -> None:
    """The last stage begins one layer too late."""
    right = stages.blocks_of_stage

    def wrong(blocks: int, stage: int, count: int) -> range:
        found = right(blocks, stage, count)
        return range(found.start + (stage == count - 1), found.stop)

    stages.blocks_of_stage = wrong


# context parallelism


def positions_restart_on_every_rank() -> None:
    """Position ids count the columns that lie here."""
    right = ParallelPolicy._run

    def wrong(self: ParallelPolicy, model: Any, micro: Microbatch, hidden: Tensor | None = None) -> Tensor:
        columns = torch.arange(micro.input_ids.shape[1]).expand_as(micro.input_ids)
        return right(self, model, replace(micro, position_ids=columns), hidden)

    ParallelPolicy._run = wrong


def local_mask(make: Callable[[ContextSegments], Tensor]) -> None:
    ContextSegments.local_mask = property(make)


def mask_of_the_first_columns() -> None:
    """The causal mask counts the columns that lie here from 0."""
    local_mask(lambda self: visible(self.whole, self.table[0], self.table.flatten()))


def leak_over_the_border() -> None:
    """Everything on earlier ranks is seen, of other samples too."""

    def wrong(self: ContextSegments) -> Tensor:
        right = visible(self.whole, self.table[self.rank], self.table.flatten())
        return right | (self.table.flatten() < self.table[self.rank].min())

    local_mask(wrong)


def zigzag_read_in_order() -> None:
    """Columns that were gathered rank after rank are taken for columns in order."""
    columns = lambda self: torch.arange(self.table.numel())  # noqa: E731
    ContextSegments.gathered_mask = property(lambda self: visible(self.whole, columns(self), columns(self)))


def partial_softmax_not_rescaled() -> None:
    """Blocks of keys are added relative to different maxima."""
    ring._kept = lambda maximum, raised: torch.where(
        maximum.isinf(), torch.zeros_like(maximum), torch.ones_like(maximum)
    )


def gradients_of_keys_stay_away() -> None:
    """Gradients of keys and values end their round one rank from home."""
    right = ring._Ring.backward

    def wrong(ctx: Any, grad: Tensor) -> Any:
        query, pair, *rest = right(ctx, grad)
        return query, of_others(pair)[1 - dist.get_rank()], *rest

    ring._Ring.backward = staticmethod(wrong)


def key_heads_tiled() -> None:
    """Heads of keys are repeated in turn, 0 1 0 1, and not each by itself, 0 0 1 1."""
    right = Tensor.repeat_interleave

    def wrong(self: Tensor, repeats: Any, dim: int | None = None, **rest: Any) -> Tensor:
        if dim == 1 and self.dim() == 4:
            return self.repeat(1, repeats, 1, 1)
        return right(self, repeats, dim, **rest)

    Tensor.repeat_interleave = wrong


def labels_rolled_after_the_split() -> None:
    """The last column of a rank predicts the first one of the same rank."""

    right: Any = TokenBatch._project

    def wrong(self: TokenBatch, *args: Any) -> Microbatch:
        micro: Microbatch = right(self, *args)
        targets = micro.target_ids.clone()
        targets[:, -1] = micro.input_ids[:, 0]
        return replace(micro, targets=targets.reshape(-1)[micro.local])

    TokenBatch._project = wrong  # type: ignore[method-assign]  # the fault


def ratio_of_own_columns() -> None:
    """The ratio of a sequence is that of its tokens on this rank."""
    ParallelPolicy.sum_over_context_parallel = lambda self, values: values


def sum_across_without_gradient() -> None:
    """The ratio of a sequence is right, and its gradient that of a rank's own tokens."""
    right = ParallelPolicy.sum_over_context_parallel

    def wrong(self: ParallelPolicy, values: Tensor) -> Tensor:
        return values + (right(self, values) - values).detach()

    ParallelPolicy.sum_over_context_parallel = wrong


def exchange_into_strided_memory() -> None:
    """gloo fills a transposed tensor as if it were contiguous."""
    right = exchange._all_to_all

    def wrong(rows: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
        out = torch.empty_like(rows)
        if out.is_contiguous():
            return right(rows, sent, received, group)
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=group)
        return out

    exchange._all_to_all = wrong


# experts


def rows_to_the_wrong_expert() -> None:
    """Each rank counts its experts from the other end."""
    right = expert._run
    expert._run = lambda module, rows, experts: right(module, rows, module.num_experts - 1 - experts)


def weighted(change: Callable[[Tensor], Tensor]) -> None:
    right = expert._added
    expert._added = lambda rows, place, index, weights, dtype: right(
        rows, place, index, change(weights), dtype
    )


def combined_without_weights() -> None:
    weighted(torch.ones_like)


def weighted_twice() -> None:
    """By the sender, and by the combine."""
    weighted(torch.square)


def router_without_gradient() -> None:
    """The loss is right, and the router learns nothing from it."""
    weighted(torch.detach)


def rows_of_later_experts_dropped() -> None:
    """Ids count all experts, and a rank other than the first finds none of them in its own list."""
    right = expert._run
    expert._run = lambda *args: right(*args) * float(on_rank(0))


def experts_summed_over_their_owners() -> Prepare:
    """Different experts of several ranks are added as if they were replicas."""

    def change(run: Run) -> None:
        model = run.trainer.policy
        found = sums_of(run)
        (group,) = {id(group): group for _, group in found}.values()
        found.append((sorted(model._experts), group))

    return change


def experts_times_ranks() -> Prepare:
    """An expert has met the tokens of all ranks, and its gradient is multiplied for them once more."""

    def change(run: Run) -> None:
        model = run.trainer.policy
        right = model.forward_backward

        def wrong(*args: Any) -> Any:
            results = right(*args)
            for name, parameter in model.named_parameters():
                if name in model._experts:
                    parameter.grad *= dist.get_world_size()
            return results

        model.forward_backward = wrong

    return change


# adapters


def adapter_off_on_one_rank() -> Prepare:
    """One rank computes with the base model."""

    def prepare(run: Run) -> None:
        if on_rank(1):
            adapter.adapter_switched_off(run)

    return prepare


def factors_a_not_summed() -> Prepare:
    """Replicas keep their own gradients of the factors A."""
    return lambda run: without(run, ".lora_A.")


def gradient_between_factors_not_summed() -> None:
    """A gets from each rank the gradient through that rank's outputs alone."""

    def forward(self: OutputFactor, module: nn.Linear, mesh: Any, x: Tensor) -> Tensor:
        return linear(x, local(module.weight))

    OutputFactor._forward = forward


def factors_b_of_own_tokens() -> None:
    """Under sequence parallelism the whole factors B keep the gradients of a rank's own tokens."""
    right = Family.partial
    Family.partial = lambda *args: (name for name in right(*args) if ".lora_B." not in name)


def factors_a_of_gathered_tokens_summed() -> None:
    """Gradients of factors A, which saw all tokens on every rank, are summed over the ranks."""
    Family._factors_of_gathered = lambda *args: iter(())
