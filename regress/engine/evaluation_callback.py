"""Evaluation as a callback of any Hugging Face trainer: real completions, judged by a verifier of one's own."""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from regress.engine.tracking.tracking_functions import safe_wandb_log
from regress.errors import TaskError

PASS_RATE, SAMPLES = "eval_avg_test_pass_rate", "eval_samples_evaluated"

Evaluate = Callable[[Any, Sequence[Any]], Sequence[float]]
"""Function ``evaluate(model, samples)``: the pass rate of each sample, from 0 to 1."""
Verify = Callable[[Any, str], float]
"""Function ``verify(sample, completion)``: the share of a sample's tests that a completion passes, from 0 to 1."""


class EnhancedInferenceCallback(TrainerCallback):
    """Evaluates the model every so many optimizer steps, and logs ``eval_avg_test_pass_rate``.

    The value is the mean over all evaluated samples, failures count 0. It goes to the trainer's ``log_history``, so
    that whoever reads it there (a curriculum) sees it, and to the sync manager of `regress.tracking` if there is one.
    The samples are the same at every evaluation, every generator is as it was afterwards, and so is the model's mode:
    training goes on as if nothing had happened. An error of the evaluation ends the training; it is never replaced by
    a number.
    """

    def __init__(
        self,
        eval_every_n_steps: int = 25,
        max_samples: int = 8,
        *,
        samples: Sequence[Any] | None = None,
        evaluate: Evaluate | None = None,
        verify: Verify | None = None,
        tokenizer: Any = None,
        prompt: Callable[[Any], Any] = lambda sample: sample["prompt"],
        max_new_tokens: int = 128,
        seed: int = 0,
    ) -> None:
        """Prepare the evaluation: greedy completions, each of which has to equal its sample's ``answer``.

        ``verify`` judges them otherwise, and ``evaluate`` takes the place of all of it.

        Args:
            eval_every_n_steps: optimizer steps between two evaluations.
            max_samples: samples that are evaluated, at most; chosen once, by ``seed``.
            samples: evaluation data; ``None``: the trainer's evaluation data set.
            evaluate: does all of an evaluation.
            verify: judges one completion.
            tokenizer: for completions; ``None``: the trainer's.
            prompt: text of a sample, or its messages for the tokenizer's chat template.
            max_new_tokens: longest completion.

        Raises:
            TaskError: if there are two ways to evaluate.
        """
        if evaluate is not None and verify is not None:
            raise TaskError("""EnhancedInferenceCallback evaluates either by evaluate=function(model, samples) or by
            verify=function(sample, completion); leave one of them away""")
        if eval_every_n_steps < 1 or max_samples < 1:
            raise TaskError(
                "EnhancedInferenceCallback: eval_every_n_steps and max_samples must be at least 1"
            )
        self._every = eval_every_n_steps
        self._max_samples = max_samples
        self._samples = samples
        self._evaluate = evaluate
        self._verify = verify or _equals_answer
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._chosen: list[Any] | None = None
        self._history: list[dict[str, float]] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the samples; a trainer that resumes has its earlier evaluations in ``log_history``.

        Raises:
            TaskError: if there is no evaluation data, or no tokenizer for completions.
        """
        self._chosen = self._choose(kwargs)
        self._history = [
            {"step": row["step"], "pass_rate": row[PASS_RATE], "samples": row[SAMPLES]}
            for row in state.log_history
            if PASS_RATE in row and SAMPLES in row
        ]
        self._tokenizer = self._tokenizer or kwargs.get("processing_class") or kwargs.get("tokenizer")
        if self._evaluate is None and self._tokenizer is None:
            raise TaskError("EnhancedInferenceCallback has no tokenizer for its completions; give tokenizer=")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluate if that is due; a step is evaluated once."""
        step = int(state.global_step)
        if step and step % self._every == 0 and not any(row["step"] == step for row in self._history):
            metrics = self.evaluate(kwargs["model"], step)
            state.log_history.append({**metrics, "step": step})
            if state.is_world_process_zero:
                safe_wandb_log(metrics, step)

    def evaluate(self, model: Any, step: int) -> dict[str, float]:
        """Return the metrics of one evaluation of a model, and add it to the summary.

        Raises:
            TaskError: if the evaluation gives no rate from 0 to 1 for each sample.
        """
        if self._chosen is None:
            self._chosen = self._choose({})
        with _unchanged(model):
            run = self._evaluate or self._completed
            rates = [float(rate) for rate in run(model, self._chosen)]
        if len(rates) != len(self._chosen) or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise TaskError(f"""the evaluation of {len(self._chosen)} samples returned {rates[:8]}; it must return one
            pass rate from 0 to 1 for each sample, 0 for a failure""")
        mean = statistics.fmean(rates)
        self._history.append({"step": float(step), "pass_rate": mean, "samples": float(len(rates))})
        return {
            PASS_RATE: mean,
            SAMPLES: float(len(rates)),
            "eval_max_pass_rate": max(rates),
            "eval_min_pass_rate": min(rates),
            "eval_std_pass_rate": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "inference/step": float(step),
            "_trainer_step": float(step),
            "curriculum/latest_performance": mean,
            "curriculum/evaluation_count": float(len(self._history)),
        }

    def get_evaluation_summary(self) -> dict[str, Any]:
        """Return number, last, best and mean of the evaluations so far, and each of them; ``None`` before the first."""
        rates = [row["pass_rate"] for row in self._history]
        last = self._history[-1] if self._history else None
        return {
            "evaluation_count": len(rates),
            "last_step": None if last is None else int(last["step"]),
            "latest_pass_rate": None if last is None else last["pass_rate"],
            "best_pass_rate": max(rates, default=None),
            "mean_pass_rate": statistics.fmean(rates) if rates else None,
            "history": [dict(row) for row in self._history],
        }

    def _choose(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the samples of every evaluation; the generator that draws them is used for nothing else."""
        samples = self._samples
        if samples is None:
            samples = getattr(given.get("eval_dataloader"), "dataset", None)
        if samples is None:
            samples = _evaluation_data(self)
        if samples is None or len(samples) == 0:
            raise TaskError("""EnhancedInferenceCallback has no evaluation data, and makes none up; give samples=, or
            the trainer an eval_dataset""")
        indices = random.Random(self._seed).sample(range(len(samples)), min(self._max_samples, len(samples)))
        chosen = [samples[index] for index in sorted(indices)]
        if self._evaluate is None and self._verify is _equals_answer:
            _require_answers(chosen)
        return chosen

    def _completed(self, model: Any, samples: Sequence[Any]) -> list[float]:
        return [
            float(self._verify(sample, self._completion(model, self._prompt(sample)))) for sample in samples
        ]

    def _completion(self, model: Any, prompt: Any) -> str:
        """Return the greedy completion of a prompt, a text or messages."""
        text = prompt
        if not isinstance(prompt, str):
            text = self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        inputs = self._tokenizer(text, return_tensors="pt").to(model.device)
        pad = self._tokenizer.pad_token_id
        found = model.generate(
            **inputs,
            do_sample=False,
            max_new_tokens=self._max_new_tokens,
            pad_token_id=self._tokenizer.eos_token_id if pad is None else pad,
        )
        completion = found[0, inputs["input_ids"].shape[1] :]
        return str(self._tokenizer.decode(completion, skip_special_tokens=True))


def _equals_answer(sample: Any, completion: str) -> float:
    return float(completion.strip() == str(sample["answer"]).strip())


def _require_answers(samples: Sequence[Any]) -> None:
    lacks = next(
        (s for s in samples if not isinstance(s, Mapping) or not {"prompt", "answer"} <= s.keys()), None
    )
    if lacks is not None:
        what = (
            f"has {', '.join(map(str, lacks))}"
            if isinstance(lacks, Mapping)
            else f"is a {type(lacks).__name__}"
        )
        raise TaskError(f"""EnhancedInferenceCallback compares the completion of each sample's prompt with its answer,
        and a sample of the evaluation data {what}; give verify=function(sample, completion) and
        prompt=function(sample), or evaluate=function(model, samples)""")


def _evaluation_data(callback: TrainerCallback) -> Any:
    """Return ``eval_dataset`` of the trainer that calls a callback, several as one; None: it has none.

    A trainer tells its callbacks of that data set only after an evaluation of its own, so it is looked for among the
    callers.
    """
    frame = sys._getframe()
    while (outer := frame.f_back) is not None:
        frame = outer
        owner = frame.f_locals.get("self")
        if callback in getattr(getattr(owner, "callback_handler", None), "callbacks", ()):
            found = getattr(owner, "eval_dataset", None)
            return (
                [sample for part in found.values() for sample in part] if isinstance(found, dict) else found
            )
    return None


@contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Leave the mode of every module, and every generator, as they were."""
    modes = {module: module.training for module in model.modules()}
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for module, mode in modes.items():
                module.training = mode
