"""Numerical regression harness for GRPO and RL post-training: did you change how it is computed, or what?

The names below are the public API. They load on first use, so that ``import regress`` starts neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regress.lazy_imports import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regress.capture.recording import record as record
    from regress.capture.tap_batch import tap_batch as tap_batch
    from regress.check.loss_check import assert_objective as assert_objective
    from regress.compare.comparison_request import check_dump as check_dump
    from regress.compare.comparison_request import compare_sources as compare_sources
    from regress.compare.dumps.comparison import Comparison as Comparison
    from regress.compare.verdicts.tolerance import Tolerance as Tolerance
    from regress.compare.verdicts.verdict import Verdict as Verdict
    from regress.dump.dump_reader import DumpReader as DumpReader
    from regress.dump.record import Record as Record
    from regress.dump.recorder import Recorder as Recorder
    from regress.dump.taps import at as at
    from regress.dump.taps import recording as recording
    from regress.dump.taps import tap as tap
    from regress.dump.taps import tap_trajectories as tap_trajectories
    from regress.dump.trajectory import Trajectory as Trajectory
    from regress.engine.numeric_types import true_float64 as true_float64
    from regress.errors import NotSupported as NotSupported
    from regress.errors import RegressError as RegressError
    from regress.explain.explanation import explain_dump as explain_dump
    from regress.golden.golden_case import GoldenCase as GoldenCase
    from regress.golden.golden_directory import GoldenStore as GoldenStore
    from regress.layout.shard_layout import ShardLayout as ShardLayout
    from regress.layout.token_layout import Segment as Segment
    from regress.layout.token_layout import TokenLayout as TokenLayout
    from regress.live.guard import Guard as Guard
    from regress.live.guard import guard as guard
    from regress.plugin.value_comparison import assert_close as assert_close
    from regress.replay.case_export import export_case as export_case
    from regress.replay.variant import Variant as Variant

_HOMES = {
    "Comparison": "compare.dumps.comparison",
    "DumpReader": "dump.dump_reader",
    "GoldenCase": "golden.golden_case",
    "GoldenStore": "golden.golden_directory",
    "Guard": "live.guard",
    "NotSupported": "errors",
    "Record": "dump.record",
    "Recorder": "dump.recorder",
    "RegressError": "errors",
    "Segment": "layout.token_layout",
    "ShardLayout": "layout.shard_layout",
    "TokenLayout": "layout.token_layout",
    "Tolerance": "compare.verdicts.tolerance",
    "Trajectory": "dump.trajectory",
    "Variant": "replay.variant",
    "Verdict": "compare.verdicts.verdict",
    "assert_close": "plugin.value_comparison",
    "assert_objective": "check.loss_check",
    "at": "dump.taps",
    "check_dump": "compare.comparison_request",
    "compare_sources": "compare.comparison_request",
    "explain_dump": "explain.explanation",
    "export_case": "replay.case_export",
    "guard": "live.guard",
    "record": "capture.recording",
    "recording": "dump.taps",
    "tap": "dump.taps",
    "tap_batch": "capture.tap_batch",
    "tap_trajectories": "dump.taps",
    "true_float64": "engine.numeric_types",
}
__all__ = [*sorted(_HOMES), "__version__"]

if not TYPE_CHECKING:  # to a type checker a module with `__getattr__` has every name
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
