"""DeepSpeed: ZeRO of every stage, AutoTP and Ulysses, around a training loop with the case's objective.

DeepSpeed has no policy loss of its own: the loop computes that of the case from logits and multiplies it by the data
ranks and the microbatches, since the engine divides by both. The one loss that it has, that of a vocabulary-parallel
head, is used where a layout says so. Gradients and parameters are the engine's, gathered by its own doors
(`safe_get_full_grad` and `safe_get_full_fp32_param`), so each rank tells the whole tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regress.systems.adapters.deepspeed_cells import CELLS
from regress.systems.exported import ExportedCase, Sample
from regress.systems.loop_numbers import group_advantages, manifest_config
from regress.systems.protocol import Cell, Engaged, Shim, System


class DeepSpeed(System):
    """Runs `deepspeed.initialize`, its backward and its step on samples of the case."""

    name = "deepspeed"
    version_of = "deepspeed"
    requirements = (
        "deepspeed==0.19.8",
        "hjson==3.1.0",
        "ninja==1.13.2",
        "py-cpuinfo==9.0.0",
        "einops==0.8.2",
        "msgpack==1.2.4",
        "psutil==7.2.2",
        "pydantic==2.14.3",
        "pydantic-core==2.50.4",
        "annotated-types==0.8.0",
        "typing-inspection==0.4.5",
    )
    modules = ("deepspeed", "transformers.models.auto.modeling_auto", "regress.capture.recording")
    shims: tuple[Shim, ...] = ()
    environ: Mapping[str, str] = {"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1"}
    builds = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from CELLS

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the loss of the loop: GRPO as a token mean without a KL term, or the likelihood."""
        own = (
            {"algorithm.preset": "sft"}
            if cell.objective == "sft"
            else {
                "algorithm.preset": "grpo",
                "algorithm.kl_coef": 0.0,
                "algorithm.aggregation": "token-mean",
                "algorithm.old_log_probs": "sampler",
            }
        )
        clip = {} if cell.layout.settings.get("clip", True) else {"optimizer.max_grad_norm": None}
        return {**own, **clip, "rollout_worker.temperature": 1.0, "optimizer.weight_decay": 0.0}

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Initialize the engine."""
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM

        self.case, self.cell, self.folder = case, cell, folder
        self.rank = int(os.environ.get("RANK", "0"))
        settings = cell.layout.settings
        self.tensor = int(settings.get("tensor", 1))
        self.sequence = int(settings.get("sequence", 1))
        self.data_ranks = cell.layout.ranks // self.tensor // self.sequence
        os.environ.setdefault("CCL_LOCAL_RANK", os.environ.get("LOCAL_RANK", "0"))
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        options = {"experts_implementation": "eager"} if case.name == "moe" else {}
        model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32, **options)
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=case.learning_rate(0),
            betas=tuple(case.optimizer["betas"]),
            eps=case.optimizer["eps"],
            weight_decay=0.0,
        )
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=self._config(),
            dist_init_required=False,
            mpu=self._ulysses(model),
        )
        self.names = dict(self.engine.module.named_parameters())

    def _ulysses(self, model: Any) -> Any:
        """Register sequence parallelism with transformers; return the groups, None without it."""
        if self.sequence == 1:
            return None
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        rows = 1 if self.cell.layout.settings.get("packed") else int(self.cell.layout.settings["per_device"])
        return UlyssesSPAttentionHF.register_with_transformers(
            model,
            core_attn_implementation="sdpa",
            sequence_parallel_size=self.sequence,
            micro_batch_size=rows,
            seq_length_is_variable=True,
        )

    def _config(self) -> dict[str, Any]:
        settings = self.cell.layout.settings
        per_device = int(settings["per_device"])
        samples = len(self.case.steps[0]) // self.data_ranks
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": per_device,
            "gradient_accumulation_steps": samples // per_device,
            "gradient_clipping": (self.case.numbers["max_grad_norm"] or 0.0) * settings.get("clip", True),
            "zero_optimization": {"stage": settings["stage"], **settings.get("zero", {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
            **settings.get("config", {}),
        }
        if self.tensor > 1:
            whole = not settings.get("own_loss", False)
            found["tensor_parallel"] = {"autotp_size": self.tensor}
            if whole:  # a tied head is split by default, and its logits are then a part of the vocabulary
                found["tensor_parallel"]["vocab_parallel_lm_head"] = False
        if self.cell.precision == "bfloat16":
            found["bf16"] = {"enabled": True}
        return found

    def step(self) -> None:
        """Make the updates, with taps around the engine's calls."""
        from regress.dump.dump_manifest import Provenance
        from regress.dump.recorder import Recorder
        from regress.dump.taps import at, recording

        mesh = {
            "world_size": self.cell.layout.ranks,
            "dp": self.data_ranks,
            "cp": self.sequence,
            "tp": self.tensor,
        }
        clip = self.cell.layout.settings.get("clip", True)
        config = manifest_config(self.case, self.name, self.cell.precision, clip=clip)
        origin = Provenance(config=config, mesh=mesh)
        options = dict.fromkeys(_TYPES, True)
        recorder = Recorder(
            str(self.folder), options=options, provenance=origin, rank=self.rank, gather=self._gather
        )
        self.engine.train()
        with recording(recorder):
            for step in range(self.cell.updates):
                with at(step=step, rank=self.rank):
                    self._update(step)

    def _update(self, step: int) -> None:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

        from regress.dump.taps import at, tap

        samples = self.case.steps[step]
        advantages = group_advantages(samples) if self.cell.objective == "grpo" else [1.0] * len(samples)
        group = self.tensor * self.sequence
        mine = list(zip(samples, advantages, strict=True))[self.rank // group :: self.data_ranks]
        size = int(self.cell.layout.settings["per_device"])
        micros = [mine[start : start + size] for start in range(0, len(mine), size)]
        for number, micro in enumerate(micros):
            with at(micro=number):
                share = self._share(micro, self.case.tokens_of_loss(step))
            self.engine.backward(share * self.data_ranks * len(micros))
            if number < len(micros) - 1:
                self.engine.step()
        stage = self.engine.zero_optimization_stage()
        gradients = {
            name: p.grad if stage == 0 and p.grad is not None else safe_get_full_grad(p)
            for name, p in self.names.items()
        }
        whole = {name: self._whole(name, value) for name, value in gradients.items() if value is not None}
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        tap("gradient", whole, meta=None if norm is None else {"grad_norm": float(norm)})
        # up to stage 2 a rank has all parameters, those that the next forward pass uses
        after = {name: p if stage < 3 else safe_get_full_fp32_param(p) for name, p in self.names.items()}
        tap("param", {name: self._whole(name, value) for name, value in after.items() if value is not None})

    def _share(self, micro: list[tuple[Sample, float]], tokens: int) -> Any:
        """Return the microbatch's share of the loss, a sum over its tokens divided by those of the window."""
        import torch

        from regress.dump.taps import tap
        from regress.systems.adapters.deepspeed_batches import batch_of

        settings = self.cell.layout.settings
        part = self.rank // self.tensor % self.sequence, self.sequence
        batch = batch_of(micro, part, packed=bool(settings.get("packed")))
        tap("batch_inputs", batch.inputs, **batch.of_inputs)
        place = batch.of_log_probs
        given = {key: value for key, value in batch.inputs.items() if key in batch.passed}
        if settings.get("own_loss"):
            found = self.engine(**given, use_cache=False, labels=batch.labels, num_items_in_batch=tokens).loss
            tap("loss", {"loss": found.detach()}, **place)
            return found
        logits = self.engine(**given, use_cache=False).logits
        log_probs = logits.float().log_softmax(-1).gather(-1, batch.next_ids[..., None])[..., 0]
        losses = -log_probs * batch.advantage
        if self.cell.objective == "grpo":
            ratio = (log_probs - batch.old).exp()
            losses = -torch.minimum(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
        share: Any = (losses * batch.mask).sum() / tokens
        (slope,) = torch.autograd.grad(share, log_probs, retain_graph=True)
        values = {"log_probs": log_probs.detach() * batch.mask, "response_mask": batch.mask}
        tap("forward_data", values, **place)
        tap("loss", {"loss": share.detach()}, **place)
        tap("token_gradient", {"token_gradient": slope * batch.mask}, **place)
        return share

    def _whole(self, name: str, value: Any) -> Any:
        """Return a whole tensor from the parts that tensor parallelism left on ranks; all ranks call it."""
        import torch

        shape, found = self.shapes[name], value.detach().float().clone()
        if tuple(found.shape) == shape:
            return found
        dim = next(i for i, size in enumerate(shape) if found.shape[i] != size)
        parts = [torch.empty_like(found) for _ in range(self.cell.layout.ranks)]
        torch.distributed.all_gather(parts, found.contiguous())
        first = self.rank // self.tensor * self.tensor
        return torch.cat(parts[first : first + self.tensor], dim)

    def _gather(self, value: Any) -> list[Any]:
        import torch

        found: list[Any] = [None] * self.cell.layout.ranks
        torch.distributed.all_gather_object(found, value)
        return found

    def engaged(self) -> Engaged:
        """Return the stage, the optimizer's class and options, the split modules, and the collectives."""
        from regress.systems.layout_evidence import collectives

        whole = sum(_count(shape) for shape in self.shapes.values())
        facts: dict[str, Any] = {
            "stage": self.engine.zero_optimization_stage(),
            "optimizer": type(self.engine.optimizer).__name__,
            "modules": sorted({type(module).__name__ for module in self.engine.module.modules()} & _SPLIT),
            "held": round(sum(p.numel() for p in self.names.values()) / whole, 3),
            "sequence": self.engine.sequence_parallel_size,
            "options": self._options(),
            "collectives": collectives(),
            "updates": self.engine.global_steps,
        }
        return Engaged(facts, "; ".join(self._lacks(facts)))

    def _options(self) -> dict[str, Any]:
        """Return what the optimizer took over of the options of its stage, as far as it tells."""
        own = self.engine.optimizer
        found: dict[str, Any] = {}
        for name in self.cell.layout.settings.get("zero", {}):
            known = ("cpu_offload", name) if name == "offload_optimizer" else (name,)
            values = [getattr(own, one) for one in known if hasattr(own, one)]
            if values:
                found[name] = values[0] if isinstance(values[0], bool | int | float) else bool(values[0])
        return found

    def _lacks(self, facts: Mapping[str, Any]) -> Iterator[str]:
        settings = self.cell.layout.settings
        zero = settings.get("zero", {})
        if facts["updates"] != self.cell.updates:
            yield f"it made {facts['updates']} updates of {self.cell.updates}"
        if facts["stage"] != settings["stage"]:
            yield f"the engine is of stage {facts['stage']}"
        if settings["stage"] and "zero" not in facts["optimizer"].lower():
            yield f"the optimizer is a {facts['optimizer']}"
        if zero.get("stage3_param_persistence_threshold") == 0 and facts["held"] > 0.1:
            yield f"a rank holds {facts['held']} of the parameters between the passes"
        for name, value in facts["options"].items():
            if value != (bool(zero[name]) if isinstance(zero[name], Mapping) else zero[name]):
                yield f"{name} is {value}"
        if self.tensor > 1 and not set(facts["modules"]) & _SPLIT - _VOCABULARY:
            yield "no module was split by AutoTP"
        if settings.get("own_loss") and not set(facts["modules"]) >= _VOCABULARY:
            yield "head and embedding are not split by the vocabulary"
        if facts["sequence"] != self.sequence:
            yield f"the engine knows {facts['sequence']} parts of a sequence"
        if self.cell.layout.ranks > 1 and not facts["collectives"]:
            yield "nothing was communicated"

    def close(self) -> None:
        """Destroy the engine."""
        if getattr(self, "engine", None) is not None:
            self.engine.destroy()


_TYPES = ("batch_inputs", "forward_data", "loss", "token_gradient", "gradient", "param")
_VOCABULARY = {"VocabParallelLinear", "VocabParallelEmbedding"}
_SPLIT = {"LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce"} | _VOCABULARY


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
