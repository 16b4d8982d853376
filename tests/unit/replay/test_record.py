"""Recording a case anew: what changes, what stays when it is refused, and what is asked for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from regress.cli import main
from regress.errors import CompareError, GoldenError
from regress.golden.case_update import commit
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.golden.golden_verification import verify
from regress.replay.case_recording import add, record
from regress.replay.case_run import replay
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay, items
from regress.replay.variant import Precision
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[3] / "golden"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change case.yaml."""
    path = folder / "case.yaml"
    tree = yaml.safe_load(path.read_text())
    change(tree)
    path.write_text(yaml.safe_dump(tree))


@dataclass(frozen=True)
class Recorded:
    """The case `dense` recorded by this machine, and recorded again under another configuration."""

    before: GoldenStore
    after: GoldenStore
    written: list[Path]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    roots = [tmp_path_factory.mktemp(name) for name in ("before", "after")]
    shutil.copytree(GOLDEN / "dense", roots[0] / "dense")
    record(GoldenStore(roots[0]), "dense")  # another processor may round otherwise
    shutil.copytree(roots[0] / "dense", roots[1] / "dense")
    before, after = map(GoldenStore, roots)
    edit(after.folder("dense"), lambda tree: tree["config"]["algorithm"].update(eps=1e-3))
    return Recorded(before, after, record(after, "dense"))


@pytest.mark.extended
def test_recording_twice_changes_nothing(recorded: Recorded) -> None:
    before = contents(recorded.before.folder("dense"))
    assert record(recorded.before, "dense") == []
    assert contents(recorded.before.folder("dense")) == before


def test_a_changed_configuration_is_recorded_with_its_values(recorded: Recorded) -> None:
    written = {path.name.partition(".")[0] for path in recorded.written}
    assert {"advantages", "gradient", "param", "manifest"} <= written
    assert not {"batch_inputs", "weights", "ref_log_probs", "old_log_probs"} & written
    assert verify(recorded.after) == []
    before, after = (contents(store.folder("dense")) for store in (recorded.before, recorded.after))
    inputs = [name for name in before if name.startswith(("model/", "reference/", "trajectories/", "optim"))]
    assert {name: after[name] for name in inputs} == {name: before[name] for name in inputs}


def test_tolerances_outlive_a_recording(recorded: Recorded, store: GoldenStore) -> None:
    before, after = store.case("dense"), recorded.after.case("dense")
    assert before.manifest is not None
    assert after.manifest is not None
    assert after.manifest.tolerances == before.manifest.tolerances


ADDED = ("token_gradient", "entropy_gradient", "logit_gradient")


def without_gradients_of_tokens(store: GoldenStore) -> None:
    """Make the case one that was recorded before there were any."""
    case = store.case("dense")
    truth = {where: dict.fromkeys(ADDED) for where in case.wheres()}
    assert case.manifest is not None
    tolerances = {quantity: dict.fromkeys(case.manifest.tolerances[quantity]) for quantity in ADDED}
    commit(case.folder, truth=truth, tolerances=tolerances, provenance=case.manifest.provenance)


@pytest.mark.extended
def test_a_quantity_is_added_to_a_recorded_case_and_nothing_else_changes(store: GoldenStore) -> None:
    without_gradients_of_tokens(store)
    folder = store.folder("dense")
    before = contents(folder)
    assert not any(name.rpartition("/")[2].startswith(ADDED) for name in before)
    command = ["golden", "record", "dense", "--golden-dir", str(store.root)]
    result = CliRunner().invoke(main, [*command, *(part for name in ADDED for part in ("--quantity", name))])
    assert result.exit_code == 0, result.output
    assert "next: regress golden calibrate dense --quantity token_gradient --quantity" in result.output
    after = contents(folder)
    assert {name: data for name, data in after.items() if name in before and name != "manifest.json"} == {
        name: data for name, data in before.items() if name != "manifest.json"
    }
    new = {name.rpartition("/")[2].partition(".")[0] for name in after.keys() - before.keys()}
    assert new == {*ADDED}
    assert add(store, "dense", ADDED) == []


@pytest.mark.extended
def test_nothing_is_added_beside_what_is_computed_otherwise(store: GoldenStore) -> None:
    without_gradients_of_tokens(store)
    edit(store.folder("dense"), lambda tree: tree["config"]["algorithm"].update(eps=1e-3))
    commit(store.folder("dense"), inputs=["case.yaml"], provenance={})
    with pytest.raises(
        GoldenError, match=r"advantages advantages at step_000000 is not what was recorded \(drift"
    ):
        add(store, "dense", ADDED)
    edit(store.folder("dense"), lambda tree: tree["config"]["algorithm"].pop("eps"))
    commit(store.folder("dense"), inputs=["case.yaml"], provenance={})
    with pytest.raises(GoldenError, match="case dense computes no sampler_weights, so it cannot have"):
        add(store, "dense", ["sampler_weights"])
    written = [path.name.partition(".")[0] for path in add(store, "dense", ["entropy_gradient"])]
    assert {*written} == {"entropy_gradient", "manifest"}
    with pytest.raises(CompareError, match="'token_gradients' is not a quantity; choose one of"):
        add(store, "dense", ["token_gradients"])


@pytest.mark.extended
def test_a_case_of_before_is_replayed_without_them(store: GoldenStore, tmp_path: Path) -> None:
    """They are recorded, and nothing is said of them; what the case has is judged as ever."""
    without_gradients_of_tokens(store)
    case = store.case("dense")
    chosen = Replay(case, VARIANTS["mbs4"], Precision.FLOAT64)
    assert not {item.quantity for item in items(chosen)} & {*ADDED}
    dump = replay(case, chosen.variant, chosen.precision, tmp_path / "replay")
    assert any(name.startswith("token_gradient/") for name in dump.names())
    verdicts = judge_replay(case, dump, chosen.plan, chosen.precision)
    assert all(verdict.ok for verdict in verdicts)
    assert not {verdict.quantity for verdict in verdicts} & {*ADDED}


@pytest.mark.extended
def test_a_case_without_signal_leaves_the_recording_alone(store: GoldenStore) -> None:
    folder = store.folder("dense")
    edit(folder, lambda tree: tree["config"]["algorithm"].update(clip_high=100.0))
    before = contents(folder)
    with pytest.raises(GoldenError, match=r"no value depends on algorithm\.clip_high \(100\.0\)"):
        record(store, "dense")
    assert contents(folder) == before


@pytest.mark.extended
def test_inputs_without_signal_do_not_outlive_a_corrected_recipe(tiny: Callable[..., GoldenCase]) -> None:
    case = tiny()
    store = GoldenStore(case.folder.parent)
    with pytest.raises(GoldenError, match="cannot become golden, because some faults could not show in it"):
        record(store, "tiny")
    assert not (case.folder / "manifest.json").exists()
    assert not (case.folder / "truth").exists()
    assert not (case.folder / "trajectories").exists()
    assert not (case.folder / "model").exists()


@pytest.mark.extended
def test_inputs_are_made_again_only_when_asked_for(
    tiny: Callable[..., GoldenCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regress.replay.case_recording.require_case_signal", lambda *_: None)
    case = tiny()
    store = GoldenStore(case.folder.parent)
    result = CliRunner().invoke(main, ["golden", "record", "tiny", "--golden-dir", str(store.root)])
    assert result.exit_code == 0, result.output
    assert f"wrote {case.folder / 'manifest.json'}" in result.output
    weights = case.folder / "model" / "model.safetensors"
    before = weights.read_bytes()
    edit(case.folder, lambda tree: tree["recipe"].update(warm_steps=2))
    result = CliRunner().invoke(main, ["golden", "record", "tiny", "--golden-dir", str(store.root)])
    assert result.exit_code == 0, result.output
    assert weights.read_bytes() == before
    result = CliRunner().invoke(
        main, ["golden", "record", "tiny", "--inputs", "--golden-dir", str(store.root)]
    )
    assert result.exit_code == 0, result.output
    assert weights.read_bytes() != before
    assert verify(store) == []
    result = CliRunner().invoke(
        main, ["golden", "record", "tiny", "--inputs", "--golden-dir", str(store.root)]
    )
    assert result.output == "tiny: nothing changed\n"


def test_a_case_with_neither_model_nor_recipe_is_refused(store: GoldenStore) -> None:
    folder = store.folder("dense")
    shutil.rmtree(folder / "model")
    edit(folder, lambda tree: tree.pop("recipe"))
    before = contents(folder)
    with pytest.raises(GoldenError, match=r"has neither model/ nor a recipe in case.yaml; lay model/, traj"):
        record(store, "dense")
    assert contents(folder) == before
