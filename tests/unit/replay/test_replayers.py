"""Replayers of other packages: chosen by ``trainer.type``, shared and judged as the engine's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from regress import plugins
from regress.replay.replay_cache import ReplayCache
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision, Variant
from regress.replay.variant_table import project_variants
from tests.golden_cases import opened

CASE = opened("dense")
REPLAYER = """
from regress.compare.diagnosis.run_context import RunContext
from regress.dump.coordinates import Place
from regress.compare.verdicts.verdict import Status, Verdict
from regress.replay.test_matrix import Item
from regress.replay.replayer_registry import Judged, Replayer
from regress.replay.variant import Precision, Variant

ROWS = {
    "here": Variant("here", "what it could break", {"trainer.type": "mine"}),
    "bytes": Variant(
        "bytes", "x", {"trainer.type": "mine"}, (Precision.BITWISE,), bitwise_reference="here"
    ),
}


class Mine(Replayer):
    leaves = ("values",)

    def __init__(self, machine):
        self.machine = machine

    def refuses(self, replay):
        return "it computes no bfloat16" if replay.precision is Precision.BFLOAT16 else None

    def items(self, replay):
        yield Item(replay, Place(0), "loss")

    def computed_as(self, replay):
        return Replay(replay.case, replay.variant, Precision.FLOAT32)

    def compute(self, replay, folder):
        with (folder.parents[2] / "ran").open("a") as file:
            file.write(replay.name + " ")
        (folder / "values").mkdir()
        (folder / "values" / "loss").write_text(str(self.machine.device))

    def judge(self, replay, folder, judging, reference):
        said = (folder / "values" / "loss").read_text()
        verdict = Verdict(Status.DRIFT, "loss", "loss", Place(0), f"{said} at {judging.scale}")
        return Judged([verdict], RunContext())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplayCache]:
    """A cache of a session in which another package registers a trainer and its variants."""
    (tmp_path / "a_replayer.py").write_text(REPLAYER.replace("import Item\n", "import Item, Replay\n"))
    monkeypatch.syspath_prepend(tmp_path)
    values = {plugins.REPLAYERS: "a_replayer:Mine", plugins.VARIANTS: "a_replayer:ROWS"}
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [EntryPoint("mine", values[group], group)] if group in values else [],
    )
    plugins.registered.cache_clear()
    yield ReplayCache(tmp_path / "replays", project_variants(tmp_path))
    plugins.registered.cache_clear()
    sys.modules.pop("a_replayer", None)


def test_it_computes_and_judges_the_variants_of_its_trainer(cache: ReplayCache, tmp_path: Path) -> None:
    here = cache.variants["here"]
    found = cache.outcome(Replay(CASE, here, Precision.FLOAT32))
    assert found.error is None
    assert [verdict.detail for verdict in found.failed] == ["None at 1.0"]
    assert not (tmp_path / "replays/dense/here-fp32/values").exists()
    assert cache.replayers.of(here) is cache.replayers.of(cache.variants["bytes"])


def test_what_computes_the_same_is_computed_once(cache: ReplayCache, tmp_path: Path) -> None:
    for precision in (Precision.BITWISE, Precision.FLOAT32, Precision.FLOAT64):
        assert cache.outcome(Replay(CASE, cache.variants["here"], precision)).failed
    assert (tmp_path / "ran").read_text().split() == ["dense/here-fp32"]


def test_what_it_refuses_is_left_out(cache: ReplayCache) -> None:
    found = cache.outcome(Replay(CASE, cache.variants["here"], Precision.BFLOAT16))
    assert found.unsupported == "it computes no bfloat16"


def test_a_trainer_that_nobody_provides_is_an_error(cache: ReplayCache) -> None:
    found = cache.outcome(Replay(CASE, Variant("gone", "x", {"trainer.type": "gone"}), Precision.FLOAT64))
    assert found.error == (
        "nothing that is installed provides 'gone' of regress.replayers (there is local, remote, mine): install the "
        "package that registers it"
    )
