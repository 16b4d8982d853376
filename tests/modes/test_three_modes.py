"""``regress compare`` of the three modes of a training: equal, and every planted discrepancy named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from regress.compare.dumps.comparison_options import Options
from regress.interop.modes.three_modes import comparable, found_between
from regress.report.mode_comparison import Directories

HERE = ("--engine", "local", "--step", "0")


def compared(modes: Any, *more: object, write: bool = True) -> Result:
    if write:
        modes.write()
    directories = {
        "--self_hosted_dir": modes.self_hosted,
        "--remote_api_dir": modes.client,
        "--weaver_dir": modes.service,
    }
    arguments = [str(word) for pair in directories.items() for word in pair]
    return CliRunner().invoke(main, ["compare", *arguments, *map(str, more)], catch_exceptions=False)


def rules(done: Result) -> list[str]:
    """Names of the discrepancies that were found."""
    lines = " ".join(done.output.split()).split("found: step ")
    return [line.partition("(rule ")[2].partition(";")[0] for line in lines[1:]]


@pytest.mark.extended
def test_the_documented_command(modes: Any, tmp_path: Path) -> None:
    modes.ranks = 6  # of twelve datums, two microbatches on each
    more = "--num_ranks", "6", "--num_micros", "2", "--output", tmp_path / "report.json"
    done = compared(modes, *HERE, *more)
    assert done.exit_code == 0, done.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exit_code"] == 0
    assert "three modes" not in report["diagnoses"]
    told = " ".join(report["notes"])
    assert "became no datums: their advantages are all 0" in told
    assert "multiplied by the weights" in told


@pytest.mark.extended
def test_inputs_that_the_service_did_not_record_are_no_difference(modes: Any) -> None:
    """Neither do its log-probs name their tokens: the index does."""
    modes.types = ("forward_data", "loss", "is_loss_debug", "param", "gradient")
    modes.ranks = 2
    done = compared(modes, *HERE, "--num_ranks", "2", "--num_micros", "2")
    assert done.exit_code == 0, done.output
    assert "\u2717" not in done.output


@pytest.mark.extended
def test_ranks_that_are_not_there_cannot_be_compared(modes: Any) -> None:
    modes.ranks = 6
    done = compared(modes, *HERE, "--num_ranks", "8", "--num_micros", "2")
    assert done.exit_code == 2
    assert "rank 6, 7 of 8 asked for is not in the actual dump" in done.output


@pytest.mark.extended
def test_all_steps_of_three_healthy_modes_are_equal(modes: Any) -> None:
    done = compared(modes)
    assert done.exit_code == 0, done.output


Plant = Callable[[Any], None]


def inputs(modes: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the inputs of the loss of each datum, and its row in the service."""
    for step in modes.steps:
        for datum, row in zip(step.datums, step.rows, strict=True):
            yield datum["loss_fn_inputs"], row


def received(modes: Any, name: str, change: Callable[[Any, Any], Any]) -> None:
    """Let the service compute with what the client sent."""
    own = {"logprobs": "old_log_probs", "advantages": "advantages"}
    for sent, row in inputs(modes):
        sent[name] = [float(v) for v in change(np.array(sent[name]), row)]
        values = np.array([0.0, *sent[name]], np.float32)
        if name == "loss_mask":
            row.mask = values.astype(np.int64)
        else:
            row.values[own[name]] = values


def shifted(values: Any, row: Any) -> Any:
    return np.concatenate([[0.0], values[:-1]])


def log_probs_shifted(modes: Any) -> None:
    received(modes, "logprobs", shifted)


def log_probs_shifted_early(modes: Any) -> None:
    received(modes, "logprobs", lambda values, row: np.concatenate([values[1:], [0.0]]))


def mask_shifted(modes: Any) -> None:
    received(modes, "loss_mask", shifted)


def mask_shifted_with_advantages(modes: Any) -> None:
    received(modes, "loss_mask", shifted)
    received(modes, "advantages", shifted)


def ddof(modes: Any) -> None:
    received(modes, "advantages", lambda values, row: values * np.sqrt(4 / 3))


def no_deviation(modes: Any) -> None:
    for step in modes.steps:
        rewards: dict[str, list[float]] = {}
        for one in step.trajectories["trajectories"]:
            rewards.setdefault(one["extra_fields"]["group_id"], []).append(one["reward"])
        of = {
            tuple(t["tokens"]): np.std(rewards[t["extra_fields"]["group_id"]], ddof=1)
            for t in step.trajectories["trajectories"]
        }
        for datum, row in zip(step.datums, step.rows, strict=True):
            sent = datum["loss_fn_inputs"]
            sent["advantages"] = [float(v * of[tuple(row.tokens)]) for v in sent["advantages"]]
            row.values["advantages"] = np.array([0.0, *sent["advantages"]], np.float32)


def advantages_sign(modes: Any) -> None:
    received(modes, "advantages", lambda values, row: -values)


def advantages_scaled(modes: Any) -> None:
    received(modes, "advantages", lambda values, row: values * 1.75)


def advantages_scattered(modes: Any) -> None:
    def moved(values: Any, row: Any) -> Any:
        found = np.zeros_like(values)
        kept = values[row.mask[1:] != 0]
        found[: kept.size] = kept
        return found

    received(modes, "advantages", moved)


def advantages_unmasked(modes: Any) -> None:
    received(modes, "advantages", lambda values, row: np.full_like(values, values[np.flatnonzero(values)[0]]))


def entropy_lost(modes: Any) -> None:
    for step in modes.steps:
        step.asked["loss_fn_config"] = {"entropy_coeff": 1e-4}
        step.config = {}


def weight_decay_lost(modes: Any) -> None:
    for step in modes.steps:
        step.adam["weight_decay"] = 0.0


def clipping_lost(modes: Any) -> None:
    for step in modes.steps:
        step.adam["grad_clip_norm"] = 0.0


def clipping_not_done(modes: Any) -> None:
    for step in modes.steps:
        step.metrics["clipped_grad_norm"] = step.metrics["grad_norm"]


def other_eps(modes: Any) -> None:
    for step in modes.steps:
        step.adam["eps"] = 1e-12


def other_beta(modes: Any) -> None:
    for step in modes.steps:
        step.adam["beta2"] = 0.95


def client_without_decay(modes: Any) -> None:
    for step in modes.steps:
        step.adam["weight_decay"] = step.asked["adam_params"]["weight_decay"] = 0.0


def chunks_permuted(modes: Any) -> None:
    for step in modes.steps:
        count = len(step.rows)
        step.chunks = [[*range(4, 8)], [*range(8, count)], [*range(4)]]


def chunks_put_together_wrongly(modes: Any) -> None:
    for step in modes.steps:
        sizes: dict[int, list[Any]] = {}
        for row in step.rows:
            sizes.setdefault(len(row.tokens), []).append(row)
        for rows in sizes.values():
            values = [(row.values["old_log_probs"], row.values["advantages"]) for row in rows]
            for row, (old, advantages) in zip(rows, [*values[1:], *values[:1]], strict=True):
                row.values["old_log_probs"], row.values["advantages"] = old, advantages


def loss_zero(modes: Any) -> None:
    for step in modes.steps:
        step.metrics["loss"] = 0.0


def datum_lost(modes: Any) -> None:
    for step in modes.steps:
        del step.datums[3], step.rows[3]


def chunk_lost_in_the_service(modes: Any) -> None:
    for step in modes.steps:
        del step.rows[4:7]


def datum_twice(modes: Any) -> None:
    for step in modes.steps:
        step.rows.append(step.rows[0])


def cut_off(modes: Any) -> None:
    for step in modes.steps:
        for datum, row in zip(step.datums, step.rows, strict=True):
            size = len(row.tokens) - 2
            datum["input_tokens"] = row.tokens[: size - 1]
            for name, values in datum["loss_fn_inputs"].items():
                datum["loss_fn_inputs"][name] = values[: size - 1]
            row.tokens, row.mask = row.tokens[:size], row.mask[:size]
            row.values = {name: values[:size] for name, values in row.values.items()}


def recomputed(modes: Any) -> None:
    for step in modes.steps:
        for row in step.rows:
            row.values["log_probs"] = row.values["log_probs"] + np.float32(0.01) * np.arange(
                len(row.tokens), dtype=np.float32
            )
            row.values["old_log_probs"] = row.values["log_probs"].copy()


def temperature(modes: Any) -> None:
    for step in modes.steps:
        step.asked["temperature"] = 0.7


def other_thresholds(modes: Any) -> None:
    for step in modes.steps:
        step.asked["loss_fn_config"] = {**step.config, "clip_high_threshold": 1.28}


PLANTED: dict[str, tuple[Plant, str, str]] = {
    "log-probs shifted": (log_probs_shifted, "log-probs-shifted", "is that of the token before"),
    "log-probs shifted early": (log_probs_shifted_early, "log-probs-shifted", "is that of the next token"),
    "mask shifted": (mask_shifted, "mask-shifted", "one token too late"),
    "mask and advantages shifted": (mask_shifted_with_advantages, "mask-shifted", "one token too late"),
    "ddof": (ddof, "deviation-ddof", "over N samples"),
    "entropy coefficient": (entropy_lost, "entropy-coefficient-lost", "0.0001, the service applied 0"),
    "weight decay": (weight_decay_lost, "weight-decay-lost", "0.01, the service applied 0"),
    "clipping": (clipping_lost, "clipping-lost", "0.05, the service applied 0"),
    "chunks": (chunks_permuted, "chunks-permuted", "in the order 3, 1, 2 of their seq_id"),
    "loss of zero": (loss_zero, "loss-reported-as-zero", "loss:sum"),
    "no deviation": (no_deviation, "advantages-not-scaled", "algorithm.scale"),
    "sign": (advantages_sign, "advantages-sign", "times -1"),
    "scale": (advantages_scaled, "advantages-scaled", "times 1.75"),
    "scattered": (advantages_scattered, "advantages-scattered", "loss_mask is 1"),
    "unmasked": (advantages_unmasked, "advantages-unmasked", "at every target"),
    "clip not done": (clipping_not_done, "clipping-lost", "after clipping to 0.05"),
    "eps": (other_eps, "optimizer-settings", "eps"),
    "beta": (other_beta, "optimizer-settings", "beta2"),
    "client's decay": (client_without_decay, "weight-decay-lost", "the client is configured with 0"),
    "values of others": (chunks_put_together_wrongly, "values-of-other-datums", "has the values that"),
    "lost datum": (datum_lost, "datums-lost", "with advantages other than 0"),
    "lost chunk": (chunk_lost_in_the_service, "datums-lost", "3 samples"),
    "twice": (datum_twice, "datums-twice", "repeat the tokens"),
    "cut off": (cut_off, "completions-cut-off", "are the first"),
    "recomputed": (recomputed, "old-log-probs-recomputed", "the same number at every token"),
    "temperature": (temperature, "other-temperature", "0.7"),
    "thresholds": (other_thresholds, "loss-settings", "clip_high_threshold"),
}


def step_of(name: str) -> int:
    return 1 if name == "loss of zero" else 0  # the losses of the first step are 0 but for rounding


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_discrepancy_is_found_alone(name: str, modes: Any) -> None:
    plant, rule, proof = PLANTED[name]
    plant(modes)
    modes.only = step_of(name)
    modes.write()
    dirs = Directories(str(modes.self_hosted), str(modes.client), str(modes.service))
    options = Options((step_of(name), step_of(name)))
    found = found_between(comparable(dirs, options), options).discrepancies
    assert [one.rule for one in found] == [rule]
    assert proof in str(found[0])


@pytest.mark.extended
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_discrepancy_is_told(name: str, modes: Any) -> None:
    plant, rule, proof = PLANTED[name]
    plant(modes)
    done = compared(modes, "--engine", "local", "--step", step_of(name))
    assert done.exit_code == 1
    assert rules(done) == [rule], done.output
    assert proof in " ".join(done.output.split())


def found_in(modes: Any, step: int = 0) -> list[str]:
    dirs = Directories(str(modes.self_hosted), str(modes.client), str(modes.service))
    options = Options((step, step))
    return [str(one) for one in found_between(comparable(dirs, options), options).discrepancies]


def test_a_deleted_file_names_the_variable(modes: Any) -> None:
    modes.write()
    (modes.service / "forward_data" / "step_000000_rank0_micro1.pt").unlink()
    shutil.rmtree(modes.client / "training_metrics")
    service, client = found_in(modes)
    assert "WEAVER_DEBUG_DUMP_OPTIONS" in service
    assert "forward_data/step_000000_rank0_micro1" in service
    assert "debug.remote_api_dump_options.training_metrics=true" in client


def test_a_type_that_is_off_names_the_variable(modes: Any) -> None:
    modes.types = ("is_loss_debug",)
    modes.write()
    (found,) = found_in(modes)
    assert "set WEAVER_DEBUG_DUMP_OPTIONS=is_loss_debug,forward_data,loss,batch_inputs" in found


@pytest.mark.extended
def test_a_deleted_file_fails_the_command(modes: Any) -> None:
    modes.write()
    (modes.service / "forward_data" / "step_000000_rank0_micro1.pt").unlink()
    done = compared(modes, *HERE, write=False)
    assert done.exit_code == 1
    assert "WEAVER_DEBUG_DUMP_OPTIONS" in done.output
