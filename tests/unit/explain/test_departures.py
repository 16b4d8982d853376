"""`explain_dump` names what is wrong with a trainer, and in which field it differs from a preset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from objective_bench import preset
from torch import Tensor
from trainer_bench import Loss, Run, World, record, trl, trl_advantages

from regress import explain_dump
from regress.errors import ConfigError
from regress.grpo.objective_presets import PRESETS, make_objective

FAULTS: dict[str, tuple[Run, Loss, dict[str, Any], str, str]] = {
    "denominator of the microbatch": (
        Run(accumulation=2),
        trl(fault="denominator of the microbatch"),
        {},
        "aggregation",
        "tokens of each microbatch",
    ),
    "factor of ranks": (Run(ranks=2), trl(fault="factor of ranks"), {}, "scale", "the number of ranks"),
    "population deviation": (Run(), trl(), {"ddof": 0}, "advantages", "population deviation"),
    "mask off by one": (
        Run(accumulation=2),
        trl(fault="mask off by one"),
        {},
        "mask",
        "lacks 11 tokens in 11 samples, the last token of each",
    ),
    "mask shifted": (
        Run(),
        trl("grpo", fault="mask shifted"),
        {},
        "mask",
        "in addition 12 tokens in 12 samples, the token before the first of each",
    ),
    "shifted targets": (Run(shift=1), trl(), {}, "targets", "shifted by +1"),
    "missing temperature": (Run(sampled=0.7), trl(), {}, "temperature", "sampled at 0.7"),
    "KL detached": (
        Run(),
        trl(beta=0.05, fault="kl detached"),
        {},
        "detached",
        "no gradient: it is detached",
    ),
    "ratio not detached": (Run(), trl("cispo", fault="ratio not detached"), {}, "detached", "not detached"),
    "entropy on masked tokens": (
        Run(),
        trl(entropy_coef=0.05, fault="entropy on masked tokens"),
        {},
        "entropy",
        "40 tokens outside of the loss mask",
    ),
    "clip sides": (Run(off_policy=0.3), trl(fault="clip sides"), {}, "clip", "the wrong side"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    run, loss, scores, subject, words = FAULTS[name]
    world = World(run)
    found = explain_dump(record(world, loss, trl_advantages(world, **scores), tmp_path / "dump"))
    texts = [statement.text for statement in found.statements if statement.subject == subject]
    assert any(words in text for text in texts), found.to_text()
    if subject not in ("aggregation", "advantages"):  # these are what other trainers do on purpose
        assert {s.subject for s in found.departures} <= {subject, "mask"}, found.to_text()
        assert any(words in s.text for s in found.departures)
    else:
        assert not found.departures


@pytest.mark.parametrize(
    ("loss_type", "scale", "names"),
    [
        ("dapo", "group", {"trl:dapo", "trl:cispo"}),
        ("bnpo", "group", {"trl:bnpo"}),
        ("grpo", "group", {"trl:grpo"}),
    ],
    ids=["dapo", "bnpo", "grpo"],
)
def test_presets_with_the_same_gradients_are_named_and_no_others(
    loss_type: str, scale: str, names: set[str], tmp_path: Path
) -> None:
    world = World(Run(accumulation=2))
    found = explain_dump(record(world, trl(loss_type), trl_advantages(world, scale), tmp_path / "dump"))
    said = found.about("preset")
    assert said is not None, found.to_text()
    assert names <= set(said.values)
    others = {
        name for name in PRESETS if make_objective(name).eps != 1e-4 and make_objective(name).scale == "group"
    }
    assert not set(said.values) & others


def test_the_departure_from_an_expected_preset_is_the_field_that_differs(tmp_path: Path) -> None:
    world = World(Run(accumulation=2))
    path = record(world, trl(), trl_advantages(world, ddof=0), tmp_path / "dump")
    found = explain_dump(path, preset="trl:dapo")
    (departure,) = found.departures
    assert departure.values == ("trl:dapo", {"ddof": 0})
    assert "ddof 0 in place of 1" in departure.text
    said = explain_dump(path).about("preset")
    assert said is not None
    assert "the nearest preset" in said.text
    with pytest.raises(ConfigError, match="the nearest preset is 'trl:dapo'"):
        explain_dump(path, preset="trl:dap")


def test_another_size_is_no_preset(tmp_path: Path) -> None:
    """A constant factor without a name: its size under each weight, and presets only in proportion."""

    def loss(world: World, batch: Any, facts: dict[str, Any]) -> Tensor:
        return 0.2 * trl("dapo")(world, batch, facts)

    world = World(Run())
    found = explain_dump(record(world, loss, trl_advantages(world), tmp_path / "dump"))
    (departure,) = found.departures
    assert departure.subject == "scale"
    assert "0.2 x 1 / tokens of the whole update" in departure.text
    said = found.about("preset")
    assert said is not None
    assert said.values == ()
    assert "trl:dapo times 0.2" in said.text


def test_a_second_bound_of_bad_tokens_is_no_wrong_side(tmp_path: Path) -> None:
    """TRL's delta cuts high ratios of negative advantages: a design, not a fault."""
    objective = make_objective("trl:dapo", delta=1.25, clip_low=0.99)
    world = World(Run(off_policy=0.3))
    found = explain_dump(record(world, preset(objective), trl_advantages(world), tmp_path / "dump"))
    assert not found.departures, found.to_text()
