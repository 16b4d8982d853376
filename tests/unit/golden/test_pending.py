"""Proposals: kept, looked at, accepted piece by piece, refused when the case moved on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regress.errors import GoldenError
from regress.golden import GoldenCase, GoldenStore, ToleranceEntry
from regress.golden.commit import commit
from regress.golden.pending import accept, list_pending, pending_names, propose, reject

LOOSE = {"log_probs": {"float32": ToleranceEntry(1e-5, reason="measured")}}


@pytest.fixture
def store(recorded: Path) -> GoldenStore:
    return GoldenStore(recorded.parent)


@pytest.fixture
def proposed(store: GoldenStore, make_truth: Any, provenance: Any) -> GoldenStore:
    """Log-probs, one gradient and the gradient norm of every update are doubled."""
    propose(
        store, "tiny", truth=make_truth(2.0), tolerances=LOOSE, provenance=provenance, notes=["log_probs 7 x"]
    )
    return store


def values(store: GoldenStore, where: str, quantity: str) -> Any:
    return store.case("tiny").truth_of(where, quantity)


def test_a_proposal_leaves_the_case_alone(
    store: GoldenStore, content: Any, make_truth: Any, provenance: Any
) -> None:
    before = content(store.root / "tiny")
    pending = propose(store, "tiny", truth=make_truth(2.0), provenance=provenance)
    assert content(store.root / "tiny") == before
    assert pending is not None
    assert pending_names(store) == ["tiny"]
    assert store.names() == ["tiny"]
    changes = {(c.where, c.quantity): c for c in pending.difference().changes}
    assert {quantity for _, quantity in changes} == {"log_probs", "gradient", "grad_norm"}
    assert len(changes) == 9
    gradient = changes["step_000001", "gradient"]
    assert (gradient.status, gradient.tensors, gradient.changed) == ("changed", 2, 1)
    assert (gradient.worst, gradient.relative, gradient.detail) == ("lm_head.weight", 1.0, "")


def test_only_new_files_are_kept(proposed: GoldenStore) -> None:
    kept = list((proposed.root / ".pending" / "tiny" / "truth").rglob("*.safetensors"))
    assert sorted({path.name.split(".")[0] for path in kept}) == ["grad_norm", "gradient", "log_probs"]
    assert len(kept) == 9


def test_nothing_to_propose(store: GoldenStore, make_truth: Any, provenance: Any) -> None:
    assert propose(store, "tiny", truth=make_truth(), provenance=provenance) is None
    assert pending_names(store) == []
    assert not (store.root / ".pending").exists()


def test_accept_all(
    proposed: GoldenStore, make_truth: Any, tmp_path: Path, make_inputs: Any, content: Any
) -> None:
    """The case becomes what a commit of the same would have made it, byte for byte."""
    (pending,) = list_pending(proposed)
    assert pending.notes == ("log_probs 7 x",)
    written = accept(proposed, "tiny")
    assert len(written) == 10
    assert not (proposed.root / ".pending").exists()
    twin = make_inputs(tmp_path / "twin" / "tiny")
    commit(twin, truth=make_truth(2.0), tolerances=LOOSE, provenance=dict(pending.manifest.provenance))
    assert content(proposed.root / "tiny") == content(twin)


def test_accept_one_quantity_and_leave_the_rest(proposed: GoldenStore, make_truth: Any) -> None:
    accept(proposed, "tiny", ["step_000001/gradient"])
    old, new = make_truth(), make_truth(2.0)
    name = "lm_head.weight"
    assert (values(proposed, "step_000001", "gradient")[name] == new["step_000001"]["gradient"][name]).all()
    for where in ("step_000000_update0", "step_000000_update1"):
        assert (values(proposed, where, "gradient")[name] == old[where]["gradient"][name]).all()
    assert proposed.case("tiny").tolerance("log_probs", "float32") is None
    (pending,) = list_pending(proposed)
    assert len(pending.difference().changes) == 8
    accept(proposed, "tiny", ["log_probs"])
    assert proposed.case("tiny").tolerance("log_probs", "float32") == LOOSE["log_probs"]["float32"]
    accept(proposed, "tiny", ["gradient", "grad_*"])
    assert pending_names(proposed) == []
    case = proposed.case("tiny")
    for where, row in new.items():
        for quantity, tensors in row.items():
            found = case.truth_of(where, quantity)
            assert all((found[n] == v).all() for n, v in tensors.items())


def test_reject_one_quantity_and_keep_the_rest(proposed: GoldenStore, content: Any) -> None:
    before = content(proposed.root / "tiny")
    reject(proposed, "tiny", ["log_probs", "grad_norm"])
    (pending,) = list_pending(proposed)
    difference = pending.difference()
    assert {change.quantity for change in difference.changes} == {"gradient"}
    assert difference.tolerances == []
    assert len(list(pending.folder.rglob("*.safetensors"))) == 3
    reject(proposed, "tiny", ["gradient"])
    assert pending_names(proposed) == []
    assert content(proposed.root) == {f"tiny/{name}": data for name, data in before.items()}


def test_reject_all(proposed: GoldenStore, content: Any) -> None:
    before = content(proposed.root / "tiny")
    reject(proposed, "tiny")
    assert content(proposed.root) == {f"tiny/{name}": data for name, data in before.items()}


def test_files_of_others_survive_a_rejection(proposed: GoldenStore) -> None:
    notes = proposed.root / ".pending" / "tiny" / "notes.txt"
    notes.write_text("mine")
    reject(proposed, "tiny")
    assert notes.read_text() == "mine"
    assert pending_names(proposed) == []


def test_proposals_for_one_state_are_merged(
    store: GoldenStore, make_truth: Any, provenance: Any, content: Any
) -> None:
    """Several workers propose what they found; the order does not show."""
    truth = make_truth(2.0)
    results = []
    for wheres in (sorted(truth), sorted(truth, reverse=True)):
        for where in wheres:
            propose(store, "tiny", truth={where: truth[where]}, provenance=provenance, notes=["same"])
        results.append(content(store.root / ".pending"))
        reject(store, "tiny")
    assert results[0] == results[1]
    propose(store, "tiny", truth=truth, provenance=provenance, notes=["same"])
    assert content(store.root / ".pending") == results[0]


def test_taking_a_proposal_back(proposed: GoldenStore, make_truth: Any, provenance: Any) -> None:
    nothing = {"log_probs": {"float32": None}}
    assert propose(proposed, "tiny", truth=make_truth(), tolerances=nothing, provenance=provenance) is None
    assert pending_names(proposed) == []


def test_an_accept_after_the_case_changed_is_refused(
    proposed: GoldenStore, make_truth: Any, provenance: Any, content: Any
) -> None:
    commit(
        proposed.root / "tiny", truth={"step_000001": {"loss": {"loss": np.ones(1)}}}, provenance=provenance
    )
    before = content(proposed.root)
    for attempt in (accept, lambda *a: reject(*a, ["gradient"])):
        with pytest.raises(
            GoldenError,
            match=r"\.pending/tiny was proposed for another state of .*/tiny, which has changed since: reject it and",
        ):
            attempt(proposed, "tiny")
    assert content(proposed.root) == before
    propose(proposed, "tiny", truth=make_truth(3.0), provenance=provenance)
    (pending,) = list_pending(proposed)
    assert pending.notes == (), "the stale one is forgotten"
    assert proposed.case("tiny").quantities("step_000001")[-2:] == ["loss", "optimizer"]
    accept(proposed, "tiny")
    assert "loss" in proposed.case("tiny").quantities("step_000001")


def test_the_first_recording_of_a_case(unrecorded: Path, make_truth: Any, provenance: Any) -> None:
    store = GoldenStore(unrecorded.parent)
    pending = propose(store, "tiny", truth=make_truth(), provenance=provenance)
    assert pending is not None
    assert {change.status for change in pending.difference().changes} == {"new"}
    with pytest.raises(GoldenError, match="changes the inputs, so all of it belongs together"):
        accept(store, "tiny", ["log_probs"])
    accept(store, "tiny")
    assert store.case("tiny").wheres() == list(make_truth())


def test_inputs_that_changed_after_the_proposal(proposed: GoldenStore, content: Any) -> None:
    (proposed.root / "tiny" / "model" / "config.json").write_text("{}")
    before = content(proposed.root)
    with pytest.raises(
        GoldenError, match=r"model/config\.json is not the file that the pending update was made from"
    ):
        accept(proposed, "tiny")
    assert content(proposed.root) == before


def test_inputs_that_changed_before_the_proposal(
    store: GoldenStore, make_truth: Any, provenance: Any
) -> None:
    (store.root / "tiny" / "model" / "config.json").write_text("{}")
    inputs = ["model/config.json"]
    propose(store, "tiny", truth=make_truth(2.0), inputs=inputs, provenance=provenance)
    (pending,) = list_pending(store)
    assert pending.difference().inputs == ["input model/config.json changed"]
    with pytest.raises(GoldenError, match="accept or reject it as a whole"):
        accept(store, "tiny", ["gradient"])
    with pytest.raises(GoldenError, match="accept or reject it as a whole"):
        reject(store, "tiny", ["gradient"])
    accept(store, "tiny")
    store.case("tiny").verify_inputs()


@pytest.mark.parametrize("verb", [accept, reject])
def test_a_pattern_that_matches_nothing(proposed: GoldenStore, verb: Any) -> None:
    with pytest.raises(
        GoldenError,
        match=re.escape(
            "nothing in the pending update of 'tiny' matches 'kl': it changes step_000000_update0/grad_norm, step_"
        ),
    ):
        verb(proposed, "tiny", ["gradient", "kl"])


@pytest.mark.parametrize("verb", [accept, reject])
def test_no_pending_update(proposed: GoldenStore, verb: Any) -> None:
    with pytest.raises(GoldenError, match="case 'moe' has no pending update: cases with one are tiny"):
        verb(proposed, "moe")
    with pytest.raises(GoldenError, match="is no name of a golden case"):
        verb(proposed, "../tiny")


@pytest.mark.parametrize("damage", [b"", b"{}", b"rubbish", b'{"schema_version": 1}'])
def test_a_damaged_proposal(proposed: GoldenStore, damage: bytes, provenance: Any) -> None:
    path = proposed.root / ".pending" / "tiny" / "proposal.json"
    path.write_bytes(damage)
    for attempt in (
        list_pending,
        lambda s: accept(s, "tiny"),
        lambda s: propose(s, "tiny", provenance=provenance),
    ):
        with pytest.raises(
            GoldenError, match=r"proposal\.json is damaged .*: reject it with regress golden reject tiny"
        ):
            attempt(proposed)
    reject(proposed, "tiny")
    assert not (proposed.root / ".pending").exists()


def test_a_damaged_file_of_a_proposal(proposed: GoldenStore, content: Any) -> None:
    victim = next((proposed.root / ".pending").rglob("gradient.*"))
    victim.write_bytes(victim.read_bytes().replace(b"lm_head", b"lm_heat"))
    before = content(proposed.root)
    (pending,) = list_pending(proposed)
    for attempt in (pending.difference, lambda: accept(proposed, "tiny")):
        with pytest.raises(GoldenError, match=re.escape(str(victim))):
            attempt()
    assert content(proposed.root) == before


def test_a_proposal_of_another_case(proposed: GoldenStore, make_inputs: Any) -> None:
    make_inputs(proposed.root / "other")
    (proposed.root / ".pending" / "tiny").rename(proposed.root / ".pending" / "other")
    with pytest.raises(GoldenError, match=r"damaged .it is not the update of 'other'\)"):
        accept(proposed, "other")


def test_refused_as_a_commit_would(store: GoldenStore, provenance: Any) -> None:
    with pytest.raises(GoldenError, match="are not finite"):
        propose(
            store, "tiny", truth={"step_000001": {"kl": {"kl": np.array([np.nan])}}}, provenance=provenance
        )
    with pytest.raises(GoldenError, match=r"has no case\.yaml"):
        propose(store, "none", provenance=provenance)
    assert GoldenCase(store.root / "tiny").manifest is not None
    assert not (store.root / ".pending").exists()
