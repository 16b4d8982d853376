"""TRL's GRPOTrainer under test, as it is: ``python examples/trl_grpo.py MODEL FOLDER [ACCUMULATION]``.

MODEL is a small local checkpoint with its tokenizer. Its rollouts do not come from the model, so that runs with another
accumulation hold the same samples: ``regress compare FOLDER1 FOLDER2``.
"""

import sys
import tempfile

from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from regress.capture import record

path, folder, accumulation = sys.argv[1], sys.argv[2], int((*sys.argv, 1)[3])
tokenizer = AutoTokenizer.from_pretrained(path)
prompts = [" ".join(tokenizer.convert_ids_to_tokens([i, i + 1])) for i in (5, 9, 14, 20)]


def rollout(prompts, trainer):
    """Completions of three to six tokens that depend on the prompt and its turn only."""
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    turns = [prompts[:i].count(prompt) for i, prompt in enumerate(prompts)]
    completions = [
        [3 + (ids[i][0] * 7 + turn + k) % 40 for k in range(3 + turn)] for i, turn in enumerate(turns)
    ]
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[0.0] * len(c) for c in completions],
    }


trainer = GRPOTrainer(
    model=path,
    reward_funcs=lambda completion_ids, **_: [float(sum(c) % 5) for c in completion_ids],
    args=GRPOConfig(tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], max_steps=2, num_generations=4,
                    per_device_train_batch_size=16 // accumulation, gradient_accumulation_steps=accumulation,
                    max_completion_length=8, shuffle_dataset=False, save_strategy="no"),
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    processing_class=tokenizer, rollout_func=rollout,
)  # fmt: skip
with record(folder, trainer.model, token_gradient=True):
    trainer.train()
