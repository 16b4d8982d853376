"""Passes and updates of a policy that is one number for each loss token: what adds up, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regress.dump.trajectory import Trajectory
from regress.engine.batch import LossTokens, Microbatch, TokenBatch
from regress.engine.optim import adamw
from regress.engine.passes import Part, _missed, _no_loss, accumulate, evaluate
from regress.engine.step import settled, train_step, update
from regress.engine.world import SingleProcess
from regress.errors import NotFinite, RegressError
from regress.grpo.inputs import InputError
from regress.grpo.logprobs import TokenLogProbs
from regress.grpo.losses import TokenLoss, token_loss
from regress.grpo.objective import Objective
from regress.grpo.presets import make_objective
from regress.layout import BatchPlan

LENGTHS = (3, 2, 4, 1)
K = sum(LENGTHS)


class Numbers:
    """Policy whose log-prob of loss token k is its k-th parameter, and whose entropy is 2 minus it."""

    sums_gradients = False
    backward_scale = 1.0

    def __init__(
        self, values: Sequence[float] | None = None, *, computes: bool = True, missing: bool = False
    ) -> None:
        given = [-0.2 - 0.15 * k for k in range(K)] if values is None else list(values)
        self.theta = nn.Parameter(torch.tensor(given, dtype=torch.float64))
        self.computes_losses, self._missing = computes, missing
        self.seen: list[int] = []

    def log_probs(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        return [self.theta.detach()[micro.select] for micro in microbatches]

    def values(self, microbatches: Sequence[Microbatch], *, entropy: bool) -> list[TokenLogProbs]:
        return [TokenLogProbs(values, 2.0 - values) for values in self.log_probs(microbatches)]

    def forward_backward(self, microbatches: Sequence[Microbatch], loss: Callable[..., Any]) -> list[Any]:
        found = []
        for micro in microbatches:
            values = self.theta[micro.select]
            share, result = loss(micro, TokenLogProbs(values, 2.0 - values))
            share.backward()
            found.append(result)
        return found

    def zero_grad(self) -> None:
        self.theta.grad = None

    def clip_grad_norm(self, max_norm: float | None) -> Tensor:
        return nn.utils.get_total_norm([self.theta.grad]) if self.theta.grad is not None else torch.zeros(())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield "theta", self.theta

    def shard(self, name: str) -> None:
        return None

    def sum_over_context_parallel(self, values: Tensor) -> Tensor:
        return values.add_(1.0) if self._missing else values  # in place, as a collective does


def trajectory(run_id: int, completion: int) -> Trajectory:
    return Trajectory("g", run_id, [2] * (2 + completion), [0] * 2 + [1] * completion, 0.0, 2, "stop")


BATCH = TokenBatch([trajectory(number, length) for number, length in enumerate(LENGTHS)])
WEIGHTS = torch.linspace(0.05, 0.15, K, dtype=torch.float64)
ADVANTAGES = torch.tensor([(1.0, -0.5, 0.7, -1.2)[sample] for sample in BATCH.sequence], dtype=torch.float64)


def tokens(**more: Any) -> LossTokens:
    shift = torch.linspace(-0.4, 0.3, K, dtype=torch.float64)
    known = {
        "weights": WEIGHTS,
        "advantages": ADVANTAGES,
        "old_log_probs": Numbers().theta.detach() + shift,
        "ref_log_probs": Numbers().theta.detach() - 2 * shift,
    }
    return LossTokens(BATCH.sequence, len(LENGTHS), **{**known, **more})


def micros(size: int) -> list[Microbatch]:
    return BATCH.microbatches(BatchPlan(micro_batch_size=size))


def objective(**fields: Any) -> Objective:
    return make_objective(**{"kl_coef": 0.1, "entropy_coef": 0.02, **fields})


def expected(of: LossTokens, fields: Objective, theta: Tensor) -> tuple[float, Tensor, TokenLoss]:
    """Loss, gradient and terms of the whole batch at once."""
    values = theta.detach().clone().requires_grad_()
    assert of.advantages is not None
    loss = token_loss(
        values,
        values.detach() if of.old_log_probs is None else of.old_log_probs,
        of.advantages,
        of.sequence,
        of.num_sequences,
        fields,
        ref_log_probs_K=of.ref_log_probs,
        entropy_K=2.0 - values,
    )
    total = (WEIGHTS * loss.loss_K).sum()
    total.backward()
    assert values.grad is not None
    return float(total.detach()), values.grad, loss


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("old", [True, False])
def test_microbatches_add_up(size: int, old: bool) -> None:
    given = tokens() if old else tokens(old_log_probs=None)
    policy, fields = Numbers(), objective()
    part = accumulate(policy, given, micros(size), fields)
    loss, gradient, terms = expected(given, fields, policy.theta)
    assert part.problem is None
    assert part.loss == pytest.approx(loss, rel=1e-13)
    assert policy.theta.grad is not None
    torch.testing.assert_close(policy.theta.grad, gradient, rtol=1e-13, atol=1e-15)
    assert terms.kl_K is not None
    assert terms.entropy_K is not None
    wanted = {
        "policy": float((WEIGHTS * terms.policy_K).sum()),
        "kl": 0.1 * float((WEIGHTS * terms.kl_K).sum()),
        "entropy": -0.02 * float((WEIGHTS * terms.entropy_K).sum()),
    }
    assert part.terms == pytest.approx(wanted, rel=1e-13)
    assert part.metrics["kl"].value == pytest.approx(float(terms.kl_K.mean()), rel=1e-13)
    assert part.metrics["kl"].count == K
    assert set(
        accumulate(Numbers(), given, micros(size), objective(entropy_coef=0.0, kl_coef=0.0)).terms
    ) == {"policy"}


@pytest.mark.parametrize("missing", [False, True])
def test_losses_and_terms_that_are_given_back_hold_no_graph(missing: bool) -> None:
    shares: list[Any] = []

    class Kept(Numbers):
        def forward_backward(self, microbatches: Sequence[Microbatch], loss: Callable[..., Any]) -> list[Any]:
            shares.extend(super().forward_backward(microbatches, loss))
            return shares

    accumulate(Kept(missing=missing), tokens(), micros(2), objective())
    assert [share.loss.requires_grad for share in shares] == [False, False]
    assert [share.loss.grad_fn for share in shares] == [None, None]


def test_tokens_that_do_not_count_are_left_out() -> None:
    effective = [[1] * (2 + length) for length in LENGTHS]
    effective[2][-1] = 0
    whole = TokenBatch(BATCH.trajectories, effective=effective)
    policy = Numbers()
    part = accumulate(policy, tokens(), whole.microbatches(BatchPlan()), objective())
    _, _, terms = expected(tokens(), objective(), policy.theta)
    counted = torch.tensor([k != sum(LENGTHS[:3]) - 1 for k in range(K)])
    wanted = float((WEIGHTS * terms.loss_K.detach())[counted].sum())
    assert part.loss == pytest.approx(wanted, rel=1e-13)
    assert policy.theta.grad is not None
    assert [k for k, value in enumerate(policy.theta.grad.tolist()) if value == 0.0] == [sum(LENGTHS[:3]) - 1]


def named(seen: dict[str, Any]) -> Callable[..., TokenLoss]:
    def function(*args: Any, **values: Any) -> TokenLoss:
        seen.clear()
        seen.update(values)
        return token_loss(*args, **values)

    return function


@pytest.mark.parametrize("name", ["kept", "penalized"])
def test_a_loss_is_told_of_marks_only_where_there_are_some(name: str) -> None:
    seen: dict[str, Any] = {}
    accumulate(Numbers(), tokens(), micros(4), objective(), loss_function=named(seen))
    assert not {"marks", "entropy_scale_K", "correction_K"} & set(seen)
    marked = torch.arange(K) % 2 == 0
    accumulate(Numbers(), tokens(**{name: marked}), micros(4), objective(), loss_function=named(seen))
    assert getattr(seen["marks"], f"{name}_K").tolist() == marked.tolist()


def test_weights_and_corrections_take_the_dtype_of_the_loss() -> None:
    seen: dict[str, Any] = {}
    single = torch.full((K,), 1.1, dtype=torch.float32)
    given = tokens(correction=single, entropy_weights=2.0 * WEIGHTS)
    fields = objective(
        sampler_correction="token_truncate", correction_max=2.0, entropy_aggregation="token-mean"
    )
    accumulate(Numbers(), given, micros(4), fields, loss_function=named(seen))
    assert seen["correction_K"].dtype == torch.float64
    assert seen["entropy_scale_K"].tolist() == [2.0] * K
    small = Numbers()
    small.theta = nn.Parameter(small.theta.detach().float())
    old, ref = (getattr(tokens(), name).float() for name in ("old_log_probs", "ref_log_probs"))
    watched: list[Tensor] = []

    def watch(micro: Microbatch, out: TokenLogProbs, loss: TokenLoss) -> None:
        watched.append(loss.loss_K)

    narrow = tokens(old_log_probs=old, ref_log_probs=ref, advantages=ADVANTAGES.float())
    part = accumulate(small, narrow, micros(4), objective(), watch=watch)
    assert watched[0].dtype == torch.float32
    share = (WEIGHTS.float() * watched[0]).sum()
    assert part.loss == share.item()


@pytest.mark.parametrize("size", [1, 4])
def test_a_pass_without_gradients_has_the_same_loss(size: int) -> None:
    fields, policy = objective(entropy_coef=0.0), Numbers()
    part = evaluate(policy, tokens(), micros(size), fields)
    again = accumulate(Numbers(), tokens(), micros(size), fields)
    known = {
        name: metric for name, metric in again.metrics.items() if name != "entropy"
    }  # nobody gave entropies
    assert (part.loss, part.terms, part.metrics) == (again.loss, again.terms, known)
    assert policy.theta.grad is None
    seen: dict[str, Any] = {}
    evaluate(policy, tokens(), micros(size), fields, loss_function=named(seen))
    assert "ref_log_probs_K" in seen
    watched: list[Microbatch] = []
    evaluate(policy, tokens(), micros(size), fields, watch=lambda micro, out, loss: watched.append(micro))
    assert len(watched) == len(micros(size))
    silent = evaluate(Numbers(computes=False), tokens(), micros(size), fields)
    assert (silent.loss, silent.metrics, silent.terms, silent.problem) == (0.0, {}, {}, None)


def poisoned(name: str, value: float = math.nan) -> tuple[Numbers, LossTokens]:
    """Policy and tokens with one value of a sample of several tokens that is not finite."""
    if name == "log_probs":
        return Numbers([-1.0] * (K - 2) + [value, -1.0]), tokens()
    values = getattr(tokens(sampler_log_probs=tokens().old_log_probs), name).clone()
    values[-2] = value  # the last of the four of sample 2
    return Numbers(), tokens(**{name: values})


@pytest.mark.parametrize("name", ["log_probs", "old_log_probs", "ref_log_probs"])
def test_values_that_are_not_finite_name_their_microbatch(name: str) -> None:
    policy, given = poisoned(name)
    part = accumulate(policy, given, micros(1), objective())
    assert isinstance(part.problem, NotFinite)
    assert str(part.problem).startswith("microbatch 2 (samples g/2) has no loss, so no update was made")
    assert policy.theta.grad is not None
    assert policy.theta.grad[-2] == 0.0 or name == "log_probs"


def test_a_loss_that_cannot_be_computed_is_no_matter_of_finite_values() -> None:
    part = accumulate(Numbers(), tokens(ref_log_probs=None), micros(2), objective())
    assert type(part.problem) is RegressError
    assert str(part.problem).startswith("microbatch 0 (samples g/0, g/1) has no loss")
    zero = [0.0, {}, {}]
    assert [part.loss, part.metrics, part.terms] == zero


def test_an_advantage_that_is_not_finite_is_an_error_of_its_kind() -> None:
    _, given = poisoned("advantages")
    part = accumulate(Numbers(), given, micros(1), objective())
    assert type(part.problem) is RegressError  # everything that the policy gave is finite


def test_a_loss_that_overflows_is_refused() -> None:
    def function(*args: Any, **values: Any) -> TokenLoss:
        found = token_loss(*args, **values)
        return found if found.loss_K.numel() != 4 else scaled(found, math.inf)

    part = accumulate(Numbers(), tokens(), micros(1), objective(), loss_function=function)
    assert isinstance(part.problem, NotFinite)
    assert str(part.problem).startswith("microbatch 2 (samples g/2) has the loss inf")
    assert math.isnan(part.loss)


def scaled(loss: TokenLoss, factor: float) -> TokenLoss:
    return TokenLoss(**{**vars(loss), "loss_K": loss.loss_K.abs() * factor})


def test_a_rank_has_no_loss_where_another_with_the_same_samples_has_none() -> None:
    part = accumulate(Numbers(missing=True), tokens(), micros(2), objective())
    assert (part.loss, part.metrics, part.terms, part.problem) == (0.0, {}, {}, None)


def test_a_rank_without_tokens_has_no_loss_but_a_graph() -> None:
    empty = torch.empty(0, dtype=torch.float64, requires_grad=True)
    share, _ = _no_loss(TokenLogProbs(empty, None))
    share.backward()
    assert (share.item(), empty.grad is not None) == (0.0, True)


def test_inputs_of_a_pass_without_gradients_are_recorded_under_their_microbatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int | None, tuple[Any, ...]]] = []
    where: list[int] = []

    @contextmanager
    def at(micro: int) -> Iterator[None]:
        where.append(micro)
        yield
        where.pop()

    def inputs(micro: Microbatch) -> None:
        seen.append((where[-1] if where else None, micro.sample_ids))

    monkeypatch.setattr("regress.engine.passes.at", at)
    monkeypatch.setattr("regress.engine.taps.inputs", inputs)
    evaluate(Numbers(), tokens(), micros(2), objective(entropy_coef=0.0))
    assert seen == [(0, (("g", 0), ("g", 1))), (1, (("g", 2), ("g", 3)))]


SETTINGS: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def test_an_update_is_that_of_torch() -> None:
    policy = Numbers()
    optimizer = adamw(policy.named_parameters(), 0.05, **SETTINGS)
    outcome = train_step(policy, optimizer, tokens(), micros(2), objective(), max_grad_norm=None)
    start = Numbers().theta
    loss, gradient, _ = expected(tokens(), objective(), start)
    start.grad = gradient
    torch.optim.AdamW([start], lr=0.05, **SETTINGS).step()
    torch.testing.assert_close(policy.theta, start, rtol=1e-13, atol=0)
    assert outcome.loss == pytest.approx(loss, rel=1e-13)
    assert outcome.grad_norm == pytest.approx(float(gradient.norm()), rel=1e-13)
    assert math.fsum(outcome.terms.values()) == pytest.approx(loss, rel=1e-13)
    assert not outcome.skipped
    assert set(outcome.metrics) >= {"kl", "entropy", "policy_loss"}


def test_tokens_are_compared_by_this_process_alone_if_there_is_no_world() -> None:
    losses = [
        train_step(
            policy := Numbers(),
            adamw(policy.named_parameters(), 0.05),
            tokens(),
            micros(2),
            objective(top_entropy_quantile=0.5, entropy_coef=0.0),
            world=world,
            max_grad_norm=None,
        ).loss
        for world in (None, SingleProcess())
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_an_update_that_is_not_finite_changes_nothing(name: str) -> None:
    policy, given = poisoned("old_log_probs") if name == "loss" else (Numbers(), tokens())
    if name == "grad_norm":
        policy.clip_grad_norm = lambda limit: torch.tensor(math.inf)  # type: ignore[method-assign]  # of this policy
    optimizer = adamw(policy.named_parameters(), 0.05)
    before = policy.theta.detach().clone()
    with pytest.raises(NotFinite):
        train_step(policy, optimizer, given, micros(1), objective(), max_grad_norm=None)
    outcome = train_step(
        policy, optimizer, given, micros(1), objective(), max_grad_norm=None, skip_nonfinite=True
    )
    assert outcome.skipped
    assert math.isnan(outcome.loss)
    assert (outcome.metrics, outcome.terms) == ({}, {})
    assert torch.equal(policy.theta, before)
    assert policy.theta.grad is None
    assert not optimizer.state[policy.theta]


@pytest.mark.parametrize("problem", [None, InputError("own")])
def test_a_recorder_that_failed_stops_the_update(problem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regress.engine.step.failure", lambda: OSError("the disk is full"))
    words = "own" if problem else "the disk is full"
    with pytest.raises(RegressError, match=words):
        settled(SingleProcess(), Part(problem=problem))
    policy = Numbers()
    accumulate(policy, tokens(), micros(4), objective())
    with pytest.raises(RegressError, match=words):
        update(policy, adamw(policy.named_parameters(), 0.1), Part(problem=problem), max_grad_norm=None)


def test_settled_passes_of_one_rank_are_its_own() -> None:
    part = accumulate(Numbers(), tokens(), micros(2), objective())
    outcome = settled(SingleProcess(), part)
    assert (outcome.loss, outcome.terms, outcome.metrics) == (part.loss, part.terms, part.metrics)
    with pytest.raises(InputError, match="own"):
        settled(SingleProcess(), Part(problem=InputError("own")))


@pytest.mark.parametrize(
    ("log_prob", "without_loss", "missed"),
    [(-1.0, 0.0, False), (-1.0, 1.0, True), (math.nan, 0.0, False), (math.nan, 1.0, True)],
)
def test_a_loss_is_missed_where_another_rank_of_the_samples_has_none(
    log_prob: float, without_loss: float, missed: bool
) -> None:
    """A rank that is alone without a loss needs not wait for others; see `Policy.sum_over_context_parallel`."""
    told: list[float] = []

    def total(own: Tensor) -> Tensor:
        told.append(own.item())
        return own + without_loss

    policy: Any = SimpleNamespace(sum_over_context_parallel=total)
    part = LossTokens(torch.zeros(1, dtype=torch.int64), 1)
    assert _missed(policy, TokenLogProbs(torch.tensor([log_prob]), None), part) is missed
    assert told == [float(math.isnan(log_prob))]
