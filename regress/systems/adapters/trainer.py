"""transformers.Trainer with accelerate: supervised fine-tuning on the recorded completions."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regress.systems.exported import ExportedCase
from regress.systems.protocol import Cell, Engaged, Layout, System


class Trainer(System):
    """Runs `Trainer.train` on token ids and labels of the case; windows are its recorded rollout batches."""

    name = "trainer"
    version_of = "transformers"
    requirements = ("transformers==5.23.0", "accelerate==1.15.0")
    modules = (
        "transformers.trainer",
        "transformers.models.auto.modeling_auto",
        "accelerate",
        "regress.capture.recording",
    )

    def cells(self) -> Iterator[Cell]:
        """Yield the cells of the table."""
        yield Cell(Layout("padded"), "sft")
        yield Cell(Layout("accumulation", settings={"per_device": 3}), "sft", updates=2)

    def objective(self, cell: Cell) -> Mapping[str, Any]:
        """Return the token mean over the window, and AdamW without decay."""
        return {
            "algorithm.preset": "sft",
            "rollout_worker.temperature": 1.0,
            "optimizer.weight_decay": 0.0,
        }

    def prepare(self, case: ExportedCase, cell: Cell, folder: Path) -> None:
        """Load the model and build the trainer."""
        import torch
        from transformers import AutoModelForCausalLM
        from transformers import Trainer as HFTrainer

        self.cell, self.folder, self.case = cell, folder, case
        self.samples = case.samples(cell.updates)
        self.model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
        self.trainer = HFTrainer(
            model=self.model,
            args=self._arguments(),
            train_dataset=[{"input_ids": one.tokens, "labels": one.labels} for one in self.samples],
            data_collator=_padded,
        )

    def _arguments(self) -> Any:
        from transformers import TrainingArguments

        settings, case = self.cell.layout.settings, self.case
        ranks = self.cell.layout.ranks
        window = len(case.steps[0])
        per_device = settings.get("per_device", window // ranks)
        first, second = case.optimizer["betas"]
        return TrainingArguments(
            output_dir=tempfile.mkdtemp(prefix="regress-trainer-"),
            use_cpu=True,
            ddp_backend="gloo" if ranks > 1 else None,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=per_device,
            gradient_accumulation_steps=window // (per_device * ranks),
            max_steps=self.cell.updates,
            learning_rate=case.learning_rate(0),
            lr_scheduler_type="constant",
            weight_decay=0.0,
            adam_beta1=first,
            adam_beta2=second,
            adam_epsilon=case.optimizer["eps"],
            max_grad_norm=case.numbers["max_grad_norm"] or 0.0,
            **settings.get("arguments", {}),
        )

    def step(self) -> None:
        """Train under `regress.record`."""
        from regress.systems.recorded import recorded

        with recorded(self.folder, self.model, self.case, self.cell, samples=self._keys, system=self.name):
            self.trainer.train()

    def _keys(self, arguments: Mapping[str, Any]) -> list[tuple[str, int]]:
        mask = arguments["attention_mask"].bool()
        rows = [row[kept].tolist() for row, kept in zip(arguments["input_ids"], mask, strict=True)]
        return self.case.keys_of(rows, self.samples)

    def engaged(self) -> Engaged:
        """Return the wrapper, the types of parameters and the collectives."""
        from regress.systems.evidence import collectives, parameter_types

        facts = {
            "wrapper": type(self.trainer.model_wrapped).__name__,
            "parameters": parameter_types(self.model),
            "collectives": collectives(),
            "updates": self.trainer.state.global_step,
        }
        missing = "" if facts["updates"] == self.cell.updates else f"it made {facts['updates']} updates"
        return Engaged(facts, missing)


def _padded(rows: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Return a right-padded batch; the id of padding is 0, which the mask hides."""
    import torch

    width = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], fill: int) -> list[int]:
        return values + [fill] * (width - len(values))

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], -100) for row in rows]),
    }
