"""Golden cases trained over the wire: the truth, and the bytes of the engine's own step on what was sent."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from regress.golden.case import GoldenCase
from regress.golden.store import GoldenStore
from regress.replay.remote import inexpressible, replay_remote
from regress.replay.remote_judge import REMOTE_VARIANTS, by_reference, by_truth
from regress.replay.remote_reference import replay_sent
from regress.replay.variants import Precision

STORE = GoldenStore(Path(__file__).parents[2] / "golden")
CASES = ["cispo", "dapo", "dense", "dr_grpo", "gpt2", "gspo", "lora", "moe", "tied", "tools"]
SDKS = {"weaver": "weaver", "tinker": "tinker"}
NOT_EXPRESSIBLE = {
    ("dr_grpo", "weaver"): "temperature of 0.8",
    ("dr_grpo", "tinker"): "temperature of 0.8",
}
DEFAULT = {
    ("dense", "remote-weaver", Precision.FLOAT32),
    ("cispo", "remote-tinker", Precision.FLOAT64),
}
"""Cover each kind once: the custom loss and a loss of the wires, both wires, both precisions."""


def _rows() -> list[object]:
    found = []
    for name, variant in REMOTE_VARIANTS.items():
        for case in CASES:
            if (case, variant.wire) in NOT_EXPRESSIBLE:
                continue
            for precision in (Precision.FLOAT64, Precision.FLOAT32):
                marks = () if (case, name, precision) in DEFAULT else (pytest.mark.extended,)
                found.append(
                    pytest.param(case, name, precision, id=f"{case}/{name}{precision.suffix}", marks=marks)
                )
    return found


def case_named(name: str) -> GoldenCase:
    return STORE.case(name)


@pytest.mark.parametrize(("name", "variant", "precision"), _rows())
def test_a_case_over_the_wire(
    name: str, variant: str, precision: Precision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    case, chosen = case_named(name), REMOTE_VARIANTS[variant]
    client = "sdk" if find_spec(SDKS[chosen.wire]) else "own"
    found = replay_remote(case, chosen.wire, precision, tmp_path, parallel=chosen.parallel, client=client)
    one_rank = not chosen.parallel
    if one_rank or precision is Precision.FLOAT64:
        reference = replay_sent(case, found, precision, tmp_path / "reference")
        failed = [v for v in by_reference(reference, found, precision, same_layout=one_rank) if not v.ok]
        assert not failed, failed[:3]
    if precision is Precision.FLOAT32:
        failed = [verdict for verdict in by_truth(case, found) if not verdict.ok]
        assert not failed, failed[:3]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wire", SDKS)
def test_what_a_wire_cannot_say_is_listed(name: str, wire: str) -> None:
    told, expected = inexpressible(case_named(name), wire), NOT_EXPRESSIBLE.get((name, wire))
    assert (told is None) == (expected is None)
    assert expected is None or expected in str(told)
