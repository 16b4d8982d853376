"""Golden values hold on other processors: torch's kernels for older instruction sets stand in for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[2] / "golden"
SUITE = """
import pytest

@pytest.mark.regress(cases="gpt2", variants="base,packed,threads2")
def test_golden(regress_record):
    regress_record.check()
"""


@pytest.mark.extended
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_golden_values_hold_with_other_kernels(
    capability: str, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugins of whoever runs this
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    pytester.makepyfile(test_suite=SUITE)
    result = pytester.runpytest_subprocess(
        "-p",
        "regress.plugin",
        "-p",
        "no:cacheprovider",
        "-q",
        f"--golden-dir={GOLDEN}",
        "--regress-matrix=default",
        timeout=280,
    )
    assert result.ret == 0
    assert any(re.match(r"regress: [4-9]\d\d quantities judged in ", line) for line in result.outlines)
