"""The configuration of a replay: whose value wins, and what is recorded."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.engine.config import load_config, to_plain
from regress.errors import ConfigError
from regress.golden.golden_case import GoldenCase
from regress.golden.golden_directory import GoldenStore
from regress.replay.replay_configuration import overlaid, replay_config
from regress.replay.variant import Precision, Variant
from regress.replay.variant_table import BASE, flat

KEYS = st.sampled_from("abc")
TREES = st.dictionaries(
    KEYS, st.recursive(st.integers(), lambda inner: st.dictionaries(KEYS, inner, max_size=2), max_leaves=4)
)


@settings(deadline=None)
@given(
    TREES, st.dictionaries(st.lists(KEYS, min_size=1, max_size=3).map(".".join), st.integers(), max_size=3)
)
def test_an_overlay_changes_what_it_names_and_nothing_else(
    tree: dict[str, Any], over: dict[str, int]
) -> None:
    before = copy.deepcopy((tree, over))
    try:
        found = dict(flat(overlaid(tree, over)))
    except ConfigError:
        return
    assert (tree, over) == before
    related = [
        key
        for key in dict(flat(tree))
        if any(f"{key}.".startswith(f"{name}.") or f"{name}.".startswith(f"{key}.") for name in over)
    ]
    for key, value in dict(flat(tree)).items():
        if key not in related:
            assert found[key] == value
    last = list(over)[-1:]
    assert all(found[key] == over[key] for key in last)


@pytest.mark.parametrize("held", [3, "x", [1]])
def test_a_key_of_what_is_no_section_is_named(held: object) -> None:
    with pytest.raises(
        ConfigError, match=r"model is .*, but has to hold the key path; write a mapping there"
    ):
        overlaid({"model": held}, {"model.path": "x"})


def test_an_empty_section_can_be_filled() -> None:
    assert overlaid({"model": None}, {"model.path": "x"}) == {"model": {"path": "x"}}


def test_the_variant_wins_over_the_case_and_over_the_precision(case: GoldenCase, tmp_path: Path) -> None:
    variant = Variant("v", "why", {"optimizer.eps": 1e-3, "threads": 2, "model.dtype": "float32"})
    config = replay_config(case, variant, Precision.BFLOAT16, 2, tmp_path)
    assert (config.optimizer.eps, config.threads, config.model.dtype) == (1e-3, 2, "float32")
    assert config.optimizer.learning_rate == 0.003  # of the case
    assert config.max_steps == 2
    assert replay_config(case, BASE, Precision.BITWISE, 2, tmp_path).model.dtype == "float32"


def test_a_replay_reads_the_case_and_records_what_is_judged(case: GoldenCase, tmp_path: Path) -> None:
    config = replay_config(case, BASE, Precision.FLOAT64, 3, tmp_path)
    folder = case.folder.resolve()
    assert config.model.path == str(folder / "model")
    assert config.reference.path == str(folder / "reference")
    assert config.optimizer.state_path == str(folder / "optimizer.safetensors")
    assert config.rollout_worker.trajectory_load_path == str(folder / "trajectories")
    assert (config.rollout_worker.type, config.rollout_worker.need_llm_inference) == ("mock", False)
    assert (config.output_dir, config.debug.dump_dir) == (str(tmp_path), str(tmp_path / "dump"))
    off = {name for name, on in vars(config.debug.dump_options).items() if not on}
    assert off == {"old_log_probs", "ref_log_probs"}


def test_files_that_a_case_lacks_are_not_asked_for(store: GoldenStore, tmp_path: Path) -> None:
    folder = store.folder("dense")
    (folder / "manifest.json").unlink()
    (folder / "optimizer.safetensors").unlink()
    shutil.rmtree(folder / "reference")
    config = replay_config(store.case("dense"), BASE, Precision.FLOAT64, 3, tmp_path)
    assert config.reference.path is None
    assert config.optimizer.state_path is None


def test_a_replay_is_repeated_by_the_file_that_it_leaves(case: GoldenCase, tmp_path: Path) -> None:
    config = replay_config(case, BASE, Precision.FLOAT64, 3, tmp_path)
    again = load_config(config_path=str(tmp_path / "config.yaml"), environ={}).config
    assert to_plain(again) == to_plain(config)


def test_the_environment_does_not_reach_a_replay(
    case: GoldenCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGRESS_OPTIMIZER__EPS", "0.5")
    config = replay_config(case, BASE, Precision.FLOAT64, 3, tmp_path)
    assert config.optimizer.eps == 1e-8


def test_a_misspelled_override_is_refused(case: GoldenCase, tmp_path: Path) -> None:
    variant = Variant("v", "why", {"batching.layot": "packed"})
    with pytest.raises(ConfigError, match=r"the nearest valid key is batching\.layout"):
        replay_config(case, variant, Precision.FLOAT64, 3, tmp_path)
