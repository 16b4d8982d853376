"""Fields that functions read, found in the source: a key that is added shows up by itself."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from tests.unit.replay.covering.reads import Function, functions

SOURCE = {
    "grpo/objective.py": """
        @dataclass
        class Objective:
            loss: str = "ppo_clip"
            kl_coef: float = 0.0
            kl_placement: str = "loss"

            @property
            def kl_in_loss(self) -> bool:
                return self.kl_coef != 0.0 and self.kl_placement == "loss"
    """,
    "grpo/losses.py": """
        def alone(objective: Objective) -> float:
            return objective.kl_coef

        def together(objective: Objective | None, other: Thing) -> float:
            known = objective.loss == "cispo" or objective.loss in ("sapo", "dro")
            return other.kl_placement if known else objective.new_key

        def through_a_property(o: Objective) -> bool:
            return o.kl_in_loss and LOSSES[o.loss].weighs

        def parts(o: Objective) -> str:
            return o.loss.partition("_")[0]

        def check_loss(o: Objective) -> None:
            check_choice("loss", o.loss, LOSSES)

        def named(o: Objective) -> str:
            raise ValueError(f"{o.loss} {o.kl_coef}")
    """,
    "engine/run.py": """
        class Run:
            config: Config

            def __init__(self, chosen: ParallelConfig) -> None:
                self._chosen = chosen

            def size(self) -> int:
                objective = self.config.algorithm
                a, b = self._chosen, self.config.batching
                return a.dp * b.micro_batch_size * len(objective.loss)
    """,
}


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Function]:
    for name, text in SOURCE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text))
    return {function.name: function for function in functions(tmp_path)}


def test_reads_follow_annotations_attributes_and_assignments(found: dict[str, Function]) -> None:
    assert {name: sorted(function.fields) for name, function in found.items()} == {
        "grpo.losses.alone": ["algorithm.kl_coef"],
        "grpo.losses.together": ["algorithm.loss", "algorithm.new_key"],
        "grpo.losses.through_a_property": ["algorithm.kl_coef", "algorithm.kl_placement", "algorithm.loss"],
        "grpo.losses.parts": ["algorithm.loss"],
        "engine.run.Run.size": ["algorithm.loss", "batching.micro_batch_size", "parallel.dp"],
    }


LOSSES = ("cispo", "sapo", "dro", "vespo", "geo_mean")


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("together", [("cispo",), ("sapo",), ("dro",), ("vespo", "geo_mean")]),
        ("through_a_property", [("cispo", "sapo", "dro"), ("vespo", "geo_mean")]),
        ("parts", [(loss,) for loss in LOSSES]),
    ],
)
def test_values_are_alike_that_a_function_does_not_tell_apart(
    found: dict[str, Function], name: str, classes: list[tuple[str, ...]]
) -> None:
    assert found[f"grpo.losses.{name}"].classes("algorithm.loss", LOSSES) == classes


def test_the_engine_is_read() -> None:
    known = {function.name: function for function in functions()}
    assert {"algorithm.clip_low", "algorithm.clip_high", "algorithm.clip_bounds", "algorithm.loss"} <= known[
        "grpo.losses._clipped"
    ].fields.keys()
    assert {"parallel.pp_schedule", "parallel.pp_stages_per_rank"} <= known[
        "parallel.policy._cut"
    ].fields.keys()
