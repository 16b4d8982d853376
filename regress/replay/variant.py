"""Variants: the same training step computed in another way, as a name and overrides of the configuration.

Those of this package are the rows of ``variants.toml``; users add rows of their own as ``[tool.regress.variants.NAME]``
in pyproject.toml, or with the hook ``pytest_regress_variants`` in conftest.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regress.golden.golden_case import GoldenCase


class Precision(StrEnum):
    """Precision that a replay computes in.

    ``MIXED`` is FSDP's policy: float32 weights, blocks that compute in bfloat16, gradients summed in float32.
    ``BITWISE`` is float32 compared byte for byte with the replay of a bitwise reference.
    """

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    MIXED = "mixed"
    BITWISE = "bitwise"

    @property
    def dtype(self) -> str:
        """Value of ``model.dtype`` in the replay: weights, gradients, optimizer state."""
        return "float32" if self in (Precision.MIXED, Precision.BITWISE) else str(self)

    @property
    def computes_in(self) -> str:
        """The dtype of activations."""
        return "bfloat16" if self is Precision.MIXED else self.dtype

    @property
    def measured_as(self) -> str:
        """Precision whose tolerances apply: its activations are as coarse, and nothing else is coarser."""
        return self.computes_in if self is Precision.MIXED else str(self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Dotted configuration key -> value, over those of a variant."""
        found: dict[str, Any] = {"model.dtype": self.dtype}
        if self is Precision.MIXED:
            found |= {"parallel.fsdp_param_dtype": "bfloat16", "parallel.fsdp_reduce_dtype": "float32"}
        return found

    @property
    def suffix(self) -> str:
        """Suffix that a test id adds to the variant's name."""
        return {"float64": "", "float32": "-fp32", "bfloat16": "-bf16"}.get(self, f"-{self}")


TIERS: Mapping[str, tuple[Precision, ...]] = {
    "semantics": (Precision.FLOAT64,),
    "precision": (Precision.FLOAT32, Precision.BFLOAT16, Precision.MIXED),
    "bitwise": (Precision.BITWISE,),
    "all": tuple(Precision),
}
"""Precisions of ``--regress-tier``: is it the same mathematics, is it accurate enough, are the bytes the same."""


class Extent(StrEnum):
    """Part of the matrix of cases and variants that is replayed.

    ``REDUCED``: every case as it was recorded, and every variant on one case of each kind that it is for, in the first
    of its precisions, on the most telling one in all; but none of the variants that only combine what others show.
    ``DEFAULT``: every variant on the cases that can reveal the faults it is for. ``FULL``: on every case on which it is
    possible.
    """

    REDUCED = "reduced"
    DEFAULT = "default"
    FULL = "full"


TRAIT = "@"
"""Beginning of a trait among patterns of cases."""
ANY = "@any"

LOCAL = "local"
"""Value of ``trainer.type`` of variants that the engine computes."""
SEMANTICS = (Precision.FLOAT64,)
BOTH = (Precision.FLOAT64, Precision.FLOAT32)
EVERY = (*BOTH, Precision.BFLOAT16)


@dataclass(frozen=True)
class Variant:
    """One way to compute a golden case.

    Attributes:
        name: name as in test ids.
        why: fault that it could reveal.
        overrides: dotted configuration key -> value, over those of the case.
        precisions: precisions that it is replayed in.
        cases: patterns (``fnmatch``) of the cases that it is replayed on, the most telling first. ``@trait`` stands
            for all cases of a trait, see `regress.replay.case_traits`; ``@any`` for all others, which it is replayed on
            in the first of its precisions.
        possible: patterns of those that it can be replayed on at all.
        resume_at: optimizer updates after which one process ends and another goes on from its checkpoint, both with
            the loop of ``regress train``; None: one process makes the bare steps.
        before: overrides of the first of the two processes, in place of ``overrides``; None: the same.
        combines: no part of the reduced matrix: it only combines settings that other variants show one by one, or
            compiles for half a minute what another traces.
        program: the replay runs the loop of ``regress train``, as one that resumes does, too. Evaluations that it
            asks for are made on problems of the case's task that are not trained on. With ``curriculum.enable`` the
            stage of each step comes from the recording.
        bitwise_reference: the variant whose bytes it has to reproduce, if ``precisions`` has ``bitwise``.

    A variant of another ``trainer.type`` is computed and judged by the replayer that is registered for it, see
    `regress.replay.replayer_registry`.
    """

    name: str
    why: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = SEMANTICS
    cases: tuple[str, ...] = ("*",)
    bitwise_reference: str | None = None
    possible: tuple[str, ...] = ("*",)
    resume_at: int | None = None
    before: Mapping[str, Any] | None = None
    program: bool = False
    combines: bool = False

    @property
    def trainer(self) -> str:
        """Value of ``trainer.type``: who trains."""
        return str(self.overrides.get("trainer.type", LOCAL))

    def rank(self, case: GoldenCase) -> int | None:
        """Return how telling a case is: the place of the first of the patterns that it has; None if it has none."""
        found = (place for place, pattern in enumerate(self.cases) if _has(case, pattern))
        return next(found, None)

    def applies_to(self, case: GoldenCase, extent: Extent = Extent.DEFAULT) -> bool:
        """Return True if the variant is replayed on a case."""
        if extent is Extent.FULL:
            return any(_has(case, pattern) for pattern in self.possible)
        return self.rank(case) is not None

    def most_telling(
        self, cases: Sequence[GoldenCase], able: Callable[[GoldenCase], bool] = lambda _: True
    ) -> list[GoldenCase]:
        """Return, for each of its patterns, the first case that has it and is able; for ``@any`` only if none is."""

        def firsts(patterns: Iterable[str]) -> list[GoldenCase]:
            found = (
                next((case for case in cases if _has(case, one) and able(case)), None) for one in patterns
            )
            return [case for case in found if case is not None]

        return firsts(one for one in self.cases if one != ANY) or firsts({ANY} & {*self.cases})

    @property
    def follows_traits(self) -> bool:
        """True if the traits of a case, not its name, decide whether it is replayed on it."""
        return any(pattern.startswith(TRAIT) for pattern in (*self.cases, *self.possible))

    def precisions_on(self, case: GoldenCase, extent: Extent = Extent.DEFAULT) -> tuple[Precision, ...]:
        """Return the precisions that it is replayed in on a case; none where it does not apply."""
        if not self.applies_to(case, extent):
            return ()
        rank = self.rank(case)
        least = extent is not Extent.FULL and rank is not None and self.cases[rank] == ANY
        return self.precisions[:1] if least else self.precisions


def _has(case: GoldenCase, pattern: str) -> bool:
    """Return True if a case has a trait, or a name that matches a pattern."""
    if not pattern.startswith(TRAIT):
        return fnmatchcase(case.name, pattern)
    from regress.replay.case_traits import traits_of

    return pattern == ANY or pattern in traits_of(case)
