"""TRL: GRPOTrainer pads prompts on the left and gives no position ids, so GPT-2 is trained at other positions.

Gradients of one step of `train()` on given completions, beside those of the same loss without padding.
"""

import tempfile
from importlib.metadata import version

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS = [[2, 3, 4, 5, 6], [2, 3, 4, 5, 6], [7], [7]]
COMPLETIONS, REWARDS = [[8, 9], [10, 8], [9, 10], [8, 8]], [1.0, 0.0, 1.0, 0.0]


def right_norm(model: GPT2LMHeadModel) -> float:
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 0.5 / (0.5**0.5 + 1e-4)
    loss = 0
    for prompt, completion, advantage in zip(PROMPTS, COMPLETIONS, advantages, strict=True):
        log_probs = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        loss = loss - advantage * log_probs[range(2), completion].sum() / 8
    return torch.stack([g.norm() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm().item()


class Norm(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, **given):
        self.actual = torch.stack([p.grad.norm() for p in given["model"].parameters()]).norm().item()


torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=12, n_positions=32, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
)
right = right_norm(model.eval())
words = {name: number for number, name in enumerate(["<pad>", "<eos>", *"abcdefghij"])}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(WordLevel(words)), pad_token="<pad>", eos_token="<eos>"
)
norm = Norm()
with tempfile.TemporaryDirectory() as folder:
    args = GRPOConfig(
        folder, use_cpu=True, bf16=False, report_to="none", max_steps=1, num_generations=2, disable_tqdm=True,
        per_device_train_batch_size=4, max_grad_norm=0.0, save_strategy="no", disable_dropout=True,
    )  # fmt: skip
    GRPOTrainer(
        model, lambda prompts, **_: REWARDS, args, Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}]),
        processing_class=tokenizer, callbacks=[norm],
        rollout_func=lambda *_: {"prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "logprobs": None},
    ).train()  # fmt: skip
print(f"torch {torch.__version__}, trl {version('trl')}, transformers {version('transformers')}")
print(f"norm of the gradient: right {right:.5f}  actual {norm.actual:.5f}  ratio {norm.actual / right:.3f}")
reproduced = abs(norm.actual / right - 1) > 1e-3
print("reproduced" if reproduced else "fixed in this version")
raise SystemExit(not reproduced)
