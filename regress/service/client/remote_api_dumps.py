"""Files of the remote API mode: prepared trajectories, datums and metrics of training, under NexRL's names and keys.

``prepared_trajectories`` has a file for every rollout step. ``datums`` and ``training_metrics`` have one for every
optimizer update, under the number of updates before it, which is the step of the service's own dumps; with one update
a rollout both numbers are the same. Source: NexRL v1.4.0, ``nexrl/utils/data_dumper.py``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from regress.dump.coordinates import parse_stem
from regress.dump.dump_continuation import ContinuationPoint, Position, StartingPlace
from regress.dump.dump_files import Stamp, stamp_of
from regress.dump.dump_location import Location, location
from regress.dump.nexrl_trajectories import as_dict
from regress.dump.request_index import REQUESTED
from regress.dump.trajectory import Trajectory
from regress.durable_files import write
from regress.engine.config.config_schema import Config
from regress.engine.grpo_trainer import UnfinishedStep
from regress.errors import DumpError, reason
from regress.service.service_api import Datum, PassResult

TYPES = ("prepared_trajectories", "datums", "training_metrics")


class RemoteDumps:
    """Writer of the files that ``debug.remote_api_dump_options`` names.

    Args:
        start: place in the run at which the files of an earlier process are continued.

    Raises:
        DumpError: if the directory holds an earlier dump and ``debug.overwrite`` does not allow to replace it.
    """

    def __init__(self, config: Config, start: StartingPlace | None = None) -> None:
        debug = config.debug
        self._each = config.updates_per_rollout
        self._stamps: dict[str, Stamp] = {}
        self._wanted = {
            n for n in TYPES if debug.enable_data_dump and getattr(debug.remote_api_dump_options, n)
        }
        self._every = debug.dump_every_n_steps
        self._suffix = "jsonl" if debug.dump_format == "jsonl" else "pt"
        self.folder: Location | None = None
        if not self._wanted:
            return
        self.folder = location(debug.dump_dir)
        if start is not None:
            self._stamps = self._continued(start)
            return
        for name in (*TYPES, "trajectory", "manifest.json"):
            below = self.folder / name
            if not below.exists():
                continue
            if not debug.overwrite or name not in TYPES:
                raise DumpError(
                    f"{self.folder} holds an earlier dump ({name}), which would be mixed with this one; choose another "
                    "debug.dump_dir" + (", or set debug.overwrite=true" if name in TYPES else "")
                )
            for path in [*below.iterdir()]:
                path.unlink()

    def position(self, place: ContinuationPoint) -> Position:
        """Return which files before a place are written."""
        kept = {name: stamp for name, stamp in self._stamps.items() if self._before(name, place)}
        return Position.of(kept)

    def _before(self, name: str, place: ContinuationPoint) -> bool:
        """Return True if a file lies before a place: trajectories by rollouts, the others by updates."""
        kind, _, file = name.partition("/")
        where = parse_stem(file.partition(".")[0])
        if where is None:
            return False
        if kind == "prepared_trajectories":
            return where.step < place.step + (place.updates_in_step > 0)
        return where.step < place.step * self._each + place.updates_in_step

    def _continued(self, start: StartingPlace) -> dict[str, Stamp]:
        """Return the files that an earlier process wrote before a place, after removing those that follow.

        Raises:
            DumpError: if they are not those that it wrote.
        """
        assert self.folder is not None
        below = [self.folder / name for name in TYPES]
        files = {f"{one.name}/{path.name}": path for one in below if one.is_dir() for path in one.iterdir()}
        kept = {name: path for name, path in files.items() if self._before(name, start.place)}
        stamps = {name: stamp_of(path.read_bytes()) for name, path in kept.items()}
        if Position.of(stamps) != start.position:
            raise DumpError(f"""{self.folder} does not hold the {start.position.files} files that were written before
            {start.stated}; restore them, or choose another debug.dump_dir""")
        for name in files.keys() - kept.keys():
            files[name].unlink()
        return stamps

    def due(self, step: int) -> bool:
        """Return True if files of this step are written."""
        return bool(self._wanted) and step % self._every == 0

    def prepared(self, step: int, work: UnfinishedStep) -> None:
        """Write the trajectories of a rollout with the advantage of each token."""
        if not self._on("prepared_trajectories", step):
            return
        rows = _advantages(work)
        items = [_with_advantages(t, values) for t, values in zip(work.trajectories, rows, strict=True)]
        payload = {"num_trajectories": len(items), "trajectories": items}
        payload["advantages"] = [_of_sample(values) for values in rows]
        self._write("prepared_trajectories", step, payload)

    def datums(
        self, step: int, update: int, data: Sequence[Datum], loss: str, settings: Mapping[str, Any]
    ) -> None:
        """Write what one update's gradient came from, sent as it is written."""
        if not self._on("datums", step):
            return
        items = [_datum(datum) for datum in data]
        extra = {"rollout_step": step, "loss_fn": loss, "loss_fn_config": dict(settings)}
        self._write("datums", update, {"num_datums": len(items), "datums": items, "extra_info": extra})

    def metrics(
        self,
        step: int,
        update: int,
        result: PassResult,
        optimizer: Mapping[str, float],
        own: Mapping[str, float],
        asked: Mapping[str, Any],
    ) -> None:
        """Write the metrics that the service returned for one update; those of the optimizer go beside them."""
        if not self._on("training_metrics", step):
            return
        metrics = dict(result.metrics)
        if "loss:sum" in metrics:
            metrics.setdefault("loss", metrics["loss:sum"])
        extra = {
            "rollout_step": step,
            "optim_step": dict(optimizer),
            "computed_here": dict(own),
            REQUESTED: dict(asked),
        }
        self._write("training_metrics", update, {"metrics": metrics, "extra_info": extra})

    def _on(self, name: str, step: int) -> bool:
        return name in self._wanted and self.due(step)

    def _write(self, name: str, step: int, payload: Mapping[str, Any]) -> None:
        assert self.folder is not None
        below = self.folder / name
        whole = {"step": step, **payload}
        if self._suffix == "pt":
            buffer = io.BytesIO()
            torch.save(whole, buffer)
            data = buffer.getvalue()
        else:
            data = (json.dumps(whole) + "\n").encode()
        path = below / f"step_{step:06d}.{self._suffix}"
        self._stamps[f"{name}/{path.name}"] = stamp_of(data)
        try:
            write(path, [data]) if isinstance(path, Path) else path.write_bytes(data)
        except OSError as error:
            raise DumpError(
                f"{path} cannot be written ({reason(error)}); choose another debug.dump_dir"
            ) from error


def _advantages(work: UnfinishedStep) -> list[list[float]]:
    """Return the advantage of every token of each trajectory, 0 where none is trained on."""
    rows = []
    for mini in work.minis:
        batch, values = mini.batch, mini.tokens.advantages
        assert values is not None
        flat = torch.zeros(len(batch.mask), dtype=torch.float64)
        flat[torch.from_numpy(batch.mask)] = values.detach().cpu().double()
        rows += [part.tolist() for part in flat.split(batch.lengths)]
    return rows


def _of_sample(values: Sequence[float]) -> float:
    """Return the advantage of a sample: that of its tokens, or their mean where they differ."""
    present = {value for value in values if value != 0.0}
    return present.pop() if len(present) == 1 else sum(values) / max(1, sum(v != 0.0 for v in values))


def _with_advantages(trajectory: Trajectory, advantages: Sequence[float]) -> dict[str, Any]:
    return {**as_dict(trajectory), "advantages": list(advantages)}


def _datum(datum: Datum) -> dict[str, Any]:
    return {
        "input_tokens": datum.tokens.tolist(),
        "loss_fn_inputs": {name: values.tolist() for name, values in datum.inputs.items()},
        "datum_id": datum.id,
    }
