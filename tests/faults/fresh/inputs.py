"""Faults of packing, masks, positions, tokens, rewards and the order of samples."""

from dataclasses import replace

import torch

from regress.engine import causal_lm_policy, grpo_trainer
from regress.engine.attention import VarlenSegments, block_causal_mask
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.grpo_trainer import Trainer
from regress.engine.mini_batch import LossTokens, TokenBatch
from regress.layout import TokenLayout, rank_layout_planner
from regress.replay.fault_injection import around, by, in_place_of
from tests.faults.fault import fault, met_in
from tests.faults.fresh.context_parallel import AFTER_BLOCK_0
from tests.faults.inputs import masks
from tests.faults.ranks.helpers import AFTER_ATTENTION


# sample 10 alone lies behind one without an end token
@fault(
    "G",
    "activations model.layers.0",
    "packed-leak module one-sample",
    on="dense/dp4-packed-mbs2",
    names=AFTER_ATTENTION,
    ranks=(3,),
    place="step0/rank3/micro0",
)
@met_in("cu_seqlens that are made from end tokens, which completions at the limit lack")
@around(LocalPolicy, "_attention")
def boundaries_at_end_tokens(right, self, micro):
    """A sample of a packed row begins behind an end token, and sees the one before it if that was cut off."""
    end = self.model.config.eos_token_id
    segments = []
    for one in micro.layout.segments:
        if segments and segments[-1].row == one.row and int(micro.input_ids[one.row, one.col - 1]) != end:
            before = segments[-1]
            segments[-1] = before._replace(stop=before.stop + one.stop - one.start)
        else:
            segments.append(one)
    joined = TokenLayout(micro.layout.shape, tuple(segments))
    return right(self, replace(micro, place=replace(micro.place, tokens=joined)))


MASK = "batch_inputs response_mask"


@fault("Q", MASK, "loss-mask", on="tools/mbs4")
@met_in("TRL#5144")
@by(masks)
def tokens_behind_a_length_masked(sample):
    """Tokens of a completion behind the eighth are not trained on: its mask is cut at another length."""
    first = sample.prompt_length + 8
    return [m if at < first else 0 for at, m in enumerate(sample.loss_mask)]


@fault("Q", MASK, "loss-mask", on="tools/mbs4")
@met_in("NeMo-RL PR#2176: the history of a conversation taken for its prompt")
@by(masks)
def only_the_last_turn_trained(sample):
    """Only the last completion of a conversation of several turns is trained on."""
    mask = list(sample.loss_mask)
    at = len(mask)
    while at and mask[at - 1]:
        at -= 1
    return [0] * at + mask[at:]


@fault("Q", MASK, "loss-mask last-token-masked", on="tools/mbs4")
@met_in("MemGen PR#33: padding and end token share an id")
@by(masks)
def end_tokens_taken_for_padding(sample):
    """Every token with the id that ends a sample is masked, inside of a conversation, too."""
    if sample.finish_reason == "length":
        return list(sample.loss_mask)
    end = sample.tokens[-1]
    return [m * int(token != end) for token, m in zip(sample.tokens, sample.loss_mask, strict=True)]


# the last one names tokens that get advantages of other samples
@fault(
    "G",
    "advantages advantages",
    "order-not-restored advantage-tokens",
    on="dr_grpo/longest-first",
    silent={"dr_grpo/mbs4": "samples keep their order"},
)
@met_in("SkyRL PR#2096, verl#2185")
def advantages_dealt_in_the_order_of_the_batch(patch):
    """Microbatches of sorted samples get the advantages in the order of the batch, as long as there are some."""
    place = [0]

    def wrong(right, self, index, *rest):
        found = right(self, index, *rest)
        if self.advantages is None:
            return found
        stop = place[0] + len(index)
        own = self.advantages[place[0] : stop]
        place[0] = stop % len(self)
        return replace(found, advantages=own)

    patch.around(LossTokens, "select", wrong)


# the last one names the mask of the attention
@fault(
    "G",
    "activations model.layers.0",
    "packed-leak module",
    on="dense/varlen-mbs4",
)
@met_in("ms-swift PR#9904: borders that do not belong to these samples")
def lengths_of_segments_sorted(patch):
    """Lengths of segments were sorted, the longest first, and their tokens were not."""
    right = VarlenSegments.of

    def wrong(layout, local):
        found = right(layout, local)
        return VarlenSegments(found.index, tuple(sorted(found.lengths, reverse=True)))

    patch.setattr(VarlenSegments, "of", wrong)


@fault("G", "activations transformer.wpe", "long-context positions-not-passed", on="gpt2/mbs4")
@met_in("unsloth PR#6738: positions that are clipped at the length of a table")
@around(LocalPolicy, "_run")
def positions_end_at_sixteen(right, self, model, micro, *rest):
    """The model is given position 15 for every token behind it: a table of another length."""
    return right(self, model, replace(micro, position_ids=micro.position_ids.clamp(max=15)), *rest)


# the last one names the mask of the attention
@fault("G", "activations transformer.h.0", "packed-leak module", on="gpt2/varlen")
@met_in("transformers PR#46634: a mask of padding that is turned")
def first_two_segments_joined(patch):
    """The first border between segments is missing, so that the second sample sees the first one."""
    right = VarlenSegments.of

    def wrong(layout, local):
        found = right(layout, local)
        lengths = found.lengths
        return VarlenSegments(found.index, (sum(lengths[:2]), *lengths[2:]))

    patch.setattr(VarlenSegments, "of", wrong)


PADDING = 0
"""Id of padding in the golden cases."""


# the last one names a token of the text with the id of padding
@fault(
    "Q",
    "activations model.layers.0",
    "module attention-mask",
    on="tools/dp2-packed-budget48",
    names=AFTER_ATTENTION,
)
@met_in("attention_mask = input_ids != pad_token_id")
@around(LocalPolicy, "_attention")
def tokens_with_the_id_of_padding_not_seen(right, self, micro):
    """A token of a completion that has the id of padding is masked for all that come behind it."""
    mask = right(self, micro)["attention_mask"]
    text = (micro.input_ids != PADDING)[:, None, None, :]
    itself = torch.eye(mask.shape[-1], dtype=torch.bool)
    return {"attention_mask": mask & (text | itself)}


# names rewards that are not passed on; one group has no advantage any more
# accepted after the first run: names other rewards
@fault("Q", "advantages advantages", "advantage-zero advantage-groups", on="dense/packed-dynamic")
@met_in("verl: a penalty of overlong completions that replaces their reward")
@around(grpo_trainer, "rewards_of")
def truncated_completions_earn_nothing(right, samples, *rest):
    """Completions that were cut off have the reward 0, whatever they were given."""
    values, weights = right(samples, *rest)
    ended = [
        0.0 if one.finish_reason == "length" else value for one, value in zip(samples, values, strict=True)
    ]
    return ended, weights


# the second one names another side
@fault(
    "G",
    "activations transformer.h.0",
    "padding-seen attention-mask module",
    on="gpt2/dp2-left-mbs5",
    names=AFTER_BLOCK_0,
)
@met_in("TRL#6800: a mask made of lengths, for rows that are padded on their left")
@around(causal_lm_policy, "block_causal_mask")
def mask_of_padding_on_the_other_side(right, layout, *rest):
    """Rows are padded on their left, and the mask takes the last columns of each for padding."""
    moved = tuple(segment._replace(col=0) for segment in layout.segments)
    return right(TokenLayout(layout.shape, moved), *rest)


# names some tokens alone
@fault("G", "batch_inputs position_ids", "position-ids", on="gpt2/packed")
@met_in("verl PR#4243: position ids of the response that are made apart from those of the prompt")
@around(TokenBatch, "_project")
def completions_count_positions_anew(right, self, *args):
    """Position ids begin again at 0 with the first token of a completion."""
    found = right(self, *args)
    ids = found.position_ids.clone()
    for segment in found.layout.segments:
        begin = self.trajectories[segment.sample].prompt_length
        own = ids[segment.row, segment.col : segment.col + segment.stop - segment.start]
        own.copy_(torch.where(own >= begin, own - begin, own))
    return replace(found, position_ids=ids)


# the second one names a mask that is off by one
@fault(
    "G",
    "activations transformer.h.0",
    "padding-seen module padding-neighbours inputs-hold",
    on="gpt2/left-mbs3",
    names=AFTER_BLOCK_0,
)
@met_in("TRL PR#2708: a mask of left padding that is off by one")
@around(causal_lm_policy, "block_causal_mask")
def first_token_behind_padding_hidden(right, layout, *rest):
    """In a row with padding on its left the first token is taken for padding: no other token sees it."""
    mask = right(layout, *rest).clone()
    for segment in layout.segments:
        if segment.col:
            mask[segment.row, 0, segment.col + 1 :, segment.col] = False
    return mask


@fault("G", "coverage", "batch-twice not-planned", on="gpt2/dp2-packed-budget48")
@met_in("a sampler of batches that repeats the last one until all ranks have as many")
@in_place_of(rank_layout_planner, "_filled")
def last_microbatch_of_a_rank_repeated(layouts, count, empty):
    """A rank that runs out of microbatches computes its last one again, where it should have an empty one."""
    last = layouts[-1] if layouts else empty
    return layouts + [last] * (count - len(layouts))


# the second one names an end one token off
@fault(
    "Q",
    "batch_inputs response_mask",
    "last-token-masked mask-shifted loss-mask",
    on="dense/dp2-packed-budget48",
)
@met_in("a trainer that drops the last token of each completion as its end token, also where there is none")
@around(Trainer, "loss_masks")
def last_token_of_truncated_completions_masked(right, self, samples):
    """The last token of completions that were cut off is not trained on, as if it were an end token."""
    masks = right(self, samples)
    return [
        [*mask[:-1], 0] if one.finish_reason == "length" else mask
        for one, mask in zip(samples, masks, strict=True)
    ]


END = 1
"""Id of the token that ends a turn in the golden cases."""


def _masked(patch, change):
    """Change the loss mask of each sample."""
    right = Trainer.loss_masks

    def wrong(self, samples):
        masks = right(self, samples)
        return [change(one, [*mask]) for one, mask in zip(samples, masks, strict=True)]

    patch.setattr(Trainer, "loss_masks", wrong)


@fault("Q", MASK, "mask-shifted tool-tokens loss-mask", on="tools/packed")
@met_in("NeMo-RL PR#2176: offsets of turns that count the token which opens them")
@by(_masked)
def later_turns_trained_from_one_token_early(sample, mask):
    """The mask of every turn but the first begins one token early, with the last one that its model did not write."""
    for place in range(sample.prompt_length, len(mask) - 1):
        if mask[place + 1] and not mask[place]:
            mask[place] = 1
    return mask


# names tokens that are left out
@fault("Q", MASK, "loss-mask", on="tools/packed-dynamic")
@met_in("TRL: a mask of completions that ends at their first end token")
@by(_masked)
def tokens_behind_the_first_end_token_masked(sample, mask):
    """A completion ends with its first end token, although a second turn follows."""
    begin = sample.prompt_length
    ends = [place for place in range(begin, len(mask)) if sample.tokens[place] == END]
    stop = ends[0] + 1 if ends else len(mask)
    return mask[:stop] + [0] * (len(mask) - stop)


# names tokens that are replaced
@fault("Q", "batch_inputs input_ids", "other-tokens", on="tools/left-mbs3")
@met_in("a collator of a tokenizer without a token for padding: input_ids[input_ids == pad] = eos")
@around(TokenBatch, "_project")
def sampled_padding_written_as_end_tokens(right, self, *args):
    """Where a completion holds the token that pads, the model reads the end token."""
    found = right(self, *args)
    there = torch.from_numpy(found.layout.attention_mask)
    ids = torch.where(there & (found.input_ids == PADDING), END, found.input_ids)
    return replace(found, input_ids=ids)


GROUP = 3
"""Samples of a prompt in the golden cases, which lie side by side."""


# names samples that are packed
@fault("G", "batch_inputs position_ids", "position-ids", on="gpt2/packed-mbs3")
@met_in("a packed collator whose positions begin at 0 once, and then at the length that was added")
@around(TokenBatch, "_project")
def positions_of_later_samples_from_one(right, self, *args):
    """Position ids of a packed row begin at 0 with its first sample, and at 1 with every other one."""
    found = right(self, *args)
    ids = found.position_ids.clone()
    for segment in found.layout.segments:
        if segment.col > 0:
            ids[segment.row, segment.col : segment.col + segment.stop - segment.start] += 1
    return replace(found, position_ids=ids)


@fault(
    "G",
    "activations model.layers.0",
    "packed-leak module inputs-hold",
    on="dense/dp2-packed-budget48",
    names=AFTER_ATTENTION,
    ranks=(0, 1),
)
@met_in("a mask for shared prompts, by which completions of one group see each other")
@in_place_of(causal_lm_policy, "block_causal_mask")
def samples_of_a_group_see_each_other(layout, *rest):
    """The mask of a packed row parts groups of samples, so that a sample sees those of its group before it."""
    joined = tuple(one._replace(sample=one.sample // GROUP) for one in layout.segments)
    return block_causal_mask(TokenLayout(layout.shape, joined), *rest)


@fault("Q", "batch_inputs response_mask", "mask-shifted loss-mask")
@met_in("Megatron PR#4243: a mask on the wrong side")
@by(masks)
def first_token_not_in_the_loss(sample):
    """The first token of each completion is masked."""
    mask = list(sample.loss_mask)
    mask[sample.prompt_length] = 0
    return mask
