"""``batch_inputs`` and ``training_metrics`` of foreign services: token ids find rows, metrics are read as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from regress.cli import main
from regress.dump.dump_location import location
from regress.interop.nexrl_dumps import NexrlDump

Setup = Callable[..., Any]


def run(golden: Path, weaver: Path) -> Result:
    command = [
        "compare",
        "--self_hosted_dir",
        golden,
        "--weaver_dir",
        weaver,
        "--step",
        0,
        "--engine",
        "local",
    ]
    return CliRunner().invoke(main, [*map(str, command)])


def inputs(run: Any, *, targets: bool, name: str = "target_tokens") -> None:
    """Write what the model read: rows with their last token, or inputs and targets."""
    for rank, micro, rows in run.batches():
        ids = run.input_ids(rows)
        payload = {"input_ids": run.tensor(ids)}
        if targets:
            payload = {"input_ids": run.tensor(ids[:, :-1]), name: run.tensor(ids[:, 1:])}
        run.write("batch_inputs", f"{run.stem}_rank{rank}_micro{micro}", payload)


@pytest.mark.parametrize("targets", [False, True])
def test_rows_in_another_order_are_found_by_batch_inputs(targets: bool, nexrl: Setup, sampled: Setup) -> None:
    golden = nexrl("sh", sampled(8)).self_hosted()
    other = nexrl("wv", sampled(8), ranks=4, ids=False).weaver()
    assert run(golden.folder, other.folder).exit_code != 0  # nothing tells whose rows these are
    inputs(other, targets=targets)
    done = run(golden.folder, other.folder)
    assert "✗ weaver/step0: missing" not in done.output
    assert "log_probs" not in " ".join(line for line in done.output.splitlines() if line.startswith("✗"))
    dump = NexrlDump(location(other.folder))
    records = [dump.read(name) for name, (type, _) in dump.entries.items() if type == "forward_data"]
    assert all("input_ids" in record.tensors for record in records)


def test_inputs_without_their_last_token_find_nothing(nexrl: Setup, sampled: Setup) -> None:
    other = nexrl("wv", sampled(4), ids=False).weaver()
    inputs(other, targets=True, name="labels")  # labels may be shifted or not
    dump = NexrlDump(location(other.folder))
    names = [name for name, (type, _) in dump.entries.items() if type == "forward_data"]
    assert all("input_ids" not in dump.read(name).tensors for name in names)


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_metrics_are_read(format: str, nexrl: Setup) -> None:
    dump = NexrlDump(location(nexrl("ra", format=format).remote_api().folder))
    assert dump.raw("training_metrics", 0) == {"step": 0, "metrics": {"loss": 0.5}}
    assert dump.raw("training_metrics", 1) is None


def test_metrics_tell_of_lost_settings(nexrl: Setup, sampled: Setup) -> None:
    golden, client = nexrl("sh", sampled(4)).self_hosted(), nexrl("ra", sampled(4)).remote_api()
    asked = {"requested": {"adam_params": {"weight_decay": 0.01, "eps": 1e-8}}}
    metrics = {"loss": 0.0, "loss:sum": 1.5, "weight_decay": 0.0, "eps": 1e-8}
    client.write("training_metrics", client.stem, {"step": 0, "metrics": metrics, "extra_info": asked})
    command = ["compare", "--self_hosted_dir", golden.folder, "--remote_api_dir", client.folder, "--step", 0]
    done = CliRunner().invoke(main, [*map(str, [*command, "--engine", "local"])])
    told = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "(rule weight-decay-lost;" in told
    assert "(rule loss-reported-as-zero;" in told
