"""Files of the remote API mode: documented names and keys, which the judge reads."""

from __future__ import annotations

import pytest

from regress.compare.comparison_request import compare_sources
from regress.errors import DumpError
from regress.interop.foreign_payloads import read_payload
from tests.unit.service.client.conftest import Sides

ALL = ("prepared_trajectories", "datums", "training_metrics")
ON = ("debug.enable_data_dump=true", *(f"debug.remote_api_dump_options.{name}=true" for name in ALL))


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_files_and_keys(sides: Sides, format: str) -> None:
    sides.there(*ON, f"debug.dump_format={format}")
    folder = sides.root / "there" / "debug_dump"
    for name in ALL:
        assert [p.name for p in sorted((folder / name).iterdir())] == [
            f"step_{step:06d}.{format}" for step in (0, 1)
        ]
    prepared, datums, metrics = (read_payload(folder / name / f"step_000001.{format}") for name in ALL)
    assert prepared["num_trajectories"] == datums["num_datums"] == 8
    assert {"tokens", "loss_mask", "reward", "is_val", "extra_fields"} <= prepared["trajectories"][0].keys()
    for item, datum in zip(prepared["trajectories"], datums["datums"], strict=True):
        inputs = datum["loss_fn_inputs"]
        assert datum["input_tokens"] == item["tokens"][:-1]
        assert inputs["target_tokens"] == item["tokens"][1:]
        assert inputs["loss_mask"] == item["loss_mask"][1:]
        kept = [value != 0 for value in item["advantages"]]
        assert [value != 0 for value in inputs["advantages"]] == kept[1:]
    assert metrics["step"] == 1
    assert metrics["metrics"]["loss"] == metrics["metrics"]["loss:sum"] != 0.0


def test_the_judge_compares_them_with_a_self_hosted_dump(sides: Sides) -> None:
    dumped = ("debug.enable_data_dump=true", "debug.dump_options.trajectory=true")
    more = ("debug.dump_options.is_loss_debug=true", "debug.dump_options.batch_inputs=true")
    here = sides.here(*dumped, *more)
    sides.there(*ON)
    found = compare_sources(here / "debug_dump", sides.root / "there" / "debug_dump", rtol=1e-4, atol=1e-5)
    equal = {verdict.quantity for verdict in found.verdicts if verdict.ok}
    assert {"trajectory", "batch_inputs", "old_log_probs"} <= equal


def test_an_earlier_dump_is_not_mixed_with(sides: Sides) -> None:
    sides.there(*ON)
    with pytest.raises(DumpError, match=r"debug[.]overwrite=true"):
        sides.there(*ON)
    sides.there(*ON, "debug.overwrite=true")
