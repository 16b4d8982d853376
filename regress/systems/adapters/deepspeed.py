"""DeepSpeed: ZeRO of every stage, and AutoTP, around a training loop with the case's objective.

DeepSpeed has no loss of its own: the loop computes that of the case from logits and multiplies it by the ranks and the
microbatches, since the engine divides by both. Gradients and parameters are the engine's, gathered by its own door
(`safe_get_full_grad` and `safe_get_full_fp32_param`), so each rank tells the whole tensor.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regress.systems.exported import ExportedCase, Sample
from regress.systems.own_loop import group_advantages, loss_mask, sampler_log_probs
from regress.systems.protocol import Cell, Engaged, Layout, Shim, System


def _layout(name: str, ranks: int = 2, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


def _zero(stage: int, name: str = "", ranks: int = 2, per_device: int = 1, **options: Any) -> Layout:
    title = f"zero{stage}-dp{ranks}" + (f"-{name}" if name else "")
    return _layout(title, ranks, stage=stage, per_device=per_device, zero=options)


_PERSIST = {"stage3_param_persistence_threshold": 0}

CELLS = (
    Cell(_zero(0), "grpo", updates=2),
    Cell(_zero(1), "grpo", updates=2),
    Cell(_zero(2), "grpo", updates=2),
    Cell(_zero(3), "grpo", updates=2),
    Cell(_zero(3, "sharded", **_PERSIST), "grpo", updates=2),
    Cell(_zero(1, "batches", per_device=2), "grpo"),
    Cell(_zero(2, "batches", per_device=3), "grpo", "tied"),
    Cell(_zero(3, "batches", per_device=3, **_PERSIST), "grpo", "tied"),
    Cell(_zero(2, "overlap", overlap_comm=True), "grpo"),
    Cell(_zero(2, "non-contiguous", contiguous_gradients=False), "grpo"),
    Cell(_zero(1, "small-buckets", reduce_bucket_size=512, allgather_bucket_size=512), "grpo"),
    Cell(_zero(2, "small-buckets", reduce_bucket_size=512), "grpo"),
    Cell(_zero(1, ranks=4), "grpo"),
    Cell(_zero(2, ranks=4), "grpo", "tied"),
    Cell(_zero(3, ranks=4), "grpo"),
    Cell(_zero(1), "grpo", "gpt2"),
    Cell(_zero(2), "grpo", "gpt2"),
    Cell(_zero(3, "sharded", **_PERSIST), "grpo", "gpt2"),
    Cell(_zero(2), "grpo", "moe"),
    Cell(_zero(2), "sft", updates=2),
    Cell(_zero(3, "sharded", **_PERSIST), "sft", "tied"),
    Cell(_layout("autotp2", 2, stage=0, per_device=1, tensor=2), "grpo"),
    Cell(_layout("autotp2", 2, stage=0, per_device=1, tensor=2), "grpo", "tied"),
    Cell(_layout("autotp2-zero1", 2, stage=1, per_device=1, tensor=2), "grpo", "tied"),
    Cell(_layout("autotp2-zero2-dp2", 4, stage=2, per_device=1, tensor=2), "grpo", "tied"),
)


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
        return {**own, "rollout_worker.temperature": 1.0, "optimizer.weight_decay": 0.0}

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Initialize the engine."""
        import deepspeed
        import torch
        from transformers import AutoModelForCausalLM

        self.case, self.cell, self.folder = case, cell, folder
        self.rank = int(os.environ.get("RANK", "0"))
        settings = cell.layout.settings
        self.tensor = int(settings.get("tensor", 1))
        self.data_ranks = cell.layout.ranks // self.tensor
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
            model=model, optimizer=optimizer, config=self._config(), dist_init_required=False
        )
        self.names = dict(self.engine.module.named_parameters())

    def _config(self) -> dict[str, Any]:
        settings = self.cell.layout.settings
        per_device = int(settings["per_device"])
        samples = len(self.case.steps[0]) // self.data_ranks
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": per_device,
            "gradient_accumulation_steps": samples // per_device,
            "gradient_clipping": self.case.numbers["max_grad_norm"] or 0.0,
            "zero_optimization": {"stage": settings["stage"], **settings.get("zero", {})},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "communication_data_type": "fp32",
        }
        if self.tensor > 1:
            found["tensor_parallel"] = {"autotp_size": self.tensor}
        return found

    def step(self) -> None:
        """Make the updates, with taps around the engine's calls."""
        from regress.dump.manifest import Provenance
        from regress.dump.recorder import Recorder
        from regress.dump.taps import at, recording

        mesh = {"world_size": self.cell.layout.ranks, "dp": self.data_ranks, "tp": self.tensor}
        origin = Provenance(
            config={"model": {"dtype": "float32"}, "capture": {"system": self.name}}, mesh=mesh
        )
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
        mine = list(zip(samples, advantages, strict=True))[self.rank // self.tensor :: self.data_ranks]
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
        from regress.layout import Segment, TokenLayout

        rows = [sample.tokens for sample, _ in micro]
        B, T = len(rows), max(map(len, rows))
        ids = torch.tensor([row + [0] * (T - len(row)) for row in rows])
        seen = torch.tensor([[1] * len(row) + [0] * (T - len(row)) for row in rows])
        mask = torch.tensor([[*loss_mask(sample), *[0] * (T - len(sample.tokens))] for sample, _ in micro])
        logits = self.engine(input_ids=ids, attention_mask=seen, use_cache=False).logits[:, :-1]
        found = logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        log_probs = torch.nn.functional.pad(found, (1, 0))
        advantage = torch.tensor([value for _, value in micro])[:, None].expand(B, T)
        losses = -log_probs * advantage
        if self.cell.objective == "grpo":
            old = torch.tensor(
                [[*sampler_log_probs(sample), *[0.0] * (T - len(sample.tokens))] for sample, _ in micro]
            )
            ratio = (log_probs - old).exp()
            losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        share: Any = (losses * mask).sum() / tokens
        (slope,) = torch.autograd.grad(share, log_probs, retain_graph=True)
        layout = TokenLayout((B, T), tuple(Segment(row, 0, len(own), row, 0) for row, own in enumerate(rows)))
        place: dict[str, Any] = {
            "layout": layout,
            "meta": {"samples": [[*sample.key] for sample, _ in micro]},
        }
        tap("batch_inputs", {"input_ids": ids, "attention_mask": seen}, **place)
        tap("forward_data", {"log_probs": log_probs.detach() * mask, "response_mask": mask}, **place)
        tap("loss", {"loss": share.detach()}, **place)
        tap("token_gradient", {"token_gradient": slope * mask}, **place)
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
        """Return the stage, the optimizer's class, the part of parameters that is held, and the collectives."""
        from regress.systems.evidence import collectives

        settings = self.cell.layout.settings
        whole = sum(_count(shape) for shape in self.shapes.values())
        facts: dict[str, Any] = {
            "stage": self.engine.zero_optimization_stage(),
            "optimizer": type(self.engine.optimizer).__name__,
            "modules": sorted({type(module).__name__ for module in self.engine.module.modules()} & _SPLIT),
            "held": round(sum(p.numel() for p in self.names.values()) / whole, 3),
            "collectives": collectives(),
            "updates": self.engine.global_steps,
        }
        lacks = []
        if facts["updates"] != self.cell.updates:
            lacks.append(f"it made {facts['updates']} updates of {self.cell.updates}")
        if facts["stage"] != settings["stage"]:
            lacks.append(f"the engine is of stage {facts['stage']}")
        if settings["stage"] and "ZeRO" not in facts["optimizer"] and "Zero" not in facts["optimizer"]:
            lacks.append(f"the optimizer is a {facts['optimizer']}")
        if settings["stage"] == 3 and settings.get("zero") and facts["held"] > 0.1:
            lacks.append(f"a rank holds {facts['held']} of the parameters between the passes")
        if self.tensor > 1 and not facts["modules"]:
            lacks.append("no module was split by AutoTP")
        if self.cell.layout.ranks > 1 and not facts["collectives"]:
            lacks.append("nothing was communicated")
        return Engaged(facts, "; ".join(lacks))

    def close(self) -> None:
        """Destroy the engine."""
        if getattr(self, "engine", None) is not None:
            self.engine.destroy()


_TYPES = ("batch_inputs", "forward_data", "loss", "token_gradient", "gradient", "param")
_SPLIT = {"LinearLayer", "LinearAllreduce", "LmHeadLinearAllreduce"}


def _count(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
