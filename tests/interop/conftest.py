"""Dumps as NexRL writes them, made from the tables of its format: no real one is public."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

PAD = 7
Values = NDArray[np.float64]
VALUES = ("log_probs", "entropy", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss")


@dataclass
class Sample:
    """A rollout and what was computed of its tokens, each value at its own token."""

    tokens: list[int]
    prompt: int
    group: str
    run: int
    reward: float
    values: dict[str, Values]

    @property
    def mask(self) -> NDArray[np.int64]:
        return (np.arange(len(self.tokens)) >= self.prompt).astype(np.int64)


def rollouts(count: int = 6, seed: int = 0, runs: int = 2) -> list[Sample]:
    """Rollouts of unequal lengths; ``runs`` of them are a group."""
    rng = np.random.default_rng(seed)
    found = []
    for index in range(count):
        prompt, response = int(rng.integers(2, 6)), int(rng.integers(2, 8))
        tokens = rng.integers(10, 60, prompt + response).tolist()
        values = {name: rng.standard_normal(len(tokens)) for name in VALUES}
        values["log_probs"] = -np.abs(values["log_probs"]) - 0.1
        values["old_log_probs"] = values["log_probs"] + 0.01 * values["old_log_probs"]
        values["prob_ratio"] = np.exp(values["log_probs"] - values["old_log_probs"])
        values["advantages"] = np.full(len(tokens), 0.5 - index % 2)
        values["elementwise_loss"] = -values["prob_ratio"] * values["advantages"]
        found.append(Sample(tokens, prompt, f"{index // runs:03d}", index % runs, float(index % 3), values))
    return found


@dataclass
class Nexrl:
    """Setup of a NexRL run, which decides the form of its dump.

    Attributes:
        old: whether it is of the generation before commit 5bd3f78.
        ranks, micros, mini_batches: microbatches are of a mini-batch, and every mini-batch writes the same files.
        junk: what stands where no token is.
        pack: samples that lie end to end in a row, with ``gap`` padding tokens between them.
        positions: whether positions are written beside the token ids.
    """

    folder: Path
    samples: Sequence[Sample]
    old: bool = False
    format: str = "pt"
    dtype: str = "float32"
    ranks: int = 2
    micros: int = 1
    mini_batches: int = 1
    step: int = 0
    junk: float = -17.25
    ids: bool = True
    kl: float = 0.0
    extra: Callable[[Sample], dict[str, Any]] = lambda sample: {}
    pack: int = 1
    gap: int = 0
    positions: bool = False

    @property
    def rows(self) -> list[Sample]:
        """The rows of the batch: filled up with the first ones, and sorted."""
        again = -len(self.samples) % self.ranks
        rows = [*self.samples, *(self.samples[i] for i in range(again))]
        return sorted(rows, key=lambda sample: (sample.group, sample.group, sample.run))

    @property
    def widths(self) -> tuple[int, int]:
        """``(W, R)``."""
        if self.old:
            response = max(len(s.tokens) - s.prompt for s in self.rows)
            return max(s.prompt for s in self.rows) + response, response
        whole = [[sample] for sample in self.rows]
        lines = (
            whole if self.pack == 1 else [line for _, _, part in self.batches() for line in self.lines(part)]
        )
        width = max(sum(len(s.tokens) + self.gap for s in line) - self.gap for line in lines)
        return width, width - 1

    def lines(self, rows: Sequence[Sample]) -> list[Sequence[Sample]]:
        return [rows[at : at + self.pack] for at in range(0, len(rows), self.pack)]

    def placed(self, rows: Sequence[Sample]) -> list[tuple[int, int, Sample]]:
        """Row, first column, and the sample that lies there."""
        found = []
        for number, line in enumerate(self.lines(rows)):
            start = self.start(line[0])
            for sample in line:
                found.append((number, start, sample))
                start += len(sample.tokens) + self.gap
        return found

    def start(self, sample: Sample) -> int:
        width, response = self.widths
        return width - response - sample.prompt if self.old else 0

    def grid(self, rows: Sequence[Sample], name: str) -> Values:
        """``[b, R]`` values of a quantity."""
        width, response = self.widths
        out = np.full((len(self.lines(rows)), width), self.junk)
        for line, start, sample in self.placed(rows):
            out[line, start : start + len(sample.tokens)] = sample.values[name]
        return out[:, width - response :]

    def mask(self, rows: Sequence[Sample]) -> NDArray[np.int64]:
        width, response = self.widths
        out = np.zeros((len(self.lines(rows)), width), np.int64)
        for line, start, sample in self.placed(rows):
            out[line, start : start + len(sample.tokens)] = sample.mask
        return out[:, width - response :]

    def input_ids(self, rows: Sequence[Sample]) -> NDArray[np.int64]:
        out = np.full((len(self.lines(rows)), self.widths[0]), PAD, np.int64)
        for line, start, sample in self.placed(rows):
            out[line, start : start + len(sample.tokens)] = sample.tokens
        return out

    def position_ids(self, rows: Sequence[Sample]) -> NDArray[np.int64]:
        out = np.zeros((len(self.lines(rows)), self.widths[0]), np.int64)
        for line, start, sample in self.placed(rows):
            out[line, start : start + len(sample.tokens)] = np.arange(len(sample.tokens))
        return out

    def tensor(self, values: Any) -> torch.Tensor:
        found = torch.as_tensor(np.asarray(values))
        return found.to(getattr(torch, self.dtype)) if found.is_floating_point() else found

    def batches(self) -> list[tuple[int, int, list[Sample]]]:
        """Rank, microbatch and rows of every file, as the last mini-batch left it."""
        rows, found = self.rows, {}
        share = len(rows) // self.ranks
        for rank in range(self.ranks):
            own = rows[rank * share : (rank + 1) * share]
            size = -(-len(own) // self.mini_batches)
            for begin in range(0, len(own), size):
                part = own[begin : begin + size]
                small = -(-len(part) // self.micros)
                for micro, at in enumerate(range(0, len(part), small)):
                    found[rank, micro] = part[at : at + small]
        return [(rank, micro, part) for (rank, micro), part in found.items()]

    def write(self, type: str, stem: str, payload: dict[str, Any]) -> Path:
        path = self.folder / type / f"{stem}.{self.format}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if self.format == "pt":
            torch.save(payload, path)
        else:
            plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in payload.items()}
            path.write_text(json.dumps(plain) + "\n")
        return path

    @property
    def stem(self) -> str:
        return f"step_{self.step:06d}"

    def trajectory(self, type: str = "trajectory", **more: Any) -> None:
        items = []
        for sample in self.samples:
            fields: dict[str, Any] = {"group_id": sample.group, "uid": sample.group, "run_id": sample.run}
            if self.old:
                fields |= {"prompt": "p", "response": "r", "finish_reason": "stop", "ground_truth": "g"}
                fields["logprobs"] = (sample.values["old_log_probs"] * sample.mask).tolist()
            fields |= self.extra(sample)
            item = {"tokens": sample.tokens, "loss_mask": sample.mask.tolist(), "reward": sample.reward}
            items.append({**item, "is_val": False, "extra_fields": fields, **more})
        payload = {"step": self.step, "num_trajectories": len(items), "trajectories": items}
        self.write(type, self.stem, payload)

    def old_log_probs(self) -> None:
        parts = [self.grid(part, "old_log_probs") for _, _, part in self.batches()]
        packed = np.concatenate(parts) if self.pack > 1 else self.grid(self.rows, "old_log_probs")
        values = self.tensor(packed)
        info = {"batch_size": len(self.samples), "input_ids_shape": [len(self.rows), self.widths[0]]}
        payload = {"step": self.step, "old_log_probs": values, "shape": [*values.shape], "batch_info": info}
        self.write("old_log_probs", self.stem, payload)

    def forward_data(self) -> None:
        for rank, micro, rows in self.batches():
            payload: dict[str, Any] = {"step": self.step, "rank": rank, "micro_idx": micro}
            for name in ("log_probs", "entropy"):
                payload[name] = self.tensor(self.grid(rows, name))
                payload[f"{name}_shape"] = [*payload[name].shape]
            payload["response_mask"] = self.tensor(self.mask(rows))
            if self.ids:
                payload["input_ids"] = self.tensor(self.input_ids(rows))
            if self.positions:
                payload["position_ids"] = self.tensor(self.position_ids(rows))
            self.write("forward_data", f"{self.stem}_rank{rank}_micro{micro}", payload)

    def loss(self) -> None:
        for rank, micro, rows in self.batches():
            terms = [(s.values["elementwise_loss"] * s.mask).sum() for s in rows]
            count = sum(int(s.mask.sum()) for s in rows)
            value = float(np.float32(np.sum(terms) / count))
            payload = {"step": self.step, "rank": rank, "micro_idx": micro, "loss": value, "pg_loss": value}
            payload |= {
                "entropy_loss": 0.25,
                "metrics": {"kl": self.kl, "tokens": "many"},
                "extra_info": {"epoch": 0, "batch_idx": 0},
            }
            self.write("loss", f"{self.stem}_rank{rank}_micro{micro}", payload)

    def is_loss_debug(self) -> None:
        for rank, micro, rows in self.batches():
            names = ("log_probs", "old_log_probs", "advantages", "prob_ratio", "elementwise_loss")
            payload: dict[str, Any] = {name: self.tensor(self.grid(rows, name)) for name in names}
            payload["effective_valid"] = self.tensor(self.mask(rows))
            payload["loss"] = self.tensor(np.float64(0.125))
            self.write("is_loss_debug", f"{self.stem}_rank{rank}_micro{micro}", payload)

    def parameter(self, type: str, values: Sequence[float] = (1.0, -2.0, 0.5)) -> None:
        for rank in range(self.ranks):
            array = self.tensor(np.array(values) * (rank + 1))
            payload = {"step": self.step, "rank": rank, "param_name": "layers.0.weight", type: array}
            payload |= {
                "shape": [*array.shape],
                "dtype": str(array.dtype),
                "norm": 1.0,
                "mean": 0.0,
                "std": 1.0,
            }
            self.write(type, f"{self.stem}_rank{rank}", payload)

    def datums(self) -> None:
        items = []
        for sample in self.samples:
            if not sample.values["advantages"].any():
                continue
            inputs = {name: sample.values[key][1:].tolist() for name, key in DATUM.items()}
            inputs |= {"target_tokens": sample.tokens[1:], "loss_mask": sample.mask[1:].tolist()}
            items.append({"input_tokens": sample.tokens[:-1], "loss_fn_inputs": inputs})
        self.write("datums", self.stem, {"step": self.step, "num_datums": len(items), "datums": items})

    def self_hosted(self) -> Nexrl:
        self.trajectory()
        self.old_log_probs()
        self.forward_data()
        self.loss()
        return self

    def weaver(self) -> Nexrl:
        self.forward_data()
        self.loss()
        self.is_loss_debug()
        return self

    def remote_api(self) -> Nexrl:
        self.trajectory("prepared_trajectories", advantages=[])
        self.datums()
        self.write("training_metrics", self.stem, {"step": self.step, "metrics": {"loss": 0.5}})
        return self


DATUM = {"logprobs": "old_log_probs", "advantages": "advantages"}


@pytest.fixture
def nexrl(tmp_path: Path) -> Callable[..., Nexrl]:
    """Set up a run of NexRL that dumps into a folder of its own."""

    def setup(name: str = "nexrl", samples: Sequence[Sample] | None = None, **options: Any) -> Nexrl:
        return Nexrl(tmp_path / name, rollouts() if samples is None else samples, **options)

    return setup


@pytest.fixture
def sampled() -> Callable[..., list[Sample]]:
    """Make rollouts."""
    return rollouts
