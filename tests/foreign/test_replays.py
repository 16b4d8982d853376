"""Golden cases replayed by a trainer of one's own: same ids, judged by what it recorded, nothing left out unseen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.foreign.foreign_project import ForeignProject

FAULTS = {
    "kl": ("gap.exp() - gap - 1)", "gap.exp() - gap)", "token_loss elementwise_loss:"),
    "ddof": ('over.std(correction=a["ddof"])', "over.std(correction=0)", "advantages:"),
    "weight": ("1 / rows / n,", "1 / rows,", "weights:"),
    "scale": ("(w * loss.sum()).backward()", "(2 * w * loss.sum()).backward()", "gradient "),
    "cold": ('float(objective["optimizer_steps"][name])', "0.0", "optimizer "),
    "decay": ('settings["weight_decay"]', "0.0", "param "),
    "clip": ('(objective["max_grad_norm"] / (norm', '(2 * objective["max_grad_norm"] / (norm', "optimizer "),
    "reference": ('given("ref_log_probs") - log_p', "log_p.detach() - log_p", "token_loss elementwise_loss:"),
    "ratio": ("log_ratio = log_p - old", "log_ratio = old - log_p", "ratio prob_ratio:"),
}
"""Faults of the script: what is replaced, by what, and where the first divergence has to be."""


@pytest.mark.extended
def test_a_script_of_the_exported_files_passes_the_suite_and_says_what_it_left_out(
    project: ForeignProject,
) -> None:
    code, said = project.pytest("-n", "0", "-k", "dense/base/ or bf16", "--regress-matrix=default")
    assert code == 0, said
    assert "1 passed, " in said
    assert "regress: 39 quantities judged in 2 tests" in said
    assert "failed" not in said
    assert "my_adapter:run does not support 1 of 2 replays:" in said
    assert "dense/base-bf16: it does not compute in bfloat16" in said
    assert "my_adapter:run did not record trajectory, activations, old_log_probs" in said


@pytest.mark.extended  # tests/foreign/test_export_truth.py compares the script with the golden values
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_where_it_begins(name: str, project: ForeignProject) -> None:
    old, new, first = FAULTS[name]
    project.plant(old, new)
    code, said = project.regress_here("replay", "dense", "--variants", "base")
    assert code == 1, said
    found = [line.strip() for line in said.splitlines()]
    at = next(index for index, line in enumerate(found) if line.startswith("first divergence: "))
    begins = found[at - 1] if "this one" in found[at] else found[at].removeprefix("first divergence: ")
    assert begins.removeprefix("drift: ").startswith(first), begins


@pytest.mark.extended
@pytest.mark.parametrize("mode", ["0", "2"])
def test_all_cases_pass_on_one_rank_and_on_two(mode: str, tmp_path: Path) -> None:
    """Every replay of dp2 has two ranks, which hold different samples; both processes of the session share replays."""
    project = ForeignProject(tmp_path, "dense", "dapo", "gpt2", "moe")
    project.suite("base,dp2")
    code, said = project.pytest("-n", mode, "--regress-matrix=full", "--regress-tier=semantics")
    assert code == 0, said
    assert "failed" not in said


@pytest.mark.extended
def test_a_hook_of_a_conftest_is_the_adapter(project: ForeignProject) -> None:
    project.named(None)
    text = "def pytest_regress_replay(case, variant, precision, folder):\n    import my_adapter\n"
    (project.folder / "conftest.py").write_text(
        text + "    my_adapter.run(case, variant, precision, folder)\n"
    )
    code, said = project.pytest("-n", "2", "-k", "dense/base/")
    assert code == 0, said
    assert "conftest:pytest_regress_replay did not record" in said


BODIES = {
    "none supported": (
        "raise NotSupported('it trains on Mars')",
        "nothing was compared: broken:run supports none of the replays, so the session fails",
    ),
    "raises": (
        "raise ValueError('no such kernel')",
        "dense/base cannot be replayed: broken:run: rank 0 of 1 raised ValueError: no such kernel",
    ),
    "dies": ("os._exit(3)", "dense/base cannot be replayed: broken:run: rank 0 of 1 ended itself with exit code 3"),
    "no dump": ("pass", "dense/base cannot be replayed: broken:run left no complete dump in the folder that it was"),
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", BODIES)
def test_an_adapter_that_cannot_is_told_in_one_sentence(name: str, project: ForeignProject) -> None:
    body, sentence = BODIES[name]
    project.broken(body)
    code, said = project.pytest("-n", "0", "-k", "dense/base/step0")
    assert code == 1, said
    assert sentence in said
    assert "INTERNALERROR" not in said


@pytest.mark.extended
def test_two_ranks_that_do_not_agree_are_an_error(project: ForeignProject) -> None:
    project.broken("import torch.distributed as d\n    if d.get_rank(): raise NotSupported('odd')")
    code, said = project.regress("replay", "dense", "--variants", "dp2")
    assert code == 2
    assert "broken:run: rank 1 raised NotSupported (odd) and others did not; raise it on every rank" in said


@pytest.mark.extended
def test_values_of_a_trainer_of_ones_own_never_become_golden(project: ForeignProject) -> None:
    before = (project.folder / "golden" / "dense" / "manifest.json").read_bytes()
    code, said = project.pytest("-n", "0", "--update-golden")
    assert code != 0
    assert "--update-golden makes golden what the engine of this package computes, but my_adapter:run" in said
    assert (project.folder / "golden" / "dense" / "manifest.json").read_bytes() == before


PARTIAL = """
import my_adapter
def run(case, variant, precision, folder):
    record = my_adapter.record
    def less(update, found, rank):
        {less}
        record(update, found, rank)
    my_adapter.record = less
    my_adapter.run(case, variant, precision, folder)
"""
LESS: dict[str, tuple[str, str]] = {
    "a sample": ("found['samples'].pop(); found['tokens'].pop()", "was produced by no microbatch"),
    "a parameter": ("found['param'].popitem()", "and nothing of this name was recorded"),
    "an update": (
        "if update['number'] == 1: return",
        "recorded the optimizer updates step0, step2, but dense has 3",
    ),
    "a rank": ("if rank: return", "rank 1 recorded nothing, but the replay has 2 ranks"),
}


@pytest.mark.extended
@pytest.mark.parametrize("name", LESS)
def test_what_is_not_recorded_is_never_left_out_unseen(name: str, project: ForeignProject) -> None:
    less, sentence = LESS[name]
    (project.folder / "partial.py").write_text(PARTIAL.format(less=less))
    if name == "a rank":  # which would hold no token that is not on the other, either
        text = (project.folder / "my_adapter.py").read_text()
        text = text.replace('TYPES = ("forward_data", "is_loss_debug", ', "TYPES = (")
        (project.folder / "my_adapter.py").write_text(text)
    project.named("partial:run")
    variant = "dp2" if name == "a rank" else "base"
    code, said = project.regress("replay", "dense", "--variants", variant)
    assert code in (1, 2), said
    assert sentence in said


@pytest.mark.extended
def test_a_dump_without_anything_of_weight_fails(project: ForeignProject) -> None:
    text = (project.folder / "my_adapter.py").read_text()
    less = text.replace('TYPES = ("forward_data", "is_loss_debug", "gradient", "param", "optimizer")',
                        'TYPES = ("is_loss_debug",)')  # fmt: skip
    (project.folder / "my_adapter.py").write_text(less)
    code, said = project.regress("replay", "dense", "--variants", "base")
    assert code == 1, said
    assert "my_adapter:run recorded none of log_probs, gradient, param" in said


@pytest.mark.parametrize(
    ("replay", "says"),
    [
        ('"nobody"', "names no function; write package.module:function"),
        ('"nobody:run"', "there is no module nobody; correct it, or install the package"),
        ("3", "names no function; write package.module:function"),
    ],
)
def test_an_adapter_that_cannot_be_meant_is_refused_at_once(replay: str, says: str, tmp_path: Path) -> None:
    from regress.errors import ConfigError
    from regress.replay.user_trainer import project_adapter

    (tmp_path / "pyproject.toml").write_text(f"[tool.regress]\nreplay = {replay}\n")
    with pytest.raises(ConfigError, match=says):
        project_adapter(tmp_path)


def test_a_function_of_other_arguments_is_refused(tmp_path: Path) -> None:
    from regress.errors import ConfigError
    from regress.replay.user_trainer import Adapter

    (tmp_path / "odd_adapter.py").write_text("def run(case, folder): pass\n")
    adapter = Adapter("odd_adapter:run", "odd_adapter", "run", str(tmp_path / "odd_adapter.py"))
    with pytest.raises(
        ConfigError, match=r"is run\(case, folder\), but it is called with case, variant, precision"
    ):
        adapter.load()
    missing = Adapter("odd_adapter:walk", "odd_adapter", "walk", str(tmp_path / "odd_adapter.py"))
    with pytest.raises(ConfigError, match="has no function walk"):
        missing.load()


def test_a_method_cannot_be_a_hook() -> None:
    from regress.errors import ConfigError
    from regress.replay.user_trainer import hook_adapter

    class Plugin:
        def pytest_regress_replay(self, **_: Any) -> None: ...

    with pytest.raises(ConfigError, match="which ranks cannot import; make it a function of a module"):
        hook_adapter(Plugin().pytest_regress_replay, "pytest_regress_replay")
