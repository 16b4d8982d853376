"""Settings that each function of the computation reads, seen while golden cases are replayed.

A property of the settings counts as the fields that it reads, for the function that asks for it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType

from regress.engine.config.batching_config import BatchingConfig, ParallelConfig
from regress.engine.config.model_config import ReferenceConfig
from regress.engine.config.training_config import AlgorithmConfig, OptimizerConfig
from regress.golden.golden_directory import GoldenStore
from regress.grpo.objective import Objective
from regress.layout import BatchPlan, Mesh, RankPlan
from regress.replay.case_run import replay
from regress.replay.variant import Precision
from regress.replay.variant_table import project_variants

SECTIONS: Mapping[type, str] = {
    **dict.fromkeys((AlgorithmConfig, Objective), "algorithm"),
    **dict.fromkeys((BatchingConfig, BatchPlan), "batching"),
    **dict.fromkeys((ParallelConfig, RankPlan, Mesh), "parallel"),
    OptimizerConfig: "optimizer",
    ReferenceConfig: "reference",
}
"""Classes that hold values of a section."""

_RENAMED = {"parallel.sequence_split": "parallel.cp_split"}
NO_NUMERICS = (
    *(
        "engine.config.",
        "grpo.objective_checks.",
        "grpo.preset_recipes.",
        "grpo.objective_presets.",
        "grpo.advantage_computation._check",
    ),
    *("engine.grpo_trainer.Trainer._plan", "parallel.process_groups.rank_plan"),
)
"""Functions that check, list or copy settings, and compute nothing, by the beginning of their names."""

Reads = Mapping[str, frozenset[str]]
"""Function -> keys that it reads."""


@contextmanager
def traced(found: dict[str, set[str]]) -> Iterator[None]:
    """Add the keys that functions of the package read, as long as the context lasts."""
    for kind, section in SECTIONS.items():
        kind.__getattribute__ = _reading(section, {spec.name for spec in fields(kind)}, found)  # type: ignore[assignment]  # a hook in place of the slot wrapper
    try:
        yield
    finally:
        for kind in SECTIONS:
            del kind.__getattribute__


def _reading(section: str, names: set[str], found: dict[str, set[str]]) -> Callable[[object, str], object]:
    def get(self: object, name: str) -> object:
        if name in names:
            key = f"{section}.{name}"
            function = _reader(sys._getframe(1))
            if function is not None:
                found.setdefault(function, set()).add(_RENAMED.get(key, key))
        return object.__getattribute__(self, name)

    return get


def _reader(frame: FrameType | None) -> str | None:
    """Return the function of the package that asks, which is none of the settings themselves."""
    while frame is not None and type(frame.f_locals.get("self")) in SECTIONS:
        if frame.f_code.co_name == "__post_init__":
            return None  # what is checked as settings are made is read by nobody
        frame = frame.f_back
    module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
    if frame is None or not module.startswith("regress."):
        return None
    name = f"{module.removeprefix('regress.')}.{frame.f_code.co_qualname}".partition(".<")[0]
    return None if name.startswith(NO_NUMERICS) else name


@dataclass(frozen=True)
class Traced:
    """Context around a run in each of its ranks, which writes what was read there into a folder."""

    folder: Path

    def __call__(self) -> AbstractContextManager[None]:
        return self._traced()

    @contextmanager
    def _traced(self) -> Iterator[None]:
        found: dict[str, set[str]] = {}
        with traced(found):
            yield
        rows = {name: sorted(keys) for name, keys in found.items()}
        (self.folder / f"{os.getpid()}.read").write_text(json.dumps(rows))


def reads(root: Path, runs: Sequence[tuple[str, str]], folder: Path) -> Reads:
    """Return what is read while cases of a project are replayed.

    Args:
        runs: cases and variants.
        folder: where the replays lie, one after the other.
    """
    store, variants = GoldenStore(root / "golden"), project_variants(root)
    found: dict[str, set[str]] = {}
    for case, variant in runs:
        inner = folder / case / variant
        inner.mkdir(parents=True)
        replay(store.case(case), variants[variant], Precision.FLOAT64, inner, around=Traced(inner))
        for path in inner.glob("*.read"):
            for name, keys in json.loads(path.read_text()).items():
                found.setdefault(name, set()).update(keys)
    return {name: frozenset(keys) for name, keys in found.items()}
