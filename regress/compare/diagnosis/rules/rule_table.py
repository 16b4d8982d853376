"""All rules of the diagnosis, read from the tables beside this module, theme by theme, and their conditions by name."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from regress.compare.diagnosis.diagnosis_rule import Condition, Rule
from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.rule_gate import masks_judged
from regress.compare.diagnosis.run_context import RunContext
from regress.compare.diagnosis.sampled_tokens import SAMPLED
from regress.compare.quantities import UPDATE_TYPES
from regress.compare.verdicts.verdict import Status

_TOKEN_GRADIENTS = ("token_gradient", "entropy_gradient", "logit_gradient")
_TERMS = ("kl", "entropy_loss", "sampler_weights", "ref_log_probs", "old_log_probs")
_LITTLE = 0.01
"""Share of the largest value: an epsilon changes advantages by less."""


def _split(dimension: str) -> Condition:
    """Return the condition that a dimension of the mesh has several ranks."""
    return lambda _, scene: scene.mesh.get(dimension, 1) > 1


def _one_exchange(_: Divergence, scene: RunContext) -> bool:
    """Return True if ranks share a layer in one way: of several ways, a layer that is off tells none."""
    return sum(scene.mesh.get(name, 1) > 1 for name in ("cp", "tp", "pp", "ep")) == 1


def _after_an_update(divergence: Divergence, _: RunContext) -> bool:
    return bool(divergence.first.place.step or divergence.first.place.update)


def _side_of(divergence: Divergence) -> str:
    """Return the side that lacks what only one of them has."""
    return "golden" if divergence.first.status is Status.EXTRA else "actual"


def _sampled_here(divergence: Divergence, _: RunContext) -> bool:
    """Return True for rollouts that the run had to sample itself, in place of repeating recorded ones."""
    return SAMPLED in divergence.first.detail


def _factor(divergence: Divergence) -> bool:
    """Return True if a common factor or dtype was found."""
    return any(p.id.startswith(("scaled", "zero", "sign", "rounded")) for p in divergence.patterns)


def _samples_in_parts(divergence: Divergence, scene: RunContext) -> bool:
    """Return True if ratios are those of samples whose tokens lie on several ranks.

    Where no configuration tells the level of ratios, one factor for all tokens of a sample does, beside golden values
    that are right by definition.
    """
    level = scene.setting("algorithm", "importance_level")
    of_samples = level in ("sequence", "sequence_product")
    if scene.trusted and not scene.config.get("algorithm"):
        of_samples = divergence.pattern("per_sample") is not None
    return scene.mesh.get("cp", 1) > 1 and of_samples


def _few_ulps(divergence: Divergence, _: RunContext) -> bool:
    """Return True for errors of at most 16 units in the last place: the same mathematics in another order."""
    first, ulp = divergence.first, divergence.first.max_ulp
    drifts = (
        first.status is Status.DRIFT and first.quantity != "replicas"
    )  # which must be the same bit for bit
    return drifts and ulp is not None and 0 < ulp <= 16


def _few_without_gradients(divergence: Divergence, _: RunContext) -> bool:
    """Return True if few elements are off, and neither gradients nor states were judged before them."""
    first = divergence.first
    return 10 * first.over <= first.count and not {"gradient", "optimizer"} & {*divergence.held}


def _ratios_of_tokens(_: Divergence, scene: RunContext) -> bool:
    """Return True unless ratios are those of whole samples."""
    return scene.setting("algorithm", "importance_level") in (None, "token")


def _penalty_in_rewards(_: Divergence, scene: RunContext) -> bool:
    """Return True if a KL penalty is taken off rewards, so that advantages depend on log-probs."""
    placement = scene.setting("algorithm", "kl_placement")
    return placement == "reward" and scene.setting("algorithm", "kl_coef") not in (None, 0, 0.0)


def _only_reports_fail(divergence: Divergence, _: RunContext) -> bool:
    """Return True if nothing fails but what a step reports."""
    reported = {"metrics", "step_metrics", "invariants", "replicas"}
    return {*divergence.downstream, *divergence.independent} <= reported


def _replicas_hold(divergence: Divergence, _: RunContext) -> bool:
    """Return True where the failing ranks are told apart by the samples that they hold, or embeddings alone are asked.

    Behind the embeddings other ranks may hold other layers, tokens or shards, so that only data parallelism tells.
    """
    of_layers = "embed" not in divergence.first.name
    return not of_layers or divergence.pattern("mesh:dp") is not None


def _tied(divergence: Divergence, _: RunContext) -> bool:
    """Return True for a model whose output projection has no weight of its own."""
    return divergence.pattern("tied") is not None


CONDITIONS: dict[str, Condition] = {
    # of the run
    "context_parallel": _split("cp"),
    "tensor_parallel": _split("tp"),
    "pipeline_parallel": _split("pp"),
    "expert_parallel": _split("ep"),
    "one_exchange": _one_exchange,
    "samples_in_parts": _samples_in_parts,
    "ratios_of_tokens": _ratios_of_tokens,
    "replicas_hold": _replicas_hold,
    "penalty_in_rewards": _penalty_in_rewards,
    "only_reports_fail": _only_reports_fail,
    "tied": _tied,
    "records_absent": lambda found, scene: bool(scene.lacks(_side_of(found))),
    "no_record_absent": lambda found, scene: not scene.lacks(_side_of(found)),
    # of what was judged
    "experts": lambda found, _: "experts" in found.kinds,
    "recurrent": lambda found, _: "recurrent layers" in found.kinds,
    "not_recurrent_alone": lambda found, _: (
        "recurrent layers" not in found.kinds or "weights of attention" in found.kinds
    ),
    "activations_not_held": lambda found, _: "activations" not in found.held,
    "gradients_agree": lambda found, _: "gradient" in found.agree,
    "gradients_not_known_to_agree": lambda found, _: "gradient" not in found.agree,
    "no_term_of_the_loss": lambda found, _: found.first.quantity not in ("gradient", *_TERMS),
    "activations_unjudged": lambda found, _: "activations" in found.unjudged,
    "loss_unjudged": lambda found, _: "loss" in found.unjudged,
    "token_loss_unjudged": lambda found, _: "token_loss" in found.unjudged,
    "token_gradients_unjudged": lambda found, _: {*_TOKEN_GRADIENTS}.isdisjoint(found.held),
    "later_gradient_holds": lambda found, _: any(quantity.startswith("gradient ") for quantity in found.held),
    # of what fails
    "places_are_tokens": lambda found, _: (
        found.first.quantity not in (*UPDATE_TYPES, "grad_norm", "loss", "trajectory")
    ),
    "parameters_held_before": lambda found, _: "param" in found.before,
    "parameters_unknown_before": lambda found, scene: (
        _after_an_update(found, scene) and "param" not in found.before
    ),
    "not_sampled_here": lambda found, scene: not _sampled_here(found, scene),
    "nothing_else_fails": lambda found, _: not found.downstream and not found.independent,
    "several_tensors": lambda found, _: found.broken[0] > 1,
    "one_tensor": lambda found, _: found.broken[0] == 1 < found.broken[1],
    "nearly_all_tensors": lambda found, _: found.broken[1] > 2 and found.broken[0] >= 0.9 * found.broken[1],
    "most_elements": lambda found, _: 2 * found.first.over >= found.first.count,
    "few_elements": lambda found, _: found.first.over <= max(1, found.first.count // 20),
    "few_without_gradients": _few_without_gradients,
    "masks_not_judged": lambda found, scene: not masks_judged(found, scene),
    # of how far it is off
    "few_ulps": _few_ulps,
    "much_without_a_factor": lambda found, _: (
        not _factor(found) and (found.first.relative >= _LITTLE or found.pattern("formula") is not None)
    ),
    "little_without_a_factor": lambda found, _: not _factor(found) and found.first.relative < _LITTLE,
}


OF_GOLDEN = "invariant-alone"
"""Rule for faults although every golden value holds; a single dump has no golden values."""
_THEMES = ("inputs", "model", "loss", "gradients", "update")


def _read(theme: str) -> Iterator[Rule]:
    """Yield the rules of one table, whose headers are their ids and whose keys are fields of `Rule`."""
    text = files("regress.compare.diagnosis.rules").joinpath(f"{theme}.toml").read_text("utf-8")
    for id, row in tomllib.loads(text).items():
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in row.items()
        }
        fields["status"] = tuple(Status(name) for name in fields.get("status", ()))
        fields["when"] = tuple(CONDITIONS[name] for name in fields.get("when", ()))
        yield Rule(id, **fields)


RULES: tuple[Rule, ...] = tuple(rule for theme in _THEMES for rule in _read(theme))
