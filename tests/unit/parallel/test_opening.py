"""Runs of several processes: configurations refused before the start, and cleanup at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from closing import opened_and_closed

from regress.engine.config import load_config
from regress.errors import ConfigError
from regress.parallel.distributed_ranks import opened_world
from regress.replay.replay_pool import shared_pool

TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("overrides", "environ", "says"),
    [
        (
            ["parallel.dp=2"],
            {},
            "parallel.dp=2 asks for 2 processes, and 1 was started; start them with torchrun --nproc-per-node 2 -m "
            "regress train ...",
        ),
        (
            ["parallel.dp=2", "parallel.tp=3"],
            {"WORLD_SIZE": "4"},
            "parallel.dp=2 * parallel.tp=3 asks for 6 processes, and 4 were started; start them with torchrun "
            "--nproc-per-node 6 -m regress train ...",
        ),
        (
            [],
            {"WORLD_SIZE": "2"},
            "parallel asks for 1 process, and 2 were started; set extents in parallel whose product is that number, "
            "such as parallel.dp",
        ),
        (
            ["parallel.dp=2"],
            {"WORLD_SIZE": "two"},
            "WORLD_SIZE=two in the environment is not a number of a process or of processes; start them with "
            "torchrun or "
            "accelerate launch, or unset it",
        ),
        (
            ["parallel.dp=2"],
            {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "WORLD_SIZE=2 but RANK and MASTER_PORT not set: 2 processes cannot find one another; start them with "
            "torchrun --nproc-per-node 2, or set the variables that it sets",
        ),
        (
            ["parallel.dp=2"],
            TWO | {"RANK": "2"},
            "RANK=2 is not a number of one of WORLD_SIZE=2 processes; count them from 0, or start them with torchrun "
            "--nproc-per-node 2",
        ),
        (
            ["parallel.dp=2"],
            TWO | {"RANK": "-1"},
            "RANK=-1 in the environment is not a number of a process or of processes; start them with torchrun or "
            "accelerate launch, or unset it",
        ),
        (
            ["parallel.dp=2", "device=gpu"],
            TWO,
            r"re:device=gpu cannot be used \(RuntimeError: .+\); set device=cpu or one that this machine has",
        ),
        (
            ["parallel.dp=2", "device=cuda:1"],
            TWO,
            "device=cuda:1 cannot be that of several processes; set device=cuda, of which each process takes the one "
            "of its LOCAL_RANK, or device=cpu",
        ),
        (
            ["parallel.dp=2", "device=cuda"],
            TWO,
            "device=cuda: LOCAL_RANK is not set, so that all processes of a machine would take the same GPU; start "
            "them with torchrun, or set it to the number of the process on its machine",
        ),
        (
            ["parallel.dp=2", "device=cuda"],
            TWO | {"LOCAL_RANK": "99"},
            r"re:device=cuda: the process of LOCAL_RANK=99 finds no GPU of its own, of \d+ here; start no more "
            r"processes on a machine than it has GPUs, or set device=cpu",
        ),
    ],
)
def test_processes_that_do_not_fit(overrides: list[str], environ: Mapping[str, str], says: str) -> None:
    config = load_config(overrides=overrides, environ={}).config
    pattern = says.removeprefix("re:") if says.startswith("re:") else re.escape(says)
    with pytest.raises(ConfigError, match=f"^{pattern}$"), opened_world(config, environ):
        pytest.fail("the run has started")


def test_processes_that_do_not_find_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 finds no rank 0 at an address that nobody has."""
    environ = TWO | {"RANK": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = load_config(overrides=["parallel.dp=2", "parallel.timeout=1"], environ={}).config
    with (
        pytest.raises(ConfigError, match=r"^the 2 processes of this run do not find one another \(Dist.+\)"),
        opened_world(config, environ),
    ):
        pytest.fail("the run has started")


def test_no_thread_of_a_process_group_outlives_the_run() -> None:
    """The caches of DTensor keep destroyed groups, which can abort the process when the interpreter ends."""
    for within, after in shared_pool().run(opened_and_closed, {}, 2):
        assert within > 0
        assert after == 0
