"""The golden case of low-rank adapters: every layout that computes it, and bugs of its ranks, found where they are.

Bugs of one process are in test_faults.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from regress.compare.verdicts.verdict import Status, Verdict
from regress.golden.store import GoldenStore
from regress.replay.judge import judge_replay
from regress.replay.layouts import LAYOUTS
from regress.replay.matrix import Replay
from regress.replay.run import replay
from regress.replay.variants import VARIANTS, Extent, Precision, Variant

sys.path.insert(0, str(Path(__file__).parent))
import layout_faults as bugs  # by the name under which the ranks import it

GOLDEN = Path(__file__).parents[2] / "golden"
CASE = "lora"
NOT_OURS = "tp2-hf*"
"""The plan of transformers, which has no place for adapters."""
LAYER = "activations model.layers.0"


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


OTHERS = [
    variant
    for variant in (VARIANTS | LAYOUTS).values()
    if not variant.applies_to(CASE) and variant.applies_to(CASE, Extent.FULL) and variant.name != "tp2-hf"
]


@pytest.mark.extended
@pytest.mark.parametrize("variant", OTHERS, ids=lambda variant: variant.name)
def test_every_other_variant_computes_the_same(variant: Variant, tmp_path: Path) -> None:
    assert verdicts(variant, tmp_path) == []


@dataclass(frozen=True)
class Fault:
    """A bug, with the quantity and the pattern of the tensors that fail first, and nothing else of that quantity."""

    inject: Callable[..., Any]
    quantity: str
    names: str = ".*"
    variant: str = "mbs4"
    status: Status = Status.DRIFT
    ranks: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        return f"{self.inject.__name__}-{self.variant}"


ALL_LAYERS = r"model\.layers\..|model\.norm|lm_head"
OF_RANKS = (
    Fault(bugs.adapter_off_on_one_rank, "activations", ALL_LAYERS, "dp2", ranks=(1,)),
    Fault(bugs.factors_a_not_summed, "gradient", r".*\.lora_A\..*", "dp2", ranks=(0, 1)),
    Fault(
        bugs.gradient_between_factors_not_summed,
        "gradient",
        r".*",
        "tp2",
        ranks=(0, 1),
    ),
    Fault(bugs.factors_b_of_own_tokens, "gradient", r".*\.(o|down)_proj\.lora_B\..*", "tp2-sp", ranks=(0, 1)),
    Fault(
        bugs.factors_a_of_gathered_tokens_summed,
        "gradient",
        r".*\.(q|v|gate)_proj\.lora_A\..*",
        "tp2-sp",
        ranks=(0, 1),
    ),
)


def require_place(fault: Fault, failed: list[Verdict]) -> None:
    assert failed, "not caught"
    first = failed[0]
    assert (first.quantity, first.status) == (fault.quantity, fault.status), first
    found = [v for v in failed if (v.quantity, v.place.update) == (first.quantity, first.place.update)]
    found = [v for v in found if v.place.step == first.place.step]
    assert {v.place.rank for v in found if v.place.rank is not None} == set(fault.ranks)
    assert all(re.fullmatch(fault.names, v.name.rpartition("/")[0] or v.name) for v in found), {
        v.name for v in found
    }


@pytest.mark.extended
@pytest.mark.parametrize("fault", OF_RANKS, ids=lambda fault: fault.name)
def test_a_fault_of_ranks_fails_first_where_it_is(fault: Fault, tmp_path: Path) -> None:
    require_place(
        fault, verdicts(LAYOUTS[fault.variant], tmp_path, launch=bugs.Broken(fault.inject), steps=1)
    )


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of peft, about transformers
def test_a_peft_loop_of_somebody_else_agrees_with_the_golden_values_by_name(tmp_path: Path) -> None:
    """A PeftModel of the exported files under `regress.record`, and `regress compare golden:lora DUMP`."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from regress import compare_sources, record
    from regress.replay.export import export_case

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
