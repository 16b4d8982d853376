"""Discrepancies of all steps that the dumps of the three modes have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.wire_view import ACTIVE, CUSTOM, WEIGHTED, flags_of, is_sent, original
from regress.interop.modes.discrepancy import Discrepancy, some
from regress.interop.modes.presence_rules import dropped, files, order, presence
from regress.interop.modes.reply_rules import replies
from regress.interop.modes.setting_rules import settings
from regress.interop.modes.step_context import StepContext
from regress.interop.modes.token_value_rules import values


@dataclass
class Found:
    """Discrepancies, those of the first step first, and notes on what is none, a sentence each."""

    discrepancies: list[Discrepancy] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def explains(self, quantity: str) -> bool:
        """Return True if a discrepancy explains that a quantity differs."""
        return any(quantity in one.explains for one in self.discrepancies)


def discrepancies(trainer: str, client: str | None, service: str | None, steps: Sequence[int]) -> Found:
    """Find discrepancies between the modes of a training.

    Args:
        trainer: dump of the self-hosted run, or the view of it that the others are compared with.
        client, service: dumps of the others; None for those that were not given.
        steps: steps that all of them have.
    """
    flags, whole = flags_of(trainer) if is_sent(trainer) else (frozenset[str](), trainer)
    base = open_side(f"sent-{WEIGHTED}:{whole}" if WEIGHTED in flags else whole)
    custom = service is not None and is_sent(service) and CUSTOM in flags_of(service)[0]
    sent, computed = (None if path is None else open_side(original(path)) for path in (client, service))
    found = Found()
    found.discrepancies += files(base, sent, computed, steps)
    for step in steps:
        _of_step(StepContext.of(step, base, sent, computed), found)
    if WEIGHTED in flags:
        found.notes.append(
            "the client sends advantages multiplied by the weights of their tokens (aggregation and denominators), "
            "which the service adds up; those of the self-hosted dump were multiplied, too"
        )
    if ACTIVE in flags:
        found.notes.append(
            "the service counts no token of samples whose advantages are all 0: its wire has no loss mask, so that "
            "advantages tell which tokens count; of these samples the inputs alone were compared"
        )
    if custom:
        found.notes.append(
            "the client computed the loss itself and sent its derivative by each log-prob, so the masks, advantages, "
            "ratios and losses of the service are those of a sum of log-probs times these weights: its log-probs, "
            "entropies, gradients and parameters were compared with the self-hosted dump, and the weights with the "
            "client's"
        )
    return found


def _of_step(context: StepContext, found: Found) -> None:
    seen = {one.rule for one in found.discrepancies}
    for rules in (presence, order, settings, values, replies):
        for one in rules(context):
            if one.rule not in seen:
                found.discrepancies.append(replace(one, step=context.step))
    names = dropped(context)
    if names:
        found.notes.append(
            f"step {context.step}: {some(names, 'sample')} of {len(context.trainer)} became no datums: their "
            "advantages are all 0, so that dropping them changes nothing"
        )
