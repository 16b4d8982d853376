"""Report on a comparison of dumps, and the values of tokens at its first differences."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regress.compare.diagnosis.first_divergence import Divergence, exchanged_divergence, find_divergence
from regress.compare.diagnosis.probable_cause import UNKNOWN, Diagnosis, diagnose
from regress.compare.diagnosis.rules.rule_table import OF_GOLDEN, RULES
from regress.compare.diagnosis.run_context import RunContext, run_context_of_side
from regress.compare.dumps.absent_records import absent_records
from regress.compare.dumps.comparison import Comparison, exchanged
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.comparison_plan import plan_units
from regress.compare.dumps.comparison_unit import Unit
from regress.compare.dumps.different_runs import two_runs
from regress.compare.dumps.opened_dump import open_side
from regress.compare.dumps.token_columns import Column, columns
from regress.compare.dumps.wire_view import original
from regress.compare.logit_lens import logit_lens
from regress.compare.quantities import QUANTITIES, UPDATE_TYPES, Kind, quantity_named
from regress.compare.single_dump_checks import check_dump
from regress.compare.updates.invariant_statements import not_asked
from regress.compare.verdicts.verdict import Verdict
from regress.dump.coordinates import Place
from regress.errors import RegressError
from regress.explain.trainer_differences import SUBJECTS, differences
from regress.layout import SampleKey, TokenFrame
from regress.report.mode_comparison import Found
from regress.report.report_model import Describable, Report
from regress.report.token_values import Columns, TokenTable, table_of
from regress.report.verdict_entries import Call

EXPLAINED = "explained"
"""Rule of a cause that the explanations of both dumps tell."""
MODES = "three modes"
"""Name of what lies between the modes of a training, among the comparisons of pairs."""


CHECK = "check"
"""Name of the judgement on a single dump."""


def checked(path: str) -> Report:
    """Return the report on a dump that is judged without golden values; raises as `check_dump`."""
    judged = check_dump(path)
    verdicts = judged.verdicts
    context = run_context_of_side(open_side(path))
    divergence = find_divergence(verdicts, context)
    causes = [] if divergence is None else diagnose(divergence, context)
    named = [cause for cause in causes if cause.rule not in (UNKNOWN, OF_GOLDEN)]
    names = ", ".join(dict.fromkeys(verdict.name for verdict in verdicts))
    elements = sum(verdict.count for verdict in verdicts)
    broken = sum(not verdict.ok for verdict in verdicts) or "none"
    return Report(
        f"{len(verdicts)} invariants over {elements} elements ({names}): {broken} broken",
        [Call(CHECK, str(verdict.basis.get("dtype", "")), verdict) for verdict in verdicts],
        divergences={} if divergence is None else {CHECK: divergence},
        diagnoses={CHECK: named} if named else {},
        environment={"actual": path},
        notes=[
            f"not checked: {one}" for one in not_asked({verdict.name for verdict in verdicts}, judged.left)
        ],
    )


def refused(error: Mapping[str, str]) -> str:
    """Return the JSON of a report on what could not be judged at all."""
    return Report("regress", error=error).dumps()


def report_of(
    found: Mapping[str, Comparison],
    sections: Mapping[str, Any] | None = None,
    tokens: Sequence[TokenTable] = (),
    modes: Found | None = None,
    options: Options | None = None,
    again: str = "",
) -> Report:
    """Return the report on comparisons, by name.

    Args:
        sections: the keys of the report that NexRL's script documents.
        tokens: token values of the dumps.
        modes: discrepancies between the three modes of a training, which take the place of what they explain.
        options: those of the comparisons.
        again: command that makes the golden dump and compares again, where that dump is not kept.
    """
    several = len(found) > 1
    calls = [
        Call(name, str(verdict.basis.get("dtype", "")), verdict)
        for name, comparison in found.items()
        for verdict in comparison.verdicts
    ]
    errors = {
        f"{name} {number}" if number else name: problem
        for name, comparison in found.items()
        for number, problem in enumerate(comparison.problems)
    }
    divergences = {}
    diagnoses: dict[str, Sequence[Describable]] = {}
    if modes is not None:
        diagnoses |= {MODES: modes.discrepancies} if modes.discrepancies else {}
    for name, comparison in found.items():
        context = run_context_of(comparison, again)
        divergence = find_divergence(comparison.verdicts, context) if comparison.failed else None
        if divergence is not None:
            divergences[name] = divergence
            if modes is None or not modes.explains(divergence.first.quantity):
                diagnoses[name] = _causes(comparison, divergence, context, options or Options())
    first = next(iter(found.values()))
    golden = f"made again by {again}" if again else original(first.golden)
    environment = {"golden": golden} | {
        f"actual ({name})" if several else "actual": original(comparison.actual)
        for name, comparison in found.items()
    }
    return Report(
        "regress compare",
        calls,
        errors=errors,
        divergences=divergences,
        diagnoses=diagnoses,
        tokens=tokens,
        lenses={name: lens for name in divergences if (lens := logit_lens(found[name])) is not None},
        environment=environment,
        notes=_notes(found, modes),
        tensors=sum(v.count > 0 for comparison in found.values() for v in comparison.verdicts),
        sections=sections or {},
    )


def _notes(found: Mapping[str, Comparison], modes: Found | None) -> list[str]:
    """Return what is said of comparisons: that they are of two runs, what modes tell, and their own notes."""
    apart, notes = [], []
    for name, comparison in found.items():
        mark = f"{name}: " if len(found) > 1 else ""
        apart += [f"{mark}{sentence}" for sentence in [two_runs(comparison)] if sentence]
        notes += [f"{mark}{note}" for note in comparison.notes]
        for side, samples in (("golden", comparison.golden_only), ("actual", comparison.actual_only)):
            notes += [f"{mark}{sample} is in the {side} dump only" for sample in samples]
    return [*apart, *([] if modes is None else modes.notes), *notes]


def _causes(
    comparison: Comparison, divergence: Divergence, context: RunContext, options: Options
) -> list[Diagnosis]:
    """Return the causes of a divergence; of a loss whose terms are not recorded those of its token gradients.

    The loss of a microbatch is one number. Its derivatives by the log-probs tell the mask, the weight and the term of
    each token, so that they prove what the number only shows.
    """
    found = diagnose(divergence, context, exchanged=partial(_exchanged, comparison, divergence, options))
    found = _explained(comparison, divergence, found)
    terms = {"token_loss", "policy_loss", "weights"} & context.quantities
    if divergence.first.quantity != "loss" or terms:
        return found
    place = divergence.first.place
    rest = [verdict for verdict in comparison.verdicts if verdict.quantity != "loss"]
    closer = find_divergence(rest, context)
    if closer is None or closer.first.quantity != "token_gradient":
        return found
    if closer.first.place.of_update != place.of_update:
        return found
    again = diagnose(closer, context, _RULES_OF_TERMS)
    if again[0].rule == UNKNOWN:
        again = diagnose(closer, context, exchanged=partial(_exchanged, comparison, closer, options))
    again = _explained(comparison, closer, again)
    return [one for one in again if one.rule != UNKNOWN] or found


_RULES_OF_TERMS = tuple(
    replace(rule, at=("token_gradient",))
    for term in ("token_loss", "policy_loss", "kl")
    for rule in RULES
    if rule.what and term in rule.at
)
"""Rules of the terms of a loss, asked of its token gradients: where the loss differs, too, its way back may be right.

A whole term that has another sign comes before a part of it that has another derivative."""
_SUBJECTS: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("token_gradient", "entropy_gradient"), SUBJECTS),
    **dict.fromkeys(("log_probs", "entropy"), ("targets", "temperature")),
    "advantages": ("advantages",),
}
"""First quantity that differs -> subjects of an explanation that may be the cause: what comes before them holds."""


def _explained(comparison: Comparison, divergence: Divergence, found: list[Diagnosis]) -> list[Diagnosis]:
    """Return the causes, with what the explanations of both dumps say on the loss of a foreign trainer.

    It is asked where no formula of a known configuration explains the wrong values.
    """
    place, subjects = divergence.first.place, _SUBJECTS.get(divergence.first.quantity, ())
    if not subjects or place.step is None or any(divergence.pattern(id) for id in ("formula", "fitted")):
        return found
    try:
        phrases = differences(comparison.golden, comparison.actual, place.step, place.update)
    except RegressError:  # no token gradients, or none that can be read
        return found
    phrases = [phrase for phrase in phrases if phrase.partition(":")[0] in subjects]
    if not phrases:
        return found
    known = [one for one in found if one.rule != UNKNOWN]
    cause = f"the losses are not the same; {'; '.join(phrases)}"
    command = f"regress explain {shlex.quote(comparison.actual)} --step {place.step}"
    return [*known, replace(found[0], rule=EXPLAINED, cause=cause, next=command, of="actual")]


def _exchanged(
    comparison: Comparison, divergence: Divergence, options: Options
) -> tuple[Divergence, RunContext] | None:
    """Return a divergence as it is with golden and actual exchanged, and the facts of the golden run."""
    verdicts = exchanged(comparison, divergence.first, options)
    context = run_context_of(replace(comparison, golden=comparison.actual, actual=comparison.golden))
    found = exchanged_divergence(divergence, verdicts, context, comparison.verdicts)
    return None if found is None else (found, context)


def run_context_of(comparison: Comparison, again: str = "") -> RunContext:
    """Return the known facts of the actual run, and the commands for a closer look.

    Args:
        again: command that compares again; by default `regress compare`.
    """
    golden, actual = open_side(comparison.golden), open_side(comparison.actual)
    context = run_context_of_side(actual)
    pair = f"{shlex.quote(comparison.golden)} {shlex.quote(comparison.actual)}"
    command = again or f"regress compare {pair}"
    return replace(
        context,
        group_sizes=comparison.group_sizes,
        quantities=frozenset(verdict.quantity for verdict in comparison.verdicts if verdict.count),
        absent=absent_records(golden, actual),
        golden_absent=() if golden.system == "golden" else absent_records(actual, golden),
        trusted=golden.system == "golden",
        precisions=(golden.precision, actual.precision),
        commands={
            "compare": f"{command} --only {{quantity}}",
            "show": f"regress dump show {shlex.quote(comparison.actual)}/{{record_type}}",
            "records": f"regress dump show {shlex.quote(comparison.actual)}",
        },
    )


UPDATES, PLACES = 2, 8
"""Number of updates whose tokens a report shows, and of microbatches in each."""


def comparison_tables(where: str, comparison: Comparison, options: Options) -> list[TokenTable]:
    """Return the tokens of the microbatches that differ first, or of the closest one if none does.

    Args:
        where: name of the comparison.
        options: options of the comparison.
    """
    found: dict[Place, dict[Place, None]] = {}
    for verdict in _notable_verdicts(comparison):
        place = verdict.place
        if place.step is not None:
            found.setdefault(place.of_update, {})[place] = None
    return [
        table
        for update, places in [*found.items()][:UPDATES]
        for table in _token_tables(
            where, comparison, replace(options, steps=(update.step or 0,) * 2), update, [*places]
        )
    ]


def _notable_verdicts(comparison: Comparison) -> Iterable[Verdict]:
    if comparison.failed:
        return comparison.failed
    near = [v for v in comparison.verdicts if quantity_named(v.quantity).kind is Kind.TOKEN]
    return sorted(near, key=lambda verdict: -verdict.multiple)[:1]


def _token_tables(
    where: str, comparison: Comparison, options: Options, update: Place, places: Sequence[Place]
) -> list[TokenTable]:
    units = [
        unit
        for unit in plan_units(comparison.golden, comparison.actual, options).units
        if isinstance(unit, Unit) and not unit.elementwise and unit.record_type not in UPDATE_TYPES
        if unit.place.update == update.update
    ]
    there = dict.fromkeys(unit.place for unit in units)
    chosen = [*dict.fromkeys(place for place in [*places, *there] if place in there)][:PLACES]
    merged = _Merged([unit for unit in units if unit.place in chosen])
    return (
        [table_of(where, update, merged.frame, merged.ids, merged.mask, merged.columns)]
        if merged.columns
        else []
    )


class _Merged:
    """Columns of several records, over all of their samples.

    Attributes:
        frame: the samples; ``ids`` their tokens, None where those of a sample are unknown; ``mask`` loss
            tokens.
        columns: values in the order of computation; of several values of a token the one furthest off.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        lengths: dict[SampleKey, int] = {}
        for unit in units:
            for key, length in zip(unit.frame.samples, unit.frame.lengths, strict=True):
                lengths[key] = max(lengths.get(key, 0), length)
        self.frame = TokenFrame(tuple(lengths), tuple(lengths.values()))
        self.mask = np.zeros(self.frame.size, bool)
        self.columns: Columns = {}
        ids = np.full(self.frame.size, -1, np.int64)
        index = {key: number for number, key in enumerate(lengths)}
        for unit in units:
            own = _canonical(unit.frame, index, self.frame)
            values, loss, found = columns(unit)
            if values is not None:
                ids[own] = np.maximum(ids[own], values)
            if loss is not None:
                self.mask[own[loss]] = True
            for column in found:
                self._add(column, own[column.tokens])
        self.ids = ids if bool((ids >= 0).any()) else None
        self.columns = {q.name: self.columns[q.name] for q in QUANTITIES if q.name in self.columns}

    def _add(self, column: Column, tokens: NDArray[np.int64]) -> None:
        nothing = np.full(self.frame.size, np.nan)
        golden, actual, _ = self.columns.setdefault(
            column.quantity, (nothing, nothing.copy(), column.tolerance)
        )
        self.mask[tokens] = True
        off = np.nan_to_num(np.abs(column.actual - column.golden), nan=np.inf)
        known = np.nan_to_num(np.abs(actual[tokens] - golden[tokens]), nan=-1.0)
        worse = off > known
        golden[tokens[worse]], actual[tokens[worse]] = column.golden[worse], column.actual[worse]


def _canonical(frame: TokenFrame, index: dict[SampleKey, int], whole: TokenFrame) -> NDArray[np.int64]:
    """Return the flat index in the whole frame of each token, ``[frame.size]``."""
    runs = [
        np.arange(length) + whole.offsets[index[key]]
        for key, length in zip(frame.samples, frame.lengths, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *runs])
