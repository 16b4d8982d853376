"""TRL's GRPOTrainer under test, unmodified: ``python examples/trl_grpo.py FOLDER [MICROBATCHES]``."""

import sys
from tempfile import mkdtemp
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from regress.capture import record

folder, micros = [*sys.argv[1:], *["1"][len(sys.argv) - 2 :]]
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, initializer_range=0.3, **sizes, **heads))
words = WordLevel({f"w{number}": number for number in range(64)}, unk_token="w2")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w1")
prompts = [torch.randint(2, 64, (3 + group,)).tolist() for group in (0, 0, 0, 0, 1, 1, 1, 1)]
completions = [torch.randint(2, 64, (4 + number,)).tolist() for number in range(8)]


def rollout(texts: list[str], trainer: Any) -> dict[str, Any]:  # recorded: both runs train on the same tokens
    return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": None}


def reward(completion_ids: list[list[int]], **others: Any) -> list[float]:
    return [float(ids[-1] % 5) for ids in completion_ids]


settings = {"per_device_train_batch_size": 8 // int(micros), "gradient_accumulation_steps": int(micros)}
quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "output_dir": mkdtemp()}
config = GRPOConfig(**settings, **quiet, num_generations=4, max_completion_length=12, max_steps=2, use_cpu=True, bf16=False)
texts = Dataset.from_dict({"prompt": ["w3", "w4"]})
trainer = GRPOTrainer(model, reward, config, texts, processing_class=tokenizer, rollout_func=rollout)
with record(folder, trainer.model, token_gradient=True):
    trainer.train()
