"""Verdicts with their place: the entries that every report consists of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import quote

from regress.compare.diagnosis.first_divergence import name_of
from regress.compare.verdicts.verdict import Verdict
from regress.dump.canonical_json import strict
from regress.report.verdict_text import placed

PAGE = "index.html"
"""File name of the page in the folder of a report."""

_NONE: Mapping[str, float] = MappingProxyType({})


class Call(NamedTuple):
    """One judgement.

    Attributes:
        where: a test, a case and variant, or the name of a comparison.
        precision: precision of the replay; may be empty.
        verdict: the judgement.
        layers: layer -> largest error in multiples of its tolerance, over all tensors that were judged together with
            this one, the passing ones, too; none where they belong to no layers.
        test: id of the test that gave it; empty outside of pytest.
    """

    where: str
    precision: str
    verdict: Verdict
    layers: Mapping[str, float] = _NONE
    test: str = ""

    @property
    def anchor(self) -> str:
        """Fragment of a link to this place and quantity in the HTML page."""
        return anchor(self.where, self.verdict)

    @property
    def label(self) -> str:
        """``dense/packed/step0/rank0/micro1: log_probs``."""
        return f"{placed(self.where, self.verdict)}: {name_of(self.verdict)}"

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that `from_json` reads; floats need not be finite."""
        return {
            "where": self.where,
            "precision": self.precision,
            "test": self.test,
            "layers": dict(self.layers),
            "verdict": self.verdict.to_json(),
        }

    def strict(self) -> dict[str, Any]:
        """Return what a report's JSON file holds of the call: strict JSON values, with the anchor of its page."""
        verdict = strict(self.verdict, "report")
        return {
            "where": self.where,
            "precision": self.precision,
            "test": self.test,
            "layers": strict(dict(self.layers), "report"),
            "verdict": verdict,
            "anchor": self.anchor,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Call:
        """Rebuild a call written by `to_json`."""
        verdict = Verdict.from_json(data["verdict"])
        return cls(data["where"], data["precision"], verdict, data["layers"], data["test"])


def anchor(where: str, verdict: Verdict) -> str:
    """Return ``dense/packed/step0/rank0/micro1/log_probs``: the place of a quantity's findings in a report."""
    return f"{placed(where, verdict)}/{verdict.quantity}"


def link(folder: Path, where: str, verdict: Verdict) -> str:
    """Return the link to a verdict in the HTML page of a report."""
    return f"{(folder.absolute() / PAGE).as_uri()}#{quote(anchor(where, verdict))}"
