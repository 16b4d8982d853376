"""README.md of an exported case: each file, field and formula, for authors of a trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from regress.engine.adapters.adapter_settings import is_adapter
from regress.engine.config.config_schema import Config
from regress.golden.golden_case import GoldenCase
from regress.grpo.objective import Objective

_FILES = {
    "model/": "policy before the first update: a Hugging Face checkpoint in float32 with its tokenizer",
    "reference/": "reference model of the KL term, of the same form",
    "optimizer.safetensors": "AdamW's `PARAMETER/exp_avg` and `PARAMETER/exp_avg_sq` before the first update, by the "
    "names of `model.named_parameters()`",
    "objective.json": "every number of the loss and of the updates; see below",
    "rollouts/step_NNNNNN.jsonl": "samples of a step, one a line",
    "derived/UPDATE.jsonl": "advantages and token weights of an update, which follow from the rest",
    "export.json": "format, case, and SHA-256 of every other file",
}
_ADAPTER = {
    "model/": "policy before the first update: a LoRA adapter of peft in float32, with the tokenizer; the frozen model "
    "under it is in `model/base/`: `model = AutoModelForCausalLM.from_pretrained('model/base')`, then "
    "`model.load_adapter('model', is_trainable=True)`",
    "optimizer.safetensors": "AdamW's `PARAMETER/exp_avg` and `PARAMETER/exp_avg_sq` before the first update, by the "
    "names in `model/adapter_model.safetensors` without `base_model.model.`; golden values have the same names",
}
_ROLLOUT = {
    "group_id, run_id": "identify the sample within its step; samples of one group share a prompt",
    "prompt_ids, completion_ids": "token ids; the model reads them one after the other, positions from 0, each token "
    "seeing itself and the earlier ones of its sample",
    "loss_mask": "one value a completion token: 1 where the policy sampled it, 0 for the answers of tools",
    "reward": "from which advantages are made; `rewards` holds its unweighted parts",
    "finish_reason": "`length` where the completion was cut off",
    "sampler_log_probs": "log-probs as sampled (null where unknown or not sampled)",
    "old_log_probs": "log-probs in the denominator of the ratio, in float64 (null: not a loss token)",
    "ref_log_probs": "log-probs under the reference model, in float64",
}
_TEXT = """# Golden case `{name}`

{reason}

Files of this folder are all that a trainer needs to repeat {updates} optimizer updates on recorded rollouts.
Tensors that it records can be compared with the golden values: `regress compare golden:{name} DUMP`.

## Files

{files}

## A line of `rollouts/`

{rollout}

Lists of log-probs have one value for each completion token, at the token itself (not at its predecessor).

## `objective.json`

- `updates`: numbered optimizer updates in order. `step` names the file of rollouts, `samples` the mini-batch as
  `[group_id, run_id]` in canonical order, `learning_rate` that of the update, `name` the golden values. Samples of
  `microbatches` are forwarded together; that matters only if `algorithm.denominator_scope` is `microbatch`.
- `algorithm`: the objective, field by field; see the table below.
- `clip_range`: bounds of the ratio, whichever way `clip_bounds` gives them.
- `norm_length`: constant length of `seq-mean-token-sum-norm`.
- `temperature`: logits are divided by it, in training as in sampling.
- `max_grad_norm`, `grad_norm_eps`: clipping of the gradient; null: none.
- `optimizer`: AdamW with decoupled weight decay on all parameters, biases and norms included.
- `optimizer_steps`: updates that each parameter had before the first of these; null: a new optimizer.
- `reference`: null: not needed; `sync_every_n_steps` null: frozen, else after every so many steps
  `reference = mixup_alpha * policy + (1 - mixup_alpha) * reference`.
- `formulas`: what follows, for programs.

## Formulas of this case

{formulas}

All sums are over loss tokens. Advantages are computed over all samples of a step, before its first update; weights
over the mini-batch of an update.{derived}

## Fields of `algorithm`

| field | value | meaning |
|---|---|---|
{algorithm}

## Repeating the golden values in float64

Golden values are true float64: load the checkpoint in float32, then `model.double()`, then run forward *and backward*
under `regress.true_float64()`, because Hugging Face modules cast norms, rotary embeddings and softmax to float32
whatever the weights are. No dropout. Mixture-of-experts models need `experts_implementation="eager"` for it.
Gradients are recorded before clipping, parameters and optimizer state after the update.
"""


def readme(case: GoldenCase, config: Config, objective: Mapping[str, Any], derived: bool) -> str:
    """Return the text, in Markdown."""
    left_out = {"reference/"} if objective["reference"] is None else set()
    left_out |= set() if derived else {"derived/UPDATE.jsonl"}
    left_out |= {"optimizer.safetensors"} if objective["optimizer_steps"] is None else set()
    files = _FILES | (_ADAPTER if is_adapter(case.folder / "model") else {})
    values = objective["algorithm"]
    table = [
        f"| `{spec.name}` | `{json.dumps(values[spec.name])}` | {spec.metadata['help']} |"
        for spec in fields(Objective)
    ]
    return _TEXT.format(
        name=case.name,
        reason=" ".join(case.reason.split()),
        updates=len(objective["updates"]),
        files=_bullets({name: text for name, text in files.items() if name not in left_out}),
        rollout=_bullets(_ROLLOUT),
        formulas=_bullets(objective["formulas"]),
        derived=" Both are in `derived/`, as `advantages` and `token_weights`." if derived else "",
        algorithm="\n".join(table),
    )


def _bullets(rows: Mapping[str, str]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in rows.items())
