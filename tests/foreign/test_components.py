"""Components of somebody's own in the place of the engine's: right ones pass, wrong ones are caught where they show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regress.errors import ConfigError
from regress.replay.extra_settings import conflict, options_text, settings_of_variants, with_settings
from regress.replay.variant import Variant
from regress.replay.variant_table import VARIANTS
from tests.foreign.foreign_project import ForeignProject

RIGHT = (
    *("--set", "model.attention=pieces:attention", "--set", "model.patch=pieces:norm"),
    *("--set", "algorithm.loss_function=pieces:loss", "--set", "optimizer.factory=pieces:adamw"),
)
WRONG = {
    "model.attention=pieces:unpacked_attention": ("packed", "activations model.layers.0"),
    "algorithm.loss_function=pieces:local_loss": ("mbs4", "token_loss"),
    "parallel.wrapper=pieces:deaf": ("dp2-ddp", "gradient"),
}
"""A wrong component -> a variant that catches it though the base run passes, and what breaks first."""


@pytest.fixture
def pieces(tmp_path: Path) -> ForeignProject:
    """A project that lists its components."""
    project = ForeignProject(tmp_path, "dense")
    shutil.copyfile(Path(__file__).with_name("pieces.py"), tmp_path / "pieces.py")
    (tmp_path / "pyproject.toml").write_text('[tool.regress]\nallow_code = ["pieces"]\n')
    return project


def test_right_components_pass_and_what_is_left_out_is_told(pieces: ForeignProject) -> None:
    code, said = pieces.regress_here("replay", "dense", "--variants", "base,packed,varlen", *RIGHT)
    assert code == 0, said
    assert "2 replays" in said
    assert "not supported: dense/varlen: the variant has an attention of its own (varlen)" in said


@pytest.mark.extended
def test_right_components_pass_the_default_variants(pieces: ForeignProject) -> None:
    code, said = pieces.regress("replay", "dense", "--matrix", "default", "--tier", "semantics", *RIGHT)
    assert code == 0, said


@pytest.mark.extended
def test_a_wrapper_of_ones_own_passes_on_two_ranks(pieces: ForeignProject) -> None:
    setting = "parallel.wrapper=pieces:wrapper"
    code, said = pieces.regress("replay", "dense", "--variants", "dp2-ddp,dp2", "--set", setting)
    assert code == 0, said
    assert "1 replay" in said
    assert "not supported: dense/dp2: the variant has no replicas under a wrapper" in said


@pytest.mark.extended
@pytest.mark.parametrize("setting", WRONG)
def test_a_wrong_component_is_caught_by_a_variant(setting: str, pieces: ForeignProject) -> None:
    variant, first = WRONG[setting]
    if not setting.startswith("parallel"):
        code, said = pieces.regress("replay", "dense", "--variants", "base", "--set", setting)
        assert code == 0, said
    code, said = pieces.regress("replay", "dense", "--variants", variant, "--set", setting)
    assert code == 1, said
    assert f"drift: {first}" in said


@pytest.mark.extended
def test_as_options_of_pytest(pieces: ForeignProject) -> None:
    code, said = pieces.pytest("-n", "2", "-k", "dense/base/", "--regress-set=model.patch=pieces:wrong_norm")
    assert code == 1, said
    assert "--regress-set=model.patch=pieces:wrong_norm" in said  # in the command that repeats it
    code, said = pieces.pytest("-n", "0", "-k", "dense/base/", "--regress-set=model.patch=pieces:norm")
    assert code == 0, said
    code, said = pieces.pytest("-n", "0", "--update-golden", "--regress-set=model.patch=pieces:norm")
    assert code != 0
    assert "--update-golden makes golden what the configuration of the cases computes" in said


BAD = {
    "model.patch=nowhere:f": "model.patch=nowhere:f cannot be imported",
    "model.patch=pieces:attention": "but it is called with 1 positional argument",
    "model.patch=os:system": "names code of the module os, which is imported only if it lies below the project root",
    "algorithm.loss_function=pieces:no_loss": "returned a Tensor; return a regress.grpo.token_losses.TokenLoss",
    "optimizer.factory=pieces:forgetful": "the optimizer leaves model.embed_tokens.weight out",
    "model.pach=pieces:norm": "model.pach",
}


@pytest.mark.extended
@pytest.mark.parametrize("setting", BAD)
def test_what_cannot_be_a_component_is_told_in_one_sentence(setting: str, pieces: ForeignProject) -> None:
    code, said = pieces.regress("replay", "dense", "--variants", "base", "--set", setting)
    assert code == 2, said
    assert BAD[setting] in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model.patch", "is not a setting; write KEY=VALUE"),
        ("=x", "is not a setting; write KEY=VALUE"),
        ("parallel.dp=2", "variants and cases decide it"),
        ("model.dtype=float32", "variants and cases decide it"),
        ("optimizer.eps=[", "the value is not valid YAML"),
        ("optimizer.eps=2024-99-99", "the value is not valid YAML"),
        ("optimizer.eps=2024-01-01", "the value is not valid YAML"),
        ("optimizer.eps=" + "[" * 5000, "the value is not valid YAML"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings_of_variants([text])


def test_settings_lie_under_the_overrides_of_a_variant_and_conflicts_are_told() -> None:
    own = settings_of_variants(["model.attention=a:b", "optimizer.eps=1e-3"])
    free = with_settings(VARIANTS["base"], own)
    assert free.overrides["model.attention"] == "a:b"
    assert conflict(free, own) is None
    varlen = with_settings(Variant("v", "x", {"model.attn_implementation": "varlen"}), own)
    assert conflict(varlen, own) == "the variant has an attention of its own (varlen)"
    other = with_settings(Variant("v", "x", {"optimizer.eps": 1e-6}), {"optimizer.eps": 1e-3})
    assert conflict(other, {"optimizer.eps": 1e-3}) == "the variant decides optimizer.eps itself (1e-06)"
    assert conflict(with_settings(Variant("v", "x", {"parallel.cp": 2}), own), own) is not None
    resumed = with_settings(
        Variant("v", "x", {"parallel.pp": 2}, resume_at=2, before={"parallel.fsdp": 2}), own
    )
    assert resumed.before == {**own, "parallel.fsdp": 2}
    remote = Variant("v", "x", {"trainer.type": "remote"})
    assert conflict(remote, {"optimizer.eps": 1e-3}) is None
    assert conflict(remote, {"optimizer.factory": "a:b"}) == (
        "a remote trainer cannot have optimizer.factory: the service has an optimizer of its own"
    )
    assert options_text({"model.patch": "a:b"}) == " --set model.patch=a:b"


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set model\.patch is given twice; keep one"):
        settings_of_variants(["model.patch=a:b", "model.patch=c:d"])
