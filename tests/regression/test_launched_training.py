"""Training as users start it, by ``accelerate launch`` and ``torchrun``; what it records replays elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from regress.dump.dump_reader import DumpReader
from regress.dump.metrics_file import read_metrics
from regress.layout.shard_layout import ShardLayout
from regress.parallel.launch.rank_pool import RankPool

ROOT = Path(__file__).parents[2]
GUARD = 240.0
"""Seconds after which a launched run hangs; nothing here depends on how long it takes."""

RUN = (
    *("max_steps=2", "model.dtype=float64", "warm_start.steps=3", "warm_start.batch_size=8"),
    *("task.train_size=16", "task.eval_size=2", "evaluation.every_n_steps=2"),
    *("data.prompts_per_step=3", "data.group_size=4", "optimizer.warmup_steps=0", "optimizer.eps=1e-6"),
    "task.rewards={exact_match: 1.0, character_match: 1.0}",
    "model.config={hidden_size: 32, intermediate_size: 64}",
    "debug.enable_data_dump=true",
    *(f"debug.dump_options.{name}=true" for name in ("trajectory", "gradient")),
)

ACCELERATE = (
    *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
)
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4")

LAUNCHES = {
    "accelerate-ddp": (ACCELERATE, "dp=2 data_parallel=accelerate", "tp=2"),
    "accelerate-fsdp2": (ACCELERATE, "fsdp=2", "pp=2"),
    "torchrun-tp2-dp2": (TORCHRUN, "tp=2 dp=2", "fsdp=2"),
}
"""Launcher, section ``parallel``, and that of a replay."""


def parallel(text: str) -> list[str]:
    return [f"parallel.{part}" for part in text.split()]


def launch(command: Sequence[str], overrides: Sequence[str]) -> str:
    """Return the output of a launched run; nothing else of it remains."""
    train = ("-m", "regress", "train", "--config-name", "reverse_string")
    process = subprocess.Popen(
        [sys.executable, "-m", *command, *train, *overrides],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    try:
        printed, _ = process.communicate(timeout=GUARD)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        raise
    finally:
        left = list(ranks_of(overrides))
        for rank in left:
            os.kill(rank, signal.SIGKILL)
    assert process.returncode == 0, printed[-3000:]
    assert left == []
    return printed


def ranks_of(overrides: Sequence[str]) -> Iterator[int]:
    """Processes with these arguments."""
    wanted = "\0".join(overrides).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if wanted in path.read_bytes():
                yield int(path.parent.name)


def gradients(folder: Path, step: int) -> dict[str, NDArray[Any]]:
    """The whole gradient of each parameter, of the parts that lie in the records of all ranks."""
    whole: dict[str, NDArray[Any]] = {}
    for record in DumpReader(folder).records("gradient", step):
        shards = record.meta.get("shards", {})
        for name, value in record.tensors.items():
            shard = ShardLayout.from_json(shards[name]) if name in shards else ShardLayout.whole(value.shape)
            full = whole.setdefault(name, np.full(shard.shape, np.nan))
            full.reshape(-1)[shard.indices()] = np.asarray(value).reshape(-1)
    assert whole
    return whole


@pytest.fixture(scope="module")
def targets() -> Iterator[Any]:
    folder = str(Path(__file__).parent)
    sys.path.insert(0, folder)
    try:
        import training_ranks

        yield training_ranks
    finally:
        sys.path.remove(folder)


@pytest.mark.parametrize(
    "name",
    [
        name if name == "accelerate-fsdp2" else pytest.param(name, marks=pytest.mark.extended)
        for name in LAUNCHES
    ],
)
def test_a_launched_run_trains_and_replays(pool: RankPool, targets: Any, tmp_path: Path, name: str) -> None:
    command, split, other = LAUNCHES[name]
    printed = launch(command, [*RUN, *parallel(split), f"output_dir={tmp_path / 'run'}"])
    assert printed.count("2 steps done") == printed.count("step 2: greedy pass rate") == 1
    assert sorted({row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")}) == [0, 1, 2]
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()

    recorded = tmp_path / "run" / "debug_dump"
    mock = [
        *(
            "rollout_worker.type=mock",
            "rollout_worker.need_llm_inference=false",
            "evaluation.every_n_steps=0",
        ),
        f"rollout_worker.trajectory_load_path={recorded}",
    ]
    expected = [gradients(recorded, step) for step in (0, 1)]
    for layout, world_size in (("", 1), (other, 2)):
        dump = tmp_path / f"dump{world_size}"
        overrides = [*RUN, *mock, *parallel(layout), f"debug.dump_dir={dump}"]
        pool.run(
            targets.trained, {"folder": tmp_path / f"replay{world_size}", "overrides": overrides}, world_size
        )
        for step, truth in enumerate(expected):
            found = gradients(dump, step)
            assert found.keys() == truth.keys()
            for parameter, values in truth.items():
                scale = np.abs(values).max()
                np.testing.assert_allclose(
                    found[parameter], values, rtol=0, atol=1e-11 * scale, err_msg=parameter
                )
