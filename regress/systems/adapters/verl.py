"""verl: its FSDP engine with `ppo_loss` and `sft_loss`, on recorded rollouts.

`FSDPEngineWithLMHead.train_batch` gets batches as verl's trainers make them, old log-probs of the sampler, and
advantages of verl's own estimator. Settings of a layout: samples of a microbatch (``micro``), tokens of one
(``dynamic``), ``rows`` that are "right-padded" or "nested", further options of the ``engine`` and the ``model``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from regress.systems.adapters.verl_cells import CELLS, FP32, PINNED, SETTINGS
from regress.systems.adapters.verl_rows import jagged, nest, padded_rows
from regress.systems.adapters.verl_shims import cpu_platform, flash_on_cpu
from regress.systems.exported import ExportedCase, Sample
from regress.systems.protocol import Cell, Engaged, Shim, System

ACTIVATIONS = r"model\.(embed_tokens|layers\.\d+|norm)"
"""Modules whose outputs are recorded, those of the truth but the head."""


class Verl(System):
    """Runs verl's FSDP engine on batches of the case."""

    name = "verl"
    version_of = "verl"
    requirements: tuple[str, ...] = (
        "verl==0.9.1",
        "tensordict==0.15.3",
        "pyvers==0.2.3",
        "orjson==3.11.4",
        "ray==2.60.0",
        "torchdata==0.11.0",
        "codetiming==1.4.0",
        "pylatexenc==2.11",
        "cloudpickle==3.1.2",
        "importlib_metadata==10.2.0",
        "zipp==4.1.2",
        "msgpack==1.2.4",
        "requests==2.34.2",
        "charset-normalizer==3.5.2",
        "idna==3.20",
        "urllib3==2.8.0",
        "certifi==2026.10.18",
    )
    modules: tuple[str, ...] = (
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
        yield from (replace(cell, warm=cell.case != "lora") for cell in CELLS)

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

        from regress.systems.optimizer_warmup import put_state

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
        base = case.model / "base"
        given = {
            "use_remove_padding": True,
            "enable_gradient_checkpointing": False,
            **(adapters_at(case.model) if base.is_dir() else {}),
            **settings.get("model", {}),
        }
        model = HFModelConfig(
            path=str(base if base.is_dir() else case.model),
            load_tokenizer=False,
            override_config={"attn_implementation": kernel},
            **given,
        )
        engine = FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            model_dtype="fp32",
            **{"fsdp_size": -1, "mixed_precision": FP32, **settings.get("engine", {})},
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
            initial_weights=self.cell.case != "lora",  # those of a model with adapters are not recorded
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
        rows = padded_rows(samples, self.case.numbers["norm_length"], scaled=self.setting.scaled)
        parts, part = self.engine.get_data_parallel_size(), self.engine.get_data_parallel_rank()
        size = len(samples) // parts
        own = slice(part * size, (part + 1) * size)
        batch = left_right_2_no_padding(rows[own])
        mine = samples[own]
        if settings.get("rows") == "nested":
            nest(batch, mine)
        if setting.supervised:
            first = int(setting.first_token)
            batch["loss_mask"] = jagged(
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

    def engaged(self) -> Engaged:
        """Return the types of parameters, the shapes of the model's inputs, the ranks and the collectives."""
        from regress.systems.layout_evidence import collectives, held_share, parameter_types

        settings, engine = self.cell.layout.settings, self.engine
        steps = {int(float(state["step"])) for state in engine.optimizer.state.values()}
        facts: dict[str, Any] = {
            "wrapper": type(engine.module).__name__,
            "parameters": parameter_types(engine.module),
            "held": round(held_share(engine.module), 3),
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
        trained = [name for name, weight in self.engine.module.named_parameters() if weight.requires_grad]
        if self.cell.case == "lora" and not all(".lora_" in name for name in trained):
            yield f"it trains {len(trained)} parameters, not those of the adapters alone"
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


def adapters_at(folder: Path) -> dict[str, Any]:
    """Return the options of verl's model that load the trainable adapters of a folder of peft."""
    from peft import PeftConfig

    return {"lora_rank": PeftConfig.from_pretrained(str(folder)).r, "lora_adapter_path": str(folder)}


class VerlOnItsPins(Verl):
    """Runs the same on the newest transformers and tensordict that verl 0.9.1 allows."""

    name = "verl-pins"
    requirements = (
        *(pin for pin in Verl.requirements if not pin.startswith(("tensordict", "pyvers"))),
        "tensordict==0.10.0",
        "pyvers==0.1.0",
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
