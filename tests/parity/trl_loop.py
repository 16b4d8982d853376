"""TRL's GRPOTrainer on recorded rollouts under `record`: ``python trl_loop.py FOLDER WORK JSON`` is one rank of it."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

GROUP_SIZE, GROUPS, LONGEST, VOCABULARY = 4, 4, 12, 64


def make_world(work: Path) -> Path:
    """A tiny Qwen3 with its tokenizer on disk, prompts, and four rollouts of each with rewards."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    ).save_pretrained(work)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=False,
        attention_dropout=0.0,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(work)
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    rollouts: dict[str, list[dict[str, Any]]] = {}
    for _ in range(2 * GROUPS):
        prompt = " ".join(f"w{i}" for i in draw(3, VOCABULARY, draw(2, 8)[0]))
        rollouts[prompt] = []
        for _ in range(GROUP_SIZE):
            completion = draw(3, VOCABULARY, draw(2, LONGEST + 1)[0])
            if len(completion) < LONGEST:
                completion[-1] = 1
            reward = draw(0, 5)[0] / 4 + 0.01 * len(completion)
            rollouts[prompt].append({"completion": completion, "reward": reward})
    (work / "rollouts.json").write_text(json.dumps(rollouts))
    return work


def make_trainer(
    work: Path, peft: bool = False, dtype: str = "float32", told: bool = False, **changes: Any
) -> Any:
    """An unmodified GRPOTrainer; its ``rollout_func`` gives the recorded completions.

    ``told``: rollouts and rewards are tapped.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
    from trl import GRPOConfig, GRPOTrainer

    recorded = json.loads((work / "rollouts.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(work)
    rank = int(os.environ.get("RANK", 0))

    def numbered(prompts: list[str]) -> list[dict[str, Any]]:
        seen: Counter[str] = Counter()
        if "RANK" in os.environ:  # the ranks share the rollouts of a batch in order
            everyone: list[Any] = [None] * int(os.environ["WORLD_SIZE"])
            torch.distributed.all_gather_object(everyone, prompts)
            seen.update(prompt for earlier in everyone[:rank] for prompt in earlier)
        found = []
        for prompt in prompts:
            found.append(recorded[prompt][seen[prompt] % GROUP_SIZE])
            seen[prompt] += 1
        return found

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        completions = [list(one["completion"]) for one in numbered(prompts)]
        return {
            "prompt_ids": [tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(completion) for completion in completions],
        }

    def reward(
        prompts: list[str], completions: Any, completion_ids: Any, trainer_state: Any, **_: Any
    ) -> list[float]:
        rewards = [one["reward"] for one in numbered(prompts)]
        if told:
            tap_rollouts(prompts, completion_ids, rewards, trainer_state.global_step)
        return rewards

    def tap_rollouts(
        prompts: list[str], completions: list[list[int]], rewards: list[float], step: int
    ) -> None:
        from regress import Trajectory, at, tap_trajectories

        found = []
        for number, (prompt, ids, reward) in enumerate(zip(prompts, completions, rewards, strict=True)):
            given = tokenizer(prompt)["input_ids"]
            mask = [0] * len(given) + [1] * len(ids)
            place = prompt, number % GROUP_SIZE
            found.append(Trajectory(*place, given + list(ids), mask, reward, len(given)))
        with at(step=step):
            tap_trajectories(found)

    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(work, dtype=getattr(torch, dtype))
    config: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "max_grad_norm": 0.5,
        "per_device_train_batch_size": GROUPS * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "max_completion_length": LONGEST,
        "beta": 0.05,
        "loss_type": "dapo",
        "num_iterations": 2,
        "max_steps": 3,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        **changes,
    }
    lora: dict[str, Any] = {}
    if peft:
        from peft import LoraConfig

        lora["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    trainer: Any = GRPOTrainer
    return trainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**config),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in recorded]),
        processing_class=tokenizer,
        rollout_func=rollout,
        **lora,
    )


def train(folder: Path, work: Path, fault: str | None = None, told: bool = False, **changes: Any) -> Any:
    """Train under `record` and return the trainer; ``told``: with all that `regress oracle` asks for."""
    from regress import record

    trainer = make_trainer(work, told=told, **changes)
    claimed: dict[str, Any] = {}
    if told:
        claimed = {"initial_weights": True, "temperature": trainer.args.temperature}
    recorded = record(folder, trainer.model, token_gradient=True, **claimed)
    planted = FAULTS[fault](trainer) if fault else contextlib.nullcontext()
    with recorded, planted:
        trainer.train()
    return trainer


@contextlib.contextmanager
def _scaled_value_projection(trainer: Any) -> Any:
    layer = trainer.model.model.layers[1].self_attn.v_proj
    handle = layer.register_forward_hook(lambda module, args, output: output * 1.01)
    yield
    handle.remove()


@contextlib.contextmanager
def _denominator_of_the_microbatch(trainer: Any) -> Any:
    own = trainer._compute_loss

    def faulty(model: Any, inputs: Any) -> Any:
        mine = inputs["completion_mask"].sum()
        return own(model, {**inputs, "num_items_in_batch": mine * trainer.args.gradient_accumulation_steps})

    trainer._compute_loss = faulty
    yield


@contextlib.contextmanager
def _mask_without_the_last_token(trainer: Any) -> Any:
    own = trainer._compute_loss

    def faulty(model: Any, inputs: Any) -> Any:
        mask = inputs["completion_mask"].clone()
        last = mask.sum(1) - 1
        mask[range(len(mask)), last] = 0
        return own(model, {**inputs, "tool_mask": mask})

    trainer._compute_loss = faulty
    yield


@contextlib.contextmanager
def _population_deviation(trainer: Any) -> Any:
    own = trainer._generate_and_score_completions

    def faulty(inputs: Any) -> Any:
        found = own(inputs)
        return {**found, "advantages": found["advantages"] * (GROUP_SIZE / (GROUP_SIZE - 1)) ** 0.5}

    trainer._generate_and_score_completions = faulty
    yield


@contextlib.contextmanager
def _no_temperature(trainer: Any) -> Any:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(trainer.model, temperature=1.0, outputs=("log_probs", "entropy"))
    yield


@contextlib.contextmanager
def _norm_with_another_epsilon(trainer: Any) -> Any:
    for module in trainer.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-3
    yield


@contextlib.contextmanager
def _norms_counted_twice(trainer: Any) -> Any:
    own = [p for name, p in trainer.model.named_parameters() if "q_norm" in name or "k_norm" in name]
    handles = [parameter.register_hook(lambda gradient: 2 * gradient) for parameter in own]
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def _decay_of_weights_that_nobody_asked_for(trainer: Any) -> Any:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def decay(optimizer: Any, *_: Any) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - 0.1 * group["lr"])

    handle = register_optimizer_step_pre_hook(decay)
    yield
    handle.remove()


FAULTS: dict[str, Any] = {
    "deviation": _population_deviation,
    "temperature": _no_temperature,
    "epsilon": _norm_with_another_epsilon,
    "norms": _norms_counted_twice,
    "decay": _decay_of_weights_that_nobody_asked_for,
    "forward": _scaled_value_projection,
    "denominator": _denominator_of_the_microbatch,
    "mask": _mask_without_the_last_token,
}


def train_on_ranks(ranks: int, folder: Path, work: Path, **changes: Any) -> None:
    """Train on several processes, each of which records."""
    start_ranks(ranks, Path(__file__), str(folder), str(work), json.dumps(changes))


def start_ranks(ranks: int, script: Path, *arguments: str) -> None:
    """Run a script on several processes with the environment of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), *arguments]
    children = [
        subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert not any(child.returncode for child in children), "\n".join(told)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    train(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
