"""Objectives whose denominators or statistics span ranks: several ranks compute what one process computes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.comparison_request import compare_sources
from regress.compare.dumps.comparison import Comparison
from regress.dump.dump_reader import DumpReader
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.run_changes import Prepare
from regress.replay.variant import Precision, Variant

sys.path.insert(0, str(Path(__file__).parent))  # ranks import the faults by name

from over_ranks import local_statistics, own_microbatches

Overrides = Mapping[str, Any]
TWO: Overrides = {"batching.micro_batch_size": 2}
BNPO: Overrides = {
    "algorithm.aggregation": "token-mean",
    "algorithm.denominator_scope": "microbatch",
    **TWO,
}
LAYOUTS: Mapping[str, Overrides] = {
    "dp2": {"parallel.dp": 2},
    "fsdp2": {"parallel.fsdp": 2},
    "cp2": {"parallel.cp": 2},
    "dp2-tp2": {"parallel.dp": 2, "parallel.tp": 2},
    "dp2-packed": {"parallel.dp": 2, "batching.layout": "packed"},
    "dp2-pp2": {"parallel.dp": 2, "parallel.pp": 2},
}
GLOBAL: Mapping[str, Overrides] = {
    "clip_cov": {"algorithm.loss": "clip_cov", "algorithm.statistics_scope": "global"},
    "kl_cov": {"algorithm.loss": "kl_cov", "algorithm.statistics_scope": "global"},
    "quantile": {"algorithm.top_entropy_quantile": 0.5, "algorithm.statistics_scope": "global"},
    "whitened": {"algorithm.advantage": "reinforce_plus_plus"},
    "batch": {"algorithm.scale": "batch"},
    "entropy": {"algorithm.entropy_coef": 0.01, "algorithm.entropy_aggregation": "token-mean"},
    "normalized": {
        "algorithm.sampler_correction": "token_truncate",
        "algorithm.correction_max": 5.0,
        "algorithm.correction_normalize": True,
        "algorithm.correction_policy": "current",
        "algorithm.loss": "reinforce",
    },
}


@pytest.fixture(scope="module")
def case() -> GoldenCase:
    return GoldenStore(Path(__file__).parents[3] / "golden").case("dense")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


def run(case: GoldenCase, folder: Path, overrides: Overrides, prepare: Prepare | None = None) -> DumpReader:
    """Replay one step, once for each set of overrides without a fault."""
    return _replayed(case, folder, tuple(sorted(overrides.items())), prepare)


@cache
def _replayed(case: GoldenCase, folder: Path, overrides: Any, prepare: Prepare | None) -> DumpReader:
    own = folder / str(sum(1 for _ in folder.iterdir()))
    return replay(
        case, Variant("ranks", "", dict(overrides)), Precision.FLOAT64, own, steps=1, prepare=prepare
    )


def compared(golden: DumpReader, actual: DumpReader) -> Comparison:
    return compare_sources(str(golden.folder), str(actual.folder))


def assert_equal(found: Comparison) -> None:
    assert (found.exit_code, found.failed, found.problems) == (0, [], [])
    judged = {verdict.quantity for verdict in found.verdicts if verdict.count}
    assert {"weights", "token_loss", "loss", "token_gradient", "gradient", "grad_norm", "param"} <= judged


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.one_in(6)
def test_a_mean_of_microbatches_is_that_of_all_ranks(layout: str, case: GoldenCase, folder: Path) -> None:
    """With the same cut into microbatches, on however many ranks, every number is the same."""
    assert_equal(compared(run(case, folder, BNPO), run(case, folder, {**BNPO, **LAYOUTS[layout]})))


@pytest.mark.parametrize("layout", ["dp2", pytest.param("fsdp2", marks=pytest.mark.extended)])
def test_weights_of_microbatches_hold_all_ranks(layout: str, case: GoldenCase, folder: Path) -> None:
    """Each token weighs 1 over the tokens of its microbatch, and over the microbatches of all ranks."""
    dump = run(case, folder, {**BNPO, **LAYOUTS[layout]})
    records = [*dump.records("is_loss_debug")]
    assert len(records) == 6
    for record in records:
        mask = record.tensors["effective_valid"]
        weights = record.tensors["weights"][mask != 0]
        assert np.allclose(weights, 1 / (mask.sum() * len(records)), rtol=1e-12, atol=0)


@pytest.mark.extended
@pytest.mark.parametrize("objective", GLOBAL)
@pytest.mark.one_in(3)
def test_statistics_of_a_batch_are_those_of_all_ranks(objective: str, case: GoldenCase, folder: Path) -> None:
    chosen = GLOBAL[objective]
    actual = run(case, folder, {**chosen, **TWO, "parallel.dp": 2})
    assert_equal(compared(run(case, folder, chosen), actual))


@pytest.mark.parametrize("layout", ["cp2", "fsdp2", "dp2-tp2"])
@pytest.mark.extended
def test_statistics_are_the_same_in_every_layout(layout: str, case: GoldenCase, folder: Path) -> None:
    chosen = GLOBAL["clip_cov"]
    assert_equal(compared(run(case, folder, chosen), run(case, folder, {**chosen, **LAYOUTS[layout]})))


def test_statistics_of_one_rank_are_caught(case: GoldenCase, folder: Path) -> None:
    chosen = GLOBAL["clip_cov"]
    actual = run(case, folder, {**chosen, "parallel.dp": 2}, local_statistics)
    assert compared(run(case, folder, chosen), actual).exit_code == 1


def test_microbatches_of_one_rank_are_caught(case: GoldenCase, folder: Path) -> None:
    found = compared(run(case, folder, BNPO), run(case, folder, {**BNPO, "parallel.dp": 2}, own_microbatches))
    assert found.exit_code == 1
    assert any(verdict.quantity == "weights" for verdict in found.failed)
