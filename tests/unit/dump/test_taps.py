"""Taps: where they go, what they merge, what they refuse, and that they change nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regress.dump import DumpReader, Recorder, at, recording, tap, tap_trajectories, wanted
from regress.dump.dump_manifest import MANIFEST
from regress.dump.taps import current
from regress.errors import DumpError

ALL = {"loss": True, "forward_data": True, "trajectory": True, "param": True}


class TableLayout:
    def to_json(self) -> dict[str, Any]:
        return {"shape": [1, 2], "segments": [(0, 1, 2, 0, 0)]}


def test_documented_tree(tmp_path: Path, make_trajectory: Any, format_name: str) -> None:
    with recording(Recorder(tmp_path, options=ALL, format=format_name)):
        for step in range(2):
            with at(step=step):
                tap_trajectories([make_trajectory()])
                for micro in range(2):
                    with at(rank=0, micro=micro):
                        tap("forward_data", log_probs=torch.zeros(1, 2))
                        tap("loss", loss=torch.tensor(0.5))
                with at(rank=0):
                    tap("param", **{"a.weight": torch.ones(2)})
    names = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    expected = [MANIFEST]
    for step in ("step_000000", "step_000001"):
        expected += [f"trajectory/{step}.{format_name}", f"param/{step}_rank0.{format_name}"]
        for micro in (0, 1):
            expected += [
                f"{type}/{step}_rank0_micro{micro}.{format_name}" for type in ("forward_data", "loss")
            ]
    assert names == sorted(expected)
    reader = DumpReader(tmp_path)
    assert [record.type for record in reader.records(step=1)] == [
        *("trajectory", "forward_data", "forward_data", "loss", "loss", "param"),
    ]


def test_updates_of_a_step_do_not_overwrite(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options=ALL)), at(step=0):
        for update in range(4):
            with at(update=update, epoch=update // 2, mini_batch=update % 2, rank=0, micro=0):
                tap("loss", loss=float(update))
    records = list(DumpReader(tmp_path))
    assert [record.tensors["loss"].item() for record in records] == [0, 1, 2, 3]
    assert [(record.epoch, record.mini_batch) for record in records] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("key", ["micro", "epoch"])
def test_what_would_share_a_file_is_an_error(tmp_path: Path, key: str) -> None:
    def run() -> None:
        with recording(Recorder(tmp_path, options=ALL)), at(step=0):
            for value in (0, 1):
                with at(**{key: value if key == "epoch" else 0}):
                    tap("loss", loss=float(value))

    with pytest.raises(DumpError, match=r"loss/step_000000.*\.safetensors would be written twice") as caught:
        run()
    assert "number the optimizer updates of a step with at(update=...)" in str(caught.value)
    assert not (tmp_path / MANIFEST).exists()
    assert len(list((tmp_path / "loss").iterdir())) == 1


def test_taps_at_one_place_make_one_record(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options=ALL)), at(step=0, rank=0, micro=0):
        tap("loss", loss=1.0, meta={"tokens": 5})
        tap("forward_data", layout=TableLayout(), log_probs=np.zeros(2))
        tap("loss", pg_loss=2.0, meta={"tokens": 5, "scale": 0.5})
    forward, loss = DumpReader(tmp_path)
    assert list(loss.tensors) == ["loss", "pg_loss"]
    assert loss.meta == {"tokens": 5, "scale": 0.5}
    assert forward.meta == {"layout": {"shape": [1, 2], "segments": [[0, 1, 2, 0, 0]]}}


def test_duplicate_names_and_contradictions(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options=ALL)), at(step=0, micro=1):
        tap("loss", loss=1.0, meta={"tokens": 5})
        with pytest.raises(DumpError, match="tensor 'loss' was tapped twice for loss at step_000000_micro1"):
            tap("loss", loss=1.0)
        with pytest.raises(DumpError, match="meta 'tokens' was tapped with two values"):
            tap("loss", pg_loss=1.0, meta={"tokens": 6})
    (record,) = DumpReader(tmp_path)
    assert list(record.tensors) == ["loss"]


@pytest.mark.parametrize("name", ["step", "regress", "", "a\nb", "\ud800", "__metadata__"])
def test_reserved_names(tmp_path: Path, name: str) -> None:
    with (
        recording(Recorder(tmp_path, options=ALL)),
        at(step=0),
        pytest.raises(DumpError, match="choose another name"),
    ):
        tap("loss", **{name: torch.zeros(1)})


def test_wanted(tmp_path: Path) -> None:
    assert not wanted("loss")
    with recording(Recorder(tmp_path, options={"loss": True, "param": False}, every_n_steps=2)):
        assert not wanted("loss")
        with at(step=2):
            assert wanted("loss")
            assert not wanted("param")
            assert not wanted("gradient")
        with at(step=3):
            assert not wanted("loss")
            tap("loss", loss=1.0)
    assert list(DumpReader(tmp_path)) == []


def test_without_recorder_a_tap_looks_at_nothing() -> None:
    tap("loss", loss=object())
    with at(step=0):
        tap("loss", loss=object())
    tap_trajectories([])


def test_tap_needs_a_step(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path, options=ALL)):
        with pytest.raises(DumpError, match=r"tap\('loss'\) does not know its step: enclose it in at\(step="):
            tap("loss", loss=1.0)
        with at(micro=0) as where:
            assert where is None
            with pytest.raises(DumpError, match=r"tap\('loss'\) does not know its step"):
                tap("loss", loss=1.0)


def test_coordinates_nest() -> None:
    assert current() is None
    with at(step=1, rank=2) as outer:
        with at(micro=3) as inner:
            assert inner is not None
            assert outer is not None
            assert (inner.step, inner.rank, inner.micro) == (1, 2, 3)
            with at(rank=None) as cleared:
                assert (cleared.rank, cleared.micro) == (None, 3)
        assert current() == outer
    assert current() is None


def test_recorders_nest(tmp_path: Path) -> None:
    with recording(Recorder(tmp_path / "outer", options=ALL)), at(step=0):
        with recording(Recorder(tmp_path / "inner", options=ALL)):
            tap("loss", loss=1.0)
        tap("loss", loss=2.0)
    for name, value in (("inner", 1.0), ("outer", 2.0)):
        (record,) = DumpReader(tmp_path / name)
        assert record.tensors["loss"].item() == value


def test_values_are_those_of_the_tap(tmp_path: Path) -> None:
    weight = torch.zeros(1000)
    with recording(Recorder(tmp_path, options=ALL)):
        for step in range(20):
            with at(step=step):
                tap("param", weight=weight)
            weight += 1
    assert [record.tensors["weight"][0] for record in DumpReader(tmp_path)] == list(range(20))


def test_exception_leaves_whole_files_and_no_manifest(tmp_path: Path) -> None:
    def run() -> None:
        with recording(Recorder(tmp_path, options=ALL)), at(step=0):
            tap("loss", loss=1.0)
            raise KeyError("why it ended")

    with pytest.raises(KeyError, match="why it ended"):
        run()
    assert [path.name for path in tmp_path.rglob("*.*")] == ["step_000000.safetensors"]
    with pytest.raises(DumpError, match=f"is not a complete dump: it has no {MANIFEST}"):
        DumpReader(tmp_path)
    assert current() is None
    assert not wanted("loss")


def test_threads_have_their_own_coordinates(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, options=ALL)

    def rank(number: int) -> None:
        with recording_of(recorder), at(step=0, rank=number):
            for micro in range(5):
                with at(micro=micro):
                    tap("loss", loss=float(10 * number + micro))

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.close()
    records = list(DumpReader(tmp_path))
    assert len(records) == 20
    assert all(record.tensors["loss"] == 10 * (record.rank or 0) + (record.micro or 0) for record in records)


def recording_of(recorder: Recorder) -> Any:
    """Share a recorder between threads: the one who made it closes it."""
    from contextlib import contextmanager

    from regress.dump import taps

    @contextmanager
    def share() -> Any:
        token = taps._recorder.set(recorder)
        yield
        taps._recorder.reset(token)

    return share()


def test_dumping_changes_no_bit_of_training(tmp_path: Path) -> None:
    def train(enabled: bool) -> bytes:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = Recorder(tmp_path, options={**ALL, "loss": enabled, "param": enabled}, overwrite=True)
        with recording(recorder):
            for step in range(3):
                with at(step=step):
                    loss = model(torch.randn(5, 4)).square().mean()
                    tap("loss", loss=loss)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    tap("param", **dict(model.named_parameters()))
        return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())

    assert train(True) == train(False)
