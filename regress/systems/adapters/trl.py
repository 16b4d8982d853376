"""TRL's GRPOTrainer and RLOOTrainer: `train()` on recorded completions.

A ``rollout_func`` gives the recorded completions and a reward function their rewards, both parts of TRL's own
interface; all else is the trainer's. Settings of a layout: samples ``per_device``, further ``arguments`` of the
configuration, and what is ``expected`` of the wrapped model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regress.systems.adapters.trainer import Trainer, fsdp_on_cpu, warm
from regress.systems.exported import ExportedCase, Sample
from regress.systems.protocol import Cell, Declared, Layout, Shim

_DDP: Mapping[str, Any] = {"wrapper": "DistributedDataParallel"}
_FSDP: Mapping[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "reshard_after_forward": True,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
_LOCAL = "bnpo divides by the tokens of the microbatch by its definition, and the truth has one microbatch"


@dataclass(frozen=True)
class Setting:
    """Arguments of a TRL configuration, and the engine's keys for the same objective."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    truth: Mapping[str, Any] = field(default_factory=dict)
    trainer: str = "GRPOTrainer"


def _loss(
    preset: str, loss_type: str, *, truth: Mapping[str, Any] | None = None, **arguments: Any
) -> Setting:
    return Setting({"loss_type": loss_type, **arguments}, {"algorithm.preset": preset, **(truth or {})})


SETTINGS: Mapping[str, Setting] = {
    "trl:grpo": _loss("trl:grpo", "grpo"),
    "trl:dapo": _loss("trl:dapo", "dapo"),
    "trl:bnpo": _loss("trl:bnpo", "bnpo"),
    "trl:dr_grpo": _loss("trl:dr_grpo", "dr_grpo", scale_rewards="none"),
    "trl:cispo": _loss("trl:cispo", "cispo", epsilon_high=5.0),
    "trl:gspo": _loss(
        "trl:gspo", "grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
    ),
    "trl:luspo": _loss(
        "trl:luspo", "luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3
    ),
    "trl:dapo scale=batch": _loss(
        "trl:dapo", "dapo", scale_rewards="batch", truth={"algorithm.scale": "batch"}
    ),
    "trl:grpo scale=none": _loss("trl:grpo", "grpo", scale_rewards="none", truth={"algorithm.scale": "none"}),
    "trl:dapo T=1.3": _loss("trl:dapo", "dapo", temperature=1.3, truth={"rollout_worker.temperature": 1.3}),
    "trl:grpo T=0.7": _loss("trl:grpo", "grpo", temperature=0.7, truth={"rollout_worker.temperature": 0.7}),
    "trl:grpo beta=0.05": _loss("trl:grpo", "grpo", beta=0.05, truth={"algorithm.kl_coef": 0.05}),
    "trl:grpo without router loss": _loss("trl:grpo", "grpo", router_aux_loss_coef=0.0),
    "trl:dapo without router loss": _loss("trl:dapo", "dapo", router_aux_loss_coef=0.0),
    "trl:rloo": Setting(
        {"beta": 0.0}, {"algorithm.preset": "trl:rloo", "algorithm.kl_coef": 0.0}, "RLOOTrainer"
    ),
}
"""Objective of a cell -> what TRL and the engine are told."""


def _layout(name: str, ranks: int = 1, **settings: Any) -> Layout:
    return Layout(name, ranks, settings)


PADDED = _layout("padded")
ACCUMULATION = _layout("accumulation", per_device=3)
SINGLE = _layout("one-sample-accumulation", per_device=1)
CHECKPOINTING = _layout("checkpointing", arguments={"gradient_checkpointing": True})
WIDE = _layout("padded-to-16", arguments={"pad_to_multiple_of": 16})
DDP = _layout("ddp2", 2, expected=_DDP)
DDP_ACCUMULATION = _layout("ddp2-accumulation", 2, per_device=2, expected=_DDP)
DDP4 = _layout("ddp4", 4, expected=_DDP)
FSDP = _layout("fsdp2-accelerate", 2, arguments=_FSDP, expected={"held": 0.5, "placement": "Shard"})
FSDP_ACCUMULATION = _layout(
    "fsdp2-accelerate-accumulation",
    2,
    per_device=3,
    arguments=_FSDP,
    expected={"held": 0.5, "placement": "Shard"},
)

CELLS = (
    *(Cell(PADDED, name) for name in SETTINGS if "router" not in name),
    Cell(PADDED, "trl:dapo", "tied", updates=2),
    Cell(PADDED, "trl:grpo without router loss", "moe"),
    Cell(PADDED, "trl:dapo", "tools"),
    Cell(PADDED, "trl:dapo", "gpt2"),
    *(Cell(ACCUMULATION, name, updates=2) for name in ("trl:grpo", "trl:dapo", "trl:dr_grpo", "trl:cispo")),
    Cell(ACCUMULATION, "trl:bnpo", declared=(Declared("loss", _LOCAL, amount=1.189),)),
    Cell(ACCUMULATION, "trl:rloo"),
    Cell(SINGLE, "trl:dapo"),
    Cell(SINGLE, "trl:gspo"),
    Cell(CHECKPOINTING, "trl:dapo"),
    Cell(WIDE, "trl:grpo"),
    *(Cell(DDP, name) for name in ("trl:grpo", "trl:dapo", "trl:dr_grpo", "trl:luspo", "trl:rloo")),
    Cell(DDP_ACCUMULATION, "trl:dapo", updates=2),
    Cell(DDP_ACCUMULATION, "trl:dapo", "tied"),
    Cell(DDP4, "trl:grpo"),
    *(Cell(FSDP, name) for name in ("trl:grpo", "trl:dapo")),
    Cell(FSDP, "trl:dapo without router loss", "moe"),
    Cell(FSDP_ACCUMULATION, "trl:dapo", updates=2),
)


class TRL(Trainer):
    """Runs the trainers of TRL on recorded rollouts."""

    name = "trl"
    version_of = "trl"
    requirements = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0")
    modules = ("trl", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "regress.capture.recording")
    shims = tuple(Shim(one.title, one.lines, one.reason, layouts=("fsdp2-*",)) for one in Trainer.shims[:1])

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from (replace(cell, warm=True) for cell in CELLS)

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the preset of the objective on rollouts of the weights that are trained, and AdamW without decay."""
        base = {
            "algorithm.old_log_probs": "current",
            "rollout_worker.temperature": 1.0,
            "optimizer.weight_decay": 0.0,
        }
        return {**base, **SETTINGS[cell.objective].truth}

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Load the model and build the trainer."""
        import torch
        import trl
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.cell, self.folder, self.case = cell, folder, case
        setting = SETTINGS[cell.objective]
        arguments = self._grpo_arguments(getattr(trl, setting.trainer.replace("Trainer", "Config")), setting)
        if arguments.fsdp:
            fsdp_on_cpu()
        rollouts = Rollouts(case.steps[: cell.updates], arguments.process_index)
        self.model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        own: dict[str, Any] = {"rollout_func": rollouts.generate} if setting.trainer == "GRPOTrainer" else {}
        self.trainer = getattr(trl, setting.trainer)(
            model=self.model,
            args=arguments,
            reward_funcs=rollouts.rewards,
            train_dataset=Dataset.from_list([{"prompt": name} for name in rollouts.groups]),
            processing_class=AutoTokenizer.from_pretrained(case.model),
            **own,
        )
        if not own:  # RLOOTrainer has no rollout_func
            vars(self.trainer)["_generate"] = rollouts.generated
        if cell.warm:
            self.trainer.add_callback(warm(self.model, case))
        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None and case.reference is not None:
            loaded = AutoModelForCausalLM.from_pretrained(case.reference, dtype=torch.float32)
            reference.load_state_dict(loaded.state_dict())

    def _grpo_arguments(self, config: Any, setting: Setting) -> Any:
        case, layout = self.case, self.cell.layout
        window = len(case.steps[0])
        per_device = layout.settings.get("per_device", window // layout.ranks)
        given: dict[str, Any] = {
            "temperature": 1.0,
            **setting.arguments,
            **layout.settings.get("arguments", {}),
        }
        return config(
            **{"gradient_checkpointing": False, "beta": 0.0, **given},
            output_dir=tempfile.mkdtemp(prefix="regress-trl-"),
            bf16=False,
            **self.common_arguments(),
            shuffle_dataset=False,
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=window // (per_device * layout.ranks),
            num_generations=max(sample.key[1] for sample in case.steps[0]) + 1,
            max_completion_length=case.numbers["norm_length"],
        )

    def step(self) -> None:
        """Train under `regress.record`."""
        from regress.capture.recording import record

        temperature = self.trainer.args.temperature
        with record(self.folder, self.model, token_gradient=True, temperature=temperature, system=self.name):
            self.trainer.train()


class Rollouts:
    """Gives recorded completions and rewards for the prompts that TRL asks for: names of their groups.

    Args:
        steps: the samples of each rollout batch.
        rank: this process; the processes share the rows of a batch in order.
    """

    def __init__(self, steps: Sequence[Sequence[Sample]], rank: int) -> None:
        self.groups: dict[str, list[Sample]] = {}
        for number, step in enumerate(steps):
            for sample in step:
                self.groups.setdefault(json.dumps([number, sample.key[0]]), []).append(sample)
        self._rank = rank

    def _samples(self, prompts: Sequence[str]) -> list[Sample]:
        first = self._rank * len(prompts)
        return [self.groups[name][(first + row) % len(self.groups[name])] for row, name in enumerate(prompts)]

    def generate(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the recorded tokens, as a ``rollout_func`` does."""
        samples = self._samples(prompts)
        found: dict[str, Any] = {
            "prompt_ids": [one.prompt for one in samples],
            "completion_ids": [one.completion for one in samples],
            "logprobs": None,
        }
        if any(0 in one.mask for one in samples):
            found["env_mask"] = [one.mask for one in samples]
        return found

    def generated(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
        """Return prompts, completions and their texts, as ``_generate`` of `RLOOTrainer` does."""
        samples = self._samples(prompts)
        return (
            [one.prompt for one in samples],
            [one.completion for one in samples],
            [one.text for one in samples],
        )

    def rewards(self, prompts: list[str], **others: Any) -> list[float]:
        """Return the recorded rewards."""
        return [one.reward for one in self._samples(prompts)]
