"""Rules of a live step: a planted fault stops training at its step with its cause, and healthy runs are left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_loop import Loop, Values, run, told
from torch import Tensor, nn

from regress.errors import GuardError
from regress.live.guard import GuardWarning, guard
from regress.live.guard_rules import CHECKS
from regress.live.replica_checksums import checksum
from regress.replay.replay_pool import shared_pool


@settings(max_examples=8, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["tokens", "samples", "microbatches"]),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.1]),
)
def test_a_healthy_run_breaks_no_rule(seed: int, aggregation: str, micros: int, kl: float) -> None:
    """A false alarm stops somebody's training for nothing."""
    watch = run(Loop(steps=2, seed=seed, aggregation=aggregation, micros=micros, kl=kl))
    assert watch.violations == []
    assert watch.updates == 2
    for name in ("finite", "on_policy", "group_sums", "sampler"):
        assert watch.checked[name] > 0, name


def replaced(name: str, make: Any) -> Any:
    return lambda values: {**values, name: make(values)}


def some_zero(values: Values) -> Tensor:
    found: Tensor = values["sampler_log_probs"].clone()
    found[:, 4] = 0
    return found


def with_nan(values: Values) -> Tensor:
    found: Tensor = values["sampler_log_probs"].clone()
    found[0, 3] = math.nan
    return found


def of_older_weights(values: Values) -> Values:
    """The first columns were sampled before the weights changed."""
    older = torch.arange(values["stale"].shape[1]) < 5
    sampler = torch.where(older, values["stale"], values["sampler_log_probs"])
    versions = torch.where(older, 3, 4).expand_as(sampler)
    return {**values, "sampler_log_probs": sampler, "weight_versions": versions, "weight_version": 4}


def above(values: Values) -> Tensor:
    """The kept mass differs from token to token, and is at most 1."""
    old: Tensor = values["old_log_probs"]
    return old + 0.3 * torch.sin(old) ** 2


def in_bfloat16(values: Values) -> Tensor:
    old: Tensor = values["old_log_probs"]
    return old.bfloat16().float()


def poisoned(model: nn.Module) -> None:
    next(iter(model.parameters())).grad[3, 2] = math.nan  # type: ignore[index]  # there is one


def overflowing(model: nn.Module) -> None:
    with torch.no_grad():
        next(iter(model.parameters()))[1, 1] = math.inf


def twice(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def repeated(values: Values) -> Values:
    """The last row of the second microbatch is one of the first."""
    samples = values["samples"]
    return {**values, "samples": [*samples[:-1], 1] if values["number"] else samples}


def hot(values: Values) -> Tensor:
    old: Tensor = values["old_log_probs"]
    return old * 1.05


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "ratio": ({"values": replaced("old_log_probs", hot)}, "on_policy", "the ratio is"),
    "baseline": ({"baseline": lambda rewards: rewards.mean()}, "group_sums", "add up to"),
    "loss doubled": (
        {"loss": lambda loss, number: loss * (2 if number == 1 else 1)},
        "shares",
        "microbatch 1 of rank 0 weighs 2.000 times as much as microbatch 0 of rank 0",
    ),
    "backward twice": ({"backward": twice}, "shares", "microbatch 0 of rank 0 was back-propagated 2 times"),
    "sample repeated": (
        {"values": repeated},
        "shares",
        "sample 1 counts 2 times in this update: in microbatch 0 of rank 0 and microbatch 1 of rank 0",
    ),
    "gradient": (
        {"before_update": poisoned},
        "finite",
        "the gradient of model.embed_tokens.weight is not finite in 1 of",
    ),
    "loss": ({"loss": lambda loss, _: loss * math.inf}, "finite", "the loss of backward pass 0 is"),
    "zeros": (
        {"values": replaced("sampler_log_probs", some_zero)},
        "sampler",
        "are exactly 0, a filled-in value",
    ),
    "missing": (
        {"values": replaced("sampler_log_probs", with_nan)},
        "sampler",
        "are missing (not finite) at 1 of",
    ),
    "next token": (
        {"values": replaced("sampler_log_probs", lambda v: v["sampler_log_probs"].roll(-1, 1))},
        "sampler",
        "those of the next token (1 away): a shift by -1",
    ),
    "previous token": (
        {"values": replaced("sampler_log_probs", lambda v: v["sampler_log_probs"].roll(1, 1))},
        "sampler",
        "those of the previous token (1 away): a shift by +1",
    ),
    "stale weights": (
        {"values": replaced("sampler_log_probs", lambda v: v["stale"])},
        "sampler",
        "those of the weights before the last update",
    ),
    "stale tokens": (
        {"values": of_older_weights},
        "sampler",
        "of them are of stale weights (version 3, and 4 is trained), first row 0",
    ),
    "support": (
        {"values": replaced("sampler_log_probs", above)},
        "sampler",
        "are never lower, as after top-p",
    ),
    "precision": (
        {"values": replaced("sampler_log_probs", in_bfloat16)},
        "sampler",
        "the size of rounding in bfloat16",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stops_training_at_its_step(name: str) -> None:
    planted, check, words = FAULTS[name]
    with pytest.raises(GuardError) as caught:
        run(Loop(**planted))
    assert str(caught.value).startswith("step 2, rank 0: ")
    assert words in str(caught.value)
    assert str(caught.value).endswith(f"(rule {check}: {CHECKS[check]})")


def test_weights_are_untouched_by_an_update_that_breaks_a_rule() -> None:
    """The error comes before the optimizer's step, so that a checkpoint can still be saved."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    with guard(model):
        model(torch.ones(1, 3)).sum().backward()
        model.weight.grad[0, 1] = math.nan  # type: ignore[index]  # there is one
        with pytest.raises(GuardError, match="the gradient of weight is not finite in 1 of 3 elements"):
            optimizer.step()
    assert torch.equal(model.weight, before)


def test_a_norm_that_overflows_is_no_value_that_is_not_finite() -> None:
    """Sums of squares of large finite values are infinite in float32."""
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(1e30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with guard(model) as watch:
        model(torch.ones(1, 2)).mul(1e-30).sum().backward()
        optimizer.step()
    assert watch.violations == []


def test_a_warning_lets_training_go_on_and_earlier_weights_leave_no_trace() -> None:
    """Looking for stale weights changes the model for a moment; training must end as without."""
    planted = {"values": replaced("sampler_log_probs", above)}
    with pytest.warns(GuardWarning, match="never lower"):
        watch = run(Loop(**planted, options={"action": "warn"}))
    assert {violation.step for violation in watch.violations} == {2}
    assert watch.updates == 4
    quiet = run(Loop())
    for one, other in zip(watch._model.parameters(), quiet._model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_overflows_is_named() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=math.inf)
    with guard(model):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(GuardError, match="the parameter of weight is not finite in 4 of 4 elements"):
            optimizer.step()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": ["ratios"]}, "guard knows no 'ratios': choose one of finite, on_policy"),
        ({"sampler_dtype": "int8"}, "guard knows no 'int8': choose one of float64, float32"),
        ({"action": "stop"}, "guard\\(action='stop'\\) is neither 'raise' nor 'warn'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        guard(nn.Linear(1, 1), **options)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(GuardError, match=r"guard\(dict\) finds no model: give the torch.nn.Module"):
        guard({})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"log_probs": torch.zeros(3)},
            r"log_probs=...\) has the shape \[3\]: give one for each token",
        ),
        (
            {"old_log_probs": torch.zeros(2, 4)},
            r"old_log_probs=...\) has the shape \[2, 4\], log_probs \[2, 3\]",
        ),
        (
            {"advantages": torch.zeros(3)},
            r"advantages=...\) has the shape \[3\]: give \[2\], one for each row",
        ),
        ({"samples": [1]}, r"samples=...\) tells 1 ids for 2 rows: give one for each row"),
    ],
)
def test_values_of_other_shapes_are_refused(values: dict[str, Any], words: str) -> None:
    with guard(nn.Linear(1, 1)) as watch, pytest.raises(GuardError, match=words):
        watch.batch(**{"log_probs": torch.zeros(2, 3), **values})


def test_summary_tells_what_was_not_checked() -> None:
    """A rule without values is not a green rule."""
    told = run(Loop(options={"checks": ["finite", "replicas"]})).summary()
    assert "finite       checked 16 times, broken 0" in told
    assert "replicas     no values were told" in told
    assert "sampler      not chosen" in told


@given(st.integers(1, 5000), st.data())
def test_checksums_see_every_bit_and_every_exchange(size: int, data: st.DataObject) -> None:
    values = torch.randn(size, generator=torch.Generator().manual_seed(size))
    index, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 31))
    other = values.clone()
    other.view(torch.int32)[index] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert not torch.equal(checksum(values), checksum(other))
    swapped, second = values.clone(), data.draw(st.integers(0, size - 1))
    swapped[[index, second]] = swapped[[second, index]]
    assert torch.equal(checksum(values), checksum(swapped)) == torch.equal(values, swapped)


def ranks(fault: str) -> list[str]:
    """Return what two ranks tell."""
    return shared_pool().run(told, {"fault": fault}, 2)


def test_replicas_that_come_apart_stop_both_ranks() -> None:
    """One element of one rank moves by its last bits."""
    found = ranks("replicas")
    words = "model.embed_tokens.weight differs between ranks 0 and 1 after the update"
    assert all("GuardError: step 2, rank 0: " in one and words in one for one in found), found


@pytest.mark.extended
@pytest.mark.parametrize(
    ("fault", "words"), [("none", "replicas     checked 4 times, broken 0"), ("repeated", "sample 0 counts")]
)
def test_other_runs_on_two_ranks(fault: str, words: str) -> None:
    found = ranks(fault)
    assert all(words in one for one in found), found


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checks": 5}, r"guard\(checks=5\) is not a list of rules: choose one of finite"),
        ({"checks": "finite"}, r"guard\(checks='finite'\) is not a list of rules"),
        ({"checks": [[]]}, r"guard knows no \[\]: choose one of finite"),
        ({"sampler_dtype": []}, r"guard knows no \[\]: choose one of float64"),
        ({"action": None}, r"guard\(action=None\) is neither 'raise' nor 'warn'"),
        ({"centered": "no"}, r"guard\(centered='no'\) is neither True nor False"),
        ({"group_size": 0}, r"guard\(group_size=0\) is not a whole number from 1"),
        ({"group_size": "2"}, r"guard\(group_size='2'\) is not a whole number from 1"),
        ({"group_size": 1.5}, r"guard\(group_size=1.5\) is not a whole number from 1"),
        ({"data_rank": -1}, r"guard\(data_rank=-1\) is not a whole number from 0"),
        ({"replica_group": 5}, r"guard\(replica_group=5\) is not a process group"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(GuardError, match=words):
        guard(nn.Linear(1, 1), **options)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"log_probs": None}, "log_probs=...\\) is of type NoneType: give a tensor of log-probs"),
        ({"log_probs": torch.zeros(2, 3, dtype=torch.int64)}, "log_probs=...\\) is of type torch.int64"),
        ({"loss_mask": [[1, 1, 1]] * 2}, "loss_mask=...\\) is of type list: give a tensor"),
        ({"advantages": [1.0, 2.0]}, "advantages=...\\) is of type list: give a tensor"),
        ({"old_log_probs": "x"}, "old_log_probs=...\\) is of type str: give a tensor"),
        ({"routing": 5}, "routing=...\\) is of type int: give a tensor"),
        ({"samples": 5}, "samples=...\\) is of type int: give a sequence with an id for each row"),
        ({"samples": "ab"}, "samples=...\\) is of type str: give a sequence with an id for each row"),
        ({"groups": [[], []]}, r"groups=...\) has the id \[\]: give texts, numbers or tuples"),
    ],
)
def test_a_value_of_another_type_is_refused(values: dict[str, Any], words: str) -> None:
    with guard(nn.Linear(1, 1)) as watch, pytest.raises(GuardError, match=words):
        watch.batch(**{"log_probs": torch.zeros(2, 3), **values})
