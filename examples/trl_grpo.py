"""TRL's GRPOTrainer under test, unmodified: ``python examples/trl_grpo.py FOLDER MICROBATCHES``."""

import sys
from tempfile import mkdtemp

import torch
from datasets import Dataset
from tiny_model import tiny_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from regress import record

folder, micros = sys.argv[1], int(sys.argv[2])
model = tiny_model()
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w2"))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
prompts = [torch.randint(2, 64, (3 + group,)).tolist() for group in (0, 0, 0, 0, 1, 1, 1, 1)]
completions = [torch.randint(2, 64, (4 + number,)).tolist() for number in range(8)]


def rollout(
    texts: list[str], trainer: GRPOTrainer
) -> dict[str, list | None]:  # both runs train on the same tokens
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}


def reward(completion_ids: list[list[int]], **others: object) -> list[float]:
    return [float(ids[-1] % 5) for ids in completion_ids]


batch = {"per_device_train_batch_size": 8 // micros, "gradient_accumulation_steps": micros}
here = {"output_dir": mkdtemp(), "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False}
config = GRPOConfig(**batch, **here, num_generations=4, max_steps=2, learning_rate=1e-3)
texts = Dataset.from_dict({"prompt": ["w3", "w4"]})
trainer = GRPOTrainer(model, reward, config, texts, processing_class=tokenizer, rollout_func=rollout)
with record(folder, trainer.model, token_gradient=True):
    trainer.train()
