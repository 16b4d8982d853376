"""verl: its FSDP engine with `ppo_loss` and `sft_loss`, on recorded rollouts.

`FSDPEngineWithLMHead.train_batch` gets batches as verl's trainers make them, old log-probs of the sampler, and
advantages of verl's own estimator. Settings of a layout: samples of a microbatch (``micro``), tokens of one
(``dynamic``), ``rows`` that are "right-padded" or "nested", further options of the ``engine`` and the ``model``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from regress.systems.exported import ExportedCase, Sample
from regress.systems.protocol import Cell, Engaged, Layout, Shim, System


@dataclass(frozen=True)
class Setting:
    """Options of verl's actor, and the engine's keys for the same objective.

    Attributes:
        actor: fields of `FSDPActorConfig`; ``loss_mode`` is that of its ``policy_loss``.
        truth: keys besides those of every cell.
        scaled: advantages are divided by the standard deviation of the group.
        first_token: the mask of `sft_loss` has the first token of each sample, too.
    """

    actor: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    scaled: bool = True
    supervised: bool = False
    first_token: bool = False


def _ppo(preset: str, truth: Mapping[str, Any] | None = None, **options: Any) -> Setting:
    own = {name: options.pop(name) for name in ("temperature", "scaled") if name in options}
    return Setting(options, {"algorithm.preset": preset, **(truth or {})}, **own)


_NORM = "seq-mean-token-sum-norm"
SETTINGS: Mapping[str, Setting] = {
    "verl:token-mean": _ppo("verl:token-mean"),
    "verl:token-sum": _ppo("verl:token-sum", loss_agg_mode="token-sum"),
    "verl:seq-mean-token-sum": _ppo("verl:seq-mean-token-sum", loss_agg_mode="seq-mean-token-sum"),
    "verl:seq-mean-token-mean": _ppo("verl:seq-mean-token-mean", loss_agg_mode="seq-mean-token-mean"),
    f"verl:{_NORM}": _ppo(f"verl:{_NORM}", loss_agg_mode=_NORM),
    "verl:dr_grpo": _ppo("verl:dr_grpo", loss_agg_mode=_NORM, scaled=False),
    "verl:gspo": _ppo(
        "verl:gspo",
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
    ),
    "verl:cispo": _ppo("verl:cispo", loss_mode="cispo"),
    "verl:sapo": _ppo("verl:sapo", loss_mode="sapo", loss_agg_mode="seq-mean-token-mean"),
    "verl:token-mean entropy=0.01": _ppo(
        "verl:token-mean", {"algorithm.entropy_coef": 0.01}, entropy_coeff=0.01
    ),
    "verl:token-mean T=0.7": _ppo("verl:token-mean", {"rollout_worker.temperature": 0.7}, temperature=0.7),
    "verl:token-mean kl=0.05": _ppo(
        "verl:token-mean",
        {"algorithm.kl_coef": 0.05, "algorithm.kl_estimator": "k3"},
        use_kl_loss=True,
        kl_loss_coef=0.05,
        kl_loss_type="low_var_kl",
    ),
    "sft": Setting(supervised=True, truth={"algorithm.preset": "sft"}),
    "sft first-token": Setting(supervised=True, first_token=True, truth={"algorithm.preset": "sft"}),
}
"""Objective of a cell -> what verl and the engine are told."""


def _layout(name: str, ranks: int = 1, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


_PADDED: Mapping[str, Any] = {"use_remove_padding": False}
_FP32: Mapping[str, Any] = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), "fp32")
_BF16: Mapping[str, Any] = {"mixed_precision": {**_FP32, "param_dtype": "bf16"}}
_SP: Mapping[str, Any] = {"ulysses_sequence_parallel_size": 2}
PACKED = _layout("packed")
MICRO1 = _layout("packed-micro1", micro=1)
MICRO3 = _layout("packed-micro3", micro=3)
PADDED = _layout("padded", model=_PADDED)
PADDED3 = _layout("padded-micro3", micro=3, model=_PADDED)
DYNAMIC = _layout("dynamic", dynamic=60)
NESTED = _layout("nested", rows="nested")
NESTED1 = _layout("nested-micro1", rows="nested", micro=1)
NESTED3 = _layout("nested-micro3", rows="nested", micro=3)
WIDE = _layout("packed-to-64", micro=3, engine={"pad_to_length": True, "pad_to_length_bucket": 64})
CHECKPOINTING = _layout("checkpointing", micro=3, model={"enable_gradient_checkpointing": True})
FSDP = _layout("fsdp2", 2)
FSDP3 = _layout("fsdp2-micro3", 2, micro=3)
FSDP_AT_ONCE = _layout(
    "fsdp2-immediate-sync", 2, micro=3, engine={"use_no_sync_for_gradient_accumulation": False}
)
FSDP_PADDED = _layout("fsdp2-padded", 2, micro=3, model=_PADDED)
FSDP_DYNAMIC = _layout("fsdp2-dynamic", 2, dynamic=60)
HSDP = _layout("hsdp2x2", 4, engine={"fsdp_size": 2})
HSDP3 = _layout("hsdp2x2-micro3", 4, micro=3, engine={"fsdp_size": 2})
ULYSSES = _layout("ulysses2-flash", 2, attention="flash", engine=_SP)
ULYSSES3 = _layout("ulysses2-flash-micro3", 2, attention="flash", micro=3, engine=_SP)
ULYSSES_DP = _layout("ulysses2-flash-dp2", 4, attention="flash", micro=3, engine=_SP)
ULYSSES_SDPA = _layout("ulysses2-sdpa", 2, micro=3, engine=_SP)
ULYSSES_EAGER = _layout("ulysses2-eager", 2, micro=3, attention="eager", engine=_SP)
MIXED = _layout("packed-mixed", engine=_BF16)
MIXED_PADDED = _layout("padded-mixed", micro=3, engine=_BF16, model=_PADDED)
FSDP_MIXED = _layout("fsdp2-mixed", 2, micro=3, engine=_BF16)
ULYSSES_MIXED = _layout("ulysses2-flash-mixed", 2, attention="flash", micro=3, engine={**_BF16, **_SP})

ACTIVATIONS = r"model\.(embed_tokens|layers\.\d+|norm)"
"""Modules whose outputs are recorded, those of the truth but the head."""

CELLS = (
    *(Cell(PACKED, name) for name in SETTINGS if "sft" not in name),
    Cell(PACKED, "sft"),
    Cell(PACKED, "sft first-token"),
    Cell(PACKED, "verl:token-mean", "tools"),
    Cell(PACKED, "verl:token-mean", "moe"),
    Cell(PACKED, "verl:token-mean", "tied", updates=2),
    *(Cell(MICRO1, name) for name in ("verl:token-mean", f"verl:{_NORM}", "verl:gspo")),
    *(Cell(MICRO3, name) for name in ("verl:token-mean", "verl:seq-mean-token-sum", "sft")),
    Cell(PADDED, "verl:token-mean"),
    Cell(PADDED, "verl:token-mean", "tied"),
    Cell(PADDED3, "verl:token-mean entropy=0.01"),
    Cell(PADDED3, "verl:seq-mean-token-mean"),
    *(Cell(DYNAMIC, name) for name in ("verl:token-mean", "verl:seq-mean-token-mean")),
    Cell(NESTED, "verl:token-mean"),
    Cell(NESTED3, "verl:seq-mean-token-sum"),
    Cell(NESTED1, f"verl:{_NORM}"),
    Cell(NESTED3, f"verl:{_NORM}"),
    Cell(NESTED3, f"verl:{_NORM}", "tools"),
    Cell(NESTED, "verl:token-mean kl=0.05"),
    Cell(PACKED, "verl:seq-mean-token-mean", "moe"),
    Cell(MICRO3, "sft", "moe"),
    Cell(FSDP3, "sft", "moe"),
    Cell(WIDE, "verl:token-mean"),
    Cell(CHECKPOINTING, "verl:token-mean"),
    Cell(FSDP, "verl:token-mean", updates=2),
    Cell(FSDP, "verl:dr_grpo"),
    Cell(FSDP, "verl:token-mean", "moe"),
    *(Cell(FSDP3, name) for name in ("verl:token-mean", "verl:gspo", "sft", "sft first-token")),
    Cell(FSDP_AT_ONCE, "verl:token-mean"),
    Cell(FSDP_PADDED, "verl:seq-mean-token-mean", "tied"),
    Cell(FSDP_DYNAMIC, "verl:token-mean"),
    Cell(HSDP, "verl:token-mean"),
    Cell(HSDP3, "verl:seq-mean-token-sum"),
    *(Cell(ULYSSES, name) for name in ("verl:token-mean", "verl:seq-mean-token-mean")),
    *(Cell(ULYSSES3, name) for name in ("verl:token-mean", "verl:token-mean T=0.7", "sft")),
    Cell(ULYSSES3, "verl:token-mean entropy=0.01"),
    Cell(ULYSSES_DP, "verl:token-mean"),
    Cell(ULYSSES_SDPA, "verl:token-mean"),
    Cell(ULYSSES_EAGER, "verl:token-mean"),
    *(Cell(MIXED, name, precision="bfloat16") for name in ("verl:token-mean", "verl:gspo", "sft")),
    Cell(MIXED, "sft", "tied", precision="bfloat16", updates=2),
    Cell(MIXED_PADDED, "sft", precision="bfloat16"),
    *(Cell(FSDP_MIXED, name, precision="bfloat16") for name in ("verl:token-mean", "sft")),
    Cell(ULYSSES_MIXED, "sft", precision="bfloat16"),
)


class Verl(System):
    """Runs verl's FSDP engine on batches of the case."""

    name = "verl"
    version_of = "verl"
    requirements = (
        "verl==0.9.1",
        "tensordict==0.15.3",
        "pyvers==0.2.3",
        "ray==2.60.0",
        "torchdata==0.11.0",
        "codetiming==1.4.0",
        "pylatexenc==2.11",
        "cloudpickle==3.1.2",
        "importlib_metadata==10.2.0",
        "zipp==4.1.2",
        "msgpack==1.2.4",
    )
    modules = (
        "ray",
        "tensordict",
        "torchdata",
        "peft",
        "trl",
        "transformers.models.auto.modeling_auto",
        "regress.capture.recording",
    )
    environ: Mapping[str, str] = {"VERL_LOGGING_LEVEL": "ERROR", "RAY_DISABLE_DOCKER_CPU_WARNING": "1"}
    shims = (
        Shim(
            "a platform called cpu in verl's registry",
            18,
            "verl 0.9.1 knows CUDA, ROCm and Ascend; its engine class is used without the registry of engines, too",
        ),
        Shim(
            "verl takes TRL for absent",
            1,
            "verl 0.9.1 imports AutoModelForCausalLMWithValueHead, which TRL 1.16 no longer has",
        ),
        Shim(
            "flash attention's entry is masked sdpa, behind verl's own all-to-all",
            13,
            "flash attention has no kernel for a CPU",
            touches_numerics=True,
            layouts=("*-flash*",),
        ),
    )

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from (replace(cell, warm=True) for cell in CELLS)

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the preset of the objective with old log-probs of the sampler, and AdamW without decay."""
        own = SETTINGS[cell.objective].truth
        old = {} if own["algorithm.preset"] == "sft" else {"algorithm.old_log_probs": "sampler"}
        base = {"rollout_worker.temperature": 1.0, "optimizer.weight_decay": 0.0}
        return {**base, **old, **own}

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Build the engine, with the recorded state of the optimizer."""
        from torch import distributed
        from torch._C._distributed_c10d import HashStore

        from regress.systems.warm import put_state

        self.case, self.cell, self.folder = case, cell, folder
        self.setting, self.shapes, self.micros = SETTINGS[cell.objective], set[tuple[int, ...]](), 0
        self.dtypes = set[str]()
        self.alone = not distributed.is_initialized()
        if self.alone:  # the engine asks for a group, even of one process
            distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        cpu_platform()
        import verl.models.transformers.monkey_patch as patches
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

        patches.is_trl_available = lambda: False
        if cell.layout.settings.get("attention") == "flash":
            flash_on_cpu(patches)
        self.engine = FSDPEngineWithLMHead(*self._configs())
        self.engine.initialize()
        if cell.warm:
            put_state(self.engine.optimizer, self.engine.module, case)
        self._watch()

    def _configs(self) -> tuple[Any, ...]:
        """Return the configurations of model, engine, optimizer and checkpoints."""
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

        settings, case = self.cell.layout.settings, self.case
        kernel = {"flash": "cpu_varlen"}.get(settings.get("attention", ""), settings.get("attention", "sdpa"))
        given = {
            "use_remove_padding": True,
            "enable_gradient_checkpointing": False,
            **settings.get("model", {}),
        }
        model = HFModelConfig(
            path=str(case.model),
            load_tokenizer=False,
            override_config={"attn_implementation": kernel},
            **given,
        )
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype="fp32",
            **{"fsdp_size": -1, "mixed_precision": _FP32, **settings.get("engine", {})},
        )
        optimizer = FSDPOptimizerConfig(
            lr=case.learning_rate(0),
            betas=tuple(case.optimizer["betas"]),
            weight_decay=0.0,
            clip_grad=case.numbers["max_grad_norm"] or float("inf"),
            total_training_steps=self.cell.updates,
            lr_warmup_steps=0,
            override_optimizer_config={"eps": case.optimizer["eps"]},
        )
        return model, engine, optimizer, CheckpointConfig()

    def _watch(self) -> None:
        """Note the inputs of the model, and the samples of a microbatch with their borders in a packed row."""
        prepare = self.engine.prepare_model_inputs

        def noting(micro_batch: Any) -> Any:
            self.borders = micro_batch["input_ids"].offsets()
            rows = [row.tolist() for row in micro_batch["input_ids"].unbind()]
            self.keys = self.case.keys_of(rows, self.case.steps[self.update])
            inputs, arguments = prepare(micro_batch=micro_batch)
            self.shapes.add(tuple(inputs["input_ids"].shape))
            self.micros += 1
            return inputs, arguments

        self.engine.prepare_model_inputs = noting
        outputs = self.engine.prepare_model_outputs

        def typed(output: Any, *arguments: Any, **named: Any) -> Any:
            self.dtypes.add(str(output.logits.dtype))
            return outputs(output, *arguments, **named)

        self.engine.prepare_model_outputs = typed

    def step(self) -> None:
        """Make the updates under `regress.record`."""
        from regress.capture.recording import record
        from regress.dump.taps import at, tap_trajectories

        engine = self.engine
        packed: dict[str, Any] = (
            {"cu_seq_lens": lambda given: self.borders} if engine.use_remove_padding else {}
        )
        with record(
            self.folder,
            engine.module,
            token_gradient=True,
            initial_weights=True,
            activations=ACTIVATIONS,
            temperature=self.setting.temperature,
            samples=lambda given: self.keys,
            sequence_group=engine.ulysses_parallel_group,
            mesh=self._mesh(),
            system=self.name,
            **packed,
        ):
            for step, samples in enumerate(self.case.steps[: self.cell.updates]):
                self.update = step
                if engine.rank == 0:
                    with at(step=step):
                        tap_trajectories([sample.trajectory for sample in samples])
                batch, loss = self._batch(samples), self._loss()
                with engine.train_mode():
                    engine.train_batch(batch, loss)
                engine.lr_scheduler_step()

    def _mesh(self) -> dict[str, int] | None:
        """Return the extents of the ranks of Ulysses, over which FSDP shards the parameters, too."""
        if not self.engine.use_ulysses_sp:
            return None
        return {
            "fsdp": self.engine.get_data_parallel_size(),
            "cp": self.engine.ulysses_sequence_parallel_size,
        }

    def _loss(self) -> Any:
        """Return verl's loss function with its configuration."""
        from verl.workers.config import FSDPActorConfig, PolicyLossConfig
        from verl.workers.utils.losses import ppo_loss, sft_loss

        given = dict(self.setting.actor)
        mode = given.pop("loss_mode", "vanilla")
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=self.cell.layout.settings.get("micro", 1),
            policy_loss=PolicyLossConfig(loss_mode=mode),
            **given,
        )
        return partial(sft_loss if self.setting.supervised else ppo_loss, config=config)

    def _batch(self, samples: Sequence[Sample]) -> Any:
        """Return this rank's part of an update, as verl's trainers hand it over."""
        from verl.utils import tensordict_utils
        from verl.workers.utils.padding import left_right_2_no_padding

        settings, setting = self.cell.layout.settings, self.setting
        rows = self._rows(samples)
        parts, part = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        size = len(samples) // parts
        own = slice(part * size, (part + 1) * size)
        batch = left_right_2_no_padding(rows[own])
        mine = samples[own]
        if settings.get("rows") == "nested":
            _nest(batch, mine)
        if setting.supervised:
            first = int(setting.first_token)
            batch["loss_mask"] = _jagged(
                [[first] + [0] * (len(one.prompt) - 1) + one.mask for one in mine], int
            )
        tensordict_utils.assign_non_tensor(
            batch,
            use_remove_padding=self.engine.use_remove_padding,
            use_dynamic_bsz="dynamic" in settings,
            micro_batch_size_per_gpu=settings.get("micro", size),
            max_token_len_per_gpu=settings.get("dynamic"),
            use_fused_kernels=False,
            temperature=setting.temperature,
            global_batch_size=len(samples),
            calculate_entropy="entropy_coeff" in setting.actor,
            compute_loss=True,
        )
        return batch

    def _rows(self, samples: Sequence[Sample]) -> Any:
        """Return prompts padded on the left and completions on the right, with verl's own advantages."""
        import numpy as np
        import torch
        from tensordict import TensorDict
        from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

        P, C = max(len(one.prompt) for one in samples), self.case.numbers["norm_length"]

        def right(values: Sequence[Sequence[Any]], dtype: Any) -> Any:
            return torch.tensor([[*row, *[0] * (C - len(row))] for row in values], dtype=dtype)

        def left(values: Sequence[Sequence[int]]) -> Any:
            return torch.tensor([[*[0] * (P - len(row)), *row] for row in values])

        responses = right([one.completion for one in samples], torch.long)
        mask = right([one.mask for one in samples], torch.long)
        prompts = left([one.prompt for one in samples])
        seen = torch.cat(
            [
                left([[1] * len(one.prompt) for one in samples]),
                right([[1] * len(one.completion) for one in samples], torch.long),
            ],
            1,
        )
        rewards = right([[0.0] * (len(one.completion) - 1) + [one.reward] for one in samples], torch.float32)
        groups = np.array([one.key[0] for one in samples], dtype=object)
        advantages, _ = compute_grpo_outcome_advantage(
            rewards, mask, groups, norm_adv_by_std_in_grpo=self.setting.scaled
        )

        def floats(values: Sequence[Sequence[float | None]]) -> Any:
            return right([[value or 0.0 for value in row] for row in values], torch.float32)

        return TensorDict(
            {
                "prompts": prompts,
                "responses": responses,
                "input_ids": torch.cat([prompts, responses], 1),
                "attention_mask": seen,
                "position_ids": (seen.cumsum(1) - 1).clamp(min=0),
                "response_mask": mask,
                "old_log_probs": floats([one.sampler or [] for one in samples]),
                "advantages": advantages,
                "ref_log_prob": floats([one.reference or [] for one in samples]),
            },
            batch_size=[len(samples)],
        )

    def engaged(self) -> Engaged:
        """Return the types of parameters, the shapes of the model's inputs, the ranks and the collectives."""
        from regress.systems.evidence import collectives, held, parameter_types

        settings, engine = self.cell.layout.settings, self.engine
        steps = {int(float(state["step"])) for state in engine.optimizer.state.values()}
        facts: dict[str, Any] = {
            "wrapper": type(engine.module).__name__,
            "parameters": parameter_types(engine.module),
            "held": round(held(engine.module), 3),
            "mesh": str(dict(zip(engine.device_mesh.mesh_dim_names, engine.device_mesh.shape, strict=True))),
            "sequence_ranks": engine.ulysses_sequence_parallel_size,
            "attention": engine.module.config._attn_implementation,
            "logits": sorted(self.dtypes),
            "inputs": [list(shape) for shape in sorted(self.shapes)],
            "microbatches": self.micros,
            "optimizer_steps": sorted(steps),
            "collectives": collectives(),
        }
        return Engaged(facts, "; ".join(self._lacks(facts, settings)))

    def _lacks(self, facts: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        parts = self.engine.get_data_parallel_size()
        share = settings.get("engine", {}).get("fsdp_size", self.cell.layout.ranks)
        size = len(self.case.steps[0]) // parts
        if not all(name.startswith("DTensor") for name in facts["parameters"]):
            yield f"parameters are {', '.join(facts['parameters'])}, no DTensors"
        if facts["held"] > 1 / share + 0.05:
            yield f"a rank holds {facts['held']} of the elements"
        if facts["logits"] != [f"torch.{self.cell.precision}"]:
            yield f"logits are of {', '.join(facts['logits'])}"
        steps = max(self.case.optimizer_steps.values(), default=0) if self.cell.warm else 0
        if max(facts["optimizer_steps"], default=0) != steps + self.cell.updates:
            yield f"the optimizer has made {facts['optimizer_steps']} steps, {steps} of them before"
        if self.cell.layout.ranks > 1 and not facts["collectives"]:
            yield "nothing was communicated"
        if self.engine.use_remove_padding != all(shape[0] == 1 for shape in facts["inputs"]):
            yield f"the inputs have the shapes {facts['inputs']}"
        if "dynamic" in settings and facts["microbatches"] < 2 * self.cell.updates:
            yield "dynamic batching made one microbatch"
        if (
            "dynamic" not in settings
            and facts["microbatches"] != size // settings.get("micro", size) * self.cell.updates
        ):
            yield f"it made {facts['microbatches']} microbatches"
        if self.cell.layout.ranks // parts != facts["sequence_ranks"]:
            yield f"{facts['sequence_ranks']} ranks share a sequence"

    def close(self) -> None:
        """Destroy the group of one process."""
        from torch import distributed

        if getattr(self, "alone", False) and distributed.is_initialized():
            distributed.destroy_process_group()


PINNED = (
    PACKED.name,
    MICRO3.name,
    PADDED3.name,
    NESTED3.name,
    FSDP3.name,
    ULYSSES3.name,
    ULYSSES_SDPA.name,
    FSDP_MIXED.name,
)


class VerlOnItsPins(Verl):
    """Runs the same on the newest transformers and tensordict that verl 0.9.1 allows."""

    name = "verl-pins"
    requirements = (
        *(pin for pin in Verl.requirements if not pin.startswith(("tensordict", "pyvers"))),
        "tensordict==0.10.0",
        "pyvers==0.1.0",
        "orjson==3.11.4",
        "transformers==5.10.4",
        "huggingface_hub==1.33.0",
        "tokenizers==0.22.2",
    )
    modules = tuple(name for name in Verl.modules if name != "trl")

    def cells(self) -> Iterator[Cell]:
        """Yield those cells of the table whose layout or objective the pins could touch."""
        for cell in super().cells():
            if cell.layout.name in PINNED and cell.case == "dense":
                yield cell


def _jagged(rows: Sequence[Sequence[Any]], kind: type) -> Any:
    import torch

    dtype = torch.long if kind is int else torch.float32
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def _nest(batch: Any, samples: Sequence[Sample]) -> None:
    """Leave the rows of a batch unpadded, as the trainer v1 of verl does."""
    lengths = [len(one.completion) for one in samples]
    batch["prompts"] = _jagged([one.prompt for one in samples], int)
    batch["responses"] = _jagged([one.completion for one in samples], int)
    batch["response_mask"] = batch["loss_mask"] = _jagged([one.mask for one in samples], int)
    for name in ("old_log_probs", "advantages", "ref_log_prob"):
        rows = [row[:length].tolist() for row, length in zip(batch[name], lengths, strict=True)]
        batch[name] = _jagged(rows, float)
    for name in ("attention_mask", "max_response_len"):
        batch.pop(name)


def cpu_platform() -> None:
    """Register a platform called cpu in verl's own registry, and choose it."""
    import torch
    from verl.plugin.platform import PlatformRegistry, set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    class CPU(PlatformCUDA):  # type: ignore[misc]  # untyped base
        device_name = vendor_name = "cpu"
        device_module = SimpleNamespace(
            is_available=lambda: True, current_device=lambda: "cpu", mem_get_info=lambda *_: (0, 0)
        )
        for name in ("empty_cache", "memory_allocated", "memory_reserved", "synchronize"):
            setattr(device_module, name, nothing)
        is_available = is_platform_available = lambda self, use_smi_check=False: True
        current_device = ray_resource_name = lambda self: "cpu"
        device_count = lambda self: 1  # noqa: E731  # one line of the shim
        set_device = synchronize = empty_cache = nothing
        manual_seed = manual_seed_all = lambda self, seed: torch.manual_seed(seed)
        communication_backend_name = lambda self: "gloo"  # noqa: E731  # one line of the shim

    os.environ["VERL_PLATFORM"] = "cpu"
    PlatformRegistry.register(platform="cpu")(CPU)
    set_platform(CPU())


def flash_on_cpu(patches: Any) -> None:
    """Give verl's Ulysses wrapper what flash attention computes for packed rows ``(1, T, heads, dim)``."""
    import torch
    from transformers import AttentionInterface
    from transformers.integrations import flash_attention

    def varlen(q: Any, k: Any, v: Any, attention_mask: Any, query_length: int, **given: Any) -> Any:
        if q.shape[0] != 1 or attention_mask is not None or given.get("position_ids") is None:
            raise NotImplementedError("only packed rows with position ids are expected here")
        number = (given["position_ids"][0] == 0).cumsum(0)
        seen = (number[:, None] == number) & torch.ones(len(number), len(number)).tril().bool()
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        found = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=given.get("softmax_scale")
        )
        return found.transpose(1, 2).contiguous()

    patches._flash_attention_forward = varlen
    AttentionInterface.register("cpu_varlen", flash_attention.flash_attention_forward)
