"""Runs through a service that end at a checkpoint and are gone on with, by our own clients over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from regress.cli import main
from regress.engine.checkpoint.checkpoint_saver import Stopped
from regress.errors import CheckpointError, DumpError
from regress.service.client.remote_run import train
from regress.service.service_api import ServiceError
from tests.unit.service.client.conftest import Sides, over_http, rows, serving

TWO_UPDATES = ("trainer.mini_batch_size=4", "evaluation.every_n_steps=1")
KL = ("algorithm.kl_coef=0.1", "trainer.save_updates=1")
CURRICULUM = (
    "curriculum.enable=true",
    "curriculum.stages=[{name: a, levels: [1], threshold: 0.01}, {name: b, levels: [1], threshold: 0.9}]",
    "curriculum.min_evaluations=1",
    "curriculum.full_pass=false",
)
OTHER_WIRE = ("service.train_service.backend", "service.weaver_service", "service.tinker_service")
DUMPS = (
    "debug.enable_data_dump=true",
    "debug.dump_format=jsonl",
    "debug.remote_api_dump_options.prepared_trajectories=true",
    "debug.remote_api_dump_options.datums=true",
    "debug.remote_api_dump_options.training_metrics=true",
)


def told(folder: Path) -> list[Mapping[str, Any]]:
    """Return what a run computed: the last row of each update or step, without clocks and events of checkpoints."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows(folder):
        kept = {
            key: "nan" if isinstance(value, float) and math.isnan(value) else value
            for key, value in row.items()
            if not key.startswith(("timing", "perf", "checkpoint", "time", "resume", "_", "final"))
            and key not in ("segment", "sequence", "after", "event", "wall_time")
        }
        found.setdefault((row.get("step"), row.get("update")), {}).update(kept)
    return [found[key] for key in sorted(found, key=str)]


def dumped(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("step_*.jsonl"))}


@pytest.mark.parametrize(
    ("wire", "chosen", "stop", "steps"),
    [
        pytest.param("weaver", KL, 3, 2, id="weaver-inside-a-step"),
        pytest.param("tinker", KL, 4, 3, id="tinker-between-steps", marks=pytest.mark.extended),
        pytest.param(
            "tinker",
            ("service.tinker_service.lora_rank=4", "trainer.save_updates=1", *CURRICULUM),
            3,
            3,
            id="tinker-lora-and-curriculum",
            marks=pytest.mark.extended,
        ),
        pytest.param(
            "weaver",
            ("service.weaver_service.lora_rank=4", *KL, "reference.without_adapter=true"),
            3,
            3,
            id="weaver-lora",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(
    sides: Sides, base: Path, tmp_path: Path, wire: str, chosen: tuple[str, ...], stop: int, steps: int
) -> None:
    """The last part of the run is another process of the client, and the service was restarted before it."""
    chosen = (f"max_steps={steps}", *TWO_UPDATES, *DUMPS, *chosen)
    with serving(base, tmp_path / "whole-state") as url:
        whole = over_http(sides, "whole", wire, url, *chosen, f"debug.dump_dir={tmp_path / 'whole-dump'}")
    again = (*chosen, f"debug.dump_dir={tmp_path / 'dump'}")
    with serving(base, tmp_path / "state") as url, pytest.raises(Stopped):
        over_http(sides, "parts", wire, url, *again, stop_after=stop)
    with serving(base, tmp_path / "state") as url:
        parts = over_http(sides, "parts", wire, url, *again, "trainer.resume_from_checkpoint=latest")
    assert told(parts) == told(whole)
    before, after = dumped(tmp_path / "whole-dump"), dumped(tmp_path / "dump")
    assert len(before) == steps + 2 * steps + 2 * steps
    assert after == before


def test_a_checkpoint_of_a_run_has_no_weights_but_says_where_they_lie(
    sides: Sides, base: Path, tmp_path: Path
) -> None:
    dumps = (*DUMPS, f"debug.dump_dir={tmp_path / 'dump'}")
    saving = ("max_steps=1", "trainer.save_steps=1", *dumps)
    again = ("max_steps=2", "trainer.save_steps=1", "trainer.resume_from_checkpoint=latest")
    with serving(base, tmp_path / "state") as url:
        folder = over_http(sides, "run", "weaver", url, *saving)
        found = folder / "checkpoint-1"
        assert not (found / "model.safetensors").exists()
        remote = json.loads((found / "regress_state.json").read_text())["parts"]["remote"]
        assert remote["path"].startswith("weaver://")
        assert remote["path"].endswith("/checkpoint-1")
        examined = CliRunner().invoke(main, ["doctor", str(folder)])
        assert examined.exit_code == 0, examined.output
        assert "the weights lie in the training service" in examined.output
        with pytest.raises(CheckpointError, match="saved with wire='weaver', and this run has wire='tinker'"):
            over_http(sides, "run", "tinker", url, *again, allow=OTHER_WIRE)
        (changed,) = (tmp_path / "dump" / "datums").glob("*")
        changed.write_text(changed.read_text().replace("1", "2"))
        with pytest.raises(
            DumpError, match="does not hold the 3 files that were written before checkpoint-1"
        ):
            over_http(sides, "run", "weaver", url, *again, *dumps)
    with (
        serving(base, tmp_path / "another") as url,
        pytest.raises(ServiceError, match="does not give back the save checkpoint-1 of the model session-"),
    ):
        over_http(sides, "run", "weaver", url, *again)


def test_a_checkpoint_with_weights_is_none_for_a_service(sides: Sides, base: Path) -> None:
    """Its weights would be left out, and the service's own trained on."""
    sides.here("trainer.save_steps=1", "max_steps=1")
    found = f"trainer.resume_from_checkpoint={sides.root / 'here' / 'checkpoint-1'}"
    config = sides.config("there", "trainer.type=remote", found, "max_steps=2")
    with pytest.raises(CheckpointError, match=r"trainer\.type"):
        train(config, Console(quiet=True), allow_change=("model",), connect=None)  # type: ignore[arg-type]
