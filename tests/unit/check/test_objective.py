"""Loss functions of one's own beside the catalogue: right ones pass, wrong ones are told by what they do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import regress
from regress.check.loss_check import check_objective
from regress.cli import main
from regress.errors import ConfigError
from tests.unit.check import losses

SCHEMA = Path(regress.__file__).parent / "check/check.schema.json"
NO_KL: Mapping[str, Any] = {"settings": {"kl_coef": 0.0}}
NAMES = {"pi": "log_probs", "mu": "old_log_probs", "w": "advantages", "m": "mask"}

RIGHT: tuple[tuple[Callable[..., Any], str, Mapping[str, Any]], ...] = (
    (losses.paper, "grpo", {}),
    (losses.paper, "grpo", {"settings": {"kl_coef": 0.1, "clip_low": 0.1, "clip_high": 0.1}}),
    (losses.named_otherwise, "dapo", {"terms": NAMES}),
    (losses.dapo, "dapo", {}),
    (losses.verl_style, "verl:token-mean", {}),
    (losses.with_denominator, "dapo", {}),
    (losses.packed, "grpo", NO_KL),
    (losses.token_losses, "dapo", {}),
    (losses.from_rewards, "grpo", NO_KL),
    (losses.MODULE, "dapo", {}),
    (losses.Module, "dapo", {}),
    (losses.single, "dapo", {}),
    (losses.minimax, "cispo", {}),
)
FAULTS = {
    "mask off by one": "the mask one token early",
    "no mask": "mask of 1",
    "first token left out": "the first loss token of each sample left out",
    "advantages of another sample": "the advantages of the sample before",
    "whitened again": "advantages whitened over the batch",
    "sign": "advantages reversed",
    "no old log-probs": "log probs in place of old log probs",
    "reference for old": "ref log probs in place of old log probs",
    "log-ratio reversed": "the parts of `log_probs_K - old_log_probs_K.detach() of importance_ratio` exchanged",
    "no clip": "loss=importance_sampling",
    "clip alone": "the second part of `(ratio * t.advantages).minimum(clipped * t.advantages) of ppo_clip` alone",
    "maximum": "a maximum in place of",
    "minimum first": "the minimum before the advantage",
    "a narrower clip": "clip_low=0.05 in place of 0.2",
    "k1": "kl_estimator=k1",
    "k2": "kl_estimator=k2",
    "k3 reversed": "the parts of `ref_log_probs_K - log_probs_K of kl_estimate` exchanged",
    "kl sign": "the sign of `objective.kl_coef * kl_K of _total` reversed",
    "no kl": "kl_coef=0 in place of 0.04",
    "twice the kl": "`objective.kl_coef * kl_K of _total` twice",
    "squared without half": "kl_estimator=k2",
    "kl detached": "without the gradient of",
    "token mean": "aggregation=token-mean",
    "mean of all places": "a division by the longest completion",
    "longest completion": "a division by the longest completion",
    "sum": "aggregation=token-sum",
    "sum of samples": "a sum of the means of samples",
    "empty samples left out": "count_empty_rows=False",
    "divided by four": "the objective times 0.25",
    "an empty sample is NaN": "not finite on a sample without loss tokens",
    "detached": "no gradient reaches the log-probs",
    "ratio of the mean": "importance_level=sequence",
    "two": "kl_estimator=k1 in place of k3 and with aggregation=token-mean",
    "kl of all tokens": "no change of the objective that was tried gives its gradient",
}


@pytest.mark.parametrize(
    ("loss", "preset", "options"), RIGHT, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_right_loss_is_its_objective(
    loss: Callable[..., Any], preset: str, options: Mapping[str, Any]
) -> None:
    found = check_objective(loss, preset, **options)
    assert not found.exit_code, found.to_text()
    assert {row.verdict for row in found.rows} <= {"right", "depends", "not tried"}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_loss_is_told_by_what_it_does(fault: str) -> None:
    found = check_objective(losses.faulty, "grpo", arguments={"fault": fault})
    assert found.exit_code == 1
    (said,) = found.departures
    assert FAULTS[fault] in said


def test_the_loss_that_faults_are_planted_in_is_right() -> None:
    assert check_objective(losses.faulty, "grpo").exit_code == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("loss", "preset", "said"),
    [(losses.minimax, "dapo", "that of cispo"), (losses.sequence_ratio, "grpo", "that of gspo")],
    ids=["cispo", "gspo"],
)
def test_another_objective_is_told_by_its_name(loss: Callable[..., Any], preset: str, said: str) -> None:
    (told,) = check_objective(loss, preset).departures
    assert said in told


@pytest.mark.extended
def test_a_constant_of_an_empty_sample_is_told_as_the_value_alone() -> None:
    (said,) = check_objective(losses.sequence_ratio, "gspo").departures
    assert said.startswith("its gradient is right, its value is not, on a sample without loss tokens")


def test_population_deviation_is_told() -> None:
    found = check_objective(losses.from_rewards, "grpo", arguments={"ddof": 0}, **NO_KL)
    assert found.departures == ("its gradient is that of the objective with ddof=0 in place of 1",)


def test_what_the_caller_has_to_do_with_microbatches_is_said() -> None:
    def line(loss: Callable[..., Any], preset: str) -> tuple[str, str]:
        row = next(row for row in check_objective(loss, preset).rows if row.name.startswith("microbatches"))
        return row.verdict, row.text

    verdict, text = line(losses.dapo, "dapo")
    assert verdict == "depends"
    assert "its share of the loss tokens" in text
    verdict, text = line(losses.paper, "grpo")
    assert verdict == "depends"
    assert "its share of the samples" in text
    assert line(losses.with_denominator, "dapo") == ("right", "they add up to the whole batch")


def test_a_packed_row_whose_boundaries_are_ignored_departs() -> None:
    def loss(
        logps: Tensor, old_logps: Tensor, advantages: Tensor, mask: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        r = torch.exp(logps - old_logps)
        each = -torch.min(r * advantages, r.clamp(0.8, 1.2) * advantages) * mask
        return (each.sum(1) / mask.sum(1).clamp(min=1)).mean()

    found = check_objective(loss, "grpo", **NO_KL)
    assert [row.verdict for row in found.rows if row.name == "packed into one row"] == ["departs"]
    assert found.exit_code == 1


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "fault", ["k1", "token mean", "divided by four", "mask off by one", "two", "maximum"]
)
def test_a_wrong_loss_in_float32_is_told_as_well(fault: str) -> None:
    @wraps(losses.faulty)
    def loss(**given: Any) -> Tensor:
        single = {name: each.float() if isinstance(each, Tensor) else each for name, each in given.items()}
        return losses.faulty(**{**single, "fault": fault})

    (said,) = check_objective(loss, "grpo").departures
    assert FAULTS[fault] in said


def test_float32_inside_is_a_note() -> None:
    (note,) = check_objective(losses.single, "dapo").notes
    assert note.endswith("as in float32")


def test_a_default_beside_the_value_that_was_given_is_shown() -> None:
    found = check_objective(losses.paper, "grpo", settings={"kl_coef": 0.1})
    assert "beta = 0.1 (kl_coef, by default 0.04)" in found.called_with


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        (lambda x, y: x, {}, "needs 'x', and nothing tells what that is: say it by --term x=TERM"),
        (lambda logits, labels: logits, {}, "give it log-probs in a function of your own"),
        (lambda advantages, mask: mask, {}, "takes no log-probs of the policy"),
        (lambda logps, token_logps: logps, {}, "which both look like log_probs"),
        (lambda logps, mask: 1.0, {}, "returns float: return the loss as a tensor"),
        (lambda logps, mask: logps.sum(0), {}, "returns a loss of shape"),
        (lambda logps, mask: logps @ logps, {}, "cannot be called"),
        (lambda logps, mask: logps, {"arguments": {"z": 1}}, "has no argument 'z'"),
        (lambda logps, mask: logps, {"terms": {"mask": "masc"}}, "'masc' is not a term"),
        (lambda logps, mask: logps, {"settings": {"clip_lo": 1}}, "clip_lo is not a field"),
    ],
    ids=[
        "unknown",
        "logits",
        "no policy",
        "twice",
        "a float",
        "by column",
        "fails",
        "argument",
        "term",
        "field",
    ],
)
def test_what_cannot_be_checked_is_refused(
    loss: Callable[..., Any], options: Mapping[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_objective(loss, "grpo", **options)
    assert said in str(error.value)


def test_assert_objective_fails_by_what_it_found() -> None:
    regress.assert_objective(losses.paper, "grpo")
    with pytest.raises(
        AssertionError, match=r"departure: its gradient is that of the objective with kl_estimator=k1"
    ):
        regress.assert_objective(losses.faulty, "grpo", arguments={"fault": "k1"})


def test_the_command_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_losses.py").write_text(
        "def mine(logps, old_logps, adv, mask):\n"
        "    r = (logps - old_logps).exp()\n"
        "    return -(r * adv * mask).sum() / mask.sum()\n"
    )
    run = CliRunner().invoke(main, ["check", "my_losses:mine", "--as", "dapo", "--json", "found.json"])
    assert run.exit_code == 1, run.output
    assert "my_losses:mine departs from dapo\n  departure: " in run.output
    tree = json.loads(Path("found.json").read_text())
    jsonschema.validate(tree, json.loads(SCHEMA.read_text()))
    assert tree["exit_code"] == 1
    assert "loss=importance_sampling" in tree["departures"][0]
    right = ["check", "my_losses:mine", "--as", "dapo", "--set", "loss=importance_sampling"]
    assert CliRunner().invoke(main, right).exit_code == 0
    for options, said in (
        (["--set", "loss"], "is not NAME=VALUE"),
        (["--set", "kl_coef=0", "--set", "kl_coef=1"], "--set kl_coef is given twice: keep one"),
        (["--set", "kl_coef=" + "-" * 50_000 + "1"], "kl_coef"),
        (["--as", "dapoo"], "the nearest preset is 'dapo'"),
        (["--arg", "z=1"], "has no argument 'z'"),
    ):
        refused = CliRunner().invoke(main, ["check", "my_losses:mine", "--as", "dapo", *options])
        assert refused.exit_code == 2
        assert said in refused.output
