"""Policy whose model and batches lie on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from transformers import PreTrainedModel

from regress.engine import step_taps
from regress.engine.adapters.adapter_parameters import adapted_experts, has_adapter, trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.engine_ranks import raise_on_all_ranks
from regress.engine.local_tensor import local
from regress.engine.log_prob_projection import Entropy
from regress.engine.mini_batch import Microbatch
from regress.engine.numeric_types import DTYPES
from regress.engine.policy_interface import Loss, Result
from regress.errors import ConfigError
from regress.grpo.selective_log_softmax import TokenLogProbs
from regress.layout import ShardLayout
from regress.parallel import (
    context_parallel,
    expert_parallel,
    fsdp,
    parameter_shards,
    tensor_parallel,
    transformers_tensor_parallel,
)
from regress.parallel.data_parallel import replicated
from regress.parallel.gradient_reduction import place_gradients, sum_gradients
from regress.parallel.pipeline_parallel import Pipeline
from regress.parallel.pipeline_schedules import ranks_of_stages
from regress.parallel.pipeline_stages import Stages, split
from regress.parallel.process_groups import ProcessGroups
from regress.parallel.vocabulary_log_probs import vocab_parallel_log_probs


class ParallelPolicy(LocalPolicy):
    """Model split over the ranks of a world; every rank builds one from the same whole model.

    The model is cut into stages; in each stage the experts and then the matrix products are split, and the
    remaining parameters are sharded or replicated.

    Args:
        model: the whole model, the same on every rank; it is cut in place.
        world: the ranks.
        settings: arguments of `LocalPolicy`.

    Raises:
        ConfigError: if the model cannot be split as the configuration asks.
    """

    def __init__(self, model: PreTrainedModel, world: ProcessGroups, **settings: Any) -> None:
        self._world = world
        _require_plain_experts(model, world)
        self._whole = copy.deepcopy(model)
        self._stages = _cut(model, world)
        self._trained = any(parameter.requires_grad for parameter in model.parameters())
        self._experts: dict[str, ShardLayout] = {}
        self._tensor: list[tensor_parallel.TensorPlan] = []
        raise_on_all_ranks(world, self._split)
        super().__init__(self._stages.models[-1], **settings)
        self._replicas = replicated(self.model, world) if self._trained else None
        if self._replicas is not None:
            self._callable = self._replicas.module
        self._pipeline = self._piped()
        self._summed = self._sums()
        self._shards = {name: self._shard(name, parameter) for name, parameter in self.named_parameters()}
        self._owned = self._owners()

    def _split(self) -> None:
        for stage in self._stages.models:
            self._split_stage(stage)

    def _split_stage(self, stage: PreTrainedModel) -> None:
        """Split one stage along every dimension but the pipeline."""
        world, config, sizes = self._world, self._world.config, self._world.mesh.sizes
        if sizes["ep"] > 1:
            self._experts |= expert_parallel.apply(stage, world.device_mesh["ep"]).experts
        if sizes["tp"] > 1:
            self._tensor.append(_tensor_parallel(stage, world))
        if sizes["cp"] > 1:
            context_parallel.apply(stage, config.cp_method, sizes["cp"], tp=sizes["tp"])
        if sizes["fsdp"] > 1:
            names = ("dp", "fsdp") if config.data_parallel == "hsdp" else "fsdp"
            fsdp.apply(
                stage,
                world.device_mesh[names],
                reshard_after_forward=config.reshard_after_forward,
                param_dtype=_dtype(config.fsdp_param_dtype),
                reduce_dtype=_dtype(config.fsdp_reduce_dtype),
            )

    def _piped(self) -> Pipeline | None:
        group = self._world.group("pp")
        if group is None:
            return None
        config = self._world.config
        return Pipeline(
            self._stages,
            group,
            schedule=config.pp_schedule,
            run=self._run,
            hidden_dtype=_dtype(config.fsdp_param_dtype),
        )

    @property
    def computes_losses(self) -> bool:
        """True if the last stage of the pipeline lies on this rank."""
        return self._pipeline is None or self._pipeline.is_last

    @property
    def sums_gradients(self) -> bool:
        """True: gradients of earlier passes must be set aside."""
        return True

    @property
    def backward_scale(self) -> float:
        """Factor that each share of the loss is multiplied by before the backward pass, because replicas
        are averaged.
        """
        return 1.0 if self._replicas is None else float(self._replicas.size)

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        """Return log-probs and, if wanted, entropies of the loss tokens of each microbatch; zeros on ranks that do not
        compute them.
        """
        if self._pipeline is None:
            found = super().values(microbatches, entropy=entropy)
        else:
            mode: Entropy = "no_grad" if entropy else False
            found = self._pipeline.values(
                microbatches,
                lambda model, micro, hidden: self._forward(micro, entropy=mode, model=model, hidden=hidden),
            )
        for stage in self._stages.models:
            fsdp.reshard(stage)
        return found

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Loss[Result]) -> list[Result]:
        """Run the passes of this rank, then sum gradients over all ranks; see :class:`Policy`."""
        if self._pipeline is None:
            results = super().forward_backward(microbatches, loss)
        else:
            results = self._pipeline.forward_backward(
                microbatches,
                loss,
                lambda model, micro, hidden: self._forward(
                    micro, entropy=self._entropy, model=model, hidden=hidden
                ),
                step_taps.inputs,
            )
        place_gradients(parameter for _, parameter in self.named_parameters())
        sum_gradients(dict(self.named_parameters()), self._summed)
        if self._pipeline is not None:
            self._pipeline.sum_tied()
        return results

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for stage in self._stages.models:
            stage.zero_grad(set_to_none=True)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters on this rank, whole or in part, under the names of the whole model."""
        return self._stages.named_parameters()

    def modules(self) -> dict[str, nn.Module]:
        """Return the modules that run on this rank, by name."""
        return self._stages.modules()

    def shard(self, name: str) -> ShardLayout | None:
        """Return the part of the parameter of that name that lies on this rank; ``None`` for all of it."""
        if name not in self._shards:  # it was tied to another parameter when the policy was made
            self._shards[name] = self._shard(name, dict(self.named_parameters())[name])
        return self._shards[name]

    @property
    def rearranges(self) -> bool:
        """True if the first backward pass decides how gradients are summed in all later ones."""
        return self._replicas is not None

    @property
    def owned(self) -> frozenset[str]:
        """Names of the parameters whose part on this rank lies on no lower rank."""
        return self._owned

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return the part of a whole tensor that corresponds to this rank's part of the named parameter,
        placed like it.
        """
        outer = self._experts.get(name)
        rows = whole if outer is None else parameter_shards.project(outer, whole)
        return parameter_shards.like(dict(self.named_parameters())[name], rows)

    def output_shard(self, module: str, shape: tuple[int, ...]) -> ShardLayout | None:
        """Return the part of a module's whole output that an output of this shape is; ``None`` for all of it."""
        found = (plan.output_layout(module, shape) for plan in self._tensor)
        return next((layout for layout in found if layout is not None), None)

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks of the same sequences; its gradient is the sum of theirs."""
        group = self._world.group("cp")
        return values if group is None else all_reduce(values, group=group)

    @property
    def architecture(self) -> PreTrainedModel:
        """Copy of the whole model; its values may be out of date."""
        return self._whole

    def whole_model(self) -> PreTrainedModel:
        """Return the one copy of the whole model, with current parameters; all ranks call this together."""
        self._refresh()
        return self._whole

    def _token_log_probs(self, logits: Tensor, targets: Tensor, entropy: Entropy) -> TokenLogProbs:
        ranges = [plan.vocabulary for plan in self._tensor if plan.vocabulary is not None]
        group = self._world.group("tp")
        if not ranges or group is None:
            return super()._token_log_probs(logits, targets, entropy)
        return vocab_parallel_log_probs(
            logits,
            targets,
            start=ranges[-1][0],
            group=group,
            temperature=self.temperature,
            vocab_chunk=self.pieces.columns,
            block=self.pieces.elements,
            entropy=entropy,
        )

    def _attention(self, micro: Microbatch) -> dict[str, object]:
        group = self._world.group("cp")
        if group is None:
            return super()._attention(micro)
        plan, width = self._world.plan, micro.place.whole.shape[1]
        ranks = self._world.mesh.group(self._world.rank, "cp")
        rows = [
            [c for first, last in plan.columns(width, rank) for c in range(first, last)] for rank in ranks
        ]
        table = torch.tensor(rows, device=self.device)
        return {
            "attention_mask": None,
            "context": context_parallel.ContextSegments(micro.place.whole, table, group),
        }

    def _accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if self._replicas is None or last else self._replicas.no_sync()

    def _backward(self, share: Tensor) -> None:
        if self._replicas is None:
            share.backward()
        else:
            self._replicas.backward(share * self.backward_scale)

    def _total_norm(self, norms: Mapping[str, Tensor]) -> Tensor:
        """Return the total 2-norm, counting every element of the gradient once: on the rank that owns it."""
        squares = [norm.double().square() for name, norm in norms.items() if name in self._owned]
        none = torch.zeros((), dtype=torch.float64, device=self.device)
        total = torch.stack([none, *squares]).sum()
        dist.all_reduce(total)
        return total.sqrt().to(self.log_prob_dtype)

    def _shard(self, name: str, parameter: nn.Parameter) -> ShardLayout | None:
        inner = parameter_shards.of(parameter)
        outer = self._experts.get(name)
        layout = inner if outer is None else inner.inside(outer)
        return None if layout.is_whole else layout

    def _sums(self) -> list[tuple[list[str], dist.ProcessGroup]]:
        """Return the gradients to sum, by group of ranks; every rank makes every group, whatever it holds itself."""
        data = ["dp", "cp"]
        if self._replicas is not None or self._world.config.data_parallel == "hsdp":
            data = [name for name in data if name == "cp" and self._replicas is None]
        partial = {name for plan in self._tensor for name in plan.partial}
        found = []
        for dims, chosen in (
            (("ep", *data), lambda name: name not in self._experts and name not in partial),
            (("ep", *data, "tp"), lambda name: name not in self._experts and name in partial),
            (tuple(data), lambda name: name in self._experts and name not in partial),
            ((*data, "tp"), lambda name: name in self._experts and name in partial),
        ):
            group = self._world.group(*dims) if dims else None
            names = [name for name, _ in self.named_parameters() if chosen(name)]
            if group is not None and names and self._trained:
                found.append((names, group))
        return found

    def _owners(self) -> frozenset[str]:
        """Return the parameters whose part on this rank lies on no lower rank."""
        own = self._shards
        earlier = self._world.gather(own)[: self._world.rank]
        return frozenset(
            name
            for name, part in own.items()
            if not any(name in other and other[name] == part for other in earlier)
        )

    @torch.no_grad()
    def _refresh(self) -> None:
        """Gather all parameters into the copy of the whole model."""
        own = {
            name: (self.shard(name), local(parameter).cpu())
            for name, parameter in self.named_parameters()
            if name in self._owned
        }
        whole = dict(trained_parameters(self._whole))
        for part in self._world.gather(own):
            for name, (shard, values) in part.items():
                target = whole[name].view(-1)
                flat = values.reshape(-1).to(target.device)
                if shard is None:
                    target.copy_(flat)
                else:
                    target[torch.from_numpy(shard.indices()).to(target.device)] = flat


def _require_plain_experts(model: PreTrainedModel, world: ProcessGroups) -> None:
    """Refuse to split experts whose adapters peft computes as whole weights."""
    name = adapted_experts(model)
    split = next((key for key in ("pp", "fsdp", "ep", "tp") if world.mesh.sizes[key] > 1), None)
    if name is not None and split is not None:
        raise ConfigError(f"""parallel.{split}={world.mesh.sizes[split]} splits the model, and model.lora.target_modules
        adapts the experts {name}, which peft computes as whole weights; leave them out there, or set
        parallel.{split}=1""")


def _cut(model: PreTrainedModel, world: ProcessGroups) -> Stages:
    """Return the stages of this rank; without a pipeline the model is the only one."""
    pp = world.mesh.pp
    if pp == 1:
        return Stages((model,), (0,), 1, {}, ())
    place = world.mesh.coordinates(world.rank)["pp"]
    ranks = ranks_of_stages(world.config.pp_schedule, pp, world.config.pp_stages_per_rank)
    stages = split(model, [stage for stage, rank in enumerate(ranks) if rank == place], len(ranks))
    if has_adapter(model) and stages.indices[0] == 0:
        # a stage takes part in the backward pass also where nothing of it is trained
        stages.models[0].enable_input_require_grads()
    return stages


def _tensor_parallel(stage: PreTrainedModel, world: ProcessGroups) -> tensor_parallel.TensorPlan:
    mesh, config = world.device_mesh["tp"], world.config
    if config.tp_implementation == "transformers":
        return transformers_tensor_parallel.apply(stage, mesh)
    return tensor_parallel.apply(stage, mesh, sequence_parallel=config.sequence_parallel)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]
