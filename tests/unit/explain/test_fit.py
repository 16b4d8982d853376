"""Fits of token gradients: rows that are fitted together are those that are fitted alone."""

from __future__ import annotations

import numpy as np
import pytest

from regress.explain import hypothesis_fit
from regress.explain.hypothesis_fit import fit_all, fit_clipped

RNG = np.random.default_rng(0)
BASE, RATIO = RNG.normal(size=60), np.exp(RNG.normal(size=60) * 0.3)
KL = RNG.normal(size=(5, 60))
CLIPPED = ((RATIO > 1.2) & (BASE < 0)) | ((RATIO < 0.8) & (BASE > 0))


@pytest.mark.parametrize("elements", [1, 2**20])
def test_rows_do_not_depend_on_each_other(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypothesis_fit, "ELEMENTS", elements)
    g = 1.7 * BASE * np.where(CLIPPED, 0.0, RATIO) + 0.3 * KL[2]
    together = fit_clipped(g, BASE, RATIO, KL)
    for row, found in enumerate(together):
        (alone,) = fit_clipped(g, BASE, RATIO, KL[row : row + 1])
        assert found is not None
        assert alone is not None
        assert found.unexplained == pytest.approx(alone.unexplained, rel=1e-9, abs=1e-12)
    best = together[2]
    assert best is not None
    assert (best.scale, best.penalty) == (pytest.approx(1.7), pytest.approx(0.3))
    assert best.clipped.tolist() == CLIPPED.tolist()
    assert best.unexplained < 1e-12
    assert all(found is not None and found.unexplained > 1e-3 for found in (*together[:2], *together[3:]))


def test_a_ratio_that_is_held_is_named() -> None:
    (found,) = fit_clipped(0.5 * BASE * np.minimum(RATIO, 1.3), BASE, RATIO)
    assert found is not None
    assert found.caps == (None, pytest.approx(1.3))
    assert not found.clipped.any()


def test_no_gradient_and_parallel_terms_have_no_fit() -> None:
    assert fit_clipped(np.zeros(60), BASE, RATIO, KL) == fit_all(np.zeros(60), BASE, KL) == [None] * 5
    assert fit_all(BASE, BASE, 2 * BASE[None]) == [None]
