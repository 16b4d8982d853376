"""transformers.Trainer with accelerate: supervised fine-tuning on the recorded completions.

Windows of the trainer are the recorded rollout batches, read in order. What a layout needs is said in its settings:
samples ``per_device``, the ``collator``, further ``arguments`` of
`TrainingArguments`, the ``distributed`` configuration that the model is loaded with, and what is ``expected`` of it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from regress.systems.adapters.transformers_trainer_cells import CELLS
from regress.systems.exported import ExportedCase
from regress.systems.protocol import Cell, Engaged, Shim, System


class Trainer(System):
    """Runs `transformers.Trainer.train` on token ids and labels."""

    name = "trainer"
    version_of = "transformers"
    requirements: tuple[str, ...] = ("transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2")
    modules: tuple[str, ...] = (
        "transformers.trainer",
        "transformers.models.auto.modeling_auto",
        "accelerate",
        "regress.capture.recording",
    )
    shims: tuple[Shim, ...] = (
        Shim(
            "accelerate keeps its FSDP plugin on a CPU",
            6,
            "accelerate 1.15 drops the plugin on a CPU without a word, with every AcceleratorState()",
            layouts=("*-accelerate",),
        ),
        Shim(
            "accelerate lets a ParallelismConfig be on a CPU",
            1,
            "accelerate 1.15 refuses tensor parallelism of a distributed type other than that of an accelerator",
            layouts=("tp2*", "ep2*"),
        ),
    )

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from (replace(cell, warm=cell.case != "lora") for cell in CELLS)

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the token mean over a window, and AdamW without decay."""
        return {
            "algorithm.preset": "sft",
            "rollout_worker.temperature": 1.0,
            "optimizer.weight_decay": 0.0,
        }

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Load the model and build the trainer."""
        from transformers import Trainer as HFTrainer

        self.cell, self.folder, self.case = cell, folder, case
        settings = cell.layout.settings
        samples = case.samples(cell.updates)
        loading: dict[str, Any] = {}
        if "distributed" in settings:
            from transformers.distributed.configuration_utils import DistributedConfig

            loading["distributed_config"] = DistributedConfig(**settings["distributed"])
        arguments = self._arguments()
        if arguments.fsdp:
            fsdp_on_cpu()
        if "distributed" in settings:
            _meshes_on_cpu()
        self.model = policy_of(case, **loading)
        self.trainer: Any = HFTrainer(
            model=self.model,
            args=arguments,
            train_dataset=[{"input_ids": one.tokens, "labels": one.labels} for one in samples],
            data_collator=_collator(settings.get("collator", "padded"), case),
        )
        if cell.warm:
            self.trainer.add_callback(warm(self.model, case))

    def _arguments(self) -> Any:
        from transformers import TrainingArguments

        settings, case = self.cell.layout.settings, self.case
        window = len(case.steps[0])
        data_ranks = self._data_ranks()
        per_device = settings.get("per_device", window // data_ranks)
        given = {"train_sampling_strategy": "sequential", **settings.get("arguments", {})}
        whole = 1 if given.get("accelerator_config", {}).get("split_batches") else data_ranks
        self.scratch = tempfile.TemporaryDirectory(prefix="regress-trainer-")  # goes with this object
        return TrainingArguments(
            output_dir=self.scratch.name,
            **self.common_arguments(),
            remove_unused_columns=False,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=-(-window // (per_device * whole)),
            **given,
        )

    def common_arguments(self) -> dict[str, Any]:
        """Return the settings of every trainer of this family: the machine, no files, and the recorded optimizer."""
        case = self.case
        first, second = case.optimizer["betas"]
        return {
            "use_cpu": True,
            "ddp_backend": "gloo" if self.cell.layout.ranks > 1 else None,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            "max_steps": self.cell.updates,
            "learning_rate": case.learning_rate(0),
            "lr_scheduler_type": "constant",
            "weight_decay": 0.0,
            "adam_beta1": first,
            "adam_beta2": second,
            "adam_epsilon": case.optimizer["eps"],
            "max_grad_norm": case.numbers["max_grad_norm"] or 0.0,
        }

    def _data_ranks(self) -> int:
        """Return the number of ranks with samples of their own."""
        shared = self.cell.layout.settings.get("distributed", {}).get("tp_size", 1)
        return self.cell.layout.ranks // int(shared)

    def step(self) -> None:
        """Train under `regress.record`."""
        from regress.capture.recording import record

        with record(self.folder, self.model, token_gradient=True, system=self.name):
            self.trainer.train()

    def engaged(self) -> Engaged:
        """Return the wrapper, the types of parameters and the collectives, as far as they are expected."""
        from regress.systems.layout_evidence import collectives, held_share, parameter_types

        expected = self.cell.layout.settings.get("expected", {})
        facts: dict[str, Any] = {
            "wrapper": type(self.trainer.model_wrapped).__name__,
            "parameters": parameter_types(self.model),
            "held": round(held_share(self.model), 3),
            "collectives": collectives(),
            "updates": self.trainer.state.global_step,
        }
        lacks = []
        if facts["updates"] != self.cell.updates:
            lacks.append(f"it made {facts['updates']} updates of {self.cell.updates}")
        if self.cell.layout.ranks > 1 and not facts["collectives"]:
            lacks.append("nothing was communicated")
        if expected.get("wrapper", facts["wrapper"]) != facts["wrapper"]:
            lacks.append(f"the model is a {facts['wrapper']}, not a {expected['wrapper']}")
        if "placement" in expected and not any(expected["placement"] in name for name in facts["parameters"]):
            lacks.append(f"no parameter is placed as {expected['placement']}")
        if facts["held"] > expected.get("held", 1.0) + 0.05:
            lacks.append(f"a rank holds {facts['held']} of the elements")
        return Engaged(facts, "; ".join(lacks))


def policy_of(case: ExportedCase, **loading: Any) -> Any:
    """Return the model of a case in float32; of a case with adapters the frozen model with those of peft."""
    import torch
    from transformers import AutoModelForCausalLM

    base = case.model / "base"
    if not base.is_dir():
        return AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32, **loading)
    from peft import PeftModel

    frozen = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **loading)
    return PeftModel.from_pretrained(frozen, case.model, is_trainable=True)


def _collator(name: str, case: ExportedCase) -> Any:
    """Return a collator of transformers."""
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, DataCollatorWithFlattening

    if name == "flattened":
        return DataCollatorWithFlattening()
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    multiple = 16 if name == "padded-to-16" else None
    return DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=multiple)


def warm(model: Any, case: ExportedCase) -> Any:
    """Return a callback that puts the recorded state into the optimizer, once it is prepared."""
    from transformers import TrainerCallback

    from regress.systems.optimizer_warmup import put_state

    class Warm(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            put_state(given["optimizer"], model, case)

    return Warm()


def _meshes_on_cpu() -> None:
    """Have accelerate take the mesh of a model that transformers distributed, on a CPU, too."""
    from accelerate import ParallelismConfig

    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def fsdp_on_cpu() -> None:
    """Have accelerate keep its FSDP plugin on a CPU; every AcceleratorState() would drop it again."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    init = AcceleratorState.__init__

    def keeping(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        init(self, *args, fsdp_plugin=fsdp_plugin, **options)
        plugin = fsdp_plugin or self.__dict__.get("kept_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin, self.kept_plugin = DistributedType.FSDP, plugin, plugin

    AcceleratorState.__init__ = keeping
