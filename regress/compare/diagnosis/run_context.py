"""Known facts of the judged run: the meaning of its numbers, and commands for a closer look."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from regress.dump.source_readers import Source
from regress.errors import ConfigError
from regress.layout import Mesh


@dataclass(frozen=True)
class RunContext:
    """Facts of a run that rules and patterns use besides its verdicts.

    Attributes:
        world_size, micros: its ranks, and the most microbatches that a rank has in an update; None if unknown.
        mesh: extent of each dimension of the mesh of ranks.
        group_sizes: numbers of samples in a group, where the samples are known.
        config: configuration of the run, nested, as far as it is known.
        quantities: those that both sides have, empty if unknown.
        absent: records that the run's dump lacks although others tell of them, a phrase each; ``golden_absent`` those
            that the golden one lacks.
        trusted: True if the golden side is right by definition, as a dump is not.
        precisions: dtypes that the golden and the actual model compute in; None where unknown.
        commands: commands for a closer look, by purpose: ``replay`` (under ``{variants}``), ``test`` and ``compare``
            (of ``{quantity}`` alone), ``show`` (the records of ``{record_type}``); those that are missing do not apply.
    """

    world_size: int | None = None
    micros: int | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    group_sizes: tuple[int, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    quantities: frozenset[str] = frozenset()
    absent: tuple[str, ...] = ()
    golden_absent: tuple[str, ...] = ()
    trusted: bool = True
    precisions: tuple[str | None, str | None] = (None, None)
    commands: Mapping[str, str] = field(default_factory=dict)

    def lacks(self, side: str) -> tuple[str, ...]:
        """Return the absent records of the ``golden`` or ``actual`` side."""
        return self.golden_absent if side == "golden" else self.absent

    def setting(self, section: str, key: str) -> Any:
        """Return a value of the configuration, None if it is unknown."""
        return (self.config.get(section) or {}).get(key)

    def coordinate(self, rank: int, dimension: str) -> int:
        """Return a coordinate of a rank in the mesh; 0 where the mesh does not have that rank."""
        try:
            return Mesh(**dict(self.mesh)).coordinates(rank)[dimension]
        except (ConfigError, KeyError, TypeError, ValueError, IndexError):
            return 0

    @property
    def extents(self) -> dict[str, tuple[int | None, str]]:
        """Numbers of ranks and microbatches that a step is split over, by name, each with its words."""
        return {
            "world_size": (self.world_size, "the number of ranks"),
            "micros": (self.micros, "the number of microbatches"),
            **{f"mesh_{name}": (size, f"the extent of {name}") for name, size in self.mesh.items()},
        }

    def named_factor(self, alpha: float) -> tuple[str, list[tuple[str, str]]]:
        """Name the run's numbers that equal a factor: ``(text of an exact factor or "", [(name, words)])``."""
        found: list[tuple[str, str]] = []
        for name, (size, words) in self.extents.items():
            if size is not None and size > 1:
                if _close(alpha, size):
                    found.append((name, f"{words}, {size}"))
                elif _close(alpha, 1 / size):
                    found.append((name, f"1 / {words}, 1/{size}"))
        for size in (size for size in self.group_sizes if size > 1):
            factor = math.sqrt(size / (size - 1))
            if _close(alpha, factor) or _close(alpha, 1 / factor):
                found += [("ddof", f"that between deviations over {size} and over {size - 1} samples")]
        for name, value in (("log2", math.log(2)), ("log10", math.log(10))):
            if _close(alpha, value) or _close(alpha, 1 / value):
                found.append(
                    ("logarithm", f"that between natural logarithms and those to the base {name[3:]}")
                )
        exponent = round(math.log2(abs(alpha))) if alpha else 0
        if exponent and _close(alpha, 2.0**exponent):
            found.append(("power_of_two", f"a power of two, 2^{exponent}"))
        return _exact(alpha), found


def _exact(alpha: float) -> str:
    """Return ``exactly 2``, ``exactly 1/3`` or the like; empty for other numbers."""
    for number in range(2, 1025):
        if _close(alpha, number):
            return f"exactly {number}"
        if _close(alpha, 1 / number):
            return f"exactly 1/{number}"
    return ""


def _close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-5)


def run_context_of_side(side: Source) -> RunContext:
    """Return the run context that a dump tells."""
    places = [where for _, where in side.entries.values()]
    ranks = {where.rank for where in places if where.rank is not None}
    micros = {where.micro for where in places if where.micro is not None}
    return RunContext(
        world_size=len(ranks) or None, micros=len(micros) or None, mesh=side.mesh, config=side.config
    )
