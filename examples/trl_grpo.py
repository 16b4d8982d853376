"""TRL's GRPOTrainer under test, as it is: ``python examples/trl_grpo.py MODEL FOLDER [ACCUMULATION]``.

MODEL is a small local checkpoint. Runs with another accumulation hold the same samples: regress compare A B.
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
options = {"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "shuffle_dataset": False}
sizes = {"per_device_train_batch_size": 16 // accumulation, "gradient_accumulation_steps": accumulation}


def rollout(prompts, trainer):
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    turns = [prompts[:i].count(prompt) for i, prompt in enumerate(prompts)]
    texts = [[3 + (own[0] * 7 + t + k) % 40 for k in range(3 + t)] for own, t in zip(ids, turns, strict=True)]
    return {"prompt_ids": ids, "completion_ids": texts, "logprobs": [[0.0] * len(text) for text in texts]}


trainer = GRPOTrainer(
    model=path,
    reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 5) for ids in completion_ids],
    args=GRPOConfig(tempfile.mkdtemp(), max_steps=2, num_generations=4, **options, **sizes),
    train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
    rollout_func=rollout,
)
with record(folder, trainer.model, token_gradient=True):
    trainer.train()
