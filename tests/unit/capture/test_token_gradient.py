"""The token gradient against autograd: the derivatives of a loss by log-probs and entropies that it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from regress.capture.hidden_state_gradients import Linearized, errors_of
from regress.capture.output_head import LinearHead
from regress.capture.token_gradient import find_temperature, residual_of, solve

HEADS = ("linear", "bias", "scaled", "capped")


class Case:
    """Random states, head and targets; a loss with known derivatives by log-prob and entropy, and its gradient."""

    def __init__(
        self,
        seed: int = 0,
        tokens: int = 24,
        width: int = 12,
        vocabulary: int = 29,
        kind: str = "linear",
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float64,
        extra: float = 0.0,
        shift: int = 0,
        bonus: float | None = None,
        peak: float = 1.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.weight = normal(vocabulary, width).to(dtype) * 0.5 * peak
        kinds: dict[str, dict[str, Any]] = {
            "linear": {},
            "bias": {"bias_V": normal(vocabulary).to(dtype)},
            "scaled": {"scale": 0.3},
            "capped": {"soft_cap": 5.0, "bias_V": normal(vocabulary).to(dtype)},
        }
        self.head = LinearHead(self.weight, **kinds[kind])
        self.hidden = normal(tokens, width).to(dtype).requires_grad_()
        self.targets = torch.randint(vocabulary, (tokens,), generator=generator)
        self.log_prob_gradient, self.entropy_gradient = normal(tokens), 0.3 * normal(tokens)
        if bonus is not None:
            self.entropy_gradient = torch.full((tokens,), -bonus, dtype=torch.float64)
        log_p = (self.head(self.hidden) / temperature).log_softmax(-1)
        used = self.targets.roll(shift)
        self.log_probs = log_p.gather(1, used[:, None])[:, 0]
        self.entropies = -(log_p.exp() * log_p).sum(-1)
        loss = (self.log_prob_gradient.to(dtype) * self.log_probs).sum()
        loss = loss + (self.entropy_gradient.to(dtype) * self.entropies).sum()
        if extra:
            loss = loss + extra * (self.head(self.hidden).logsumexp(-1) ** 2).sum()
        (self.grad,) = torch.autograd.grad(loss, self.hidden)

    def arguments(self) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor], Tensor]:
        return self.hidden.detach(), self.grad, self.head, self.targets


@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(HEADS),
    temperature=st.sampled_from((0.7, 1.0, 1.3)),
    vocabulary=st.integers(3, 60),
    chunk=st.integers(1, 40),
)
@settings(max_examples=40, deadline=None)
def test_both_derivatives_of_any_loss_come_back(
    seed: int, kind: str, temperature: float, vocabulary: int, chunk: int
) -> None:
    case = Case(seed, vocabulary=vocabulary, kind=kind, temperature=temperature)
    out = solve(*case.arguments(), temperature=temperature, chunk=chunk)
    for name, found, want, error in (
        ("log-prob", out.log_prob_K, case.log_prob_gradient, out.log_prob_error_K),
        ("entropy", out.entropy_K, case.entropy_gradient, out.entropy_error_K),
    ):
        wrong = (found - want).abs()
        assert bool((wrong <= 1e-9 + 1e3 * error).all()), (name, wrong.max())
    sure = out.recoverable_K & (out.log_prob_error_K < 1e-11)
    torch.testing.assert_close(out.log_prob_K[sure], case.log_prob_gradient[sure], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(out.log_probs_K, case.log_probs.detach(), rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(out.entropies_K, case.entropies.detach(), rtol=1e-11, atol=1e-11)
    assert float(out.residual_K.max()) < 1e-11


@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.3, 3.0),
    kind=st.sampled_from(HEADS),
    bonus=st.sampled_from((0.0, 0.05)),
)
@settings(max_examples=15, deadline=None)
def test_the_temperature_is_found(seed: int, temperature: float, kind: str, bonus: float) -> None:
    """Without an entropy bonus and with one: to rounding, although the entropy hides its error to first order."""
    case = Case(seed, kind=kind, temperature=temperature, dtype=torch.float32, bonus=bonus)
    found = solve(*case.arguments())
    assert found.temperature is not None
    assert found.temperature_error is not None
    assert found.temperature == pytest.approx(temperature, rel=1e-4)
    assert abs(found.temperature - temperature) <= 5 * found.temperature_error
    assert found.temperature_error < 1e-3 * temperature
    assert float(found.residual_K.median()) < 1e-5


@given(seed=st.integers(0, 10_000), temperature=st.floats(0.3, 3.0), kind=st.sampled_from(HEADS))
@settings(max_examples=15, deadline=None)
def test_any_entropy_derivatives_leave_a_temperature_within_its_error(
    seed: int, temperature: float, kind: str
) -> None:
    case = Case(seed, kind=kind, temperature=temperature, dtype=torch.float32)
    found = solve(*case.arguments())
    if found.temperature is not None:
        assert found.temperature_error is not None
        assert abs(found.temperature - temperature) <= found.temperature_error < 0.03 * temperature


@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(HEADS),
    temperature=st.sampled_from((0.7, 1.0, 1.3)),
    vocabulary=st.integers(3, 80),
    width=st.sampled_from((8, 16, 64)),
    peak=st.sampled_from((1.0, 3.0, 8.0)),
    bonus=st.sampled_from((None, 0.0, 0.05)),
)
@example(
    3, "capped", 0.7, 3, 64, 8.0, None
)  # caps of two of three logits: in float32 they have no slope left
@example(
    743, "scaled", 1.0, 69, 8, 8.0, 0.05
)  # the product over the vocabulary and the factor's own rounding
@example(894, "linear", 1.3, 78, 8, 3.0, 0.0)
@settings(max_examples=60, deadline=None)
def test_errors_of_float32_stay_within_their_bounds(
    seed: int, kind: str, temperature: float, vocabulary: int, width: int, peak: float, bonus: float | None
) -> None:
    """Peaked distributions, too: there errors of the probabilities lie along the two directions and leave no rest."""
    case = Case(
        seed,
        width=width,
        vocabulary=vocabulary,
        kind=kind,
        temperature=temperature,
        dtype=torch.float32,
        bonus=bonus,
        peak=peak,
    )
    out = solve(*case.arguments(), temperature=temperature)
    for found, want, error in (
        (out.log_prob_K, case.log_prob_gradient, out.log_prob_error_K),
        (out.entropy_K, case.entropy_gradient, out.entropy_error_K),
    ):
        wrong = (found - want.float().double()).abs()[out.recoverable_K]
        assert bool((wrong <= error[out.recoverable_K]).all()), (wrong / error[out.recoverable_K]).max()


@pytest.mark.parametrize("kind", HEADS)
def test_bounds_are_near_enough_to_the_errors_to_see_three_times_as_much(kind: str) -> None:
    """The median error is a hundredth of its bound or more, and an error of three bounds in the gradient shows."""
    ratios, caught = [], []
    for seed in range(12):
        case = Case(seed, width=16, vocabulary=5 + 6 * seed, kind=kind, temperature=0.7, dtype=torch.float32)
        out = solve(*case.arguments(), temperature=0.7)
        want, error = case.log_prob_gradient.float().double(), out.log_prob_error_K
        sure = out.recoverable_K & error.isfinite()
        ratios.append(((out.log_prob_K - want).abs() / error)[sure])
        at = Linearized(case.hidden.detach(), case.head, case.targets, None, 0).at(0.7)
        moved = case.grad.double() + 3 * error.nan_to_num(posinf=0.0)[:, None] * at.a
        wrong = solve(case.hidden.detach(), moved, case.head, case.targets, temperature=0.7)
        caught.append(((wrong.log_prob_K - want).abs() > error)[sure])
    assert float(torch.cat(ratios).median()) > 0.01
    assert bool(torch.cat(caught).all())
    assert torch.cat(caught).numel() > 200


def test_a_head_that_is_no_linear_head_has_bounds_of_the_same_size() -> None:
    """Its terms are measured by random signs; another module gives no access to its weights."""
    case = Case(width=16, vocabulary=60, dtype=torch.float32)
    own = solve(*case.arguments(), temperature=1.0)
    hidden, grad, head, targets = case.arguments()
    other = solve(hidden, grad, lambda states: head(states), targets, temperature=1.0)
    ratio = (other.log_prob_error_K / own.log_prob_error_K)[own.recoverable_K]
    assert 0.5 < float(ratio.min()) <= float(ratio.max()) < 2


def test_the_weights_of_a_float64_head_stay_what_they_were() -> None:
    case = Case()
    before = case.weight.clone()
    solve(*case.arguments(), temperature=1.0)
    assert torch.equal(case.weight, before)


def test_a_derivative_that_rounding_may_hide_has_no_bound() -> None:
    """And where rounding is small, the bound is that of the share that it takes from what was found."""
    shares = torch.tensor([[[0.0, 0.0], [0.0, 0.0]], [[0.5, 0.25], [0.0, 0.0]], [[0.5, 0.6], [0.5, 0.5]]])
    found, noise = torch.tensor([[2.0, 4.0]] * 3), torch.tensor([[0.125, 0.0]] * 3)
    # true g is at most (2.125 + 0.25 * 4) / 0.5 = 6.25 where half of it and a quarter of h may be lost
    assert errors_of(found, shares, noise).tolist() == [[0.125, 0.0], [4.25, 0.0], [torch.inf, torch.inf]]


def test_bounds_are_of_use() -> None:
    """Where logits are not extreme, all are finite and small."""
    out = solve(*Case(width=16, dtype=torch.float32).arguments(), temperature=1.0)
    assert float((out.log_prob_error_K / out.log_prob_K.abs())[out.recoverable_K].median()) < 1e-4
    assert bool(out.log_prob_error_K[out.recoverable_K].isfinite().all())


def test_positions_without_gradient_are_zero_and_not_nan() -> None:
    case = Case(extra=0.0)
    case.grad[3:7] = 0.0
    out = solve(*case.arguments(), temperature=1.0)
    for values in (out.log_prob_K, out.entropy_K, out.residual_K):
        assert values[3:7].tolist() == [0.0] * 4
    assert bool(out.recoverable_K.all())
    assert bool((out.log_prob_K[7:] != 0).all())


def test_a_gradient_that_is_not_finite_stays_so_on_its_token_alone() -> None:
    case = Case()
    case.grad[5, 2] = torch.nan
    out = solve(*case.arguments(), temperature=1.0)
    assert out.log_prob_K.isnan().nonzero().tolist() == [[5]]
    assert not out.recoverable_K[5]


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12], ids=str)
def test_the_scale_of_the_loss_goes_through(scale: float) -> None:
    case = Case()
    case.grad = case.grad * scale
    out = solve(*case.arguments(), temperature=1.0)
    torch.testing.assert_close(out.log_prob_K / scale, case.log_prob_gradient, rtol=1e-8, atol=1e-9)


def test_a_certain_token_is_not_recoverable_and_says_so() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 8, generator=generator)
    hidden = torch.randn(6, 8, generator=generator)
    targets = torch.arange(6)
    hidden[0] = 40 * weight[0] / weight[0].norm()  # 1 - p far below the rounding of float32
    targets[0] = int((hidden[0] @ weight.T).argmax())
    states = hidden.clone().requires_grad_()
    picked = (states @ weight.T).log_softmax(-1).gather(1, targets[:, None])
    (grad,) = torch.autograd.grad(picked.sum(), states)
    out = solve(hidden, grad, LinearHead(weight), targets, temperature=1.0)
    assert out.recoverable_K.tolist() == [False, True, True, True, True, True]
    torch.testing.assert_close(out.log_prob_K[1:], torch.ones(5, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_a_vocabulary_of_two_recovers_nothing_and_has_no_temperature() -> None:
    case = Case(vocabulary=2)
    out = solve(*case.arguments())
    assert out.temperature is None
    assert not out.recoverable_K.any()


def test_no_position_with_a_gradient_has_no_temperature() -> None:
    case = Case()
    case.grad.zero_()
    assert find_temperature(*case.arguments()) is None
    assert solve(case.hidden[:0], case.grad[:0], case.head, case.targets[:0]).log_prob_K.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_term_besides_log_prob_and_entropy_shows_in_the_residual(dtype: torch.dtype) -> None:
    case = Case(extra=0.05, dtype=dtype)
    assert float(solve(*case.arguments(), temperature=1.0).residual_K.median()) > 1e-2
    found = solve(*case.arguments())  # never a wrong one with a small error
    assert found.temperature is None or abs(found.temperature - 1.0) <= found.temperature_error  # type: ignore[operator]


def test_a_wrong_shift_of_the_targets_is_told_from_the_right_one() -> None:
    case = Case(shift=1)
    found = residual_of(
        case.hidden.detach(),
        case.grad,
        case.head,
        {"0": case.targets, "-1": case.targets.roll(1), "none": torch.full_like(case.targets, -1)},
        temperature=1.0,
    )
    assert found["-1"] < 1e-10 < 0.1 < found["0"]
    assert "none" not in found


def test_parts_of_a_vocabulary_add_up_to_the_whole() -> None:
    """Two ranks in lock step: each call of `reduce` waits for the other's tensor."""
    import threading

    case = Case(vocabulary=30, temperature=0.8, bonus=0.1)
    borders = (0, 13, 30)
    barrier, slots = threading.Barrier(2), [torch.empty(0), torch.empty(0)]
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        def reduce(values: Tensor, how: str) -> Tensor:
            slots[rank] = values
            barrier.wait(timeout=60)
            both = torch.stack([slots[0], slots[1]])
            out = both.sum(0) if how == "sum" else both.amax(0)
            barrier.wait(timeout=60)
            return out

        start, stop = borders[rank], borders[rank + 1]
        results[rank] = solve(
            case.hidden.detach(),
            case.grad,
            LinearHead(case.weight[start:stop]),
            case.targets,
            reduce=reduce,
            vocabulary_start=start,
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for out in results:
        assert out.temperature == pytest.approx(0.8, rel=1e-6)
        torch.testing.assert_close(out.log_prob_K, case.log_prob_gradient, rtol=1e-5, atol=1e-5)


def test_a_head_with_tensors_of_another_dtype_needs_no_copy_of_them() -> None:
    case = Case(dtype=torch.bfloat16)
    logits = LinearHead(case.weight)(case.hidden.detach().double())
    torch.testing.assert_close(logits, case.hidden.detach().double() @ case.weight.double().T)


def test_the_parameters_of_the_head_get_no_gradient() -> None:
    case = Case()
    layer = torch.nn.Linear(12, 29, dtype=torch.float64)
    solve(case.hidden.detach(), case.grad, layer, case.targets, temperature=1.0)
    assert layer.weight.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad_KH": torch.zeros(3, 3)}, "do not fit"),
        ({"targets_K": torch.full((24,), 99)}, "outside the vocabulary of 29"),
        ({"temperature": 0.0}, "must be greater than 0"),
    ],
    ids=["shape", "target", "temperature"],
)
def test_what_cannot_be_solved_is_refused(change: dict[str, Any], message: str) -> None:
    case = Case()
    names = ("hidden_KH", "grad_KH", "head", "targets_K")
    with pytest.raises(ValueError, match=message):
        solve(**{**dict(zip(names, case.arguments(), strict=True)), **change})
