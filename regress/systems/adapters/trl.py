"""TRL's GRPOTrainer and RLOOTrainer: `train()` on recorded completions.

A ``rollout_func`` gives the recorded completions and a reward function their rewards, both parts of TRL's own
interface; all else is the trainer's. Settings of a layout: samples ``per_device``, further ``arguments`` of the
configuration, and what is ``expected`` of the wrapped model.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from regress.systems.adapters.transformers_trainer import Trainer, fsdp_on_cpu, policy_of, warm
from regress.systems.adapters.trl_cells import CELLS, SETTINGS, Setting
from regress.systems.exported import ExportedCase, Sample
from regress.systems.protocol import Cell, Shim


class TRL(Trainer):
    """Runs the trainers of TRL on recorded rollouts."""

    name = "trl"
    version_of = "trl"
    requirements = ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft==0.21.2")
    modules = ("trl", "trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "regress.capture.recording")
    shims = (
        *(Shim(one.title, one.lines, one.reason, layouts=("fsdp2-*",)) for one in Trainer.shims[:1]),
        Shim(
            "vLLM is counted as used once the trainer is built",
            2,
            "corrections for the sampler are there for vLLM only, whose server is not asked for anything here",
            layouts=("sampled*",),
        ),
    )

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield from (replace(cell, warm=cell.case != "lora") for cell in CELLS)

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
        import trl
        from datasets import Dataset
        from transformers import AutoTokenizer

        self.cell, self.folder, self.case = cell, folder, case
        setting = SETTINGS[cell.objective]
        arguments = self._grpo_arguments(getattr(trl, setting.trainer.replace("Trainer", "Config")), setting)
        if arguments.fsdp:
            fsdp_on_cpu()
        batches = -(-cell.updates // arguments.num_iterations)
        rollouts = Rollouts(case.steps[:batches], arguments.process_index, sampled=setting.sampled)
        self.model = policy_of(case)
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
        if setting.sampled:
            self.trainer.use_vllm = True
            self.trainer._last_loaded_step = self.trainer.state.global_step
        if cell.warm:
            self.trainer.add_callback(warm(self.model, case))
        self._put_reference()

    def _put_reference(self) -> None:
        """Give the trainer the case's reference, where it would take a copy of the initial policy."""
        import torch
        from transformers import AutoModelForCausalLM

        reference = getattr(self.trainer, "ref_model", None)
        if reference is not None and self.case.reference is not None:
            loaded = AutoModelForCausalLM.from_pretrained(self.case.reference, dtype=torch.float32)
            reference.load_state_dict(loaded.state_dict())
        for name, p in self.trainer.model.named_parameters():
            if ".lora_B.ref." in name:  # the reference of a case with adapters is the model without
                p.data.zero_()

    def _grpo_arguments(self, config: Any, setting: Setting) -> Any:
        case, layout = self.case, self.cell.layout
        window = len(case.steps[0])
        per_device = layout.settings.get("per_device", window // layout.ranks)
        given: dict[str, Any] = {
            "temperature": 1.0,
            **setting.arguments,
            **layout.settings.get("arguments", {}),
        }
        self.scratch = tempfile.TemporaryDirectory(prefix="regress-trl-")  # goes with this object
        return config(
            **{"gradient_checkpointing": False, "beta": 0.0, **given},
            output_dir=self.scratch.name,
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
        sampled: give the sampler's log-probs, too.
    """

    def __init__(self, steps: Sequence[Sequence[Sample]], rank: int, *, sampled: bool = False) -> None:
        self.groups: dict[str, list[Sample]] = {}
        for number, step in enumerate(steps):
            for sample in step:
                self.groups.setdefault(json.dumps([number, sample.key[0]]), []).append(sample)
        self._rank = rank
        self._sampled = sampled

    def _samples(self, prompts: Sequence[str]) -> list[Sample]:
        first = self._rank * len(prompts)
        return [self.groups[name][(first + row) % len(self.groups[name])] for row, name in enumerate(prompts)]

    def generate(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the recorded tokens, as a ``rollout_func`` does."""
        samples = self._samples(prompts)
        found: dict[str, Any] = {
            "prompt_ids": [one.prompt for one in samples],
            "completion_ids": [one.completion for one in samples],
            "logprobs": [_sampler(one) for one in samples] if self._sampled else None,
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


def _sampler(sample: Sample) -> list[float]:
    """Return the sampler's log-probs of a completion, 0 where there are none."""
    return [0.0 if value is None else value for value in sample.sampler or ()]
