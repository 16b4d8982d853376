"""Public API as a type checker sees it; `mypy --strict` reads this file, nothing runs it.

Each ignored line is a mistake that must be found: an ignore that is not needed is an error itself.
"""

from __future__ import annotations

from typing import assert_type

from torch import nn

import regress

recorder = regress.Recorder("dump", options={"loss": True}, every_n_steps=2)
assert_type(recorder, regress.Recorder)
regress.Recorder("dump", options={"loss": True}, every=2)  # type: ignore[call-arg]
with regress.recording(recorder) as same, regress.at(step=0, micro=1):
    assert_type(same, regress.Recorder)
    regress.tap("loss", loss=1.0, meta={"tokens": 3})
    regress.tap("loss", layout=3)  # type: ignore[arg-type]

reader = regress.DumpReader("dump")
assert_type(reader.names("loss", step=0), list[str])
assert_type(reader.read("loss/step_000000.safetensors"), regress.Record)
regress.DumpReader("dump", kind="loss")  # type: ignore[call-arg]

assert_type(regress.GoldenStore("golden").case("dense"), regress.GoldenCase)
layout = regress.TokenLayout((1, 4), (regress.Segment(0, 0, 4, 0, 0),))
assert_type(layout.num_tokens, int)
assert_type(regress.ShardLayout.whole((2, 3)).local_shape, tuple[int, ...])
regress.assert_close([1.0], [1.0], rtol=1e-6, why="two sums")
regress.assert_close([1.0], [1.0], relative=1e-6)  # type: ignore[call-arg]
with regress.true_float64():
    pass
found = regress.compare_sources("golden:dense", "dump", only="gradient/*", bitwise=True)
assert_type(found, regress.Comparison)
assert_type(found.verdicts, list[regress.Verdict])
regress.compare_sources("a", "b", tolerance=1e-3)  # type: ignore[call-arg]
assert_type(regress.check_dump("dump"), list[regress.Verdict])
explanation = regress.explain_dump("dump", step=0)
explanation.to_json()
regress.explain_dump("dump", steps=0)  # type: ignore[call-arg]


def adapter(case: regress.GoldenCase, variant: regress.Variant) -> None:
    """Refuse every variant."""
    regress.export_case(case, "folder", derived=False)
    regress.export_case(case, "folder", derive=False)  # type: ignore[call-arg]
    raise regress.NotSupported(f"no {variant.name}")


def train(model: nn.Module) -> None:
    """Record a trainer."""
    with regress.record("dump", model, token_gradient=True) as recorder:
        assert_type(recorder, regress.Recorder)
        regress.tap_batch(advantages=[1.0])
    with regress.record("dump", model, tokens=True):  # type: ignore[call-arg]
        pass


regress.no_such_name  # type: ignore[attr-defined]  # noqa: B018
