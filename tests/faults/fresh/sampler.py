"""Faults of the sampler, and of the weights that it draws with."""

from dataclasses import replace
from types import SimpleNamespace

import torch
from torch.nn import functional
from transformers import LogitsProcessor, MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from regress.engine import rollout_worker, sampling
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.dialogue_rollouts import Conversation
from regress.engine.grpo_trainer import Trainer
from regress.engine.local_tensor import local
from regress.engine.rollout_worker import HFRolloutWorker, SampledRollouts, SharedRollouts
from regress.engine.sampling import Completion, LogProbRecorder, sample
from regress.parallel.parallel_policy import ParallelPolicy
from regress.replay.fault_injection import around, by, in_place_of
from regress.replay.probes.model_probes import rounded
from tests.faults.fault import fault, met_in
from tests.faults.ranks.helpers import on_rank


# both name the sampler's weights; it has not received those of the trainer as they are
@fault("P", "trajectory", "sampler-distribution sampler-weights", on="rollout/rollout-pp2", steps=None)
@met_in("Megatron-Bridge: halves of a fused projection in another order")
@around(ParallelPolicy, "_refresh")
@torch.no_grad()
def gate_and_up_exchanged_for_the_sampler(right, self):
    """Stages are put together for the sampler with the gate of an MLP in the place of its other input, and back."""
    right(self)
    for module in self._whole.modules():
        if hasattr(module, "gate_proj"):
            own = module
            gate, up = own.gate_proj.weight, own.up_proj.weight
            before = gate.clone()
            gate.copy_(up)
            up.copy_(before)


# names other weights
@fault("P", "old_log_probs old_log_probs", "old-log-probs", on="cispo/packed-mbs3", steps=None)
@met_in("TRL#5312: a copy of the policy for scoring that wakes up with its first weights")
def old_log_probs_of_a_copy_left_behind(patch):
    """Old log-probs are computed by a copy of the policy that never learns of its updates."""
    kept = {}

    @torch.no_grad()
    def wrong(right, self, source, *rest):
        if source is not self.policy:
            return right(self, source, *rest)
        parts = {name: local(parameter.detach()) for name, parameter in self.policy.named_parameters()}
        now = {name: part.clone() for name, part in parts.items()}
        for name, part in parts.items():
            part.copy_(kept.setdefault(name, now[name]))
        found = right(self, source, *rest)
        for name, part in parts.items():
            part.copy_(now[name])
        return found

    patch.around(Trainer, "_collected", wrong)


PENALTY = 1.2


def warped(patch, change):
    """Change the list of processors that turn logits into the distribution that is drawn from."""
    right = sampling._warpers
    patch.setattr(sampling, "_warpers", lambda params: change(params, right(params)))


@fault("V", "trajectory", "sampler-distribution", on="rollout/base", steps=None)
@met_in("generation_config.json: a repetition penalty that nobody asked for")
@by(warped)
def penalty_of_repetition_left_on(_, found):
    """Tokens that were read or written before are less probable, as the checkpoint of a chat model asks for."""
    return [RepetitionPenaltyLogitsProcessor(PENALTY), *found]


# names other answers of the environment to the same completions
@fault("V", "trajectory", "rollouts-given", on="rollout/rollout-dp2-batch5", steps=None)
@met_in("add_generation_prompt=False for the turn of a tool")
@around(Conversation, "answer")
def generation_prompt_missing_behind_a_reply(right, self, said, reply):
    """Behind the environment's reply the token is missing that asks the policy to go on."""
    return right(self, said, reply[:-1])


@fault(
    "P",
    "trajectory",
    "sampler-weights sampler-distribution sampler",
    on="rollout/rollout-fsdp2-packed",
    steps=None,
)
@met_in("Megatron PR#6920: shards that are not gathered for the engine that samples")
@around(ParallelPolicy, "_refresh")
def only_own_shards_reach_the_sampler(right, self):
    """The sampler of a rank receives the rank's own shards; the others stay as they were at the beginning."""
    known = self._world
    self._world = SimpleNamespace(gather=lambda own: [own])
    try:
        right(self)
    finally:
        self._world = known


# norms moved little: the same tokens are drawn, with other log-probs
@fault(
    "P", "sampler_log_probs", "sampler-not-updated sampler-log-probs", on="rollout/rollout-tp2", steps=None
)
@met_in("verl#7495: a synchronization of matrices alone")
@around(ParallelPolicy, "_refresh")
@torch.no_grad()
def norms_not_sent_to_the_sampler(right, self):
    """The sampler receives matrices; the weights of its norms stay as they were at the beginning."""
    whole = dict(trained_parameters(self._whole))
    kept = {name: values.clone() for name, values in whole.items() if values.dim() == 1}
    right(self)
    for name, values in kept.items():
        whole[name].copy_(values)


@fault(
    "P", "old_log_probs old_log_probs", "old-log-probs precision", kind="precision", on="cispo/packed-mbs3"
)
@met_in("TRL#5312: log-probs of a copy of the policy in the dtype of the engine that samples")
@around(Trainer, "_collected")
@torch.no_grad()
def old_log_probs_of_weights_in_bfloat16(right, self, source, *rest):
    """Old log-probs are computed with weights that are rounded to half precision, as they were sent."""
    if source is not self.policy:
        return right(self, source, *rest)
    kept = [(local(p), local(p).clone()) for _, p in self.policy.named_parameters()]
    for values, known in kept:
        values.copy_(known.bfloat16())
    try:
        found = right(self, source, *rest)
    finally:
        for values, known in kept:
            values.copy_(known)
    return found


@fault("V", "trajectory", "sampler-distribution sampler", on="rollout/base", steps=None)
@met_in("vllm#42259: top-p and top-k in the other order")
@by(warped)
def nucleus_before_the_top_k(_, found):
    """The nucleus is chosen among all tokens, and the most probable ones of it are left after that."""
    return sorted(found, key=lambda one: type(one).__name__ == "TopKLogitsWarper")


@fault("V", "trajectory", "sampler-distribution sampler", on="rollout/base", steps=None)
@met_in("a second request of a conversation that lacks the sampling parameters")
@around(SampledRollouts, "_turn")
def temperature_of_the_first_turn_alone(right, self, talks, rows, params, keys):
    """Completions behind an answer of the environment are drawn at temperature 1."""
    later = keys[0][-1] != 0
    right(self, talks, rows, replace(params, temperature=1.0) if later else params, keys)


@fault("V", "trajectory", "sampler-distribution sampler", on="rollout/rollout-dp2-batch5", steps=None)
@met_in("lerobot#3668: a mode of evaluation that one rank keeps")
@around(HFRolloutWorker, "complete")
def one_rank_samples_greedily(right, self, prompts, params, *rest):
    """The second rank takes the most probable token in training, too."""
    return right(self, prompts, replace(params, greedy=params.greedy or on_rank(1)), *rest)


SHARE = 0.2
"""Least probability of a token, as a share of that of the most probable one."""


# few draws are near a border: the same tokens, with other log-probs
# names other weights
# if a token is another one, too
@fault(
    "P",
    "sampler_log_probs",
    "sampler-log-probs sampler-distribution sampler precision",
    kind="precision",
    on="rollout/rollout-fsdp2-packed",
    precisions="float64",
)
@met_in("weights that are gathered for the engine in its own dtype")
@around(ParallelPolicy, "_refresh")
@torch.no_grad()
def weights_gathered_for_the_sampler_in_bfloat16(right, self):
    """Shards are gathered for the sampler, and what it gets of them is rounded to half precision."""
    right(self)
    for _, values in trained_parameters(self._whole):
        values.copy_(rounded(values))


# names what is left of the vocabulary
# names a cut that may leave the first token as it is
@fault("V", "trajectory", "sampler-distribution sampler-cache sampler", on="rollout/base")
@met_in("generation_config.json: min_p of the checkpoint")
@around(sampling, "_warpers")
def improbable_tokens_not_drawn(right, params):
    """Tokens with less than a fifth of the probability of the most probable one are not drawn."""
    found = right(params)
    return found if params.greedy else [*found, MinPLogitsWarper(SHARE)]


# the first one names the limit of a turn
@fault("V", "trajectory", "sampler-end sampler", on="rollout/rollout-dp2-batch5")
@met_in("one max_new_tokens for a batch of conversations: the least that is left of any")
@in_place_of(rollout_worker, "sample")
def shortest_room_of_a_batch_for_all(model, prompts, params, *, generators, limits):
    """No completion of a batch may be longer than the one of its conversations that has least room allows."""
    least = [min(limits)] * len(prompts)
    return sample(model, prompts, params, generators=generators, limits=least)


# names temperature and top-p
@fault("V", "trajectory", "sampler-distribution", on="rollout/base", steps=None)
@met_in("vllm#42259: the order of temperature and nucleus")
@by(warped)
def nucleus_before_the_temperature(_, found):
    """The nucleus is chosen of plain probabilities, and the temperature is applied after it."""
    return sorted(found, key=lambda one: type(one).__name__ == "TemperatureLogitsWarper")


class _Narrow(LogitsProcessor):
    """Keeps the tokens before the one that crosses the mass of the nucleus, and the most probable one."""

    def __init__(self, mass):
        self._mass = mass

    def __call__(self, input_ids, scores):
        ordered, index = scores.sort(dim=-1, descending=True)
        outside = ordered.softmax(-1).cumsum(-1) > self._mass
        outside[:, 0] = False
        return scores.masked_fill(torch.zeros_like(outside).scatter(1, index, outside), -torch.inf)


# names top-p
@fault("V", "trajectory", "sampler-distribution", on="rollout/base", steps=None)
@met_in("a nucleus without the token that completes it")
@by(warped)
def nucleus_without_its_last_token(params, found):
    """The token that lifts the probability of the nucleus above its mass is left out."""
    return found if params.greedy or params.top_p >= 1.0 else [*found[:-1], _Narrow(params.top_p)]


class _Noted(LogitsProcessor):
    """Keeps the scores that pass."""

    def __init__(self):
        self.scores = None

    def __call__(self, input_ids, scores):
        self.scores = scores
        return scores


@fault("V", "sampler_log_probs", "sampler-log-probs", on="rollout/base", steps=None)
@met_in("TRL#6789, vllm#42259")
def sampler_log_probs_before_the_nucleus(patch):
    """Log-probs are those of the tempered logits before tokens were excluded."""
    known = []

    def change(_, found):
        known.append(_Noted())
        after = next((n + 1 for n, one in enumerate(found) if "Temperature" in type(one).__name__), 0)
        return [*found[:after], known[-1], *found[after:]]

    def recorded(call, self, input_ids, scores):
        before = known[-1].scores
        call(self, input_ids, before)
        return scores

    warped(patch, change)
    patch.around(LogProbRecorder, "__call__", recorded)


# names the limit of a turn and of a conversation
@fault("V", "trajectory", "sampler-end", on="rollout/base", steps=None)
@met_in("TRL#5144: a limit of each turn")
@in_place_of(Conversation, "room")
def limit_of_each_turn(self):
    """Every turn of a conversation may be as long as the whole of it."""
    return self.limit


# names the reason of the end
@fault("V", "trajectory", "rollout-records", on="rollout/base", steps=None)
@met_in("a reason of truncation that is not passed on")
@around(sampling, "_completion")
def truncated_told_as_ended(right, *args):
    """Completions that were cut off are told to have ended by themselves."""
    found = right(*args)
    return Completion(found.tokens, found.log_probs, "stop")


# names the order of trajectories
@fault("V", "trajectory", "rollout-records", on="rollout/rollout-dp2-batch5", steps=None)
@met_in("verl#2185: an order of ranks that is not undone")
@in_place_of(SharedRollouts, "rollout")
def prompts_in_the_order_of_ranks(self, step, prompts, split):
    """Trajectories of all ranks are laid end to end, rank after rank, and prompts were dealt out in turn."""
    self._policy.whole_model()
    own = prompts[self._world.rank :: self._world.plan.mesh.world_size]
    found = self._worker.rollout(step, own, split) if own else []
    return [one for part in self._world.gather(found) for one in part]


# names the mask that the sampler writes, and answers of the environment
@fault("V", "trajectory", "rollout-mask", on="rollout/base", steps=None)
@met_in("miles PR#1827: masks of replies that are one token short")
@around(Conversation, "answer")
def first_token_of_a_reply_trained(right, self, said, reply):
    """The first token that the environment writes is trained on."""
    before = len(self.mask)
    right(self, said, reply)
    if len(self.mask) > before:
        self.mask[before] = 1


@fault(
    "P",
    "activations lm_head",
    "output-projection stale-weights",
    on="tied/mbs4",
    place="step1/rank0/micro0",
    steps=2,
)
@met_in("prime-rl PR#2823, vllm PR#51665")
def tied_head_not_refreshed(run):
    """The output projection reads a copy of the tied weight from before the update; its gradient arrives."""
    head = run.trainer.policy.model.get_output_embeddings()
    before = head.weight.detach().clone()
    head.forward = lambda hidden: functional.linear(hidden, before + (head.weight - head.weight.detach()))
