"""The golden case of low-rank adapters: every layout that computes it. Its faults are in test_faults.py."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regress.compare.verdicts.verdict import Verdict
from regress.golden.golden_directory import GoldenStore
from regress.replay.case_run import replay
from regress.replay.replay_judge import judge_replay
from regress.replay.test_matrix import Replay, replays
from regress.replay.variant import SEMANTICS, Extent, Precision, Variant
from regress.replay.variant_table import VARIANTS

GOLDEN = Path(__file__).parents[2] / "golden"
CASE = "lora"
NOT_OURS = "tp2-hf*"
"""The plan of transformers, which has no place for adapters."""


def verdicts(
    variant: Variant, folder: Path, *, launch: Any = None, steps: int | None = None
) -> list[Verdict]:
    """Return what is wrong with a replay, in order."""
    chosen = Replay(GoldenStore(GOLDEN).case(CASE), variant, Precision.FLOAT64)
    dump = replay(chosen.case, variant, Precision.FLOAT64, folder, launch=launch, steps=steps)
    plan = [update for update in chosen.plan if steps is None or update.step < steps]
    found = [
        v for v in judge_replay(chosen.case, dump, plan, Precision.FLOAT64) if v.place.step < (steps or 99)
    ]
    assert found
    return [verdict for verdict in found if not verdict.ok]


FULL, DEFAULT = (
    {one.variant.name for one in replays([GoldenStore(GOLDEN).case(CASE)], VARIANTS, SEMANTICS, extent)}
    for extent in (Extent.FULL, Extent.DEFAULT)
)
OTHERS = [VARIANTS[name] for name in VARIANTS if name in FULL - DEFAULT - {"tp2-hf"}]


@pytest.mark.extended
@pytest.mark.parametrize("variant", OTHERS, ids=lambda variant: variant.name)
def test_every_other_variant_computes_the_same(variant: Variant, tmp_path: Path) -> None:
    assert verdicts(variant, tmp_path) == []


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_a_peft_loop_of_somebody_else_agrees_with_the_golden_values_by_name(tmp_path: Path) -> None:
    """A PeftModel of the exported files under `regress.record`, and `regress compare golden:lora DUMP`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from regress import compare_sources, record
    from regress.replay.case_export import export_case

    folder = export_case(GoldenStore(GOLDEN).case(CASE), tmp_path / "export", derived=False)
    source = (GOLDEN.parent / "examples" / "foreign_trainer.py").read_text()
    source = source.replace(
        'n.replace(".default.", ".")', 'n.replace("base_model.model.", "").replace(".default.", ".")'
    )
    script = ModuleType("foreign_trainer")
    exec(compile(source, "foreign_trainer.py", "exec"), script.__dict__)
    with ExitStack() as stack:

        def load(place: Path, dtype: torch.dtype) -> Any:
            base = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
            model = PeftModel.from_pretrained(base, place, is_trainable=True).to(dtype).eval()
            stack.enter_context(record(tmp_path / "dump", model, pad_token_id="none"))
            return model

        script.load = load  # type: ignore[attr-defined]
        script.train(folder)
    found = compare_sources(f"golden:{CASE}", tmp_path / "dump", golden_dir=GOLDEN)
    assert found.exit_code == 0
    assert {v.quantity for v in found.verdicts} >= {"param", "optimizer", "log_probs", "entropy"}
    named = {
        v.name.rpartition("/")[0] or v.name for v in found.verdicts if v.quantity in ("param", "optimizer")
    }
    assert named >= set(GoldenStore(GOLDEN).case(CASE).truth("step_000000")["param"])
