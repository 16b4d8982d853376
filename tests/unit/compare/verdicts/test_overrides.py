"""Tolerances that a project sets by hand: what they change, and how a mistaken one is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regress.compare.dumps.tolerance_bounds import Bounds
from regress.compare.verdicts.tolerance import EXACT, Tolerance
from regress.compare.verdicts.tolerance_overrides import Override, Overrides, read_overrides
from regress.errors import ConfigError
from regress.golden.golden_directory import GoldenStore

GOLDEN = Path(__file__).parents[4] / "golden"
MEASURED = Tolerance(1e-6, 1e-9, reason="measured")


def bounds(quantity: str) -> Tolerance | None:
    return {"batch_inputs": EXACT, "kl": None}.get(quantity, MEASURED)


def write(folder: Path, rows: str) -> Path:
    (folder / "pyproject.toml").write_text(rows)
    return folder


def row(text: str) -> str:
    return f"[[tool.regress.tolerances]]\n{text}\n"


def test_without_rows_everything_is_as_measured(tmp_path: Path) -> None:
    for root in (None, tmp_path, write(tmp_path, "[project]\nname = 'x'\n")):
        assert read_overrides(root).over(bounds) is bounds


def test_a_row_replaces_the_measured_bound_and_keeps_it_in_sight(tmp_path: Path) -> None:
    rows = row('quantity = "gradient"\nrelative = 1e-3\nreason = "keys are summed in half precision"')
    found = read_overrides(write(tmp_path, rows)).over(bounds, case="dense", precision="float32")("gradient")
    assert found is not None
    assert (found.relative, found.absolute) == (1e-3, 0.0)
    assert found.reason == "set by hand: keys are summed in half precision"
    assert found.basis == {
        "override": f"{tmp_path}/pyproject.toml: [[tool.regress.tolerances]] row 1",
        "measured_relative": 1e-6,
        "measured_absolute": 1e-9,
    }


def test_a_row_about_some_tensors_leaves_the_others(tmp_path: Path) -> None:
    rows = row('quantity = "gradient"\ntensor = "*.bias"\nabsolute = 2e-4\nreason = "zero but for rounding"')
    found = read_overrides(write(tmp_path, rows)).over(bounds)("gradient")
    assert found is not None
    assert found.of("model.norm.weight") == found
    assert (found.relative, found.absolute) == (1e-6, 1e-9)
    assert (found.of("k_proj.bias").relative, found.of("k_proj.bias").absolute) == (0.0, 2e-4)
    assert found.scaled(10).of("k_proj.bias").absolute == pytest.approx(2e-3)


def test_the_last_row_that_matches_counts() -> None:
    first, last = (Override(name, "because", relative=bound) for name, bound in (("a", 1.0), ("b", 2.0)))
    of_one = Override("c", "because", relative=3.0, tensor="x")
    assert Overrides([first, last]).over(bounds)("loss").relative == 2.0  # type: ignore[union-attr]
    found = Overrides([of_one, last]).over(bounds)("loss")
    assert found is not None
    assert found.of("x").relative == 2.0
    found = Overrides([last, of_one]).over(bounds)("loss")
    assert found is not None
    assert (found.of("x").relative, found.of("y").relative) == (3.0, 2.0)


@settings(deadline=None)
@given(
    st.sampled_from(["*", "dense", "d*", "moe"]),
    st.sampled_from(["*", "float32", "float*", "bfloat16"]),
    st.sampled_from(["*", "gradient", "grad*", "loss"]),
)
def test_a_row_covers_what_all_its_patterns_match(case: str, precision: str, quantity: str) -> None:
    rows = Overrides([Override("x", "because", 0.5, quantity=quantity, case=case, precision=precision)])
    found = rows.over(bounds, case="dense", precision="float32")("gradient")
    covered = case != "moe" and precision != "bfloat16" and quantity != "loss"
    assert found == MEASURED if not covered else found is not None and found.relative == 0.5


def test_what_is_compared_exactly_stays_so_and_dumps_without_a_case_know_no_rows_of_cases() -> None:
    rows = Overrides([Override("x", "because", 1.0), Override("y", "because", 2.0, case="dense")])
    assert rows.over(bounds)("batch_inputs") is EXACT
    assert rows.over(bounds)("loss").relative == 1.0  # type: ignore[union-attr]


def test_a_row_makes_judged_what_was_not() -> None:
    everything = Overrides([Override("x", "because", 0.5)]).over(bounds)("kl")
    assert everything is not None
    assert everything.relative == 0.5
    one = Overrides([Override("x", "because", 0.5, tensor="kl")]).over(bounds)("kl")
    assert one is not None
    assert (one.of("kl").relative, one.of("other").relative) == (0.5, float("inf"))


REFUSED = [
    ("", "row 1 has no reason; add reason = "),
    ('reason = " "\nrelative = 1', "row 1 has no reason"),
    ('reason = "x"', "row 1 sets no bound; add relative = 1e-6, absolute = 1e-9, or both"),
    ('reason = "x"\nrelative = -1', "row 1 has relative = -1; a bound is a finite number of at least 0"),
    ('reason = "x"\nabsolute = inf', "row 1 has absolute = inf; a bound is a finite number"),
    ('reason = "x"\nabsolute = true', "row 1 has absolute = True; a bound is"),
    (
        'reason = "x"\nrelativ = 1',
        "row 1 has the key 'relativ'; choose from reason, relative, absolute, quantity",
    ),
    ('reason = "x"\nrelative = 1\ncase = 3', "row 1 has case = 3; give a name, or a pattern such as"),
    (
        'reason = "x"\nrelative = 1\nquantity = "grads"',
        "row 1: no quantity matches 'grads'; choose from sampler_log_probs",
    ),
    (
        'reason = "x"\nrelative = 1\nquantity = "batch_inputs"',
        "batch_inputs is compared exactly, so it has no tol",
    ),
    (
        'reason = "x"\nrelative = 1\nprecision = "fp8"',
        "no precision matches 'fp8'; choose from float64, float32",
    ),
]


@pytest.mark.parametrize(("text", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_refused_rows(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read_overrides(write(tmp_path, row(text)))
    assert says in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/pyproject.toml: [[tool.regress.tolerances]]")


def test_rows_that_are_no_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an array of tables"):
        read_overrides(write(tmp_path, "[tool.regress.tolerances]\nloss = 1\n"))
    with pytest.raises(ConfigError, match="row 1 is 3; give a table with keys of reason"):
        read_overrides(write(tmp_path, "[tool.regress]\ntolerances = [3]\n"))


@pytest.mark.parametrize(
    ("patterns", "says"),
    [
        ({"case": "sparse"}, "x: no case matches 'sparse'; recorded are dense, dr_grpo"),
        ({"quantity": "kl", "case": "dr_grpo"}, "x: no quantity that matches 'kl' was recorded in dr_grpo"),
        (
            {"quantity": "gradient", "tensor": "*.bias"},
            "x: no tensor of gradient matches '*.bias' in dense, dr_grpo",
        ),
    ],
)
def test_a_row_about_nothing_is_told(patterns: dict[str, str], says: str) -> None:
    cases = [GoldenStore(GOLDEN).case(name) for name in ("dense", "dr_grpo")]
    with pytest.raises(ConfigError) as error:
        Overrides([Override("x", "because", **patterns)]).check(cases)
    assert str(error.value).startswith(says)


def test_rows_about_something_are_not_refused() -> None:
    rows = Overrides([Override("x", "y", quantity="grad*", tensor="lm_head.*", case="d*", precision="*16")])
    rows.check([GoldenStore(GOLDEN).case("dense")])
    Overrides().check([])


def test_dumps_are_compared_by_what_is_set_by_hand_before_what_was_measured() -> None:
    case = GoldenStore(GOLDEN).case("gpt2")
    measured = Bounds.of_case(case).of("param", ["float32"])
    own = measured.of("transformer.h.0.attn.c_attn.bias")
    assert own.absolute > measured.relative * 0.1, "ill-conditioned, so apart, as in a replay"
    assert own.relative == 0
    rows = Overrides([Override("x", "because", 0.5, quantity="param", precision="float32", case="gpt2")])
    assert Bounds.of_case(case, rows).of("param", ["float32"]).relative == 0.5
    assert Bounds.of_case(case, rows).of("param", ["bfloat16"]).relative != 0.5
    assert Bounds(overrides=rows).of("param", ["float32"]) == Bounds().of("param", ["float32"])
