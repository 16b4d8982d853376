"""Findings of docs/findings.md on released frameworks, as variants under test: their own path, and the verdicts.

Those that need several ranks and a change of the engine stand in test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from regress.compare.verdicts.verdict import Verdict
from regress.engine.run_construction import Run
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision, Variant
from regress.replay.variant_names import overrides_of

STORE = GoldenStore(Path(__file__).parents[2] / "golden")


def failures(name: str, folder: Path, prepare: Callable[[Run], None] | None = None) -> list[Verdict]:
    """Return the failing verdicts on the first step of ``case/variant`` in float64."""
    case, spelled = name.split("/")
    overrides = overrides_of(spelled)
    assert overrides is not None
    variant = Variant(spelled, "a finding", overrides)
    golden = STORE.case(case)
    dump = replay(golden, variant, Precision.FLOAT64, folder, steps=1, prepare=prepare)
    plan = [update for update in Replay(golden, variant, Precision.FLOAT64).plan if update.step == 0]
    verdicts = judge_replay(golden, dump, plan, Precision.FLOAT64)
    return [verdict for verdict in verdicts if verdict.place.step == 0 and not verdict.ok]


def called(change: Callable[[dict[str, Any]], None]) -> Callable[[Run], None]:
    """Call the model with other keyword arguments."""

    def prepare(run: Run) -> None:
        model = run.trainer.policy.model
        forward = model.forward

        def other(**given: Any) -> Any:
            change(given)
            return forward(**given)

        model.forward = other

    return prepare


def default_cache(given: dict[str, Any]) -> None:
    """Packed rows told by position ids alone, and ``use_cache`` at its default."""
    given["attention_mask"] = None
    del given["use_cache"]


def mask_of_ones(given: dict[str, Any]) -> None:
    given["attention_mask"] = torch.ones_like(given["input_ids"])


def boolean_mask(given: dict[str, Any]) -> None:
    """The mask that sdpa takes, given to eager attention, which adds it."""
    given["attention_mask"] = given["attention_mask"] == 0


def positions_alone(given: dict[str, Any]) -> None:
    """Packed rows told by position ids, as transformers finds them without a cache: right."""
    given["attention_mask"] = None


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dense/packed", default_cache),
        ("dense/packed", mask_of_ones),
        ("dense/eager", boolean_mask),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_attention_across_samples_shows_first_in_hidden_states(
    name: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    first, *others = failures(name, tmp_path, called(change))
    assert first.quantity == "activations"
    assert first.name == "model.layers.0"
    assert first.multiple > 1e9
    assert {"log_probs", "gradient"} <= {verdict.quantity for verdict in others}


def test_packed_rows_without_a_cache_are_right(tmp_path: Path) -> None:
    """So the failures above are those of the cache and of the mask, not of position ids."""
    assert not failures("dense/packed", tmp_path, called(positions_alone))


def test_double_is_not_float64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``model.double()`` without TrueFloat64: the float64 tier sees the float32 inside of it, and how small it is."""
    monkeypatch.setattr("regress.engine.causal_lm_policy.arithmetic", lambda dtype: nullcontext())
    first, *_ = failures("dense/packed", tmp_path)
    assert first.quantity == "activations"
    assert 1e-9 < first.relative < 1e-5


@pytest.mark.extended
def test_q_norm_under_transformers_plan(tmp_path: Path) -> None:
    """One microbatch is right; with several the gradients of head norms fail, and nothing before them."""
    assert not failures("dense/tp2-hf", tmp_path / "one")
    found = failures("dense/tp2-hf-mbs3", tmp_path / "several")
    assert found[0].quantity == "gradient"
    names = {verdict.name for verdict in found if verdict.quantity == "gradient"}
    assert names == {
        f"model.layers.{n}.self_attn.{norm}.weight" for n in (0, 1) for norm in ("q_norm", "k_norm")
    }
    assert {verdict.quantity for verdict in found} == {
        *("gradient", "grad_norm", "param", "optimizer"),
        *("metrics", "step_metrics"),
    }
    of_metrics = {v.name for v in found if v.quantity in ("metrics", "step_metrics")}
    assert {name.rpartition("/")[2] for name in of_metrics} == {
        "grad_norm",
        "grad_norm_mean",
        "grad_norm_max",
    }
    assert {verdict.place.rank for verdict in found} == {0, 1}  # both hold the same wrong numbers
