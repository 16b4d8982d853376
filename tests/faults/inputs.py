"""Faults in the model's inputs and masks."""

from dataclasses import replace

import torch

from regress.engine import causal_lm_policy, recurrent_layers
from regress.engine.attention import VarlenSegments, visible
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import TokenBatch
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import (
    columns_as_positions,
    order_not_restored,
    tool_tokens_in_the_loss,
)
from tests.faults.fault import Shown, fault, met_in

fault(
    "G",
    "batch_inputs position_ids",
    "position-columns",
    on="gpt2/packed-dynamic",
    place="step0/rank0/micro0",
    tokens="behind another",
    probe="log_probs",
    silent={},
    blind=("loss 5 %",),
)(met_in("LlamaFactory PR#7318")(columns_as_positions))


@fault(
    "G",
    "activations transformer.wpe",
    "positions-not-passed position-embedding",
    on="gpt2/packed-dynamic",
    place="step0/rank0/micro0",
    tokens="behind another",
    probe="log_probs",
    also=(
        Shown(
            "gpt2",
            "left",
            "activations transformer.wpe",
            place="step0/rank0/micro0",
            tokens="behind padding",
            probe="log_probs",
        ),
    ),
    silent={
        "dense/packed-dynamic": "rotary: only distances within a sample count",
        "dense/left": "rotary: only distances within a sample count",
    },
)
@met_in("TRL#6800, OpenRLHF#217")
@around(LocalPolicy, "_run")
def positions_ignored(run, self, model, micro, *rest):
    """Position ids count through the row, but only in the model: the recorded batch is right."""
    columns = torch.arange(micro.layout.shape[1]).expand(micro.layout.shape)
    return run(self, model, replace(micro, position_ids=columns), *rest)


@fault(
    "G",
    "activations model.layers.0",
    "padding-seen packed-leak",
    on="dense/left-mbs3",
    place="step0/rank0/micro0",
    tokens="behind padding",
    probe="log_probs",
    also=(
        Shown(
            "dense",
            "packed-mbs3",
            "activations model.layers.0",
            place="step0/rank0/micro0",
            tokens="behind another",
            probe="log_probs",
        ),
    ),
    silent={"dense/base": "nothing lies before a right padded sample"},
)
@met_in("TRL PR#2708: no attention mask in the forward pass of log-probs")
@in_place_of(causal_lm_policy, "block_causal_mask")
def causal_only(layout, implementation, *_):
    """The attention mask is the causal one alone."""
    assert implementation == "sdpa"
    rows, columns = layout.shape
    return torch.ones(rows, 1, columns, columns, dtype=torch.bool).tril()


@fault(
    "G",
    "activations model.layers.0",
    "packed-leak",
    on="dense/varlen",
    place="step0/rank0/micro0",
    tokens="behind another",
    probe="log_probs",
)
@met_in("NeMo-RL#2105, maxtext#4476")
def one_segment(patch):
    """``cu_seqlens`` is dropped: a packed row is one sequence."""
    of = VarlenSegments.of

    def wrong(layout, local_index):
        right = of(layout, local_index)
        return VarlenSegments(right.index, (sum(right.lengths),))

    patch.setattr(VarlenSegments, "of", wrong)


@fault(
    "G",
    "activations model.layers.0",
    "state-across-samples",
    on="hybrid/packed",
    place="step0/rank0/micro0",
    tokens="behind another",
    probe="log_probs",
    silent={
        "hybrid/base": "nothing lies before a right padded sample",
        "hybrid/left-mbs3": "padding adds nothing to a state: its embedding is zero, and no layer before it has a bias",
        "dense": "attention alone carries no state",
    },
)
@met_in("transformers#44717, slime PR#1686, NeMo-Automodel#2131")
def state_handed_on(patch):
    """Layers of linear attention run over the whole row, as without ``cu_seqlens``: attention keeps samples apart."""
    layer = recurrent_layers.SampleBySample
    apart = layer.forward
    patch.setattr(layer, "forward", lambda self, *args, varlen=None, **named: apart(self, *args, **named))


fault(
    "Q",
    "batch_inputs response_mask",
    "tool-tokens",
    on="tools/mbs4",
    place="step0/rank0/micro0",
    silent={"dense": "no tool writes anything"},
)(met_in("UniRL PR#409, NeMo-RL PR#2176")(tool_tokens_in_the_loss))

fault(
    "G",
    "ref_log_probs ref_log_probs",
    "order-not-restored",
    on="dense/reversed",
    place="step0/rank0/micro0",
    silent={"dense/base": "one microbatch in the given order"},
)(met_in("verl#2185, SkyRL PR#2096")(order_not_restored))


def projected(patch, change):
    """Change every microbatch that is laid out."""
    right = TokenBatch._project
    patch.setattr(TokenBatch, "_project", lambda self, *args: change(right(self, *args)))


def masks(patch, change):
    """Train on the tokens that ``change`` tells of a sample."""
    patch.setattr(Trainer, "loss_masks", lambda _, samples: [change(sample) for sample in samples])


@fault("G", "batch_inputs position_ids", "position-offset", on="gpt2/mbs4")
@met_in("fairseq-style positions that begin at 1")
@by(projected)
def positions_from_one(micro):
    """Position ids begin at 1."""
    return replace(micro, position_ids=micro.position_ids + 1)


@fault("Q", "batch_inputs response_mask", "prompt-tokens")
@met_in("a mask of the response that begins with the prompt")
@by(masks)
def prompt_tokens_in_the_loss(sample):
    """All tokens but the first are trained on."""
    return [0] + [1] * (len(sample.tokens) - 1)


@fault("Q", "batch_inputs response_mask", "last-token-masked")
@met_in("slime#1490")
@by(masks)
def stop_token_not_in_the_loss(sample):
    """The last token of a sample is masked, so that it never learns to stop."""
    return [*sample.loss_mask[:-1], 0]


# loss-mask: it names truncated completions
@fault(
    "Q",
    "batch_inputs response_mask",
    "loss-mask",
    on="dapo/mbs4",
    silent={"dense": "truncated completions are trained on"},
)
@met_in("DAPO's overlong filter that is not applied")
@by(masks)
def truncated_completions_in_the_loss(sample):
    """Completions that were cut off are trained on."""
    return sample.loss_mask


@fault("Q", "batch_inputs input_ids", "other-tokens")
@met_in("TRL#5224, slime PR#117")
@by(projected)
def tokens_encoded_again(micro):
    """Decoding and encoding again gives another id for the most frequent token."""
    ids = micro.input_ids
    often = ids[torch.from_numpy(micro.layout.attention_mask)].mode().values
    return replace(micro, input_ids=torch.where(ids == often, ids + 1, ids))


@fault("G", "activations model.layers.0", "module long-context")
@met_in("sliding_window of another configuration")
@around(causal_lm_policy, "block_causal_mask")
def window_of_four(right, layout, *args):
    """Tokens see no more than the four last ones."""
    band = torch.ones(layout.shape[1], layout.shape[1], dtype=torch.bool).triu(-3)
    return right(layout, *args) & band


@fault("G", "activations model.layers.0", "module")
@met_in("a mask that is off by one")
@in_place_of(causal_lm_policy, "block_causal_mask")
def next_token_seen(layout, *_):
    """A token sees the one after it."""
    columns = torch.arange(layout.shape[1])
    right = visible(layout, columns, columns)
    samples = torch.from_numpy(layout.sample_ids)
    after = (columns[None, :] == columns[:, None] + 1) & (samples[:, :, None] == samples[:, None, :])
    return right | (after & (samples[:, :, None] >= 0))[:, None]
