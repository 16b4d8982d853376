"""Page of a run: how many mutants of each scope were caught, by what, and which are alive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mutation.mutants import Mutant
from mutation.run import Outcome
from mutation.scopes import SCOPES

Found = Mapping[str, Sequence[tuple[Mutant, Outcome]]]

_HEAD = """# Mutation testing

`python -m mutation --page docs/mutation.md` changes one expression of the engine at a time, in the files that compute,
and looks for a check that notices. This page is written by it, or with `--known` from the outcomes of earlier runs;
do not edit it.

A mutant goes through the cheapest golden replay that reaches its line, then through the unit tests that do, then
through the other replays (float64, the reduced matrix), until one fails. It counts as caught by

- *verdict*: a golden value or an invariant of the replay failed;
- *raised*: the mutated function, or what it called, raised;
- *raised later*: other code raised, or the dump could not be judged, because of what the function returned;
- *unit test*: no replay before it failed, but a test of `tests/unit` did.

All but a verdict is believed only if the same check passes with the same function put into force unchanged. A *timeout*
is a check that came to no end, and passes unchanged in less than half of the time; it counts as caught in no column.
*Equivalent* mutants compute the same, each with its reason in `mutation/equivalent.toml`; *unreached* are those whose
line no check runs. The share is what was caught of all that ran, less equivalent mutants and timeouts. Where fewer ran
than there are, they are a sample, drawn by a seed. Mutants of layouts, which the judge reads, too, are in force there.

"""
COLUMNS = (
    "scope",
    "mutants",
    "run",
    "verdict",
    "raised",
    "raised later",
    "unit test",
    "timeout",
    "equivalent",
    "alive",
    "unreached",
    "error",
    "share",
    "goal",
)


def fate(outcome: Outcome, equivalent: Mapping[str, str]) -> str:
    """Return the column of an outcome: an equivalent mutant that was killed was none, and counts as killed."""
    if outcome.fate == "killed":
        return outcome.how
    if outcome.fate in ("alive", "unreached") and outcome.name in equivalent:
        return "equivalent"
    return outcome.fate


def rows(found: Found, equivalent: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return the cells of each scope, in the order of `COLUMNS`."""
    result = []
    for name, outcomes in found.items():
        scope = SCOPES[name]
        fates = Counter(fate(outcome, equivalent) for _, outcome in outcomes)
        killed = sum(fates[how] for how in ("verdict", "raised", "raised later", "unit test"))
        judged = killed + fates["alive"] + fates["unreached"]
        share = f"{100 * killed / judged:.1f} %" if judged else "-"
        numbers = [len(scope.mutants()), len(outcomes), *(fates[column] for column in COLUMNS[3:12])]
        result.append((name, *map(str, numbers), share, f"{100 * scope.goal:.0f} %"))
    return result


def table(found: Found, equivalent: Mapping[str, str]) -> str:
    """Return the table as Markdown."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS), *rows(found, equivalent)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def page(found: Found, equivalent: Mapping[str, str]) -> str:
    """Return the whole page as Markdown."""
    parts = [_HEAD, table(found, equivalent)]
    for name, outcomes in found.items():
        left = [
            (mutant, column)
            for mutant, outcome in outcomes
            if (column := fate(outcome, equivalent)) in ("alive", "unreached", "timeout", "error")
        ]
        if left:
            ordered = sorted(left, key=lambda one: (one[0].path, one[0].line, one[0].number))
            parts.append(f"\n## {name}: not caught\n\n")
            parts += [f"- {column}: {_line(mutant)}\n" for mutant, column in ordered]
    return "".join(parts)


def _line(mutant: Mutant) -> str:
    text = mutant.text.replace("`", "'")
    return f"`{mutant.path}:{mutant.line}` {mutant.function}: `{text}` ({mutant.operator})"
