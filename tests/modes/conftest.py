"""Dumps of three modes, made of two runs of the engine: one trains itself, the other's numbers are of the service."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from regress.dump.coordinates import Coordinates
from regress.dump.dump_files import write_atomically
from regress.dump.dump_reader import DumpReader
from regress.dump.formats import FORMATS
from regress.dump.nexrl_trajectories import trajectory_lists
from regress.dump.record import Record
from regress.dump.request_index import (
    INDEX,
    REQUESTED,
    DumpedDatum,
    DumpedRequest,
    Operation,
    Part,
    requested,
)
from regress.engine.config import load_config
from regress.engine.training_run import train
from regress.layout import Segment, TokenLayout

STEPS = 3
RECORDED = ("trajectory", "forward_data", "loss", "is_loss_debug", "batch_inputs", "gradient", "param")
RUN: dict[str, Any] = {
    "max_steps": STEPS,
    "data.prompts_per_step": 6,
    "data.group_size": 4,
    "warm_start.steps": 40,
    "evaluation.every_n_steps": 0,
    "optimizer.warmup_steps": 0,
    "optimizer.weight_decay": 0.01,
    "optimizer.max_grad_norm": 0.05,
    "debug.enable_data_dump": "true",
    **{f"debug.dump_options.{name}": "true" for name in RECORDED},
}
TOKENS = ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss", "entropy")


def trained(folder: Path, **settings: Any) -> Path:
    """Train, and return the dump."""
    values = {**RUN, "output_dir": folder, "debug.dump_dir": folder / "dump", **settings}
    overrides = [f"{key}={value}" for key, value in values.items()]
    train(load_config(None, "reverse_string", overrides).config, Console(file=io.StringIO()))
    return folder / "dump"


@dataclass
class Row:
    """A datum as the service computed it: values at their own tokens, ``[S]`` each."""

    tokens: list[int]
    mask: np.ndarray[Any, Any]
    values: dict[str, np.ndarray[Any, Any]]
    order: int


@dataclass
class Step:
    """One step of client and service, before it is written; tests change it."""

    trajectories: dict[str, Any]
    datums: list[dict[str, Any]]
    rows: list[Row]
    metrics: dict[str, Any]
    asked: dict[str, Any]
    adam: dict[str, float]
    config: dict[str, Any]
    whole: list[Record]
    chunks: list[list[int]] = field(default_factory=list)
    loss: str = "importance_sampling"


@dataclass
class Modes:
    """Three dumps: ``self_hosted`` is there, the others are written by `write`, all steps or one."""

    self_hosted: Path
    folder: Path
    steps: list[Step]
    ranks: int = 1
    micros: int | None = None
    types: tuple[str, ...] = ("forward_data", "loss", "is_loss_debug", "batch_inputs", "param", "gradient")
    only: int | None = None

    @property
    def client(self) -> Path:
        return self.folder / "client"

    @property
    def service(self) -> Path:
        return self.folder / "service"

    def write(self) -> Modes:
        lines, seq = [], 0
        for number, step in enumerate(self.steps):
            if self.only not in (None, number):
                continue
            self._client(number, step)
            places = self._places(len(step.rows))
            for chunk in step.chunks or [[*range(len(step.rows))]]:
                seq += 1
                lines.append(self._pass(number, step, seq, chunk, places))
            self._records(number, step, lines, places)
            seq += 1
            norm = float(step.metrics["grad_norm"])
            told = {"grad_norm": norm, "clipped_grad_norm": float(step.metrics["clipped_grad_norm"])}
            lines.append(
                DumpedRequest(
                    "model", Operation.OPTIM_STEP, number, seq, adam=step.adam, metrics=told, types=("param",)
                )
            )
        write_atomically(self.service / INDEX, [line.line() for line in lines])
        return self

    def _client(self, number: int, step: Step) -> None:
        stem = Coordinates(number).stem
        info = {REQUESTED: step.asked}
        payloads = {
            "prepared_trajectories": {"step": number, **step.trajectories},
            "datums": {"step": number, "num_datums": len(step.datums), "datums": step.datums},
            "training_metrics": {"step": number, "metrics": step.metrics, "extra_info": info},
        }
        for type, payload in payloads.items():
            path = self.client / type / f"{stem}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(payload, path)

    def _places(self, count: int) -> list[tuple[int, int]]:
        """Return rank and microbatch of each row: the ranks in turn."""
        return [(i % self.ranks, i // self.ranks) for i in range(count)]

    def _pass(
        self, number: int, step: Step, seq: int, chunk: list[int], places: list[tuple[int, int]]
    ) -> DumpedRequest:
        parts = tuple(Part(*places[row], (index,)) for index, row in enumerate(chunk))
        rows = [step.rows[row] for row in chunk]
        total = math.fsum(float(r.values["elementwise_loss"] @ r.mask) for r in rows)
        return DumpedRequest(
            "model",
            Operation.FORWARD_BACKWARD,
            number,
            seq,
            f"op{seq}",
            loss=step.loss,
            config=step.config,
            types=tuple(type for type in self.types if type not in ("param", "gradient")),
            datums=tuple(DumpedDatum(tuple(row.tokens)) for row in rows),
            parts=parts,
            metrics={"loss:sum": total},
        )

    def _records(
        self, number: int, step: Step, lines: list[DumpedRequest], places: list[tuple[int, int]]
    ) -> None:
        keys: dict[int, Any] = {}
        passes = [one for one in lines if one.step == number and one.operation != Operation.OPTIM_STEP]
        for one, chunk in zip(passes, step.chunks or [[*range(len(step.rows))]], strict=True):
            keys |= {row: one.key(index) for index, row in enumerate(chunk)}
        for index, row in enumerate(step.rows):
            for record in self._row(number, row, places[index], keys[index]):
                self._put(record)
        for record in step.whole:
            if record.type in self.types:
                self._put(record)

    def _row(self, number: int, row: Row, place: tuple[int, int], key: Any) -> list[Record]:
        where = Coordinates(number, rank=place[0], micro=place[1])
        size = len(row.tokens)
        layout = TokenLayout((1, size), (Segment(0, 0, size, 0, 0),)).to_json()
        meta = {"layout": layout, "samples": [key]}
        v = {name: values[None] for name, values in row.values.items()}
        ids, mask = np.array([row.tokens]), row.mask[None]
        loss = np.float32((v["elementwise_loss"] * mask).sum())
        debug = {name: v[name] for name in TOKENS if name != "entropy"}
        found: dict[str, dict[str, Any]] = {
            "batch_inputs": {"input_ids": ids, "response_mask": mask},
            "forward_data": {"log_probs": v["log_probs"], "entropy": v["entropy"], "response_mask": mask},
            "is_loss_debug": {**debug, "effective_valid": mask, "loss": loss},
            "loss": {"loss": loss},
        }
        if "batch_inputs" not in self.types:
            del found["batch_inputs"]
        return [
            Record.of(type, where, tensors, meta) for type, tensors in found.items() if type in self.types
        ]

    def _put(self, record: Record) -> None:
        path = self.service / record.type / f"{record.where.stem}.pt"
        write_atomically(path, FORMATS["pt"].encode(record))


def steps_of(dump: Path) -> list[Step]:
    """Return the steps of client and service, from the numbers of a run of the engine."""
    reader = DumpReader(dump)
    found = []
    for step in range(STEPS):
        (trajectory,) = reader.records("trajectory", step)
        whole = [record for type in ("gradient", "param") for record in reader.records(type, step)]
        rows = [row for row in _rows(reader, step) if row.values["advantages"].any()]
        datums = [_datum(row) for row in rows]
        norm = float(whole[0].meta["grad_norm"])  # type: ignore[arg-type]
        rate = 1e-3 * (STEPS - step) / STEPS
        adam = {"learning_rate": rate, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
        adam |= {"weight_decay": 0.01, "grad_clip_norm": 0.05}
        loss = math.fsum(float(r.values["elementwise_loss"] @ r.mask) for r in rows)
        metrics = {"loss": loss, "loss:sum": loss, "grad_norm": norm, "clipped_grad_norm": min(norm, 0.05)}
        config = {"entropy_coeff": 0.0}
        asked = requested(loss="importance_sampling", config=config, adam=adam, temperature=1.0)
        found.append(
            Step(trajectory_lists(trajectory), datums, rows, metrics, asked, dict(adam), config, whole)
        )
    return found


def _rows(reader: DumpReader, step: int) -> list[Row]:
    found: dict[tuple[str, int], Row] = {}
    (inputs,), (forward,) = reader.records("batch_inputs", step), reader.records("forward_data", step)
    (debug,) = reader.records("is_loss_debug", step)
    tensors = {**debug.tensors, "entropy": forward.tensors["entropy"]}
    weights = tensors["weights"]
    for name in ("advantages", "elementwise_loss"):
        tensors[name] = (tensors[name].astype(np.float64) * weights).astype(np.float32)
    layout: Any = debug.meta["layout"]
    for key, (_, start, stop, row, col) in zip(debug.meta["samples"], layout["segments"], strict=True):  # type: ignore[arg-type]
        assert start == 0
        at = row, slice(col, col + stop)
        tokens = inputs.tensors["input_ids"][at].tolist()
        values = {name: tensors[name][at].copy() for name in TOKENS}
        mask = tensors["effective_valid"][at].astype(np.int64)
        found[key[0], key[1]] = Row(tokens, mask, values, len(found))  # type: ignore[index]
    return [*found.values()]


def _datum(row: Row) -> dict[str, Any]:
    inputs: dict[str, Any] = {"target_tokens": row.tokens[1:], "loss_mask": row.mask[1:].tolist()}
    for name, key in (("logprobs", "old_log_probs"), ("advantages", "advantages")):
        inputs[name] = (row.values[key] * row.mask)[1:].astype(float).tolist()
    return {"input_tokens": row.tokens[:-1], "loss_fn_inputs": inputs}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], tuple[Path, list[Step]]]:
    """Train twice: padded batches of all samples, and again from the recorded rollouts on, padded on the left."""

    @cache
    def recorded() -> tuple[Path, list[Step]]:
        golden = trained(tmp_path_factory.mktemp("self_hosted"))
        mock = {
            "rollout_worker.type": "mock",
            "rollout_worker.need_llm_inference": "false",
            "rollout_worker.trajectory_load_path": golden / "trajectory",
            "batching.padding_side": "left",
        }
        again = trained(tmp_path_factory.mktemp("again"), **mock)
        return golden, steps_of(again)

    return recorded


@pytest.fixture
def modes(runs: Callable[[], tuple[Path, list[Step]]], tmp_path: Path) -> Modes:
    """Healthy dumps of three modes, not written yet."""
    golden, steps = runs()
    return Modes(golden, tmp_path, copy.deepcopy(steps))
