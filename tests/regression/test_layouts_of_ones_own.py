"""Layouts that judge a case of one's own: by what it is, whatever it is called."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main

GOLDEN = Path(__file__).parents[2] / "golden"
ESSENTIAL = "base left mbs3 packed packed-mbs3 dp2 dp2-mbs2 fsdp2 tp2 pp2 cp2"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugins of whoever runs this
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_suite.py").write_text(
        "import pytest\n\n@pytest.mark.regress(MARK)\ndef test_golden(regress_record):\n    regress_record.check()\n"
    )
    marked(tmp_path, 'cases="*"')
    return tmp_path


def marked(project: Path, arguments: str) -> None:
    path = project / "test_suite.py"
    path.write_text(path.read_text().replace("MARK", arguments))


def copied(project: Path, case: str, name: str) -> None:
    shutil.copytree(GOLDEN / case, project / "golden" / name)


def typed(code: int, *arguments: str) -> list[str]:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output.splitlines()


def listed(name: str, *options: str) -> list[str]:
    """Variants that `regress replay NAME --list` lists, with their precisions."""
    lines = typed(0, "replay", name, "--list", *options)
    return [line.split()[0].partition("/")[2] for line in lines if line.startswith(f"{name}/")]


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "regress.plugin", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280).stdout


def collected(*arguments: str) -> list[str]:
    """Replays whose tests pytest collects."""
    lines = run("--collect-only", *arguments).splitlines()
    ids = (line.partition("[")[2].removesuffix("]") for line in lines if "[" in line)
    return list(dict.fromkeys("/".join(id.split("/")[1:2]) for id in ids if "/" in id))


CASES = sorted(path.parent.name for path in GOLDEN.glob("*/case.yaml"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_a_name_changes_nothing(case: str, project: Path) -> None:
    copied(project, case, "zebra")
    shipped = ["--golden-dir", str(GOLDEN)]
    for options in ([], ["--tier", "all"]):
        assert listed("zebra", *options) == listed(case, *shipped, *options)


def test_a_case_of_ones_own_is_judged_by_every_essential_layout(project: Path) -> None:
    copied(project, "gspo", "digits")
    assert {*ESSENTIAL.split()} <= {*listed("digits")}
    assert typed(0, "replay", "digits", "--list")[-1].startswith(
        "layouts that judge digits: base, left, mbs3, "
    )
    assert {*ESSENTIAL.split()} <= {*collected("-k", "step0 and log_probs")}


@pytest.mark.extended
def test_what_is_not_possible_is_said_with_the_reason(project: Path) -> None:
    copied(project, "rloo", "mine")
    *_, told = typed(0, "replay", "mine", "--list")
    assert "; not possible: mbs3, packed-mbs3, dp2-mbs2 (it makes other microbatches, on which " in told
    assert "tp2 (parallel.tp=2 does not divide num_key_value_heads=1 of this qwen3 model; " in told
    (refusal,) = typed(2, "replay", "mine", "--variants", "tp2")
    assert refusal.startswith(
        "error: mine/tp2 is not possible: parallel.tp=2 does not divide num_key_value_heads"
    )
    said = run("-k", "mine and step0 and coverage and not pp2 and not cp2")
    assert "not possible, and left out: mine/mbs3, mine/packed-mbs3, mine/dp2-mbs2: it makes other" in said
    *_, judged, verdict = typed(0, "replay", "mine", "--variants", "base,tp2")
    assert judged.startswith(
        "layouts that judged mine: base; not possible: tp2 (parallel.tp=2 does not divide "
    )
    assert verdict.endswith(": all within tolerance")


def test_a_marker_names_variants(project: Path) -> None:
    copied(project, "gspo", "mine")
    path = project / "test_suite.py"
    path.write_text(path.read_text().replace('cases="*"', 'variants="packed,tp2"'))
    assert collected() == ["packed", "tp2"]
    path.write_text(path.read_text().replace("packed,tp2", "pp2-zb-mbs6,ep2"))
    assert collected() == ["pp2-zb-mbs6"]  # no layout that it has by itself, and one that it cannot have


LEAKS = """
import torch


def attention(module, query, key, value, attention_mask, scaling=None, **others):
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None
"""


def test_samples_of_a_row_that_see_one_another_fail_by_default(project: Path) -> None:
    """An attention without the block-causal mask of packed rows is right on every padded one."""
    copied(project, "gspo", "mine")
    (project / "my_kernels.py").write_text(LEAKS)
    (project / "pyproject.toml").write_text('[tool.regress]\nallow_code = ["my_kernels"]\n')
    wrong = ["model.attention=my_kernels:attention"]
    said = run(
        "-k", "(base or packed) and step0 and log_probs and not fp32 and not bf16", "--regress-set", *wrong
    )
    assert "mine/packed/step0/rank0/micro0/log_probs" in said
    assert "mine/base/step0" not in said.partition("short test summary")[2]


@pytest.mark.extended
def test_every_layout_by_default_finds_samples_that_see_one_another(project: Path) -> None:
    copied(project, "tied", "mine")
    (project / "my_kernels.py").write_text(LEAKS)
    (project / "pyproject.toml").write_text('[tool.regress]\nallow_code = ["my_kernels"]\n')
    lines = typed(1, "replay", "mine", "--set", "model.attention=my_kernels:attention")
    assert any("mine/packed" in line for line in lines)
    assert any(line.startswith("layouts that judged mine: base, left, ") for line in lines)
