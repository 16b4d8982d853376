"""A golden case of one's own, from its case.yaml to its first test, as it is typed and mistyped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from regress.cli import main
from regress.golden.golden_case import GoldenCase

GOLDEN = Path(__file__).parents[2] / "golden"
SUITE = "def test_golden(regress_record):\n    regress_record.check()\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with a suite, and no case yet."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # the plugins of whoever runs this
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_suite.py").write_text(SUITE)
    return tmp_path


def describe(project: Path, **recipe: object) -> Path:
    """The case.yaml of `gspo`, with another recipe, and a seed whose rollouts have every signal that a case needs."""
    tree = yaml.safe_load((GOLDEN / "gspo" / "case.yaml").read_text())
    tree["config"]["seed"] = 35
    tree["recipe"] |= recipe
    folder = project / "golden" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.yaml").write_text(yaml.safe_dump(tree))
    return folder


def typed(code: int, *arguments: str) -> list[str]:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output.splitlines()


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "regress.plugin", "-p", "no:cacheprovider", "-q"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280).stdout


@pytest.mark.extended
def test_a_refused_recipe_can_be_corrected(project: Path) -> None:
    """Inputs made by the refused recipe must not be what the corrected one is judged by."""
    folder = describe(project, steps=2)
    (refusal,) = typed(2, "golden", "record", "mine")
    assert "it has 2 optimizer updates, and needs at least 3" in refusal
    assert [path.name for path in folder.iterdir()] == ["case.yaml"]
    describe(project, stepps=3)
    assert "the recipe cannot be followed" in typed(2, "golden", "record", "mine")[0]
    describe(project)
    lines = typed(0, "golden", "record", "mine")
    assert lines[0].startswith(f"mine: wrote {Path('golden/mine/manifest.json')} and ")
    assert lines[1] == "next: regress golden calibrate mine"
    assert lines[-1].startswith("layouts that judge mine: base, left, mbs3, mbs4, packed, ")
    said = run()
    assert f"{folder} has no measured tolerances yet: run regress golden calibrate mine" in said
    assert "1 failed" in said
    assert typed(0, "golden", "record", "mine") == [
        "mine: inputs are those that were there; --inputs makes them again, as the recipe says",
        "mine: nothing changed",
    ]


def test_inputs_laid_by_hand_are_kept(project: Path) -> None:
    """A recipe that came with a copied case.yaml does not replace somebody's weights."""
    folder = describe(project)
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    typed(2, "golden", "record", "mine")
    assert (folder / "model" / "config.json").read_text() == "{}"


@pytest.mark.extended
def test_a_quantity_without_a_tolerance_names_the_remedy(project: Path) -> None:
    folder = project / "golden" / "dense"
    shutil.copytree(GOLDEN / "dense", folder)
    manifest = GoldenCase(folder).manifest
    assert manifest is not None
    tolerances = {name: row for name, row in manifest.tolerances.items() if name != "entropy"}
    (folder / "manifest.json").write_text(replace(manifest, tolerances=tolerances).text)
    said = run("-k", "dense/base-fp32 and step0 and micro0 and entropy and not entropy_loss")
    assert "tolerance  none was measured: run regress golden calibrate dense" in said
    assert "1 failed quantity in 1 replay" in said


WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
OWN_FAMILIES: dict[str, tuple[int, dict[str, object], str]] = {
    "qwen2": (6, {"use_sliding_window": True, **WINDOW}, "tp2,pp2"),
    "gemma2": (
        1,
        {
            "head_dim": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 4.0,
            "query_pre_attn_scalar": 8,
            **WINDOW,
        },
        "",
    ),
}
"""Family -> a seed whose rollouts have every signal, its configuration, and how else its layers can be split."""


@pytest.mark.extended
@pytest.mark.parametrize("family", OWN_FAMILIES)
def test_a_case_of_another_family(family: str, project: Path) -> None:
    """Windows and soft caps included; what the engine cannot do with them is refused by its reason."""
    seed, own, split = OWN_FAMILIES[family]
    tree = yaml.safe_load((GOLDEN / "gspo" / "case.yaml").read_text())
    tree["config"]["seed"] = seed
    sizes = {key: value for key, value in tree["recipe"]["model"]["config"].items() if key != "head_dim"}
    tree["recipe"]["model"] = {"family": family, "config": {**sizes, **own}}
    folder = project / "golden" / "mine"
    folder.mkdir(parents=True)
    (folder / "case.yaml").write_text(yaml.safe_dump(tree))
    typed(0, "golden", "record", "mine")
    manifest, measured = GoldenCase(folder).manifest, GoldenCase(GOLDEN / "gspo").manifest
    assert manifest is not None
    assert measured is not None  # to measure its own takes minutes, and float64 has a bound of its own
    (folder / "manifest.json").write_text(replace(manifest, tolerances=measured.tolerances).text)
    variants = ",".join(filter(None, ("base,left,packed,mbs3,eager,dp2,fsdp2", split)))
    assert "all within tolerance" in typed(0, "replay", "mine", "--variants", variants)[-1]

    said = "\n".join(typed(2, "replay", "mine", "--variants", "varlen,cp2"))
    assert "mine/varlen cannot be replayed: model.attn_implementation=varlen " in said
    assert (
        "parallel.cp=2 has no sliding window, and that of the model is 4, shorter than data.max_seq_le"
        in said
    )


HAND = """
[[tool.regress.tolerances]]
quantity = "entropy"
precision = "float32"
{bound}
reason = "a kernel of our own"
"""


@pytest.mark.extended
def test_a_tolerance_set_by_hand_is_used_and_told(project: Path) -> None:
    shutil.copytree(GOLDEN / "gspo", project / "golden" / "gspo")
    (project / "pyproject.toml").write_text(HAND.format(bound="absolute = 1e-30"))
    said = run("-k", "gspo/base-fp32 and step0 and micro0 and entropy and not entropy_loss")
    assert "1 failed quantity in 1 replay" in said
    assert "tolerance  set by hand: a kernel of our own (override " in said
    assert "[[tool.regress.tolerances]] row 1" in said
    options = ["--tier", "precision", "--variants", "base"]
    assert "all within tolerance" not in typed(1, "replay", "gspo", *options)[-1]
    (project / "pyproject.toml").write_text(HAND.format(bound="relative = 1e-3"))
    assert "all within tolerance" in typed(0, "replay", "gspo", *options)[-1]
    (project / "pyproject.toml").write_text(HAND.format(bound='relative = 1\ntensor = "entropie"'))
    (refusal,) = typed(2, "replay", "gspo", *options)
    assert (
        "row 1: no tensor of entropy matches 'entropie' in gspo; regress golden show CASE QUANTITY" in refusal
    )
    assert "no tensor of entropy matches 'entropie'" in run()


def test_mistakes_of_the_project_have_no_traceback(project: Path) -> None:
    (project / "golden").mkdir()
    (project / "pyproject.toml").write_text('[tool.regress.variants.wide]\nbecause = "x"\n')
    said = run()
    assert "variant 'wide' has the key 'because'; choose from why, overrides" in said
    assert "session.py" not in said
    (project / "pyproject.toml").unlink()
    (project / "conftest.py").write_text("def pytest_regress_variants(config):\n    return ['wide']\n")
    said = run()
    assert "pytest_regress_variants gave 'wide'; give a list of regress.replay.variant.Variant" in said
    assert "session.py" not in said


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_recording_changes_nothing(project: Path) -> None:
    """Inputs that are made again lie in the case only once it is recorded with them."""
    folder = project / "golden" / "gspo"
    shutil.copytree(GOLDEN / "gspo", folder)
    path = folder / "case.yaml"
    path.write_text(path.read_text().replace("steps: 3", "steps: 2"))
    before = contents(project)
    (refusal,) = typed(2, "golden", "record", "gspo", "--inputs")
    assert "it has 2 optimizer updates, and needs at least 3" in refusal
    assert "such as recipe.steps" in refusal
    assert contents(project) == before
    path.write_text(path.read_text().replace("warm_steps: 8", "warm_steps: eight"))
    before = contents(project)
    (refusal,) = typed(2, "golden", "record", "gspo", "--inputs")
    assert str(Path("golden/gspo/case.yaml")) in refusal
    assert contents(project) == before


@pytest.mark.extended
def test_the_documented_start(project: Path) -> None:
    """A seed without signal gives way to another, and the case can be made again from what it then says."""
    folder = project / "golden" / "mine"
    folder.mkdir(parents=True)
    path = folder / "case.yaml"
    path.write_text(
        "# mine\n" + (GOLDEN / "dense" / "case.yaml").read_text().replace("seed: 5", "seed: 5  # any")
    )
    lines = typed(0, "golden", "record", "mine")
    seed = yaml.safe_load(path.read_text())["config"]["seed"]
    assert lines[1] == (
        f"mine: took seed {seed}, with which every signal is there, and not 5; stored in {path.relative_to(project)}"
    )
    assert path.read_text().startswith("# mine\n")
    assert f"seed: {seed}  # any" in path.read_text()
    typed(0, "golden", "verify", "mine")
    before = contents(folder)
    assert typed(0, "golden", "record", "mine", "--inputs") == ["mine: nothing changed"]
    assert contents(folder) == before


@pytest.mark.extended
def test_no_seed_helps_where_a_key_is_wrong(project: Path) -> None:
    path = describe(project) / "case.yaml"
    tree = yaml.safe_load(path.read_text())
    tree["config"]["algorithm"]["clip_high"] = 9.0
    path.write_text(yaml.safe_dump(tree))
    before = contents(project)
    (refusal,) = typed(2, "golden", "record", "mine")
    assert "no value depends on algorithm.clip_high (9.0)" in refusal
    assert "such as the settings of algorithm that are named" in refusal
    assert "; no seed of 35, 1, 2" in refusal
    assert contents(project) == before
