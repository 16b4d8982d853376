"""The one model behind text, JSON, HTML, tables, JUnit and CI summaries."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from regress.compare.verdicts.verdict_sequence import Verdicts
from regress.credential_redaction import redacted_tree
from regress.dump.canonical_json import strict
from regress.printable_text import printable_tree
from regress.report.headroom import Closest, VariantRow, closest_calls
from regress.report.number_format import plural
from regress.report.token_values import TokenTable
from regress.report.verdict_entries import Call

if TYPE_CHECKING:
    import pandas as pd

    from regress.compare.logit_lens import LogitLens

SCHEMA_VERSION = 3


class Describable(Protocol):
    """Finding that converts to words (by ``str``, one or several lines) and to data."""

    def to_json(self) -> Mapping[str, Any]:
        """Return plain values."""


@dataclass(frozen=True)
class Report:
    """Everything that was judged, with its verdicts.

    Attributes:
        title: one line: what was compared.
        calls: every verdict that is not ok, and of each place and quantity at least the closest passing one.
        errors: replay, file or section -> why it could not be judged.
        divergences: first record, by `Call.where`, whose inputs hold and whose output does not.
        diagnoses: probable causes, by `Call.where`, the likeliest first.
        tokens: token values of the failures, or of the closest call if nothing failed.
        lenses: log-probs that the state after each layer implies, by `Call.where`.
        environment: facts for the reader: versions, command, differences from the environment of the
            recording.
        notes: sentences that belong to no verdict.
        tensors: number of compared tensors, if larger than the number of calls.
        variants: headroom of several variants.
        sections: further top-level keys of the JSON file: those of the report that NexRL's script documents.
        error: why nothing could be judged, as `RegressError.to_json` tells it.
        ended: exit code of the command, where it follows another rule than `exit_code` does.
    """

    title: str
    calls: Sequence[Call] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    divergences: Mapping[str, Describable] = field(default_factory=dict)
    diagnoses: Mapping[str, Sequence[Describable]] = field(default_factory=dict)
    tokens: Sequence[TokenTable] = ()
    lenses: Mapping[str, LogitLens] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    tensors: int = 0
    variants: Sequence[VariantRow] = ()
    sections: Mapping[str, Any] = field(default_factory=dict)
    error: Mapping[str, str] | None = None
    ended: int | None = None

    def __post_init__(self) -> None:
        for name in ("title", "errors", "environment", "notes", "sections"):
            object.__setattr__(self, name, printable_tree(redacted_tree(getattr(self, name))))

    @property
    def verdicts(self) -> Verdicts:
        """All verdicts, for `to_frame`."""
        return Verdicts(call.verdict for call in self.calls)

    def to_frame(self) -> pd.DataFrame:
        """Return the columns of `Verdicts.to_frame`, after the texts ``where``, ``precision`` and ``test``."""
        frame = self.verdicts.to_frame()
        for position, name in enumerate(("where", "precision", "test")):
            values = [getattr(call, name) for call in self.calls]
            frame.insert(position, name, values)
            frame[name] = frame[name].astype("string")
        return frame

    @cached_property
    def failed(self) -> list[Call]:
        """Every call that is not ok, in the order given."""
        return [call for call in self.calls if not call.verdict.ok]

    @property
    def findings(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Replays with findings: name, the first divergence if it is known, and the probable causes."""
        for where in dict.fromkeys([*self.divergences, *self.diagnoses]):
            first = [str(self.divergences[where])] if where in self.divergences else []
            yield where, first, [*map(str, self.diagnoses.get(where, ()))]

    @cached_property
    def closest(self) -> list[Closest]:
        """Headroom of every quantity and precision."""
        return closest_calls(self.calls)

    @property
    def exit_code(self) -> int:
        """Exit code: 0 all within tolerance, 1 something is not, 2 something, or all of it, could not be judged."""
        if self.ended is not None:
            return self.ended
        return 2 if self.error or self.errors or not self.calls else int(bool(self.failed))

    @property
    def sign(self) -> str:
        """Sign: ``✓`` all within tolerance, ``✗`` something is not, ``!`` something could not be judged."""
        return "✗" if self.failed else "!" if self.exit_code else "✓"

    @property
    def summary(self) -> str:
        """Summary in one line: the amount compared, and the result."""
        if not self.calls:
            return "nothing was compared" if self.error is None else self.error["message"]
        wheres = dict.fromkeys(call.where for call in self.failed)
        end = f"{len(self.failed)} failed in {', '.join([*wheres][:3])}" if wheres else "all within tolerance"
        if len(wheres) > 3:
            end += f" and {len(wheres) - 3} more"
        tensors = f" of {plural(self.tensors, 'tensor')}" if self.tensors else ""
        missing = f"; {len(self.errors)} could not be judged" if self.errors else ""
        return f"{plural(len(self.calls), 'check')}{tensors}: {end}{missing}"

    def to_json(self, *, every: bool = True) -> dict[str, Any]:
        """Return a tree of strict JSON values, as docs/reference/report.md says.

        Floats that are not finite are tagged.

        Args:
            every: with every call; otherwise with what failed alone.
        """
        return self.head(every=every) | {"calls": [call.strict() for call in self._calls(every)]}

    def head(self, *, every: bool = True) -> dict[str, Any]:
        """Return the tree of `to_json` with no calls, which are by far the most of it."""
        tree = {
            **self.sections,
            "schema_version": SCHEMA_VERSION,
            "title": self.title,
            "summary": self.summary,
            "exit_code": self.exit_code,
            "error": self.error,
            "checks": len(self.calls),
            "failed": len(self.failed),
            "tensors": self.tensors,
            "calls": [],
            "errors": self.errors,
            "headroom": [row.to_json() for row in self.closest if every or row.failed],
            "variants": [row.to_json() for row in self.variants],
            "divergences": {where: _finding_json(found) for where, found in self.divergences.items()},
            "diagnoses": {
                where: [_finding_json(one) for one in found] for where, found in self.diagnoses.items()
            },
            **(
                {"lenses": {name: lens.to_json() for name, lens in self.lenses.items()}}
                if self.lenses
                else {}
            ),
            "tokens": [table.to_json() for table in (self.tokens if every else self._first_tokens())],
            "environment": self.environment,
            "notes": [*self.notes],
        }
        found: dict[str, Any] = strict(tree, "report")
        return found

    def dumps(self, *, every: bool = True) -> str:
        """Return the text of `to_json`, a call a line."""
        head = self.head(every=every)
        del head["calls"]
        data = json.dumps(head, indent=1, allow_nan=False)
        lines = ",\n".join(f"  {json.dumps(call.strict(), allow_nan=False)}" for call in self._calls(every))
        calls = f"[\n{lines}\n ]" if lines else "[]"
        return f'{data[:-2]},\n "calls": {calls}\n}}\n'

    def _calls(self, every: bool) -> Sequence[Call]:
        return self.calls if every else self.failed

    def _first_tokens(self) -> Iterator[TokenTable]:
        """Yield for each replay with failures the first table that has the values of one, with those of the first."""
        for where in dict.fromkeys(call.where for call in self.failed):
            failed = [call.verdict.quantity for call in self.failed if call.where == where]
            rows = (
                (table, [one for one in table.values if one.quantity in failed])
                for table in self.tokens
                if table.where == where
            )
            yield from islice((replace(table, values=values[:1]) for table, values in rows if values), 1)


def _finding_json(found: Describable) -> dict[str, Any]:
    return {"text": str(found), **found.to_json()}
