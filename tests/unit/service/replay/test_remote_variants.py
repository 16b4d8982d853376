"""Replays through a training service: what they are judged by, and where they are left out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regress.compare.dumps.comparison import Comparison
from regress.compare.verdicts.verdict import Status, Verdict
from regress.dump.coordinates import Place
from regress.errors import CompareError, ConfigError, NotSupported
from regress.golden.golden_case import GoldenCase
from regress.replay.replay_cache import ReplayCache
from regress.replay.replayer_registry import Machine, Replayers
from regress.replay.test_matrix import Replay
from regress.replay.user_trainer_replays import ForeignReplayer
from regress.replay.variant import Extent, Precision, Variant
from regress.replay.variant_table import VARIANTS, project_variants
from regress.service.replay import remote_replay
from regress.service.replay.remote_judge import judged
from regress.service.replay.remote_replay import RemoteReplay, inexpressible, replay_remote
from regress.service.replay.remote_replayer import RemoteReplayer
from regress.service.replay.remote_variants import REMOTE, quantities
from tests.golden_cases import cases, opened

CISPO = Replay(opened("cispo"), REMOTE["remote-tinker"], Precision.FLOAT32)


def compared(replay: Replay, *changed: Verdict, without: str = "") -> Comparison:
    """Return a comparison in which each quantity agrees at each update as a service counts them."""
    verdicts = [
        Verdict(Status.OK, quantity, quantity, Place(number, None, 0))
        for number in range(len(replay.plan))
        for quantity in quantities(replay.precision)
        if quantity != without
    ]
    found: Any = SimpleNamespace(problems=[], verdicts=[*verdicts, *changed], actual="service/dump")
    return found  # type: ignore[no-any-return]


def test_a_row_of_a_project_can_train_through_a_service(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.regress.variants.mine]\nwhy = "x"\n[tool.regress.variants.mine.overrides]\n'
        '"trainer.type" = "remote"\n"service.train_service.backend" = "tinker"\n"parallel.tp" = 2\n'
    )
    mine = project_variants(tmp_path)["mine"]
    assert mine.trainer == "remote"
    assert RemoteReplay.of(mine, tmp_path).wire == "tinker"
    assert Replay(opened("dense"), mine, Precision.FLOAT64).world_size == 2
    assert VARIANTS["packed"].trainer == "local"


@pytest.mark.parametrize("precision", REMOTE["remote-tinker"].precisions)
def test_every_update_of_a_case_has_its_tests(precision: Precision) -> None:
    found = list(RemoteReplayer().items(Replay(opened("cispo"), REMOTE["remote-tinker"], precision)))
    wheres = {str(Place(update.step, update.update)) for update in CISPO.plan}
    assert len(wheres) == 4
    assert {(str(item.place), item.quantity) for item in found} == {
        (where, quantity) for where in wheres for quantity in (*quantities(precision), "coverage")
    }


def test_updates_that_a_service_counts_are_those_of_the_rollouts() -> None:
    found = judged(CISPO, compared(CISPO), masked=True)
    assert {(v.place.step, v.place.update) for v in found} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {v.place.rank for v in found} == {0}


def test_a_quantity_that_nobody_compared_is_an_error() -> None:
    with pytest.raises(CompareError, match="gradient was not compared: the service's dump"):
        judged(CISPO, compared(CISPO, without="gradient"), masked=True)


@pytest.mark.parametrize(("masked", "count"), [(True, 1), (False, 0)])
def test_a_mask_counts_where_the_wire_carries_one(masked: bool, count: int) -> None:
    wrong = Verdict(Status.MASK, "batch_inputs", "forward_data/response_mask", Place(0, None, 0, 0))
    found = judged(CISPO, compared(CISPO, wrong), masked=masked)
    assert sum(not verdict.ok for verdict in found) == count


@pytest.mark.parametrize("wire", ["weaver", "tinker"])
@pytest.mark.parametrize("name", [case.name for case in cases() if not case.precisions])
def test_what_a_wire_cannot_say_is_told(name: str, wire: str) -> None:
    told = inexpressible(opened(name), wire)
    assert (told is None) == (name not in ("dr_grpo", "rollout"))
    assert told is None or "a temperature of 0.8" in told


def test_a_case_that_no_wire_can_say_is_not_replayed(tmp_path: Path) -> None:
    case = opened("dr_grpo")
    with pytest.raises(NotSupported, match=r"trained at a temperature of 0\.8, which the wires cannot say"):
        replay_remote(case, REMOTE["remote-weaver"], Precision.FLOAT32, tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_trainer_of_ones_own_has_no_service_of_ours(tmp_path: Path) -> None:
    nobody: Any = None
    replay = Replay(opened("dense"), REMOTE["remote-weaver"], Precision.FLOAT64)
    assert ForeignReplayer(nobody, tmp_path).refuses(replay) == (
        "it is about the training service, which is that of this package"
    )


def test_the_default_matrix_has_each_wire_once() -> None:
    for extent, most in ((Extent.DEFAULT, 1), (Extent.FULL, len(cases()))):
        assert {sum(v.applies_to(case, extent) for case in cases()) for v in REMOTE.values()} == {most}


def test_a_launcher_does_not_start_a_service(tmp_path: Path) -> None:
    launch: Any = object()
    with pytest.raises(ConfigError, match="starts its ranks on this machine; leave it out, or --launcher"):
        Replayers(Machine(launch)).of(CISPO.variant).refuses(CISPO)


def test_dumps_of_a_service_are_not_given_as_those_of_the_engine(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dumps of another form; take them with --regress-keep-dumps"):
        ReplayCache(tmp_path, REMOTE).dump(CISPO)


def test_bytes_are_judged_without_a_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def serve(case: GoldenCase, variant: Variant, precision: Precision, *_: object, **__: object) -> Any:
        ran.append(Replay(case, variant, precision).name)
        raise ArithmeticError("far enough")

    monkeypatch.setattr(remote_replay, "replay_remote", serve)
    cache = ReplayCache(tmp_path, REMOTE)
    bitwise = Replay(CISPO.case, CISPO.variant, Precision.BITWISE)
    assert "far enough" in str(cache.outcome(bitwise).error)
    assert ran == ["cispo/remote-tinker-fp32"]


def test_a_variant_of_another_kind_is_local() -> None:
    assert Variant("mine", "x", {"service.train_service.backend": "tinker"}).trainer == "local"
    case: GoldenCase = opened("dense")
    assert inexpressible(case, "weaver") is None
