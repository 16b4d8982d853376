"""Dumps that any trainer can write: without layouts, with names of their own, with defects."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from regress.cli import main
from regress.dump import Recorder, Trajectory, at, recording, tap, tap_trajectories
from regress.layout import Segment, TokenLayout

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "recordings.md"
TYPES = dict.fromkeys(
    ("batch_inputs", "forward_data", "old_log_probs", "is_loss_debug", "loss", "gradient"), True
)
Taps = Mapping[tuple[int, int], Sequence[tuple[str, dict[str, Any]]]]
"""Rank and microbatch -> what is tapped there: type, then tensors and options."""


def record(folder: Path, taps: Taps) -> Path:
    with recording(Recorder(folder, options=TYPES)):
        for (rank, micro), several in taps.items():
            with at(step=0, rank=rank, micro=micro):
                for type, values in several:
                    tap(type, **values)
    return folder


def compare(golden: Path, actual: Path, *options: str) -> Result:
    done = CliRunner().invoke(main, ["compare", str(golden), str(actual), "--engine", "local", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def placed(samples: Sequence[str], columns: int) -> dict[str, Any]:
    """A layout of one sample a row."""
    segments = tuple(Segment(i, 0, columns, i, 0) for i in range(len(samples)))
    return {
        "layout": TokenLayout((len(samples), columns), segments),
        "meta": {"samples": [[name, 0] for name in samples]},
    }


def one(type: str, **values: Any) -> Taps:
    return {(0, 0): [(type, values)]}


def test_the_snippet_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (snippet,) = (block for block in blocks if 'tap("forward_data"' in block)
    monkeypatch.chdir(tmp_path)
    names = {"log_probs": torch.randn(4, 16), "entropy": torch.rand(4, 16), "loss": torch.randn(())}
    exec(compile(snippet, PAGE.name, "exec"), dict(names))
    done = compare(tmp_path / "my_dump", tmp_path / "my_dump")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "9 checks of 9 tensors: all within tolerance" in done.output
    assert "note: forward_data has no token layout" in done.output
    assert 'tap it with layout= and meta={"samples": [(group_id, run_id), ...]}' in done.output


def test_one_element_without_a_layout(tmp_path: Path) -> None:
    values = torch.randn(4, 16)
    other = values.clone()
    other[2, 5] += 1e-3
    done = compare(
        record(tmp_path / "a", one("forward_data", log_probs=values)),
        record(tmp_path / "b", one("forward_data", log_probs=other)),
    )
    assert done.exit_code == 1
    assert "step0/rank0/micro0: drift: log_probs: element [2, 5]: golden" in done.output


@pytest.mark.parametrize(
    ("golden", "actual", "sentence"),
    [
        pytest.param(
            one("forward_data", log_probs=torch.zeros(4, 16)),
            one("forward_data", log_probs=torch.zeros(2, 32)),
            "step0: log_probs of forward_data of rank 0 microbatch 0 has the shape [4, 16] in the golden dump and "
            "[2, 32] in the actual one, and nothing tells which of its elements are the same: tap it with layout=",
            id="shape",
        ),
        pytest.param(
            {(0, m): [("forward_data", {"log_probs": torch.zeros(2, 16)})] for m in range(2)},
            one("forward_data", log_probs=torch.zeros(2, 16)),
            "step0: forward_data has no token layout, and was recorded by other ranks or for other microbatches "
            "(golden: rank 0 microbatch 0, rank 0 microbatch 1; actual: rank 0 microbatch 0): tap it with layout=",
            id="microbatches",
        ),
        pytest.param(
            {(0, m): [("loss", {"loss": 1.0})] for m in range(2)},
            one("loss", loss=2.0),
            "step0: loss has no token layout, and was recorded by other ranks or for other microbatches",
            id="losses",
        ),
        pytest.param(
            one("forward_data", log_probs=torch.zeros(2, 8), **placed(["a", "b"], 8)),
            one("forward_data", log_probs=torch.zeros(2, 8)),
            "step0: forward_data of rank 0 microbatch 0 of the actual dump has no token layout, but forward_data of "
            "rank 0 microbatch 0 has one in the other dump: tap it with layout=",
            id="one side",
        ),
        pytest.param(
            one("forward_data", log_probs=torch.zeros(2, 8), layout=placed(["a", "b"], 8)["layout"]),
            one("forward_data", log_probs=torch.zeros(2, 8), layout=placed(["a", "b"], 8)["layout"]),
            "forward_data of rank 0 microbatch 0 has a token layout, but nothing tells whose tokens these are: tap it",
            id="no samples",
        ),
        pytest.param(
            {
                (0, 0): [
                    ("forward_data", {"log_probs": torch.zeros(2, 8), **placed(["a", "b"], 8)}),
                    ("is_loss_debug", {"advantages": torch.zeros(2, 8)}),
                ]
            },
            {
                (0, 0): [
                    ("forward_data", {"log_probs": torch.zeros(2, 8), **placed(["b", "a"], 8)}),
                    ("is_loss_debug", {"advantages": torch.zeros(2, 8)}),
                ]
            },
            "step0: advantages of is_loss_debug of rank 0 microbatch 0 has no places of tokens, and the microbatch "
            "holds other tokens in the two dumps: tap it with layout=",
            id="other rows",
        ),
    ],
)
def test_what_cannot_be_compared_without_a_layout(
    tmp_path: Path, golden: Taps, actual: Taps, sentence: str
) -> None:
    done = compare(record(tmp_path / "a", golden), record(tmp_path / "b", actual))
    assert done.exit_code == 2, done.output
    assert sentence in done.output


def test_a_tensor_that_nobody_knows(tmp_path: Path) -> None:
    """Neither its values nor its presence were looked at."""
    dumps = {
        value: record(
            tmp_path / str(value),
            one("is_loss_debug", per_token_loss=torch.full((2, 8), value), coef_1=torch.ones(2, 8)),
        )
        for value in (1.0, 3.0)
    }
    same = compare(dumps[1.0], dumps[1.0])
    assert same.exit_code == 0
    note = (
        "note: is_loss_debug/per_token_loss is not a tensor that regress knows, the nearest is "
        "elementwise_loss; it was"
    )
    assert same.output.count(note) == 1
    assert "is_loss_debug/coef_1 is not a tensor that regress knows, the nearest is prob_ratio" in same.output
    done = compare(dumps[1.0], dumps[3.0])
    assert done.exit_code == 1
    assert "other is_loss_debug/per_token_loss: element [0, 0]" in done.output
    assert compare(dumps[1.0], dumps[3.0], "--only", "*coef_1").exit_code == 0


def test_a_tensor_that_nobody_knows_under_another_layout(tmp_path: Path) -> None:
    """Where it has a layout it is compared token by token."""
    values = torch.arange(16.0).reshape(2, 8)
    golden = record(
        tmp_path / "a", one("is_loss_debug", mine=values, advantages=values, **placed(["a", "b"], 8))
    )
    turned = {"mine": values.flip(0).clone(), "advantages": values.flip(0), **placed(["b", "a"], 8)}
    actual = record(tmp_path / "b", one("is_loss_debug", **turned))
    assert compare(golden, actual).exit_code == 0
    turned["mine"][0, 3] += 1
    done = compare(golden, record(tmp_path / "c", one("is_loss_debug", **turned)))
    assert done.exit_code == 1
    assert "other is_loss_debug/mine: sample b/0, position 3" in done.output


def test_a_tensor_on_one_side(tmp_path: Path) -> None:
    golden = record(tmp_path / "a", one("is_loss_debug", mine=torch.ones(2, 8), kl=torch.ones(2, 8)))
    actual = record(tmp_path / "b", one("is_loss_debug", kl=torch.ones(2, 8)))
    for pair, words in (
        ((golden, actual), "only in the golden dump"),
        ((actual, golden), "only in the actual dump"),
    ):
        done = compare(*pair)
        assert done.exit_code == 1
        assert f"other is_loss_debug/mine: {words}" in done.output


def test_a_tensor_that_one_microbatch_lacks(tmp_path: Path) -> None:
    both = {"mine": torch.ones(2, 8), "kl": torch.ones(2, 8)}
    golden = record(tmp_path / "a", {(0, m): [("is_loss_debug", both)] for m in range(2)})
    part = {(0, 0): [("is_loss_debug", both)], (0, 1): [("is_loss_debug", {"kl": torch.ones(2, 8)})]}
    done = compare(golden, record(tmp_path / "b", part))
    assert done.exit_code == 1
    assert "step0/rank0/micro1: missing: other is_loss_debug/mine: only in the golden dump" in done.output


def test_rollouts_of_several_ranks(tmp_path: Path) -> None:
    """Those of the first rank alone were compared."""

    def rollouts(name: str, reward: float) -> Path:
        with recording(Recorder(tmp_path / name, options={"trajectory": True})):
            for rank in range(2):
                with at(step=0, rank=rank):
                    value = reward if rank else 1.0
                    tap_trajectories([Trajectory(f"g{rank}", 0, [1, 2, 3], [0, 1, 1], value, 1)])
        return tmp_path / name

    golden = rollouts("a", 1.0)
    assert compare(golden, golden).exit_code == 0
    done = compare(golden, rollouts("b", 2.0))
    assert done.exit_code == 1
    assert "trajectory reward: sample g1/0" in done.output


def test_integers_that_nobody_knows_are_exact(tmp_path: Path) -> None:
    values = torch.full((2, 8), 10_000_000)
    golden = record(tmp_path / "a", one("is_loss_debug", ids=values))
    done = compare(golden, record(tmp_path / "b", one("is_loss_debug", ids=values + 1)), "--rtol", "0.1")
    assert done.exit_code == 1


def test_not_a_number_on_both_sides(tmp_path: Path) -> None:
    values = torch.randn(2, 8)
    values[1, 2] = torch.nan
    golden = record(tmp_path / "a", one("forward_data", log_probs=values))
    done = compare(golden, golden)
    assert done.exit_code == 0
    assert (
        "note: warning: log_probs has 1 element that is NaN or infinite at the same place in both dumps, which counts "
        "as equal" in done.output
    )
    moved = values.clone()
    moved[1, 2], moved[0, 0] = 0.0, torch.nan
    assert compare(golden, record(tmp_path / "b", one("forward_data", log_probs=moved))).exit_code == 1


def test_old_log_probs_of_each_microbatch(tmp_path: Path) -> None:
    taps = {(0, m): [("old_log_probs", {"old_log_probs": torch.full((2, 8), float(m))})] for m in range(2)}
    golden = record(tmp_path / "a", taps)
    assert compare(golden, golden).exit_code == 0
    taps[0, 1] = [("old_log_probs", {"old_log_probs": torch.zeros(2, 8)})]
    assert compare(golden, record(tmp_path / "b", taps)).exit_code == 1


@dataclass
class Claim:
    """A layout that `TokenLayout` would never make."""

    shape: tuple[int, int]
    segment: tuple[int, int, int, int, int]

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "segments": [list(self.segment)]}


@pytest.mark.parametrize(
    "layout",
    [
        Claim((1, 1 << 40), (0, 0, 1 << 40, 0, 0)),
        Claim((2, 8), (0, 1 << 50, (1 << 50) + 8, 0, 0)),
    ],
    ids=["columns", "positions"],
)
def test_a_layout_that_claims_more_tokens_than_there_can_be(tmp_path: Path, layout: Claim) -> None:
    """Arrays of as many tokens would be made."""
    taps = one("forward_data", log_probs=torch.ones(2, 8), layout=layout, meta={"samples": [["a", 0]]})
    folder = record(tmp_path / "a", taps)
    done = compare(folder, folder)
    assert done.exit_code == 2
    assert "the token layout of forward_data of rank 0 microbatch 0 claims" in done.output + done.stderr
    assert "far more than its tensors have elements; record it again" in done.output + done.stderr


def _values(draw: Callable[[Any], Any], shape: Sequence[int]) -> Any:
    kind = draw(st.sampled_from(["float32", "float64", "int64", "nan", "bool"]))
    values = np.random.default_rng(draw(st.integers(0, 5))).standard_normal(tuple(shape))
    if kind == "nan":
        return np.where(values > 1, np.nan, values)
    return values.astype(kind)


@st.composite
def damaged(draw: Callable[[Any], Any]) -> Taps:
    """Draw taps with a trainer's possible mistakes: other shapes, wrong layouts, repeated samples, ranks
    without a mesh.
    """
    taps: dict[tuple[int, int], list[tuple[str, dict[str, Any]]]] = {}
    for rank in range(draw(st.integers(1, 2))):
        for micro in range(draw(st.integers(1, 2))):
            several = []
            for type in draw(
                st.sets(st.sampled_from([name for name in TYPES if name != "gradient"]), min_size=1)
            ):
                names = {
                    "batch_inputs": ["input_ids", "response_mask", "extra"],
                    "forward_data": ["log_probs", "entropy", "response_mask", "mine"],
                    "old_log_probs": ["old_log_probs"],
                    "is_loss_debug": ["advantages", "weights", "loss", "per_token_loss"],
                    "loss": ["loss", "pg_loss", "clip_fraction"],
                }[type]
                chosen = draw(st.sets(st.sampled_from(names), min_size=1))
                shapes = st.sampled_from(
                    [(2, 8), (2, 8), (2, 8), (2,), (), (16,), (3, 4), (2, 8, 3), (1, 5, 3), (0,)]
                )
                values = {name: _values(draw, draw(shapes)) for name in sorted(chosen)}
                layout = draw(st.sampled_from(["none", "good", "good", "no samples", "repeated", "broken"]))
                if layout != "none":
                    same = draw(st.booleans())
                    name = "s" if same else f"{rank}.{micro}"
                    kept = ["s", "s"] if layout == "repeated" else [f"{name}a", f"{name}b"]
                    values |= placed(kept, 8)
                if layout == "no samples":
                    values["meta"] = {}
                if layout == "broken":
                    values["meta"] = {"samples": [["a", 0]]}
                several.append((type, values))
            if draw(st.booleans()):
                shape = draw(st.sampled_from([(4, 2), (4, 3)]))
                several.append(("gradient", {"w": _values(draw, shape)}))
            taps[rank, micro] = several
    return taps


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": [Phase.generate],
}


def check_itself(folder: Path, taps: Taps) -> None:
    record(folder, taps)
    done = compare(folder, folder)
    assert done.exit_code in (0, 2), done.output
    if done.exit_code == 2:
        assert "not compared: " in done.output or done.stderr.startswith("error: "), done.output


@settings(max_examples=20, derandomize=True, **SETTINGS)
@given(damaged())
def test_a_dump_never_differs_from_itself(tmp_path_factory: pytest.TempPathFactory, taps: Taps) -> None:
    check_itself(tmp_path_factory.mktemp("dump") / "a", taps)


@pytest.mark.extended
@settings(max_examples=300, **SETTINGS)
@given(damaged())
def test_no_dump_ever_differs_from_itself(tmp_path_factory: pytest.TempPathFactory, taps: Taps) -> None:
    check_itself(tmp_path_factory.mktemp("dump") / "a", taps)
