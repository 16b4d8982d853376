"""Scopes: files whose statements compute, by what they compute, and how many of their mutants are run."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

from mutation.mutants import ROOT, Mutant, mutants
from regress.replay.variant import Extent


@dataclass(frozen=True)
class Scope:
    """Some files.

    Attributes:
        name: of what they compute.
        paths: from the root of the repository.
        ranks: most ranks of a replay that can show a mutant.
        extent: part of the matrix that is replayed.
        goal: share of mutants, without equivalent ones, that has to be caught.
        sample: number of mutants, drawn by a seed; None: all of them.
    """

    name: str
    paths: tuple[str, ...]
    ranks: int = 1
    extent: Extent = Extent.DEFAULT
    goal: float = 0.97
    sample: int | None = None

    def mutants(self) -> list[Mutant]:
        """Return its mutants, in the order in which they are run: drawn by a seed, so that any part is a sample."""
        found = list(mutants(self.paths))
        random.Random(0).shuffle(found)
        return [mutant for mutant in found if not mutant.is_of_a_check][: self.sample]


def _files(folder: str, *left_out: str) -> tuple[str, ...]:
    found = sorted(path.relative_to(ROOT) for path in (ROOT / folder).glob("*.py"))
    return tuple(str(path) for path in found if path.name not in ("__init__.py", *left_out))


def _of(folder: str, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{folder}/{name}.py" for name in names)


SCOPES = {
    scope.name: scope
    for scope in (
        Scope("step", _of("regress/engine", ("training_step", "training_passes", "optimizer"))),
        Scope(
            "planner", _of("regress/layout", ("layout_planner", "token_layout", "canonical_frame")), ranks=2
        ),
        Scope(
            "losses",
            _of(
                "regress/grpo",
                (
                    "token_losses",
                    "policy_losses",
                    "importance_ratios",
                    "kl_divergence",
                    "sampler_corrections",
                    "token_selection",
                ),
            ),
        ),
        Scope(
            "log-probs",
            (
                *_of("regress/grpo", ("selective_log_softmax",)),
                *_of("regress/engine", ("log_prob_projection",)),
            ),
        ),
        Scope(
            "advantages",
            _of(
                "regress/grpo",
                (
                    "advantage_computation",
                    "group_statistics",
                    "advantage_estimators",
                    "discounted_returns",
                ),
            ),
        ),
        Scope("aggregation", _of("regress/grpo", ("loss_aggregation",)), ranks=2),
        Scope(
            "parallel",
            _files("regress/parallel", "failure_report.py", "parallel_run.py", "model_families.py"),
            4,
            Extent.REDUCED,
            0.9,
            400,
        ),
    )
}
PATHS = tuple(sorted({path for scope in SCOPES.values() for path in scope.paths}))
"""Files of all scopes, whose reached lines are noted together."""
