"""Megatron-core: its GPT model, schedules and optimizer, on samples of the case.

Megatron-core has no policy loss: the function of the log-probs is this adapter's, and each cell counts for its layout,
whose code is Megatron's own: the split layers and the vocabulary-parallel likelihood, the schedule of the pipeline with
its scaling by tokens or microbatches, DDP's buffers, `finalize_model_grads`, clipping and the optimizer. Log-probs are
what the model returns for its labels; gradients are `main_grad` once the schedule has finalized them, each rank's part
under its Hugging Face name (`megatron_names`). Of the distributed optimizer a rank has its own range of the gradients
only; they are gathered from all ranks by the ranges of Megatron's buffer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regress.systems.adapters.megatron_cells import CELLS
from regress.systems.adapters.megatron_evidence import SHIMS, SPLIT, lacking
from regress.systems.adapters.megatron_ranges import finalized_gradients, moment
from regress.systems.exported import ExportedCase, Sample
from regress.systems.loop_numbers import group_advantages, loss_mask, manifest_config, sampler_log_probs
from regress.systems.protocol import Cell, Engaged, System


class Megatron(System):
    """Runs the schedule and the optimizer of megatron-core on a model with the weights of the case."""

    name = "megatron"
    version_of = "megatron-core"
    requirements = ("megatron-core==0.16.1", "einops==0.8.2")
    modules = ("megatron.core", "transformers.models.auto.modeling_auto")
    environ: Mapping[str, str] = {"NVTE_FRAMEWORK": "none"}
    shims = SHIMS

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from CELLS

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the loss of the adapter: GRPO without a KL term over tokens or samples, or the likelihood."""
        aggregation = "seq-mean-token-mean" if cell.objective == "sequence-mean" else "token-mean"
        own = {
            "algorithm.preset": "grpo",
            "algorithm.kl_coef": 0.0,
            "algorithm.aggregation": aggregation,
            "algorithm.old_log_probs": "sampler",
        }
        if cell.objective == "sft":
            own = {"algorithm.preset": "sft"}
        clip = {} if cell.layout.settings.get("clip", True) else {"optimizer.max_grad_norm": None}
        return {**own, **clip, "rollout_worker.temperature": 1.0, "optimizer.weight_decay": 0.0}

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Arrange the ranks and build model, buffers and optimizer."""
        import torch

        from regress.systems.adapters import megatron_shims as shims

        self.case, self.cell, self.folder = case, cell, folder
        self.settings = cell.layout.settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.updates = self.passes = self.wanted_passes = 0
        self.lengths: set[float] = set()
        shims.cuda_on_cpu()
        shims.one_random_state()
        shims.named_as_cuda()
        shims.router_without_engine()
        if not torch.distributed.is_initialized():
            self.scratch = tempfile.TemporaryDirectory(prefix="regress-megatron-")
            store = f"file://{self.scratch.name}/store"
            torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        from megatron.core import parallel_state as ranks

        ranks.initialize_model_parallel(
            self.settings["tp"],
            self.settings["pp"],
            virtual_pipeline_model_parallel_size=self.settings.get("virtual"),
            expert_model_parallel_size=self.settings.get("ep", 1),
            create_gloo_process_groups=True,
        )
        self.share = ranks.get_data_parallel_rank()
        self._build()

    def _build(self) -> None:
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from transformers import AutoModelForCausalLM

        from regress.systems.adapters.megatron_model import build_model, transformer_config

        distributed = bool(self.settings.get("distributed"))
        overlap = bool(self.settings.get("overlap"))
        source = AutoModelForCausalLM.from_pretrained(self.case.model, dtype=torch.float32)
        by_tokens = self.cell.objective != "sequence-mean"
        self.config = transformer_config(source.config, self.settings, by_tokens=by_tokens)
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap and distributed,
            use_distributed_optimizer=distributed,
            average_in_collective=bool(self.settings.get("average")),
            bucket_size=self.settings.get("bucket"),
        )
        self.chunks: list[Any] = []
        self.names: dict[str, Any] = {}
        for stage in range(self.settings.get("virtual") or 1):
            virtual = stage if self.settings.get("virtual") else None
            model = build_model(self.config, source.config, self.settings, virtual)
            self._load(model, source, virtual)
            for layer in model.decoder.layers:
                layer.register_forward_hook(self._seen)
            chunk = DistributedDataParallel(self.config, ddp, model, disable_bucketing=stage > 0)
            self.chunks.append(chunk)
        self.config.finalize_model_grads_func = finalize_model_grads
        if overlap:
            self.config.no_sync_func = self.chunks[0].no_sync
        first, second = self.case.optimizer["betas"]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=self.case.learning_rate(0),
                min_lr=0.0,
                weight_decay=0.0,
                adam_beta1=first,
                adam_beta2=second,
                adam_eps=self.case.optimizer["eps"],
                clip_grad=(self.case.numbers["max_grad_norm"] or 0.0) * self.settings.get("clip", True),
                use_distributed_optimizer=distributed,
                overlap_param_gather=overlap and distributed,
            ),
            self.chunks,
        )
        self.config.grad_scale_func = self.optimizer.scale_loss

    def _seen(self, module: Any, given: Any, found: Any) -> None:
        """Count a pass of a layer, and keep the part of the sequence that it works on."""
        self.passes += 1
        self.lengths.add(found[0].shape[0] / self.width)

    def _load(self, model: Any, source: Any, stage: int | None) -> None:
        """Fill a model from the source, and keep its parameters by their names in the whole model."""
        import torch
        from megatron.core import parallel_state as ranks
        from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

        from regress.systems.adapters.megatron_names import NameMap

        whole = {name: p.detach().numpy() for name, p in source.named_parameters()}
        self.map = NameMap(
            {name: value.shape for name, value in whole.items()},
            source.config.num_attention_heads,
            source.config.num_key_value_heads,
            ranks.get_tensor_model_parallel_rank(),
            self.settings["tp"],
            first_expert=ranks.get_expert_model_parallel_rank() * self._experts(source.config),
        )
        offset = get_transformer_layer_offset(self.config, vp_stage=stage)
        with torch.no_grad():
            for name, p in model.named_parameters():
                parts = name.split(".")
                if parts[:2] == ["decoder", "layers"]:
                    parts[2] = str(int(parts[2]) + offset)
                known = ".".join(parts)
                p.copy_(torch.from_numpy(self.map.fuse(known, whole)))
                self.names[known] = p

    def _experts(self, found: Any) -> int:
        """Return the number of experts on a rank."""
        return int(getattr(found, "num_experts", 0) or 0) // int(self.settings.get("ep", 1))

    def step(self) -> None:
        """Make the updates, with taps around Megatron's calls."""
        from regress.dump.dump_manifest import Provenance
        from regress.dump.recorder import Recorder
        from regress.dump.taps import at, recording

        mesh = {
            "world_size": self.cell.layout.ranks,
            **{key: self.settings[key] for key in ("pp", "dp", "tp")},
        }
        config = manifest_config(self.case, self.name, clip=self.settings.get("clip", True))
        recorder = Recorder(
            str(self.folder),
            options=dict.fromkeys(_TYPES, True),
            provenance=Provenance(config=config, mesh=mesh),
            rank=self.rank,
            gather=self._gather,
        )
        with recording(recorder):
            for step in range(self.cell.updates):
                with at(step=step, rank=self.rank):
                    self._update(step)

    def _update(self, step: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        batches = self._batches(step)
        self.width = batches[0]["ids"].shape[1]
        layers = sum(len(chunk.module.decoder.layers) for chunk in self.chunks)
        self.wanted_passes += layers * len(batches) * (2 if self.settings.get("recompute") else 1)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(enumerate(batches)) for _ in self.chunks]
        virtual = len(self.chunks) > 1
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if virtual else iterators[0],
            model=self.chunks if virtual else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=batches[0]["ids"].shape[1],
            micro_batch_size=batches[0]["ids"].shape[0],
            forward_only=False,
        )
        distributed = bool(self.settings.get("distributed"))
        gradients = finalized_gradients(self.chunks, self.names, distributed=distributed)
        for group in self.optimizer.param_groups:
            group["lr"] = self.case.learning_rate(step)
        done, norm, _ = self.optimizer.step()
        self.updates += bool(done)
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        self._tap("gradient", gradients, {} if norm is None else {"grad_norm": float(norm)})
        for key in ("exp_avg", "exp_avg_sq"):
            states = {
                name: moment(self._optimizers(), p, key, distributed=distributed)
                for name, p in self.names.items()
            }
            self._tap("optimizer", states, {}, f"/{key}")
        self._tap("param", {name: p.detach() for name, p in self.names.items()}, {})

    def _batches(self, step: int) -> list[dict[str, Any]]:
        """Return the microbatches of this rank, all of one width, a multiple of the tensor ranks."""
        import torch

        samples = self.case.steps[step]
        plain = self.cell.objective == "sft"
        advantages = [1.0] * len(samples) if plain else group_advantages(samples)
        mine = list(zip(samples, advantages, strict=True))[self.share :: self.settings["dp"]]
        width = max(len(sample.tokens) for sample in samples)
        T = width + -width % self.settings["tp"]

        def padded(rows: list[list[Any]]) -> Any:
            return torch.tensor([row + [0] * (T - len(row)) for row in rows])

        def batch(rows: list[tuple[Sample, float]]) -> dict[str, Any]:
            own = [sample for sample, _ in rows]
            return {
                "samples": own,
                "ids": padded([sample.tokens for sample in own]),
                "seen": padded([[1] * len(sample.tokens) for sample in own]),
                "mask": padded([loss_mask(sample) for sample in own]),
                "old": padded([sampler_log_probs(sample) for sample in own]).float(),
                "advantage": torch.tensor([value for _, value in rows])[:, None].expand(len(rows), T),
                "tokens": self.case.tokens_of_loss(step),
                "count": len(samples),
            }

        size = int(self.settings["rows"])
        return [batch(mine[start : start + size]) for start in range(0, len(mine), size)]

    def _forward(self, batches: Any, model: Any, *args: Any) -> tuple[Any, Any]:
        """Run a microbatch through the layers of a stage; the loss function serves the last one."""
        import functools

        import torch

        number, batch = next(batches)
        B, T = batch["ids"].shape
        hidden = torch.ones(1, 1, T, T).triu(1).bool()
        labels = batch["ids"].roll(-1, 1)
        found = model(batch["ids"], torch.arange(T)[None].expand(B, T), hidden, labels=labels)
        return found, functools.partial(self._loss, number, batch)

    def _loss(self, number: int, batch: dict[str, Any], likelihood: Any) -> tuple[Any, ...]:
        """Return the loss of a microbatch as Megatron wants it: a sum and its tokens, or a mean of samples."""
        import torch

        from regress.dump.taps import at

        log_probs = torch.nn.functional.pad(-likelihood[:, :-1], (1, 0))
        advantage, mask = batch["advantage"], batch["mask"]
        losses = -log_probs * advantage
        if self.cell.objective != "sft":
            ratio = (log_probs - batch["old"]).exp()
            losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        if self.cell.objective == "sequence-mean":
            each = (losses * mask).sum(1) / mask.sum(1).clamp(min=1)
            own, share = each.mean(), each.sum() / batch["count"]
        else:
            own = (losses * mask).sum()
            share = own / batch["tokens"]
        (slope,) = torch.autograd.grad(share, log_probs, retain_graph=True)
        with at(micro=number):
            self._tap_micro(batch, log_probs.detach(), share.detach(), slope)
        metrics = {"loss": share.detach()}
        if self.cell.objective == "sequence-mean":
            return own, metrics
        return own, mask.sum().int(), metrics

    def _tap_micro(self, batch: dict[str, Any], log_probs: Any, share: Any, slope: Any) -> None:
        from regress.dump.taps import tap
        from regress.layout import Segment, TokenLayout

        own, mask = batch["samples"], batch["mask"]
        segments = tuple(Segment(row, 0, len(one.tokens), row, 0) for row, one in enumerate(own))
        place: dict[str, Any] = {
            "layout": TokenLayout(tuple(batch["ids"].shape), segments),
            "meta": {"samples": [[*one.key] for one in own]},
        }
        tap("batch_inputs", {"input_ids": batch["ids"], "attention_mask": batch["seen"]}, **place)
        tap("forward_data", {"log_probs": log_probs * mask, "response_mask": mask}, **place)
        tap("loss", {"loss": share}, **place)
        tap("token_gradient", {"token_gradient": slope * mask}, **place)

    def _tap(self, kind: str, values: Mapping[str, Any], meta: Mapping[str, Any], suffix: str = "") -> None:
        """Record parameters (or what belongs to them) by their Hugging Face names, with the part on this rank."""
        from regress.dump.taps import tap
        from regress.systems.adapters.megatron_names import joined

        parts: dict[str, list[Any]] = {}
        for name, value in values.items():
            for label, part in self.map.split(name, value.numpy()).items():
                parts.setdefault(label + suffix, []).append(part)
        whole = {label: joined(own) for label, own in parts.items()}
        tensors = {label: value for label, (value, _) in whole.items()}
        shards = {label: shard.to_json() for label, (_, shard) in whole.items()}
        tap(kind, tensors, meta={**meta, "shards": shards})

    def _gather(self, value: Any) -> list[Any]:
        import torch

        found: list[Any] = [None] * self.cell.layout.ranks
        torch.distributed.all_gather_object(found, value)
        return found

    def engaged(self) -> Engaged:
        """Return the modules of tensor parallelism, the held part, the schedule, the optimizer and the collectives."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from regress.systems.layout_evidence import collectives

        whole = sum(_count(shape) for shape in self.map.shapes.values())
        modules = [type(one).__name__ for chunk in self.chunks for one in chunk.modules()]
        facts: dict[str, Any] = {
            "schedule": get_forward_backward_func().__name__,
            "optimizer": sorted({type(one).__name__ for one in self._optimizers()}),
            "modules": sorted(set(modules) & SPLIT),
            "stages": len(self.chunks),
            "passes": self.passes,
            "lengths": sorted(self.lengths),
            "overlap": [chunk.ddp_config.overlap_grad_reduce for chunk in self.chunks],
            "held": round(sum(p.numel() for p in self.names.values()) / whole, 3),
            "buckets": sum(len(buffer.buckets) for chunk in self.chunks for buffer in chunk.buffers),
            "collectives": collectives(),
            "updates": self.updates,
        }
        return Engaged(facts, "; ".join(lacking(facts, self.cell, self.wanted_passes)))

    def _optimizers(self) -> list[Any]:
        return list(getattr(self.optimizer, "chained_optimizers", [self.optimizer]))

    def close(self) -> None:
        """Release Megatron's process groups."""
        if getattr(self, "chunks", None) is not None:
            from megatron.core import parallel_state as ranks

            ranks.destroy_model_parallel()


_TYPES = ("batch_inputs", "forward_data", "loss", "token_gradient", "gradient", "optimizer", "param")


def _count(shape: Any) -> int:
    import math

    return math.prod(shape)
