"""Golden cases trained over the wire: the truth, and the bytes of the engine's own step on what was sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from regress.replay.fault_injection import injected
from regress.replay.replay_cache import ReplayCache
from regress.replay.test_matrix import Replay
from regress.replay.variant import Precision
from regress.replay.variant_table import project_variants
from regress.service.replay.remote_variants import REMOTE
from tests.faults import loss
from tests.golden_cases import cases, opened

ROOT = Path(__file__).parents[2]
NOT_EXPRESSIBLE = dict.fromkeys(("dr_grpo", "rollout"), "a temperature of 0.8")
REPLAYS = [
    Replay(case, variant, precision)
    for variant in REMOTE.values()
    for case in cases()
    if not case.precisions  # wires round to float32
    for precision in dict.fromkeys((*variant.precisions, Precision.FLOAT32))
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ReplayCache:
    return ReplayCache(tmp_path_factory.mktemp("replays"), project_variants(ROOT))


@pytest.mark.extended
@pytest.mark.parametrize("replay", REPLAYS, ids=lambda replay: replay.name)
def test_every_case_over_every_wire(replay: Replay, cache: ReplayCache) -> None:
    found = cache.outcome(replay)
    assert found.error is None
    why = NOT_EXPRESSIBLE.get(replay.case.name)
    if why is not None:
        assert why in str(found.unsupported)
        return
    assert found.unsupported is None
    assert found.failed == []
    for item in cache.replayers.of(replay.variant).items(replay):
        assert found.outcomes[str(item.place), item.quantity].tensors, item.id


@pytest.mark.extended
def test_a_fault_of_the_service_is_found(tmp_path: Path) -> None:
    with injected(loss.ratio_inverted):
        replay = Replay(opened("cispo"), REMOTE["remote-weaver"], Precision.FLOAT32)
        found = ReplayCache(tmp_path, project_variants(ROOT)).outcome(replay)
    assert found.error is None
    assert found.failed[0].quantity in ("gradient", "grad_norm", "log_probs", "param")
