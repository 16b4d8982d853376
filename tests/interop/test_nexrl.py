"""Dumps of NexRL, of both generations of its format, are read, compared with one another, and reported."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tensor_selection import Selection
from regress.compare.verdicts.verdict import Status
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap, tap_trajectories
from regress.dump.trajectory import Trajectory
from regress.layout import BatchPlan, offsets_of, plan_microbatches

Setup = Callable[..., Any]


def compared(golden: Any, actual: Any, **options: Any) -> Comparison:
    return compare_dumps(str(golden.folder), str(actual.folder))


def told(comparison: Comparison, text: str) -> bool:
    return any(text in note for note in comparison.notes)


LAYOUTS = {
    "the-older-generation": {"old": True},
    "jsonl": {"format": "jsonl"},
    "four-ranks-with-padding-copies": {"ranks": 4},
    "three-ranks-two-microbatches": {"ranks": 3, "micros": 2},
    "older-jsonl-padding-copies": {"old": True, "format": "jsonl", "ranks": 4},
    "other-junk-in-padding": {"junk": 3.5},
    "NaN-in-padding": {"junk": float("nan")},
}


@pytest.mark.parametrize("other", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_generations_and_formats_hold_the_same(nexrl: Setup, dtype: str, other: dict[str, Any]) -> None:
    golden = nexrl("golden", dtype=dtype).self_hosted()
    actual = nexrl("actual", dtype=dtype, **other).self_hosted()
    found = compared(golden, actual)
    values = [v for v in found.failed if v.quantity not in ("loss",)]
    if "junk" in other and np.isnan(other["junk"]):
        assert {v.status for v in values} == {Status.NONFINITE}
        return
    assert values == []
    assert all("means do not add up" in problem for problem in found.problems)
    assert {v.quantity for v in found.verdicts} >= {"log_probs", "entropy", "old_log_probs", "trajectory"}
    assert sum(v.count for v in found.verdicts if v.quantity == "log_probs") > 0


def test_losses_of_other_microbatches_cannot_be_compared_and_that_is_said(nexrl: Setup) -> None:
    found = compared(nexrl("golden").self_hosted(), nexrl("actual", micros=2).self_hosted())
    assert (found.failed, found.exit_code) == ([], 2)
    assert "means do not add up" in found.problems[0]


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_metrics_beside_the_losses_are_compared(nexrl: Setup, format: str) -> None:
    golden = nexrl("golden", format=format).self_hosted()
    same = compared(golden, nexrl("same", format=format).self_hosted())
    assert same.exit_code == 0
    assert {v.name for v in same.verdicts if v.quantity == "metrics"} == {"kl"}
    found = compared(golden, nexrl("changed", format=format, kl=0.01).self_hosted())
    assert [(v.quantity, v.name, v.place.rank) for v in found.failed] == [
        ("metrics", "kl", 0),
        ("metrics", "kl", 1),
    ]
    # in another number of microbatches the metrics are of other tokens
    split = compared(golden, nexrl("split", format=format, micros=2).self_hosted())
    assert not [v for v in split.verdicts if v.quantity == "metrics"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("old", [False, True], ids=["since 5bd3f78", "before"])
@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_the_same_dump_is_equal_and_a_changed_token_is_named(
    nexrl: Setup, sampled: Setup, dtype: str, old: bool, format: str
) -> None:
    options = {"dtype": dtype, "old": old, "format": format}
    golden = nexrl("golden", **options).self_hosted()
    assert compared(golden, nexrl("same", **options).self_hosted()).exit_code == 0
    samples = sampled()
    position = samples[3].prompt + 1
    samples[3].values["log_probs"][position] -= 1e-4 if dtype == "float32" else 1.0
    found = compared(golden, nexrl("changed", samples, **options).self_hosted())
    assert found.exit_code == 1
    verdict = next(v for v in found.failed if v.quantity == "log_probs")
    assert verdict.worst is not None
    token = samples[3].tokens[position]
    assert (
        verdict.worst.where
        == f"sample {samples[3].group}/{samples[3].run}, position {position}, token {token}"
    )


def test_rows_are_found_without_rollouts(nexrl: Setup, sampled: Setup) -> None:
    golden, actual = nexrl("golden", ranks=1), nexrl("actual", sampled()[::-1], ranks=3)
    actual.samples[2].run = 5
    golden.forward_data()
    actual.forward_data()
    found = compared(golden, actual)
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
    assert told(found, "matched by their tokens")
    assert sum(v.count for v in found.verdicts if v.quantity == "log_probs") == sum(
        s.mask.sum() for s in sampled()
    )


def test_earlier_mini_batches_are_overwritten_and_that_is_said(nexrl: Setup) -> None:
    golden = nexrl("golden").self_hosted()
    actual = nexrl("actual", mini_batches=3).self_hosted()
    found = compared(golden, actual)
    assert told(found, "forward_data holds 2 of 6 rollouts")
    (lost,) = [v for v in found.failed if v.quantity == "coverage" and v.name == "forward_data"]
    assert "was produced by no microbatch" in lost.detail
    assert found.exit_code == 1
    both = compared(nexrl("again", mini_batches=3).self_hosted(), actual)
    assert (both.failed, both.problems, both.exit_code) == ([], [], 0)
    assert told(both, "the earlier ones were overwritten")


def test_padding_copies_are_told_and_compared(nexrl: Setup, sampled: Setup) -> None:
    actual = nexrl("actual", ranks=4).self_hosted()
    found = compared(nexrl("golden", ranks=1).self_hosted(), actual)
    assert told(found, "2 rows repeat others to fill the batch up")
    assert [v for v in found.failed if v.quantity != "loss"] == []
    path = actual.folder / "forward_data" / "step_000000_rank0_micro0.pt"
    import torch

    payload = torch.load(path, weights_only=True)
    payload["log_probs"][1] -= 0.5
    torch.save(payload, path)
    wrong = compared(nexrl("golden2", ranks=1).self_hosted(), actual)
    assert any(v.quantity == "log_probs" and v.status is Status.DRIFT for v in wrong.failed)


def test_the_forward_pass_before_the_first_step(nexrl: Setup) -> None:
    golden, actual = nexrl("golden"), nexrl("actual")
    for run in (golden, actual):
        run.self_hosted()
        run.step = -1
        run.forward_data()
    assert (actual.folder / "forward_data" / "step_-00001_rank0_micro0.pt").is_file()
    found = compared(golden, actual)
    assert (found.failed, found.exit_code) == ([], 0)
    assert {v.place.step for v in found.verdicts if v.quantity == "log_probs"} == {-1, 0}
    assert told(found, "written before the step was known")


def test_identical_rollouts_are_paired_by_their_values_and_that_is_said(nexrl: Setup, sampled: Setup) -> None:
    samples = sampled()
    samples[1].tokens, samples[1].prompt = list(samples[0].tokens), samples[0].prompt
    for name in samples[1].values:
        samples[1].values[name] = samples[0].values[name] + 0.25
    swapped = deepcopy(samples)
    swapped[0].values, swapped[1].values = swapped[1].values, swapped[0].values
    golden, actual = nexrl("golden", samples), nexrl("actual", swapped)
    golden.forward_data()
    actual.forward_data()
    found = compared(golden, actual)
    assert (found.failed, found.exit_code) == ([], 0)
    assert told(found, "identical rollouts with different values")


def test_gradients_are_parts_of_ranks(nexrl: Setup) -> None:
    golden, actual = nexrl("golden"), nexrl("actual")
    for run, values in ((golden, (1.0, -2.0, 0.5)), (actual, (1.0, -2.0, 0.75))):
        run.forward_data()
        run.parameter("gradient")
        run.parameter("param", values)
    found = compared(golden, actual)
    assert told(found, "the part of the gradient that lies on a rank")
    assert told(found, "the first parameter only")
    assert {(v.quantity, v.place.rank, v.over) for v in found.failed} == {("param", 0, 1), ("param", 1, 1)}
    assert sum(v.count for v in found.verdicts if v.quantity == "gradient") == 6


def test_weaver_against_what_the_trainer_itself_tells(nexrl: Setup, sampled: Setup) -> None:
    golden = nexrl("golden").self_hosted()
    found = compared(golden, nexrl("weaver").weaver())
    assert [v.quantity for v in found.failed] == []
    names = {v.name for v in found.verdicts if v.ok and v.count}
    assert names >= {
        "is_loss_debug/log_probs",
        "old_log_probs",
        "prob_ratio",
        "is_loss_debug/effective_valid",
    }
    assert told(found, "is_loss_debug/advantages is in the actual dump only: NexRL does not write it")
    samples = sampled()
    samples[2].values["prob_ratio"][samples[2].prompt] *= 1.01
    wrong = compared(golden, nexrl("wrong", samples).weaver())
    assert [v.name for v in wrong.failed] == ["prob_ratio"]


def test_weaver_without_token_ids_is_found_by_place(nexrl: Setup, sampled: Setup) -> None:
    golden = nexrl("golden", micros=2).self_hosted()
    found = compared(golden, nexrl("weaver", ids=False, micros=2).weaver())
    assert (found.failed, found.exit_code) == ([], 0)
    assert told(found, "6 rows were matched by rank, microbatch and row")
    samples = sampled()
    samples[4].values["log_probs"][samples[4].prompt] -= 1e-4
    wrong = compared(golden, nexrl("wrong", samples, ids=False, micros=2).weaver())
    verdict = next(v for v in wrong.failed if v.quantity == "log_probs")
    assert verdict.worst is not None
    assert verdict.worst.where.startswith(
        f"sample {samples[4].group}/{samples[4].run}, position {samples[4].prompt}"
    )


def test_datums_against_what_the_remote_trainer_got(nexrl: Setup, sampled: Setup) -> None:
    golden = nexrl("remote").remote_api()
    found = compared(golden, nexrl("weaver").weaver())
    names = {v.name for v in found.verdicts if v.ok and v.count}
    assert names >= {"advantages", "old_log_probs", "is_loss_debug/effective_valid"}
    assert found.failed == []
    samples = sampled()
    samples[0].values["advantages"][:] = 0
    dropped = nexrl("dropped", samples).remote_api()
    assert told(compared(dropped, dropped), "5 of 6 rollouts became datums")


def test_a_missing_rank_file_is_a_failure(nexrl: Setup) -> None:
    golden, actual = nexrl("golden").self_hosted(), nexrl("actual").self_hosted()
    (actual.folder / "forward_data" / "step_000000_rank1_micro0.pt").unlink()
    found = compared(golden, actual)
    assert found.exit_code == 1
    assert any(v.name == "forward_data" and "produced by no microbatch" in v.detail for v in found.failed)


@pytest.mark.parametrize("old", [False, True], ids=["since 5bd3f78", "before"])
def test_a_dump_of_our_own_against_one_of_nexrl(
    nexrl: Setup, sampled: Setup, tmp_path: Path, old: bool
) -> None:
    samples = sampled()
    own = own_dump(tmp_path / "own", samples)
    actual = nexrl("actual", old=old, ranks=4).self_hosted()
    only = Options(only=Selection.of("log_probs"))
    found = compare_dumps(str(own), str(actual.folder), only)
    assert (found.failed, found.problems, found.exit_code) == ([], [], 0)
    samples[3].values["log_probs"][samples[3].prompt] += 1e-4
    changed = nexrl("changed", samples, old=old, ranks=4).self_hosted()
    wrong = compare_dumps(str(own), str(changed.folder), only)
    assert wrong.exit_code == 1
    assert wrong.failed[0].worst is not None
    assert wrong.failed[0].worst.where.startswith(f"sample {samples[3].group}/{samples[3].run}, position")


def own_dump(folder: Path, samples: Any) -> Path:
    """The same computation as our own recorder writes it: packed, in another order."""
    order = samples[::-1]
    lengths = [len(sample.tokens) for sample in order]
    (layout,) = plan_microbatches(lengths, BatchPlan("packed"))
    offsets = offsets_of(lengths)

    def flat(values: Any) -> Any:
        return layout.scatter(np.concatenate([values(sample) for sample in order]), offsets)

    tensors = {
        "log_probs": flat(lambda s: np.where(s.mask, s.values["log_probs"], 0).astype(np.float32)),
        "entropy": flat(lambda s: np.where(s.mask, s.values["entropy"], 0).astype(np.float32)),
        "response_mask": flat(lambda s: s.mask),
        "input_ids": flat(lambda s: np.array(s.tokens)),
    }
    meta = {"samples": [(sample.group, sample.run) for sample in order]}
    recorder = Recorder(folder, options={"forward_data": True, "trajectory": True})
    with recording(recorder), at(step=0):
        tap_trajectories([_trajectory(sample) for sample in samples])
        with at(rank=0, micro=0):
            tap("forward_data", tensors, layout=layout, meta=meta)
    return folder


def _trajectory(sample: Any) -> Trajectory:
    return Trajectory(
        sample.group, sample.run, sample.tokens, sample.mask.tolist(), sample.reward, sample.prompt
    )


def with_versions(old: str = "", prefix: str = "weight") -> Callable[[Any], dict[str, Any]]:
    """Versions of the completion's tokens: 4, but 3 for the first of the sample named."""

    def extra(sample: Any) -> dict[str, Any]:
        first = 3 if f"{sample.group}/{sample.run}" == old else 4
        return {f"{prefix}_versions": [first, *[4] * (len(sample.tokens) - sample.prompt - 1)]}

    return extra


@pytest.mark.parametrize("prefix", ["weight", "route"])
def test_versions_of_tokens_are_compared_and_older_ones_are_told(nexrl: Setup, prefix: str) -> None:
    golden = nexrl("golden", extra=with_versions(prefix=prefix)).self_hosted()
    same = compared(golden, nexrl("same", extra=with_versions(prefix=prefix)).self_hosted())
    assert same.exit_code == 0
    assert f"{prefix}_versions" in {v.name for v in same.verdicts}
    assert not told(same, "stale")

    found = compared(golden, nexrl("older", extra=with_versions("001/1", prefix)).self_hosted())
    assert [(v.name, v.over) for v in found.failed] == [(f"{prefix}_versions", 1)]
    assert "sample 001/1" in found.failed[0].detail
    assert "golden 4, actual 3" in found.failed[0].detail
    assert told(found, f"sampled tokens have other {prefix}_versions than the newest, 4 (stale ")


def test_log_probs_of_stale_weights_are_told_by_token(nexrl: Setup, sampled: Any) -> None:
    """Only where every token that differs has other weights; another one as well is another cause."""
    golden = nexrl("golden", old=True, extra=with_versions()).self_hosted()
    for spoil, expected in ((0, True), (1, False)):
        samples = sampled()
        wrong = samples[3]
        wrong.values["old_log_probs"][wrong.prompt] += 0.5
        samples[spoil].values["old_log_probs"][samples[spoil].prompt] += 0.5 * spoil
        actual = nexrl(f"actual{spoil}", samples, old=True, extra=with_versions("001/1")).self_hosted()
        found = compared(golden, actual)
        assert ("trajectory", "log_probs") in {(v.quantity, v.name) for v in found.failed}
        assert told(found, "the sampler's log-probs differ at 1 tokens, each of other weights") is expected


PACKED = {
    "two-a-row": {"pack": 2},
    "three-a-row-four-ranks": {"pack": 3, "ranks": 4},
    "padding-between": {"pack": 3, "gap": 2},
    "jsonl-with-positions": {"pack": 2, "format": "jsonl", "positions": True},
}


@pytest.mark.parametrize("packed", PACKED.values(), ids=PACKED.keys())
def test_packed_rows_hold_the_same_as_padded_ones(nexrl: Setup, packed: dict[str, Any]) -> None:
    golden, actual = nexrl("golden").self_hosted(), nexrl("actual", **packed).self_hosted()
    found = compared(golden, actual)
    assert [v for v in found.failed if v.quantity != "loss"] == []
    whole = sum(int(sample.mask.sum()) for sample in golden.samples)
    for quantity in ("log_probs", "entropy", "old_log_probs"):
        assert sum(v.count for v in found.verdicts if v.quantity == quantity) >= whole, quantity
    assert not told(found, "tokens that no rollout of the step has")


def test_a_wrong_token_of_a_packed_row_is_found_in_its_sample(nexrl: Setup, sampled: Any) -> None:
    samples = sampled()
    wrong = samples[3]
    wrong.values["log_probs"][wrong.prompt + 1] += 1
    found = compared(nexrl("golden").self_hosted(), nexrl("actual", samples, pack=3, ranks=1).self_hosted())
    (first, *_) = [v for v in found.failed if v.quantity == "log_probs"]
    assert f"sample {wrong.group}/{wrong.run}, position {wrong.prompt + 1}" in first.to_json()[
        "detail"
    ] + str(first)


def test_packed_rows_without_rollouts_are_told_apart_by_positions(nexrl: Setup) -> None:
    """The weaver's dumps have no rollouts; without positions a packed row is one unknown sample."""
    golden = nexrl("golden").weaver()
    assert compared(golden, nexrl("actual", pack=3, positions=True).weaver()).golden_only == []
    assert compared(golden, nexrl("silent", pack=3).weaver()).golden_only != []
