"""Precision faults: fewer bits than there should be."""

from dataclasses import replace

import torch

from regress.engine import causal_lm_policy as policy
from regress.engine import grpo_trainer, training_passes
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.log_prob_projection import chunked_log_probs
from regress.engine.mini_batch import TokenBatch
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.fresh.gradient_norm import _scaled_by
from tests.faults.optimizer import EMBEDDING, around_the_update
from tests.faults.rounding import outputs_rounded


@fault(
    "O",
    "activations transformer.wpe",
    "position-embedding module-dtype module precision inputs-hold",
    kind="precision",
    on="gpt2/left",
    names=r"transformer\.(wpe|h\.|ln_f).*|lm_head",
)
@met_in("a table of positions that is kept in half precision beside embeddings in full")
def embeddings_of_positions_in_bfloat16(run):
    """Embeddings of positions are rounded to half precision, and those of tokens are not."""
    outputs_rounded(run, "wpe")


@fault(
    "O",
    "log_probs",
    "temperature log-softmax vocabulary-parts precision inputs-hold",
    kind="precision",
    on="dr_grpo/tp2-packed-chunk7",
    ranks=(0, 1),
)
@met_in("a temperature that is a tensor of the dtype of logits under autocast")
def temperature_in_bfloat16(run):
    """Logits are divided by the number of half precision that is nearest to the temperature."""
    policy = run.trainer.policy
    policy.temperature = float(torch.tensor(policy.temperature).bfloat16())


@fault(
    "O",
    f"optimizer {EMBEDDING}/exp_avg",
    "clip-of-gradients state-of-a-rank-unclipped precision",
    kind="precision",
    on="tied/mbs4",
)
@met_in("a factor of clipping in the dtype of half-precision gradients")
@by(_scaled_by)
def clip_factor_in_bfloat16(limit, norm):
    """The factor that clips gradients is rounded to half precision."""
    return rounded((limit / (norm + 1e-6)).clamp(max=1.0))


# the last one names the dtype
@fault("O", "loss", "precision loss-sum", kind="precision")
@met_in("a loss that is summed under autocast")
@around(training_passes, "_sum")
def loss_summed_in_bfloat16(right, micro, values):
    """Losses of tokens are right, and their sum has half precision."""
    return rounded(right(micro, values))


@fault("O", "grad_norm grad_norm", "precision norm", kind="precision")
@met_in("a norm of gradients in their own half precision")
@around(LocalPolicy, "_total_norm")
def norm_in_bfloat16(right, self, norms):
    """The norm of each gradient is rounded to half precision before the norms are joined."""
    return right(self, {name: rounded(norm) for name, norm in norms.items()})


@fault(
    "O",
    "advantages advantages",
    "advantage-dtype precision",
    kind="precision",
    on="on_policy/base",
    precisions="float64",
)
@met_in("rewards that a service returns in half precision")
@around(grpo_trainer, "token_advantages")
def rewards_in_bfloat16(right, rewards, *args, **rest):
    """Rewards are rounded to half precision before their group is looked at."""
    return right(rounded(rewards), *args, **rest)


# the last one names the dtype of the sum
@fault("O", f"param {EMBEDDING}", "param-dtype precision optimizer-settings", kind="precision")
@met_in("updates without master weights, added in half precision")
@by(around_the_update)
@torch.no_grad()
def updates_in_bfloat16(optimizer, update):
    """Updates are rounded to half precision before they are added; the parameter itself is not."""
    before = {p: p.clone() for group in optimizer.param_groups for p in group["params"]}
    update()
    for parameter, known in before.items():
        parameter.copy_(known + rounded(parameter - known))


@fault("O", "activations model.embed_tokens", "module-dtype precision", kind="precision")
@met_in("NeMo-RL docs/adding-new-models.md: embeddings of small numbers")
def embeddings_in_bfloat16(run):
    """Embeddings of tokens are rounded to half precision."""
    outputs_rounded(run, "embed_tokens")


@fault("O", "ref_log_probs ref_log_probs", "softmax-dtype precision", kind="precision")
@met_in("rllm#816")
@around(Trainer, "_collected")
def reference_stored_in_float16(right, self, source, *rest):
    """Log-probs of the reference are stored in float16 until the update."""
    found = right(self, source, *rest)
    return found if source is self.policy else rounded(found, torch.float16)


@fault(
    "O", "sampler_weights sampler_weights", "sampler-mismatch precision", kind="precision", on="cispo/mbs4"
)
@met_in("SkyRL PR#1908: log-probs that travel in half precision")
@around(TokenBatch, "sampler_log_probs")
def sampler_log_probs_travel_in_bfloat16(right, self, dtype):
    """The trainer gets the sampler's log-probs in half precision."""
    found = right(self, dtype)
    return None if found is None else rounded(found)


@fault("O", "log_probs log_probs", "softmax-dtype precision", kind="precision", precisions="float64")
@met_in("O04: a softmax that asks for float32 whatever its logits are")
@around(policy, "token_log_probs")
def softmax_in_float32(right, logits, *args, **rest):
    """Log-probs of float64 logits are computed in float32."""
    found = right(logits.float(), *args, **rest)
    entropy = None if found.entropy is None else found.entropy.to(logits.dtype)
    return replace(found, log_probs=found.log_probs.to(logits.dtype), entropy=entropy)


# the last one names the dtype
@fault("O", "token_loss elementwise_loss", "precision token-loss", kind="precision", on="dr_grpo/mbs4")
@met_in("xtuner PR#1108: a cap at the least number of half precision")
@around(training_passes, "token_loss")
def loss_of_a_token_in_float16(right, *args, **rest):
    """The terms of a token's loss are added in float16."""
    found = right(*args, **rest)
    return replace(found, loss_K=rounded(found.loss_K, torch.float16))


@fault(
    "O",
    "activations lm_head",
    "output-projection module precision inputs-hold",
    kind="precision",
    on="dense/chunked",
)
@met_in("a fused projection that casts its rows to half precision")
@in_place_of(policy, "chunked_log_probs")
def rows_of_chunks_in_bfloat16(model, hidden, *args, **rest):
    """Hidden states are rounded to half precision before they are projected chunk by chunk."""
    return chunked_log_probs(model, rounded(hidden), *args, **rest)


@fault(
    "O",
    "old_log_probs",
    "rounded old-log-probs softmax-dtype precision inputs-hold",
    kind="precision",
    on="cispo/dp2-packed-mbs3",
)
@met_in("old log-probs that workers return in half precision")
@around(Trainer, "_collected")
def log_probs_of_ranks_joined_in_bfloat16(right, self, *args):
    """Ranks hand the log-probs that they recompute before the first update to each other in half precision."""
    return rounded(right(self, *args))
