"""Comparison of the three modes of one training: pairs of dumps, and the discrepancies between all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.wire_view import (
    ACTIVE,
    CUSTOM,
    RECORDED,
    WEIGHTED,
    flags_of,
    is_sent,
    original,
    sent,
)
from regress.errors import CompareError, RegressError
from regress.interop.modes.discrepancy import Discrepancy, some
from regress.interop.modes.nexrl_report import sections, steps_in
from regress.interop.modes.nexrl_report_text import lines_of
from regress.interop.modes.presence_rules import dropped, files, order, presence
from regress.interop.modes.reply_rules import replies
from regress.interop.modes.setting_rules import settings
from regress.interop.modes.step_context import StepContext, is_indexed
from regress.interop.modes.token_value_rules import values
from regress.interop.modes.wire_format import flags_for, is_custom
from regress.report.mode_comparison import Directories

REMOTE, WEAVER, BETWEEN = "remote API", "weaver", "client and service"


def comparable(dirs: Directories, options: Options) -> Directories:
    """Return the directories with the views of self-hosted and service's dump that can be compared.

    Damaged dumps are left to the comparison, which names the damage.

    Raises:
        CompareError: if the self-hosted run made several updates a rollout step.
    """
    others = [path for path in (dirs.remote_api, dirs.weaver) if path is not None]
    try:
        known = [open_side(path) if path is not None else None for path in (dirs.remote_api, dirs.weaver)]
        whole = open_side(dirs.self_hosted)
        several = any(where.update for _, where in whole.entries.values())
    except RegressError:
        return dirs
    if several and others:
        raise CompareError(f"""{dirs.self_hosted} has several optimizer updates in a rollout step, and {others[0]}
        counts updates, so that its steps are others; compare runs of one update a step (trainer.epochs=1,
        trainer.mini_batch_size=null)""")
    try:
        flags = flags_for(whole, known[0], known[1], steps_in(dirs, options))
        flags |= {RECORDED} if whole.system == "regress" else set()
        custom = is_custom(known[0], known[1], steps_in(dirs, options))
    except RegressError:
        return dirs
    weaver = sent(dirs.weaver, {CUSTOM}) if custom and dirs.weaver is not None else dirs.weaver
    return replace(dirs, self_hosted=sent(dirs.self_hosted, flags), weaver=weaver)


def pairs_of(dirs: Directories) -> dict[str, tuple[str, str]]:
    """Return the pairs of golden and actual dumps, by name; client and service where requests tell whose datums."""
    flags, whole = (
        flags_of(dirs.self_hosted) if is_sent(dirs.self_hosted) else (frozenset(), dirs.self_hosted)
    )
    found = {}
    if dirs.remote_api is not None:  # a client dumps masks, whether its wire has them or not
        found[REMOTE] = sent(whole, flags - {ACTIVE}), dirs.remote_api
    if dirs.weaver is not None:
        found[WEAVER] = dirs.self_hosted, dirs.weaver
    if dirs.remote_api is not None and dirs.weaver is not None and is_indexed(original(dirs.weaver)):
        found[BETWEEN] = sent(dirs.remote_api, flags & {ACTIVE}), dirs.weaver
    return found


def found_between(dirs: Directories, options: Options) -> Found:
    """Return the discrepancies between the modes; none where a part was asked for that they do not belong to."""
    if options.only.patterns:
        return Found(notes=["--only was given, so discrepancies between the three modes were not looked for"])
    return discrepancies(dirs.self_hosted, dirs.remote_api, dirs.weaver, steps_in(dirs, options))


class ThreeModes:
    """The modes of a training of NexRL: pairs of dumps, the sections of its script, and discrepancies."""

    def __init__(self, dirs: Directories, options: Options) -> None:
        self._dirs, self._options = comparable(dirs, options), options
        self.pairs = pairs_of(self._dirs)

    def sections(self) -> dict[str, Any]:
        """Return the keys of the script's report."""
        return sections(self._dirs, self._options)

    def lines(self, sections: Mapping[str, Any]) -> Iterable[str]:
        """Return these keys as lines for a reader."""
        return lines_of(sections)

    def found(self) -> Found:
        """Return the discrepancies between the modes."""
        return found_between(self._dirs, self._options)


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
