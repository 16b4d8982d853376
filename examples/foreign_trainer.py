"""A GRPO trainer written against an exported golden case: ``regress golden export CASE DIR --no-derived``.

It reads the files of the export only; the one helper of regress is float64 that is float64 everywhere.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from regress.engine.numeric_types import TrueFloat64


def load(folder, dtype):
    experts = {"experts_implementation": "eager"} if dtype == torch.float64 else {}
    base = folder / "base" if (folder / "base").is_dir() else folder  # below an adapter of peft
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **experts)
    if base != folder:
        model.load_adapter(folder, is_trainable=True)
    return model.to(dtype).eval()  # eval: no dropout


def forward(model, sample, temperature):
    """Return log-probs and entropies of the completion's tokens."""
    prompt, completion = sample["prompt_ids"], sample["completion_ids"]
    ids = torch.tensor([prompt + completion])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    log_p = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    chosen = log_p.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1)


def loss_mask(sample, a):
    drop = a["mask_truncated_completions"] and sample["finish_reason"] == "length"
    return torch.tensor(sample["loss_mask"], dtype=torch.bool) & (not drop)


def advantages(samples, a):
    """Return the advantage of each sample: grpo with any scale."""
    assert (a["advantage"], a["kl_placement"]) == ("grpo", "loss"), "not one of this trainer's"
    groups = {}
    for sample in samples:
        groups.setdefault(sample["group_id"], []).append(sample["reward"])
    found = []
    for sample in samples:
        rewards = torch.tensor(groups[sample["group_id"]], dtype=torch.float64)
        others = samples if a["scale"] == "batch" else ()
        over = torch.tensor([s["reward"] for s in others] or rewards.tolist(), dtype=torch.float64)
        scale = 1.0 if a["scale"] == "none" else over.std(correction=a["ddof"]) + a["eps"]
        centred = sample["reward"] - rewards.mean()
        found.append(float(centred / scale) if len(set(rewards.tolist())) > 1 else 0.0)
    return found


def weights(masks, a, norm_length):
    """Return the weight of each loss token of the mini-batch, sample by sample."""
    counts = [int(mask.sum()) for mask in masks]
    rows = len(masks) if a["count_empty_rows"] else sum(count > 0 for count in counts)
    per_sample = {
        "token-mean": lambda n: 1 / sum(counts),
        "token-sum": lambda n: 1.0,
        "seq-mean-token-mean": lambda n: 1 / rows / n,
        "seq-mean-token-sum": lambda n: 1 / rows,
        "seq-mean-token-sum-norm": lambda n: 1 / rows / norm_length,
    }[a["aggregation"]]
    return [per_sample(count) if count else 0.0 for count in counts]


def token_loss(log_p, entropy, sample, mask, advantage, objective):
    """Return loss and ratio of the loss tokens of a sample; refuse objectives that this trainer lacks."""
    a = objective["algorithm"]
    assert (a["denominator_scope"], a["dual_clip"], a["kl_bias_correction"]) == ("global", None, False)

    def given(name):
        values = [0.0 if value is None else value for value in sample[name]]
        return torch.tensor(values, dtype=log_p.dtype)[mask]

    old = log_p.detach() if a["old_log_probs"] == "current" else given("old_log_probs")
    log_ratio = log_p - old
    if a["importance_level"] == "sequence":
        log_ratio = log_ratio.mean().expand_as(log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(*objective["clip_range"])
    if a["loss"] == "cispo":
        loss = -clipped.detach() * advantage * log_p
    else:
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
    if a["sampler_correction"] == "token_truncate":
        loss = loss * (old - given("sampler_log_probs")).exp().clamp(a["correction_min"], a["correction_max"])
    if a["kl_coef"]:
        gap = given("ref_log_probs") - log_p
        loss = loss + a["kl_coef"] * (gap.exp() - gap - 1)
    return loss - a["entropy_coef"] * entropy, ratio


def train(folder, dtype=torch.float64, observe=lambda update, found: None):
    """Make all updates; pass each to ``observe`` with its computed values, token quantities sample by sample."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    folder = Path(folder)
    objective = json.loads((folder / "objective.json").read_text())
    a, settings = objective["algorithm"], objective["optimizer"]
    model = load(folder / "model", dtype)
    named = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
    adamw = torch.optim.AdamW(
        named.values(), lr=0.0, betas=settings["betas"], eps=settings["eps"],
        weight_decay=settings["weight_decay"], foreach=False,
    )  # fmt: skip
    if objective["optimizer_steps"] is not None:
        warm = load_file(folder / "optimizer.safetensors")
        for name, p in named.items():
            adamw.state[p] = {key: warm[f"{name}/{key}"].to(dtype) for key in ("exp_avg", "exp_avg_sq")}
            adamw.state[p]["step"] = torch.tensor(float(objective["optimizer_steps"][name]))
    for update in objective["updates"]:
        lines = (folder / "rollouts" / f"step_{update['step']:06d}.jsonl").read_text().splitlines()
        step = {(s["group_id"], s["run_id"]): s for s in map(json.loads, lines)}
        advantage = dict(zip(step, advantages(step.values(), a), strict=True))
        keys = [tuple(key) for key in update["samples"]]
        masks = [loss_mask(step[key], a) for key in keys]
        mini = list(zip(keys, masks, weights(masks, a, objective["norm_length"]), strict=True))[rank::world]
        found = {"samples": [step[key] | {"mask": m} for key, m, _ in mini], "tokens": [], "loss": 0.0}
        for p in named.values():
            p.grad = torch.zeros_like(p)
        with TrueFloat64() if dtype == torch.float64 else nullcontext():
            for key, mask, w in mini:
                log_p, entropy = (v[mask] for v in forward(model, step[key], objective["temperature"]))
                loss, ratio = token_loss(log_p, entropy, step[key], mask, advantage[key], objective)
                (w * loss.sum()).backward()
                found["loss"] += float((w * loss.detach()).sum())
                row = {"log_probs": log_p, "entropy": entropy, "prob_ratio": ratio, "elementwise_loss": loss}
                for name, value in (("advantages", advantage[key]), ("weights", w)):
                    row[name] = torch.full_like(loss, value)
                found["tokens"].append({name: values.detach() for name, values in row.items()})
        for p in named.values() if world > 1 else ():
            dist.all_reduce(p.grad)
        found["gradient"] = {name: p.grad.clone() for name, p in named.items()}
        norm = torch.stack([p.grad.norm() for p in named.values()]).norm()
        found["grad_norm"] = float(norm)
        if objective["max_grad_norm"] is not None:
            for p in named.values():
                p.grad *= (objective["max_grad_norm"] / (norm + objective["grad_norm_eps"])).clamp(max=1.0)
        adamw.param_groups[0]["lr"] = update["learning_rate"]
        adamw.step()
        found["param"] = {name: p.detach().clone() for name, p in named.items()}
        states = ((f"{n}/{key}", value) for n, p in named.items() for key, value in adamw.state[p].items())
        found["optimizer"] = {name: value.clone() for name, value in states}
        observe(update, found)
