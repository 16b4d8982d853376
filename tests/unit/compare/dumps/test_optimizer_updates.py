"""Updates of AdamW where gradients are nearly zero: healthy ones pass by the recorded gradients, wrong ones never."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from regress.compare.diagnosis.first_divergence import find_divergence
from regress.compare.diagnosis.probable_cause import diagnose
from regress.compare.dumps.comparison import Comparison, compare_dumps
from regress.compare.dumps.comparison_options import Options
from regress.compare.dumps.tensor_selection import Selection
from regress.dump.dump_manifest import Provenance
from regress.dump.recorder import Recorder
from regress.dump.taps import at, recording, tap
from regress.layout import Segment, ShardLayout, TokenLayout

NAME = "layers.0.weight"
SHAPE = (48, 40)
RATE, EPS = 1e-3, 1e-8
CONFIG = {"learning_rate": RATE, "betas": [0.9, 0.999], "eps": EPS, "weight_decay": 0.0, "max_grad_norm": 1.0}
Array = NDArray[np.float32]
GAIN = 4.0
"""Relative change of log-probs over that of weights, about as in the golden cases."""
LAYOUT = TokenLayout((1, 12), (Segment(0, 0, 12, 0, 0),))


@dataclass(frozen=True)
class Run:
    """A parameter trained by AdamW; gradients are those of a formula, plus rounding that differs between runs."""

    rounding: int
    steps: int = 1
    rate: float = RATE
    sign: float = 1.0
    skip: tuple[int, ...] = ()
    types: tuple[str, ...] = ("gradient", "param")
    config: bool = True
    states: bool = False  # the records of the optimizer tell its settings, as those of foreign trainers do
    every: int = 1
    ranks: int = 1
    turned: bool = False
    zeros: float = 0.01  # part of the gradients of which rounding alone is left
    answers: bool = False  # log-probs that the weights give, of another layout where rounding differs
    wrong_rate: tuple[int, float] = (-1, 1.0)  # an update, and the factor of its rate
    wrong_answer: tuple[int, float] = (-1, 0.0)  # an update, and what is added to a log-prob of it

    def gradients(self) -> list[Array]:
        found = []
        for step in range(self.steps):
            rng = np.random.default_rng(step)
            whole = rng.standard_normal(SHAPE) * 1e-2
            whole[rng.random(SHAPE) < self.zeros] = 0.0
            noise = np.random.default_rng(1000 + 7 * self.rounding + step).standard_normal(SHAPE) * 2e-9
            found.append((-(whole + noise) if self.turned else whole + noise).astype(np.float32))
        return found

    def record(self, folder: Path) -> Path:
        weight = torch.nn.Parameter(
            torch.from_numpy(np.random.default_rng(5).standard_normal(SHAPE) * 0.05).float()
        )
        optimizer = torch.optim.AdamW([weight], lr=self.rate, eps=EPS, weight_decay=0.0)
        start = weight.detach().clone()
        told = Provenance(config={"optimizer": CONFIG} if self.config else {})
        options = dict.fromkeys((*self.types, *(["forward_data"] * self.answers)), True)
        with recording(Recorder(folder, options=options, every_n_steps=self.every, provenance=told)):
            for step, gradient in enumerate(self.gradients()):
                if self.answers:
                    self._answer(step, (weight.detach().double() - start.double()).reshape(-1))
                optimizer.param_groups[0]["lr"] = self.rate * (
                    self.wrong_rate[1] if step == self.wrong_rate[0] else 1.0
                )
                weight.grad = torch.from_numpy(gradient).clone() * self.sign
                before = weight.detach().clone()
                norm = torch.nn.utils.clip_grad_norm_([weight], 1.0)
                optimizer.step()
                if step in self.skip:
                    weight.data.copy_(before)
                self._tap(step, {"gradient": gradient, "param": weight.detach().numpy().copy()}, float(norm))
                if "optimizer" in self.types:
                    state = {f"{NAME}/{k}": v.numpy().copy() for k, v in optimizer.state[weight].items()}
                    with at(step=step, rank=0):
                        tap("optimizer", state, meta=self._settings() if self.states else {})
        return folder

    def _answer(self, step: int, moved: torch.Tensor) -> None:
        """Record log-probs that change with the weights as those of a model do."""
        rng = np.random.default_rng(11)
        slopes = torch.from_numpy(rng.standard_normal((12, moved.numel()))) * GAIN / moved.numel() ** 0.5
        log_probs = (-2 + torch.tanh(slopes @ moved / 0.05)).float()[None]
        if step == self.wrong_answer[0]:
            log_probs[0, 3] += self.wrong_answer[1]
        with at(step=step, rank=0, micro=0):
            tap("forward_data", log_probs=log_probs, layout=LAYOUT, meta={"samples": [["g", 0]]})

    def _settings(self) -> dict[str, Any]:
        rest = {"betas": [0.9, 0.999], "eps": EPS, "amsgrad": False, "maximize": False}
        return {"optimizer_type": "torch.optim.adamw.AdamW", "learning_rates": {NAME: self.rate}, **rest}

    def _tap(self, step: int, tensors: dict[str, Array], norm: float) -> None:
        for rank in range(self.ranks):
            rows = slice(rank * SHAPE[0] // self.ranks, (rank + 1) * SHAPE[0] // self.ranks)
            with at(step=step, rank=rank):
                for record_type, whole in tensors.items():
                    meta: dict[str, Any] = {"grad_norm": norm} if record_type == "gradient" else {}
                    if self.ranks > 1:
                        ranges = (((rows.start, rows.stop),), ((0, SHAPE[1]),))
                        meta["shards"] = {NAME: ShardLayout(SHAPE, ranges).to_json()}
                    tap(record_type, {NAME: whole[rows], "bias": np.ones(3, np.float32)}, meta=meta)


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Comparison]:
    def compare(golden: Run, actual: Run) -> Comparison:
        return compare_dumps(str(golden.record(tmp_path / "golden")), str(actual.record(tmp_path / "actual")))

    return compare


def _params(found: Comparison) -> list[bool]:
    return [verdict.ok for verdict in found.verdicts if verdict.quantity == "param"]


BOTH = ("gradient", "param", "optimizer")
TOLD: dict[str, Any] = {"types": BOTH, "config": False, "states": True}
HEALTHY: Sequence[tuple[Run, Run]] = (
    (Run(1), Run(2)),
    (Run(1, steps=3), Run(2, steps=3)),
    (Run(1), Run(2, ranks=3)),
    (Run(1, ranks=2), Run(2)),
    (Run(1, ranks=2), Run(2, ranks=3)),
    (Run(1, types=("param", "optimizer")), Run(2, types=("param", "optimizer"))),
    (Run(1, steps=2, types=BOTH), Run(2, steps=2, types=BOTH)),
    (Run(1, steps=3, **TOLD), Run(2, steps=3, **TOLD)),
)


@pytest.mark.parametrize(("golden", "actual"), HEALTHY)
def test_rounding_of_gradients_is_no_fault_of_the_update(
    golden: Run, actual: Run, compared: Callable[..., Comparison]
) -> None:
    found = compared(golden, actual)
    assert [str(verdict.quantity) for verdict in found.failed] == []
    assert found.exit_code == 0
    assert any("than AdamW makes of the gradients" in note for note in found.notes)


def test_a_state_of_one_side_leaves_the_gradients_of_both(compared: Callable[..., Comparison]) -> None:
    """The state is missing and told as such; the parameters are explained by what both sides recorded."""
    found = compared(Run(1, steps=2, types=BOTH), Run(2, steps=2))
    assert all(_params(found))
    assert not found.problems


FAULTS: dict[str, Run] = {
    "rate 2 % off": Run(2, rate=RATE * 1.02),
    "update skipped": Run(2, skip=(0,)),
    "second update skipped": Run(2, steps=2, skip=(1,)),
    "sign turned": Run(2, sign=-1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "types", [("gradient", "param"), pytest.param(("param",), marks=pytest.mark.extended)]
)
def test_a_wrong_update_is_caught(
    fault: str, types: tuple[str, ...], compared: Callable[..., Comparison]
) -> None:
    actual = replace(FAULTS[fault], types=types)
    found = compared(Run(1, steps=actual.steps, types=types), actual)
    assert found.exit_code == 1
    assert not all(_params(found))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_update_of_a_trainer_without_a_configuration_is_caught(
    fault: str, compared: Callable[..., Comparison]
) -> None:
    actual = replace(FAULTS[fault], **TOLD)
    found = compared(Run(1, steps=actual.steps, **TOLD), actual)
    assert found.exit_code == 1
    assert not all(_params(found))


@pytest.mark.parametrize("types", [("gradient", "param"), ("param", "optimizer")])
def test_wrong_gradients_explain_nothing(types: tuple[str, ...], tmp_path: Path) -> None:
    """The parameters follow from the recorded gradients, and these are wrong, though nobody asked about them."""
    golden = Run(1, types=types).record(tmp_path / "golden")
    actual = Run(2, turned=True, types=types).record(tmp_path / "actual")
    found = compare_dumps(str(golden), str(actual), Options(only=Selection.of("param")))
    assert (found.exit_code, [verdict.name for verdict in found.failed]) == (1, [NAME])


def test_an_element_that_no_gradient_explains_is_named(tmp_path: Path) -> None:
    """One weight of a healthy run is moved by less than the learning rate: its gradient is the same on both sides."""
    golden, actual = Run(1).record(tmp_path / "golden"), tmp_path / "actual"
    run = Run(2)
    gradients = run.gradients()
    index = np.unravel_index(int(np.abs(gradients[0]).argmax()), SHAPE)

    class Moved(Run):
        def _tap(self, step: int, tensors: dict[str, Array], norm: float) -> None:
            tensors["param"][index] += 5e-4
            super()._tap(step, tensors, norm)

    Moved(2).record(actual)
    found = compare_dumps(str(golden), str(actual))
    (failed,) = found.failed
    assert failed.over == 1
    assert failed.worst is not None
    assert failed.worst.where == f"element [{index[0]}, {index[1]}] of {NAME}"


def test_without_gradients_few_elements_are_undecided(compared: Callable[..., Comparison]) -> None:
    found = compared(Run(1, types=("param",)), Run(2, types=("param",)))
    assert (found.exit_code, found.failed) == (2, [])
    assert any("record gradient (or optimizer)" in problem and NAME in problem for problem in found.problems)


def test_an_unknown_optimizer_explains_nothing_and_that_is_said(compared: Callable[..., Comparison]) -> None:
    found = compared(*(Run(seed, types=("param",), config=False) for seed in (1, 2)))
    assert found.exit_code == 1
    divergence = find_divergence(found.verdicts)
    assert divergence is not None
    assert [one.rule for one in diagnose(divergence)] == ["undecided-update"]


def test_updates_between_the_recorded_ones_are_undecided(compared: Callable[..., Comparison]) -> None:
    found = compared(Run(1, steps=3, every=2), Run(2, steps=3, every=2))
    assert found.exit_code == 2
    assert [
        problem for problem in found.problems if problem.startswith("step2") and "every update" in problem
    ]


def test_a_bound_that_was_asked_for_is_kept(tmp_path: Path) -> None:
    from regress.compare.comparison_request import compare_sources

    golden, actual = Run(1).record(tmp_path / "golden"), Run(2).record(tmp_path / "actual")
    assert compare_sources(golden, actual, rtol=1e-6).exit_code == 1
    assert compare_sources(golden, actual, bitwise=True).exit_code == 1


def _later(rounding: int, **changes: Any) -> Run:
    """A run of six updates whose log-probs follow from its weights."""
    return Run(rounding, steps=6, answers=True, **{**TOLD, **changes})


@pytest.mark.parametrize("zeros", [0.01, 0.001, 0.0])
@pytest.mark.parametrize("types", [BOTH, ("gradient", "param")])
def test_what_earlier_updates_made_of_rounding_is_no_fault_of_later_ones(
    zeros: float, types: tuple[str, ...], compared: Callable[..., Comparison]
) -> None:
    told = {"zeros": zeros, "types": types, "config": types != BOTH}
    found = compared(_later(1, **told), _later(2, **told))
    assert [str(verdict) for verdict in found.failed] == []
    assert found.exit_code == 0
    widened = [note for note in found.notes if "weights that differ before the update by" in note]
    assert bool(widened) == bool(zeros)


@pytest.mark.parametrize(
    ("fault", "place"),
    [({"wrong_answer": (4, 1e-3)}, "step4"), ({"wrong_answer": (0, 1e-4)}, "step0")],
)
def test_a_wrong_value_of_a_later_update_is_still_one(
    fault: dict[str, Any], place: str, compared: Callable[..., Comparison]
) -> None:
    found = compared(_later(1, zeros=1e-4), _later(2, zeros=1e-4, **fault))
    assert found.exit_code == 1
    assert {(v.quantity, str(v.place).split("/")[0]) for v in found.failed} == {("log_probs", place)}


@pytest.mark.parametrize("fault", [{"wrong_rate": (2, 1.01)}, {"wrong_rate": (2, 0.0)}, {"skip": (2,)}])
def test_a_wrong_update_excuses_nothing(fault: dict[str, Any], compared: Callable[..., Comparison]) -> None:
    """Nothing but rounding explains the difference of the weights, so that log-probs after it are wrong, too."""
    found = compared(_later(1, zeros=0.0), _later(2, zeros=0.0, **fault))
    failed = {(verdict.quantity, verdict.place.step) for verdict in found.failed}
    assert ("log_probs", 3) in failed
    assert not any(
        "weights that differ before the update" in note for note in found.notes if "step 3" in note
    )


def test_without_parameters_nothing_is_excused(compared: Callable[..., Comparison]) -> None:
    """Nothing tells how far the weights lie apart."""
    types = ("gradient", "optimizer")
    found = compared(_later(1, types=types), _later(2, types=types))
    assert {verdict.quantity for verdict in found.failed} == {"log_probs"}
