"""Keys that may change when a run goes on."""

from __future__ import annotations

import pytest

from regress.engine.checkpoint.configuration_changes import FREE, ON_DEMAND, is_free, is_on_demand
from regress.engine.config.config_schema import options
from regress.errors import CheckpointError, ConfigError
from tests.unit.checkpoint.conftest import Case


def test_steps_saving_and_layout_change_freely(case: Case) -> None:
    more = ("max_steps=3", "trainer.save_updates=null", "trainer.save_steps=1", "batching.micro_batch_size=2")
    result = case.resume(*more)
    assert result.metrics
    assert not case.checkpoint("checkpoint-2-update1").exists()
    assert case.checkpoint("checkpoint-3").exists()


def test_a_seed_changes_only_if_it_is_named(case: Case) -> None:
    with pytest.raises(CheckpointError) as caught:
        case.resume("seed=1")
    assert str(caught.value) == (
        "checkpoint-1 was written with seed=0, and this run has seed=1, which changes what is computed; set seed=0, "
        "or allow the change with --allow-change seed"
    )
    case.resume("rollout_worker.temperature=0.9", allow=("rollout_worker",))


def test_what_decides_the_updates_never_changes(case: Case) -> None:
    with pytest.raises(CheckpointError) as caught:
        case.resume("optimizer.learning_rate=0.1", allow=("seed",))
    assert str(caught.value).endswith(
        "which cannot change in the middle of a run; set optimizer.learning_rate=0.001"
    )


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("sed", "--allow-change sed names no key of the configuration; did you mean seed?"),
        ("max_steps", "--allow-change max_steps is not needed"),
        ("optimizer.eps", "--allow-change optimizer.eps cannot be allowed in the middle of a run"),
    ],
)
def test_a_permission_that_means_nothing_is_refused(case: Case, key: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        case.resume(allow=(key,))
    assert says in str(caught.value)


def test_a_permission_without_a_checkpoint_is_refused(case: Case) -> None:
    with pytest.raises(ConfigError, match="has a meaning only for a run that goes on"):
        case.run(allow=("seed",))


def test_fewer_steps_than_are_made_are_refused(case: Case) -> None:
    with pytest.raises(
        CheckpointError, match=r"max_steps=1 is less than the steps .* \(2\); raise max_steps"
    ):
        case.resume("max_steps=1", name="checkpoint-2")


def test_every_section_is_known() -> None:
    """A new section has to be put on one of the lists, or stay fixed for good."""
    fixed = {key for key in options() if not is_free(key) and not is_on_demand(key)}
    assert {key.partition(".")[0] for key in fixed} == {"optimizer", "trainer"}
    assert {key for key in fixed if key.startswith("trainer.")} == {
        "trainer.epochs",
        "trainer.mini_batch_size",
        "trainer.resampling",
        "trainer.resampling_power",
        "trainer.type",
    }
    assert not {*FREE} & {*ON_DEMAND}
