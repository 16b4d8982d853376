"""Faults of the sampler: what is drawn, where a completion ends, and the log-probs that are kept."""

from dataclasses import replace

import torch
import torch.distributed as dist
from transformers import GenerationMixin, LogitsProcessor

from regress.engine import dialogue_rollouts, rollout_worker, sampling
from regress.engine.dialogue_rollouts import Conversation
from regress.engine.rollout_worker import VAL, SampledRollouts
from regress.engine.sampling import Completion, LogProbRecorder, OwnDraws
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, in_place_of
from regress.tasks.portable_draws import generator
from tests.faults.fault import fault, met_in


def sampled_with(patch, **values):
    """Draw with other parameters."""
    right = sampling._warpers
    patch.setattr(sampling, "_warpers", lambda params: right(replace(params, **values)))


@fault("V", "trajectory", "sampler-distribution", on="rollout/base", steps=None)
@met_in("vllm#42259")
def sampler_without_temperature(patch):
    """Draw at temperature 1."""
    sampled_with(patch, temperature=1.0)


@fault("V", "trajectory", "sampler-distribution sampler-stream", on="rollout/base", steps=None)
@met_in("TRL#6789")
def sampler_without_top_p(patch):
    """Draw from all tokens, however improbable."""
    sampled_with(patch, top_p=1.0)


@fault("V", "trajectory", "sampler-distribution sampler-stream", on="rollout/base", steps=None)
@met_in("ms-swift PR#8442")
def sampler_without_top_k(patch):
    """Draw from more than the most probable tokens."""
    sampled_with(patch, top_k=0)


@fault("V", "trajectory", "sampler-stream", on="rollout/base", steps=None)
@met_in("seeds that leave the turn out")
@in_place_of(rollout_worker, "generator")
def same_stream_in_every_turn(*key):
    """Leave the turn out of the stream's key."""
    return generator(*key[:-1])


@fault("V", "trajectory", "sampler-stream", on="rollout/base", steps=None)
@met_in("verl PR#6857, verl-omni#561")
@in_place_of(rollout_worker, "generator")
def same_stream_for_a_group(*key):
    """Leave the run out of the stream's key."""
    return generator(*key[:5], *key[6:])


@fault("V", "trajectory", "sampler-stream", on="rollout/base", steps=None)
@met_in("verl PR#6857")
@in_place_of(rollout_worker, "generator")
def same_stream_in_every_step(*key):
    """Leave the step out of the stream's key."""
    return generator(*key[:2], 0, *key[3:])


@fault(
    "V",
    "trajectory",
    "sampler-stream",
    on="rollout/base",
    steps=None,
    silent={"rollout/rollout-batch1": "each batch has one row"},
)
@met_in("verl-omni#561")
@around(OwnDraws, "__init__")
def stream_of_the_batch(right, self, generators):
    """Draw the numbers of all rows from the generator of the first."""
    right(self, [generators[0]] * len(generators))


@fault("V", "trajectory", "sampler-end", on="rollout/base", steps=None)
@met_in("slime#1490")
@around(sampling, "_completion")
def stop_token_dropped(right, tokens, log_probs, params):
    """Leave the end token out of completions."""
    found = right(tokens, log_probs, params)
    if found.finish_reason == "length" or len(found.tokens) < 2:
        return found
    return Completion(found.tokens[:-1], found.log_probs[:-1], "stop")


@fault("V", "trajectory", "sampler-end", on="rollout/base", steps=None)
@met_in("TRL#5144")
@in_place_of(Conversation, "room")
def completion_one_token_short(self):
    """End a conversation one token before its limit."""
    return self.limit - len(self.after) - 1


@fault("V", "trajectory", "sampler-end", on="rollout/base", steps=None)
@met_in("TRL#5144")
@in_place_of(Conversation, "room")
def completion_one_token_long(self):
    """End a conversation one token after its limit."""
    return self.limit - len(self.after) + 1


@fault("V", "trajectory", "rollout-mask", on="rollout/base", steps=None)
@met_in("UniRL PR#409, miles PR#1827")
@around(dialogue_rollouts.Conversation, "answer")
def replies_in_the_loss(right, self, said, reply):
    """Train on the tokens of the environment."""
    before = len(self.mask)
    right(self, said, reply)
    self.mask[before:] = [1] * (len(self.mask) - before)


class _Before(LogitsProcessor):
    def __init__(self):
        self.scores = None

    def __call__(self, input_ids, scores):
        self.scores = scores
        return scores


@fault("V", "sampler_log_probs", "sampler-log-probs", on="rollout/base", steps=None)
@met_in("TRL#4159")
def sampler_log_probs_before_the_temperature(patch):
    """Record log-probs of the model's distribution, not of the one that is drawn from."""
    known = []
    warpers, call = sampling._warpers, LogProbRecorder.__call__

    def changed(params):
        known.append(_Before())
        return [known[-1], *warpers(params)]

    def recorded(self, input_ids, scores):
        before = known[-1].scores
        call(self, input_ids, before)
        return scores

    patch.setattr(sampling, "_warpers", changed)
    patch.setattr(LogProbRecorder, "__call__", recorded)


@fault("V", "sampler_log_probs", "sampler-log-probs", on="rollout/base", steps=None)
@met_in("rllm#816")
@in_place_of(LogProbRecorder, "_settle")
def sampler_log_probs_of_the_likeliest(self, drawn):
    """Record the log-prob of the most probable token."""
    if self._last is not None:
        self._columns.append(self._last.double().log_softmax(-1).max(1).values)
        self._last = None


@fault("V", "trajectory", "sampler-distribution sampler-cache", on="rollout/base", steps=None)
@met_in("a cache that begins one position late")
@around(GenerationMixin, "prepare_inputs_for_generation")
def cache_one_position_off(right, self, *args, **kwargs):
    """Continue after the prompt at one position too far."""
    found = right(self, *args, **kwargs)
    ids, positions = found.get("input_ids"), found.get("position_ids")
    return {**found, "position_ids": positions + 1} if ids.shape[1] == 1 else found


@fault("V", "trajectory", "sampler-distribution", on="rollout/base", steps=None)
@met_in("OpenRLHF#217, TRL#6800")
@around(GenerationMixin, "generate")
def sampler_sees_padding(right, self, *args, **kwargs):
    """Let prompts see the padding before them."""
    mask = kwargs["attention_mask"]
    return right(self, *args, **{**kwargs, "attention_mask": torch.ones_like(mask)})


@fault("V", "trajectory", "sampler-greedy sampler-distribution", on="rollout/base", steps=None)
@met_in("do_sample in evaluations")
@around(SampledRollouts, "rollout")
def evaluation_is_drawn(right, self, step, prompts, split):
    """Draw the completions of evaluations."""
    params, seed = self._of_split[VAL]
    self._of_split[VAL] = (replace(params, greedy=False), seed)
    return right(self, step, prompts, split)


@fault("V", "trajectory", "sampler-stream", on="rollout/rollout-dp2-batch5", steps=None)
@met_in("Megatron PR#5983")
@in_place_of(rollout_worker, "generator")
def stream_of_the_rank(*key):
    """Let the rank decide what is drawn."""
    return generator(dist.get_rank(), *key)


@fault("V", "trajectory", "sampler-stream", on="rollout/rollout-dp2-batch5", steps=None)
@met_in("TRL PR#2824")
def streams_that_ranks_share(patch):
    """Count the groups of each rank from 0, so that ranks share streams."""
    seen = {}

    def own(*key):
        number = seen.setdefault(key[4], len(seen))
        return generator(*key[:4], number, *key[5:])

    patch.setattr(rollout_worker, "generator", own)


@fault("V", "trajectory", "sampler-weights", on="rollout/rollout-tp2", steps=None)
@met_in("verl#7495, unsloth PR#8701, TRL#5312")
def sampler_keeps_the_first_weights(patch):
    """Put the whole model together only once."""
    done = []

    def whole(right, self):
        if not done:
            done.append(right(self))
        return done[0]

    patch.around(ParallelPolicy, "whole_model", whole)
