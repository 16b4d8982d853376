"""Updates of another trainer, each repeated in true float64 from the weights and moments that it began with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim import AdamW

from regress.compare.dumps.recorded_clipping import ratios_as_clipped, taken_branches
from regress.dump.coordinates import Place
from regress.dump.numpy_arrays import Array
from regress.dump.taps import at, tap_trajectories
from regress.dump.trajectory import Trajectory
from regress.engine.adapters.adapter_parameters import trained_parameters
from regress.engine.causal_lm_policy import LocalPolicy
from regress.engine.config.config_schema import Config
from regress.engine.engine_ranks import SingleProcess
from regress.engine.mini_batch import LossTokens, TokenBatch
from regress.engine.model_probe import in_float64
from regress.engine.numeric_types import true_float64
from regress.engine.recorded_optimizer_state import put_state
from regress.engine.reference_policy import Reference
from regress.engine.router_loss import RouterLoss, router_loss
from regress.engine.run_construction import recorded
from regress.engine.run_models import build_policy, build_reference
from regress.engine.run_provenance import provenance
from regress.engine.training_step import train_step, weigh
from regress.errors import OracleError
from regress.explain.update_tokens import Floats
from regress.grpo.loss_aggregation import entropy_weights
from regress.grpo.objective import Objective
from regress.layout import BatchPlan
from regress.oracle.float64_engine import NO_TOKENIZER
from regress.oracle.observed_updates import Observed, Optimizer, Recorded
from regress.oracle.old_log_probs import OldPolicy
from regress.oracle.recorded_gradients import step_with
from regress.oracle.recorded_inputs import Known, advantages_of
from regress.oracle.recorded_routing import forced
from regress.oracle.withheld_records import without
from regress.replay.case_run import torch_settings


@dataclass
class Repetition:
    """Engine that repeats the updates of a dump, into a dump of its own.

    Attributes:
        config: the whole configuration; its objective is what the trainer should minimize.
        given: the dump of the trainer.
        advantage: one advantage for every loss token, in place of those that follow from rewards.
        max_grad_norm: as the caller says; by default as the trainer was seen to clip.
        rounding: tolerance of a log-prob, relative to the largest; a ratio that lies within it of the clip range is
            clipped as the trainer does.
        spacing: that of the dtype which the trainer rounds log-probs to.
        own_gradients: the optimizer steps with the gradients of the engine; False: with those of the dump, which are
            judged by themselves, where it has all of them: AdamW makes a whole step of the rounding of a gradient
            that should be zero.
        perturb: changes the weights for the forward and backward pass of each update.
        context: returns the context of those passes.
        notes: what is not judged, or taken from the dump itself; a sentence each.
        places: the updates that were repeated.
    """

    config: Config
    given: Recorded
    advantage: float | None = None
    max_grad_norm: float | None = None
    rounding: float = 0.0
    spacing: float = 0.0
    own_gradients: bool = True
    perturb: Callable[[LocalPolicy], None] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    notes: dict[str, None] = field(default_factory=dict)
    places: list[Place] = field(default_factory=list)

    @cached_property
    def old(self) -> OldPolicy:
        """Log-probs in the denominators of the ratios."""
        rule = self.config.algorithm.old_log_probs
        return OldPolicy(self.given, rule, self.rounding, self._earlier, self.notes)

    def run(self) -> Path:
        """Repeat every update whose weights are known; return the folder of the dump.

        Raises:
            OracleError: if the dump lacks what the objective needs, or no update can be repeated.
        """
        config, world = self.config, SingleProcess()
        with torch_settings(config.threads), ExitStack() as resources:
            with self._built():
                policy = build_policy(config, NO_TOKENIZER, world)
                frozen = build_reference(config, NO_TOKENIZER, policy)
            recorded(config, policy, provenance(config, None), world, resources)
            reference = None if frozen is None else Reference(policy, config.reference, frozen, world)
            router = router_loss(policy, config.model)
            before: Place | None = None
            for update in self.given.updates():
                if self._begin(policy, update, before):
                    self._repeat(policy, reference, router, update, before)
                    self.places.append(update.at)
                before = update.at
        self.notes.update(dict.fromkeys(self.old.taken()))
        if not self.places:
            raise OracleError(
                f"no update of {self.given.dump.folder} can be repeated: {next(iter(self.notes))}"
            )
        return Path(config.debug.dump_dir)

    def old_before(self, update: Observed) -> Floats | None:
        """Return log-probs of the loss tokens before the first update on a rollout, flat over the update's frame.

        None where nothing tells the weights at that time.
        """
        policy = self._earlier(update.began)
        if policy is None or update.recorded is None:
            return None
        known = Known(policy, None, self.config.algorithm, update, self._mask)
        values, bounds = known.computed(), update.tokens.frame.offsets
        out = np.full(update.tokens.frame.size, np.nan)
        for index, number, sample in zip(known.own, update.recorded, update.samples, strict=True):
            out[bounds[number] : bounds[number + 1]][np.asarray(self._mask(sample), bool)] = values[index]
        return out

    def _built(self) -> AbstractContextManager[object]:
        """Return the context that a model is built in: its buffers, which no checkpoint holds, are the trainer's."""
        wide = self.given.capture.get("buffers") == "float64" and self.config.model.dtype == "float64"
        return true_float64() if wide else nullcontext()

    def _begin(self, policy: LocalPolicy, update: Observed, before: Place | None) -> bool:
        """Give the policy the weights that an update began with; return False, and note why, if nothing tells them."""
        first = before is None
        if first and update.at.step == 0:
            return True  # the initial weights
        if first or (before is not None and (update.at.step or 0) > (before.step or 0) + 1):
            self.notes[f"{update.at.words} was not judged: the update before it was not recorded"] = None
            return False
        assert before is not None
        lacking = self._put_weights(policy, before)
        if lacking:
            self.notes[
                f"{update.at.words} was not judged: {lacking} after {before.words} was not recorded (param=True)"
            ] = None
        return not lacking

    def _put_weights(self, policy: LocalPolicy, after: Place) -> str:
        """Give the policy the weights that were recorded after an update; return the first that was not, if any."""
        weights = self.given.whole("param", after)
        own = dict(trained_parameters(policy.architecture))
        lacking = sorted(own.keys() - weights.keys())
        if lacking:
            return lacking[0]
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(torch.from_numpy(weights[name].astype(np.float64)))
        return ""

    def _earlier(self, at: Place) -> LocalPolicy | None:
        """Return the policy as it was before an update; None if nothing tells its weights."""
        places = self.given.places
        number = places.index(at)
        with self._built():
            policy = build_policy(self.config, NO_TOKENIZER, SingleProcess())
        if number == 0:
            return policy if at.step == 0 else None
        return None if self._put_weights(policy, places[number - 1]) else policy

    def _repeat(
        self,
        policy: LocalPolicy,
        reference: Reference | None,
        router: RouterLoss | None,
        update: Observed,
        before: Place | None,
    ) -> None:
        given = self.given.optimizer(update.at)
        optimizer = self._optimizer(policy, given, before)
        self._disturb(policy, optimizer)
        limit = self._limit(given)
        if not self.own_gradients:
            step_with(optimizer, policy, self.given.whole("gradient", update.at), limit)
        samples = [replace(sample, loss_mask=self._mask(sample)) for sample in update.samples]
        batch = TokenBatch(samples)
        micros = batch.microbatches(self._plan(update))
        unknown = before is None and self.given.continued(update.at)
        if unknown:
            self.notes[
                f"parameters and optimizer states after {update.at.words} were not judged: AdamW had made updates "
                "before it, and nothing tells its moments"
            ] = None
        kept = without(("param", "optimizer") if unknown else ())
        with self.context(), kept, forced(policy, self.given.experts(update)):
            known = Known(policy, reference, self.config.algorithm, update, self._mask)
            tokens = self._tokens(known, batch, batch.partition(self._plan(update)))
            with at(step=update.at.step, update=update.at.update, rank=0):
                if update.tapped:
                    tap_trajectories(list(update.tapped))
                self.old.tap_passes(known)
                objective = self.config.algorithm
                with in_float64(policy.model, f"model.path={self.config.model.path!r}"):
                    train_step(
                        policy, optimizer, tokens, micros, objective, max_grad_norm=limit, router=router
                    )

    def _tokens(self, known: Known, batch: TokenBatch, partition: Sequence[Sequence[int]]) -> LossTokens:
        """Return the loss tokens of an update with everything that precedes it."""
        objective = self.config.algorithm
        _refuse_beyond(objective)
        tokens = batch.loss_tokens()
        weights = weigh(
            tokens,
            partition,
            objective,
            max_completion_length=self.config.data.max_completion_length,
            completion_lengths=[len(one.tokens) - one.prompt_length for one in batch.trajectories],
        )
        entropy = entropy_weights(tokens.sequence, tokens.num_sequences, objective, partition=partition)
        dtype = known.policy.log_prob_dtype
        old, ref = self._settled(known, self.old.log_probs(known)), known.reference_log_probs()
        tokens = replace(
            tokens,
            weights=weights,
            entropy_weights=entropy,
            sampler_log_probs=batch.sampler_log_probs(dtype),
            old_log_probs=None if old is None else old.to(dtype),
            ref_log_probs=None if ref is None else ref.to(dtype),
        )
        return replace(tokens, advantages=self._advantages(known, tokens).to(dtype))

    def _disturb(self, policy: LocalPolicy, optimizer: AdamW) -> None:
        """Perturb the weights, and restore them before the optimizer steps."""
        if self.perturb is None:
            return
        before = {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}
        self.perturb(policy)

        @torch.no_grad()
        def restore(*_: object) -> None:
            for name, parameter in policy.named_parameters():
                parameter.copy_(before[name])

        optimizer.register_step_pre_hook(restore)

    def _mask(self, sample: Trajectory) -> list[int]:
        """Return the loss tokens of a sample under the objective."""
        if not self.config.algorithm.mask_truncated_completions:
            return sample.loss_mask
        if sample.finish_reason is None:
            raise OracleError("""algorithm.mask_truncated_completions leaves cut completions out, and the trajectories
            do not tell which are; tap them with finish_reason""")
        return [0] * len(sample.tokens) if sample.finish_reason == "length" else sample.loss_mask

    def _plan(self, update: Observed) -> BatchPlan:
        """Return one microbatch, or those of the trainer where the objective counts over them."""
        if self.config.algorithm.denominator_scope != "microbatch":
            return BatchPlan()
        blocks = update.blocks()
        if blocks is None or sorted(blocks) != blocks or len({blocks.count(one) for one in blocks}) != 1:
            raise OracleError(f"""the objective counts its denominator over a microbatch, and those of
            {update.at.words} do not hold the samples in order, equally many each; record a run with such microbatches,
            or set algorithm.denominator_scope=global""")
        return BatchPlan(micro_batch_size=blocks.count(blocks[0]))

    def _settled(self, known: Known, old: torch.Tensor | None) -> torch.Tensor | None:
        """Return denominators of the ratios that are clipped where the trainer clips, as far as rounding decides it."""
        update, objective = known.update, self.config.algorithm
        theirs = update.at_loss("forward_data/log_probs", mask=self._mask)
        if theirs is None or old is None or objective.importance_level != "token":
            return old
        before = update.chosen(update.old, self._mask)
        if before is None:
            return old
        now, ratios = known.chosen(known.computed()).numpy(), theirs - before
        gradient = update.at_loss("token_gradient/token_gradient", mask=self._mask)
        if gradient is not None and not objective.kl_coef:
            rounded = 0.5 * self.spacing * (np.abs(theirs) + np.abs(before))
            ratios = taken_branches(ratios, gradient, objective.clip_range, rounded)
        found, count = ratios_as_clipped(
            now, old.numpy(), ratios, objective.clip_range, self.rounding * float(np.abs(now).max())
        )
        if count:
            self.notes[
                f"{update.at.words}: {count} of {len(now)} ratios lie on the other side of the clip range than in "
                "float64, and by no more than rounding: they were clipped as the trainer did"
            ] = None
        return torch.from_numpy(found)

    def _advantages(self, known: Known, tokens: LossTokens) -> torch.Tensor:
        if self.advantage is not None:
            return torch.full((len(tokens),), self.advantage, dtype=torch.float64)
        if known.update.rollout is None:
            tapped = known.update.at_loss("is_loss_debug/advantages", mask=self._mask)
            if tapped is None:
                raise OracleError(f"""nothing tells the advantages of {known.update.at.words}; tap rewards with
                tap_trajectories, or advantages with tap_batch, or give --set advantages=1.0 for supervised
                fine-tuning""")
            self.notes["advantages were taken as they were tapped: no rewards tell what they should be"] = (
                None
            )
            return torch.from_numpy(tapped)
        return advantages_of(known, tokens, self.old.computed.get(known.update.began))

    def _limit(self, given: Optimizer | None) -> float | None:
        return self.max_grad_norm if self.max_grad_norm is not None or given is None else given.max_grad_norm

    def _optimizer(self, policy: LocalPolicy, given: Optimizer | None, before: Place | None) -> AdamW:
        """Return AdamW with the settings and moments of the trainer's own at this update."""
        named_parameters = dict(policy.named_parameters())
        chosen = self.config.optimizer
        groups: list[dict[str, Any]] = []
        for name, parameter in named_parameters.items():
            group: dict[str, Any] = {"params": [(name, parameter)]}
            if given is not None:
                betas = given.of("betas", name) or chosen.betas
                group |= {
                    "lr": given.rates.get(name, 0.0),
                    "betas": (float(betas[0]), float(betas[1])),
                    "eps": given.of("eps", name),
                    "weight_decay": given.of("weight_decay", name),
                }
            groups.append(group)
        optimizer = AdamW(groups)
        state: Mapping[str, Array] = {} if before is None else self.given.whole("optimizer", before)
        if given is not None and state:
            put_state(
                optimizer, policy, state, f"the state of the optimizer after {(before or Place(0)).words}"
            )
        return optimizer


def judged_types(given: Recorded, places: Sequence[Place]) -> dict[str, bool]:
    """Return which results of the optimizer can be judged: its own updates, if it is AdamW with known settings."""
    known = all(given.optimizer(place) is not None for place in places)
    return {"param": known, "optimizer": known}


def _refuse_beyond(objective: Objective) -> None:
    """Raise `OracleError` for what an objective asks of a whole rollout or of earlier updates, which nobody repeats."""
    beyond = {
        "rejection": objective.rejection is not None and objective.correction_policy == "old",
        "correction_normalize": objective.correction_normalize and objective.correction_policy == "old",
        "kl_controller": objective.kl_controller == "adaptive",
        "entropy_controller": objective.entropy_controller == "adaptive",
        "reward_aggregation": objective.reward_aggregation == "normalize_then_sum",
        "advantage": objective.advantage == "gdpo",
    }
    for name, depends in beyond.items():
        if depends:
            raise OracleError(f"""algorithm.{name}={getattr(objective, name)} depends on more of the run than a dump
            tells; give --set algorithm.{name} another value""")
