"""Rounding decides between two dumps of float32: a branch of the clip, an expert, a bias; and errors of estimates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from regress import Comparison, Recorder, Segment, TokenLayout, at, compare_sources, recording, tap
from regress.dump.dump_manifest import Provenance

TOKENS = 12
LAYOUT = TokenLayout((1, TOKENS), (Segment(0, 0, TOKENS, 0, 0),))
SAMPLE = {"samples": [["g", 0]]}
OBJECTIVE = {"algorithm": {"loss": "ppo_clip", "clip_low": 0.2, "clip_high": 0.2, "clip_bounds": "offset"}}
BOUND = float(np.log(1.2))
REFERENCE = 0.3 * np.cos(np.arange(TOKENS))[None]
Term = Callable[[NDArray[Any]], NDArray[Any]]


def written(folder: Path, records: dict[str, dict[str, Any]], **meta: Any) -> str:
    """Write one microbatch of one sample of float32."""
    told = Provenance(config={**OBJECTIVE, "model": {"dtype": "float32"}})
    options = dict.fromkeys(records, True)
    with recording(Recorder(folder, options=options, provenance=told)), at(step=0, rank=0, micro=0):
        for record_type, tensors in records.items():
            of_tokens = {"layout": LAYOUT, "meta": {**SAMPLE, **meta}}
            with at(micro=None) if record_type == "gradient" else at():
                tap(record_type, tensors, **({} if record_type == "gradient" else of_tokens))
    return str(folder)


def clipped(folder: Path, log_ratio: float, *, free: bool, of_kl: Term | None = None) -> str:
    """Write a sample of advantage 1 whose token 5 has a ratio; it has a gradient, or the clip has stopped it.

    Args:
        of_kl: gradient of a KL term, of the log-probs minus those of the reference.
    """
    ratios = np.linspace(0.9, 1.1, TOKENS)[None]
    ratios[0, 5] = np.exp(log_ratio)
    gradient = -0.125 * ratios
    gradient[0, 5] *= free
    if of_kl is None:
        return with_gradient(folder, ratios, gradient)
    return with_gradient(folder, ratios, gradient + of_kl(np.log(ratios) - REFERENCE), ref=REFERENCE)


def with_gradient(
    folder: Path, ratios: NDArray[Any], gradient: NDArray[Any], ref: NDArray[Any] | None = None
) -> str:
    """Write a sample; log-probs of the reference are relative to the old ones."""
    old = np.linspace(-2.0, -0.5, TOKENS, dtype=np.float32)[None]
    reference = {} if ref is None else {"ref_log_probs": (old + ref).astype(np.float32)}
    return written(
        folder,
        {
            "is_loss_debug": {
                "log_probs": (old + np.log(ratios)).astype(np.float32),
                "old_log_probs": old,
                "prob_ratio": ratios.astype(np.float32),
                **reference,
            },
            "token_gradient": {"token_gradient": gradient.astype(np.float32)},
        },
    )


def compared(golden: str, actual: str, **options: Any) -> Comparison:
    return compare_sources(golden, actual, common=True, **options)


def failing(found: Comparison) -> set[str]:
    return {verdict.quantity for verdict in found.failed}


def test_a_token_at_the_bound_may_take_the_other_branch(tmp_path: Path) -> None:
    golden = clipped(tmp_path / "golden", BOUND - 2e-8, free=True)
    found = compared(golden, clipped(tmp_path / "actual", BOUND + 2e-8, free=False))
    assert failing(found) == set()
    assert any("1 token lie at a bound of the clip range" in note for note in found.notes)


@pytest.mark.parametrize("options", [{"rtol": 1e-5, "atol": 0.0}, {}], ids=["given", "away"])
def test_a_token_away_from_the_bound_may_not_and_nothing_may_under_a_given_tolerance(
    tmp_path: Path, options: dict[str, float]
) -> None:
    away = 0.0 if options else 0.05
    golden = clipped(tmp_path / "golden", BOUND - 2e-8 - away, free=True)
    found = compared(golden, clipped(tmp_path / "actual", BOUND + 2e-8 - away, free=False), **options)
    assert failing(found) == {"token_gradient"}


KL: list[Term] = [lambda way: 0.02 + 0 * way, lambda way: 0.02 * way, lambda way: -0.02 * np.expm1(-way)]


@pytest.mark.parametrize("term", KL, ids=["k1", "k2", "k3"])
def test_what_a_kl_term_adds_goes_on_beyond_the_bound(tmp_path: Path, term: Term) -> None:
    golden = clipped(tmp_path / "golden", BOUND - 2e-8, free=True, of_kl=term)
    found = compared(golden, clipped(tmp_path / "actual", BOUND + 2e-8, free=False, of_kl=term))
    assert failing(found) == set()
    assert any("1 token lie at a bound of the clip range" in note for note in found.notes)
    away = [
        clipped(tmp_path / name, BOUND - 0.05, free=free, of_kl=term)
        for name, free in (("a", True), ("b", False))
    ]
    assert failing(compared(*away)) == {"token_gradient"}
    twice = clipped(tmp_path / "twice", BOUND + 2e-8, free=False, of_kl=lambda way: 2 * term(way))
    assert failing(compared(golden, twice)) == {"token_gradient"}


@pytest.mark.parametrize("far", [1e3, 1e30])
def test_a_reference_of_impossible_log_probs_tells_no_kl_term(tmp_path: Path, far: float) -> None:
    ratios = np.linspace(0.9, 1.1, TOKENS)[None]
    gradient = -0.125 * ratios
    golden = with_gradient(tmp_path / "golden", ratios, gradient, ref=far * REFERENCE)
    gradient[0, 5] = 0.0
    found = compared(golden, with_gradient(tmp_path / "actual", ratios, gradient, ref=far * REFERENCE))
    assert failing(found) == {"token_gradient"}


def test_gradients_of_a_kl_that_are_gone_were_not_clipped(tmp_path: Path) -> None:
    ratios = np.linspace(0.95, 1.05, TOKENS)[None]
    of_kl = 0.04 * np.cos(np.arange(TOKENS))[None]  # no advantage: the KL alone, of either sign
    golden = with_gradient(tmp_path / "golden", ratios, of_kl)
    (verdict,) = compared(golden, with_gradient(tmp_path / "actual", ratios, 0 * of_kl)).failed
    assert (verdict.quantity, verdict.over, verdict.count) == ("token_gradient", TOKENS, TOKENS)
    of_advantage = with_gradient(tmp_path / "policy", ratios, -0.04 * ratios)
    (verdict,) = compared(of_advantage, with_gradient(tmp_path / "stopped", ratios, 0 * of_kl)).failed
    assert verdict.tolerance < 1e-7, "a whole sample that is clipped is a difference however coarse the dtype"


def routed(folder: Path, margin: float, taken: int) -> str:
    """Write a router whose token 3 has two experts that nearly tie, and takes one of them."""
    logits = np.tile(np.array([1.0, 0.5, -0.5], np.float32), (TOKENS, 1))
    logits[3] = 1.0, 1.0 - margin, -0.5
    experts = np.zeros((TOKENS, 1), np.int64)
    experts[3] = taken
    router = {"mlp.router": logits[None], "mlp.router/experts": experts[None]}
    return written(folder, {"activations": router})


@pytest.mark.parametrize(("margin", "wrong"), [(1e-7, set()), (1e-3, {"activations"})])
def test_a_token_may_go_to_an_expert_that_nearly_ties(tmp_path: Path, margin: float, wrong: set[str]) -> None:
    found = compared(routed(tmp_path / "golden", margin, 0), routed(tmp_path / "actual", margin, 1))
    assert failing(found) == wrong
    assert any("near-ties that rounding decides" in note for note in found.notes) is not bool(wrong)


def test_errors_of_estimates_add_to_the_bound_and_not_to_one_that_was_asked_for(tmp_path: Path) -> None:
    values = np.linspace(0.1, 1.0, TOKENS, dtype=np.float32)[None]
    paths = [
        written(
            tmp_path / name,
            {"token_gradient": {"token_gradient": values + np.float32(error)}},
            **({"accuracy": {"token_gradient": 2e-3}} if name == "estimated" else {}),
        )
        for name, error in (("golden", 0.0), ("exact", 1e-3), ("estimated", 1e-3))
    ]
    assert failing(compared(paths[0], paths[1])) == {"token_gradient"}
    assert failing(compared(paths[0], paths[2])) == set()
    assert failing(compared(paths[0], paths[2], rtol=1e-5, atol=0.0)) == {"token_gradient"}


def test_a_bias_has_the_scale_of_the_weight_beside_it(tmp_path: Path) -> None:
    """Its gradient may be nothing but rounding, as that of the keys' bias in attention."""

    def gradients(name: str, bias: float, **more: Any) -> str:
        own = {"k_proj.bias": np.full(4, bias, np.float32), **more}
        return written(tmp_path / name, {"gradient": own})

    weight = {"k_proj.weight": np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3)}
    assert failing(compared(gradients("g", 1e-9, **weight), gradients("a", -1e-9, **weight))) == set()
    assert failing(compared(gradients("G", 1e-9), gradients("A", -1e-9))) == {"gradient"}
