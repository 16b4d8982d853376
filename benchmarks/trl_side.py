"""TRL's GRPOTrainer on recorded completions, stepped from outside.

The trainer runs its own loop (`train`) with its own sampler, loss, accumulation, clipping and optimizer. Only what is
rolled out is given: through `rollout_func`, TRL's interface for that. The loop runs in a thread that waits after every
step, so that its steps can take turns with those of another trainer.
"""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
    TrainerControl,
)
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from benchmarks.timing import Seconds
from benchmarks.workload import EOS, PAD, Size
from regress.dump.trajectory import Trajectory

# TRL's defaults use options that transformers deprecates, and its interface for recorded rollouts is new
warnings.filterwarnings("ignore", category=FutureWarning, message=".*gradient_checkpointing.*")
warnings.filterwarnings("ignore", message=".*rollout_func.*")

LEARNING_RATE, MAX_GRAD_NORM = 1e-3, 1.0
EPSILON = 1e-3
"""Epsilon of AdamW, of the size of the gradient's elements: with a negligible one, AdamW's first update is
the sign of the gradient, and elements that are zero up to rounding would differ by their whole update.
"""


class TimedGRPOTrainer(GRPOTrainer):
    """Records the loss and the gradient norm of a step, and the time in which its rollouts were made and scored."""

    loss = 0.0
    grad_norm = 0.0
    scoring = Seconds()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        start = Seconds.now()
        output = super()._generate_and_score_completions(inputs)
        self.loss, self.scoring = 0.0, Seconds.now() - start
        return output

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.loss += loss.item()
        return loss

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = super()._clip_grad_norm(model)
        self.grad_norm = float(norm)
        return norm


class TrlSide(TrainerCallback):
    """A GRPOTrainer whose steps are taken one by one.

    Args:
        model: its policy, trained in place.
        trajectories: the completions and rewards of every step, ordered by group.
        microbatches: into how many forward and backward passes a step is split (gradient accumulation).
        folder: where TRL may write.

    Attributes:
        model: the policy.
        keep_gradient: whether steps leave their clipped gradient, all parameters end to end, in ``gradient``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        trajectories: list[Trajectory],
        folder: Path,
        *,
        size: Size,
        microbatches: int = 1,
    ) -> None:
        self.model = model
        self.keep_gradient = False
        self.gradient: Tensor | None = None
        self.trainer = make_grpo_trainer(model, trajectories, folder, size, microbatches)
        self.trainer.add_callback(self)
        self._begin = self._took = Seconds()
        self._stop = False
        self._error: BaseException | None = None
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._train, name="trl", daemon=True)
        self._thread.start()

    def step(self) -> Seconds:
        """Take one step; return the time from its first forward pass to the cleared gradients, without its
        rollouts.
        """
        self._turn.release()
        self._done.acquire()
        if self._error is not None:
            raise self._error
        return self._took

    def close(self) -> None:
        """Let the trainer end."""
        self._stop = True
        self._turn.release()
        self._thread.join()

    def _train(self) -> None:
        torch.set_num_threads(1)
        self._turn.acquire()
        try:
            self.trainer.train()
        except BaseException as error:  # raised where the step was asked for
            self._error = error
        self._done.release()

    def on_step_begin(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._begin = Seconds.now()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if self.keep_gradient:
            gradients = [p.grad.flatten() for p in kwargs["model"].parameters() if p.grad is not None]
            self.gradient = torch.cat(gradients).double()

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self._took = Seconds.now() - self._begin - self.trainer.scoring
        self._done.release()
        self._turn.acquire()
        control.should_training_stop = self._stop


def make_grpo_trainer(
    model: PreTrainedModel, trajectories: list[Trajectory], folder: Path, size: Size, microbatches: int
) -> TimedGRPOTrainer:
    """Return the trainer: TRL's default loss (DAPO's), `benchmarks.trl`'s optimizer, and TRL's defaults otherwise."""
    groups = list(dict.fromkeys(trajectory.group_id for trajectory in trajectories))

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        if prompts != [trajectory.group_id for trajectory in trajectories]:
            raise AssertionError(f"TRL asks for the groups {prompts}, in another order than recorded")
        return {
            "prompt_ids": [t.tokens[: t.prompt_length] for t in trajectories],
            "completion_ids": [t.tokens[t.prompt_length :] for t in trajectories],
            "logprobs": None,
        }

    def reward(**_: Any) -> list[float | None]:
        return [trajectory.reward for trajectory in trajectories]

    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=100_000,
        per_device_train_batch_size=len(trajectories) // microbatches,
        gradient_accumulation_steps=microbatches,
        num_generations=len(trajectories) // len(groups),
        max_completion_length=size.longest,
        loss_type="dapo",
        shuffle_dataset=False,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=LEARNING_RATE,
        adam_epsilon=EPSILON,
        max_grad_norm=MAX_GRAD_NORM,
    )
    trainer = TimedGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": groups}),
        processing_class=make_tokenizer(size),
        rollout_func=rollout,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def make_tokenizer(size: Size) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a word for every id: TRL decodes completions for its rewards."""
    words = {f"w{index}": index for index in range(size.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token=f"w{PAD}"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}")
