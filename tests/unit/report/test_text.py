"""Messages of failures: the first line, the details, line by line."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from regress.compare.diagnosis.common_patterns import Pattern
from regress.compare.diagnosis.first_divergence import Divergence
from regress.compare.diagnosis.probable_cause import Diagnosis
from regress.compare.verdicts.tensor_judge import judge_tensor
from regress.compare.verdicts.tolerance import BITWISE, EXACT, Tolerance
from regress.compare.verdicts.verdict import Status, Verdict, Worst
from regress.dump.coordinates import Place
from regress.report.number_format import multiple, pair, plural
from regress.report.verdict_text import explain, headline

PLACE = Place(0, None, 0, 1)
DRIFT = Verdict(
    Status.DRIFT,
    "log_probs",
    "log_probs",
    PLACE,
    worst=Worst((0, 17), "sample 001/0, position 17, token 5 'a'", -1.5, -1.25, 0.25, 1024.0),
    multiple=250.0,
    max_error=0.25,
    relative=0.1,
    relative_l2=0.04,
    scale=2.5,
    over=3,
    count=512,
    tolerance=0.001,
    basis={"perturbation": 2.1e-6, "kappa": 4},
    reason="4 times the noise floor",
)


def test_the_first_line_names_verdict_quantity_and_element() -> None:
    assert headline(DRIFT, "dense/packed") == (
        "drift: log_probs: sample 001/0, position 17, token 5 'a': golden -1.5, actual -1.25, 250 x tolerance "
        "(dense/packed/step0/rank0/micro1)"
    )
    assert headline(DRIFT).endswith("250 x tolerance")


def test_the_first_line_of_other_verdicts() -> None:
    def judged(actual: object, golden: object, tolerance: Tolerance) -> str:
        verdict = judge_tensor(
            None if actual is None else np.asarray(actual),
            None if golden is None else np.asarray(golden),
            tolerance,
            quantity="param",
            name="w",
            place=PLACE,
        )
        return headline(verdict, "a/b")

    place = "(a/b/step0/rank0/micro1)"
    assert judged([1, 2], [1, 3], EXACT) == (
        f"mask: param w: element [1]: golden 3, actual 2, 1 of 2 elements {place}"
    )
    assert judged(None, [1.0], EXACT) == (
        f"missing: param w: golden float64 [1], and nothing of this name was recorded {place}"
    )
    assert judged([1.0], [1.0, 2.0], EXACT) == f"shape: param w: golden [2], actual [1] {place}"
    assert judged([1.0, np.nan], [1.0, 2.0], EXACT) == (
        "nonfinite: param w: golden finite, actual NaN (1 of 2 elements do not match), at element [1] "
        + place
    )
    assert judged([np.nextafter(1.0, 2.0)], [1.0], BITWISE) == (
        "drift: param w: element [0]: golden 1, actual 1.0000000000000002, 1 of 1 elements " + place
    )


def test_the_first_line_is_never_long() -> None:
    assert DRIFT.worst is not None
    far = replace(DRIFT, name="model." * 10, worst=replace(DRIFT.worst, where="sample " + "x" * 20))
    assert headline(far, "case/" * 20) == headline(far)
    endless = replace(far, detail="", worst=replace(DRIFT.worst, where="x" * 300))
    assert len(headline(endless, "case")) == 159
    assert headline(endless).endswith("...")


def test_the_details_of_a_drift() -> None:
    commands = {"reproduce": "pytest 'a b'", "update": "pytest --update-golden"}
    text = explain([DRIFT], environment=["recorded with torch 2.12, now 2.13"], commands=commands)
    assert text.splitlines() == [
        "drift: log_probs at step0/rank0/micro1",
        "  worst      sample 001/0, position 17, token 5 'a', at [0, 17] of the local tensor",
        "  golden     -1.5",
        "  actual     -1.25",
        "  error      0.25, 1.02e+03 ulp: 250 x tolerance of 0.001",
        "  relative   0.1 of the scale 2.5, 0.04 in the Euclidean norm",
        "  elements   3 of 512 beyond the tolerance",
        "  tolerance  4 times the noise floor (perturbation 2.1e-06, kappa 4)",
        "environment: recorded with torch 2.12, now 2.13",
        "reproduce: pytest 'a b'",
        "update: pytest --update-golden",
    ]


def test_the_details_of_something_missing() -> None:
    lost = Verdict(Status.MISSING, "entropy", "entropy", PLACE, "forward_data was not recorded")
    assert explain([lost], where="tests/a.py::b").splitlines() == [
        "missing: entropy at tests/a.py::b",
        "  forward_data was not recorded",
    ]


def test_the_details_of_coverage_count_tokens() -> None:
    doubled = Verdict(
        Status.COVERAGE,
        "coverage",
        "loss",
        Place(0),
        "sample 001/0, position 0 was produced twice: microbatches 1 and 2",
        Worst((7,), "sample 001/0, position 0", 1.0, 2.0, 1.0),
        multiple=math.inf,
        over=9,
        count=20,
    )
    assert "  elements   9 of 20" in explain([doubled])
    assert headline(doubled, "a/b") == (
        "coverage: coverage loss: sample 001/0, position 0 was produced twice: microbatches 1 and 2 (a/b/step0)"
    )


def test_further_tensors_of_the_test_are_listed() -> None:
    others = [replace(DRIFT, quantity="gradient", name=f"layer.{i}") for i in range(12)]
    lines = explain([DRIFT, *others]).splitlines()
    start = lines.index("12 more tensors of this test failed:")
    assert lines[start + 1].startswith("  drift: gradient layer.0: ")
    assert lines[start + 11] == "  and 2 more"
    assert "1 more tensor of this test failed:" in explain([DRIFT, others[0]])


def test_the_first_divergence_is_named_with_its_cause() -> None:
    earlier = replace(DRIFT, quantity="activations", name="model.layers.1", place=Place(0, None, 0, 2))
    cause = Diagnosis("module", "its weights", ("activations model.layers.1 breaks",), "regress replay dense")
    divergence = Divergence(
        earlier,
        held=("batch_inputs", "activations model.layers.0"),
        downstream={"log_probs": 1, "gradient": 2},
        patterns=(Pattern("micro", "only microbatch 2"), Pattern("sign", "sign flipped")),
    )
    lines = explain([DRIFT], divergence=divergence, diagnoses=[cause]).splitlines()
    start = "first divergence: activations model.layers.1 at step0/rank0/micro2, while batch_inputs, "
    assert lines[-5:] == [
        f"{start}activations model.layers.0 hold: {headline(earlier)}",
        "affected: only microbatch 2; sign flipped",
        "broken because of it: log_probs (1), gradient (2)",
        "probably: its weights (rule module; because activations model.layers.1 breaks)",
        "next: regress replay dense",
    ]
    own = explain([earlier], divergence=divergence).splitlines()
    assert "first divergence: this one, while batch_inputs, activations model.layers.0 hold" in own
    assert "divergence" not in explain([DRIFT])


def test_nothing_cannot_be_explained() -> None:
    with pytest.raises(ValueError, match="no verdict to explain"):
        explain([])


def test_values_show_as_many_digits_as_tell_them_apart() -> None:
    assert pair(1.0, 2.0) == ("1", "2")
    assert pair(1.0, 1.0 + 1e-8) == ("1", "1.00000001")
    assert pair(0.1, np.nextafter(0.1, 1.0)) == ("0.10000000000000001", "0.10000000000000002")
    assert pair(math.nan, math.nan) == ("nan", "nan")


def test_words_of_numbers() -> None:
    assert multiple(2.0) == "2 x tolerance"
    assert multiple(math.inf) == "nothing is tolerated"
    assert [plural(n, "tensor") for n in (0, 1, 2)] == ["0 tensors", "1 tensor", "2 tensors"]


def test_replicas_that_differ_are_told_by_their_ranks() -> None:
    verdict = replace(
        DRIFT,
        quantity="replicas",
        name="gradient/norm.weight",
        place=Place(0),
        detail="norm.weight of rank 1 differs from that of rank 0 in 1 of 3 elements, most at element [1]: 2.5 and 2.0",
    )
    assert headline(verdict, "a/b") == (
        "drift: replicas gradient/norm.weight: norm.weight of rank 1 differs from that of rank 0 in 1 of 3 elements, "
        "most at element [1]: 2.5 and 2.0 (a/b/step0)"
    )
