"""Architectures under the layouts of a trainer: what transformers computes otherwise is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from click.testing import CliRunner
from transformers import GPT2Config, Qwen3Config, Qwen3ForCausalLM

import regress
from regress.check import architecture_check as checks
from regress.cli import main
from tests.unit.check.model_table import FAMILIES, PAGE, checked, row

SCHEMA = Path(regress.__file__).parent / "check/model.schema.json"
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
}
DEFAULT = ("Qwen3", "Gemma 2", "OPT")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in DEFAULT else pytest.mark.extended) for one in FAMILIES]
)
def test_a_family_is_as_the_page_says(family: str) -> None:
    assert row(family, checked(family)) in PAGE.read_text().splitlines()


@pytest.mark.extended
def test_the_command_tells_the_token_that_is_off(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        done = CliRunner().invoke(main, ["check", "model", name, "--json", str(tmp_path / "found.json")])
        assert done.exit_code == 1, done.output
    assert "padded left                wrong    log-prob of sample 0, token 1:" in done.output
    assert "padded left, position ids  right" in done.output
    tree = json.loads((tmp_path / "found.json").read_text())
    jsonschema.validate(tree, json.loads(SCHEMA.read_text()))
    assert [one["layout"] for one in tree["rows"] if one["verdict"] == "wrong"] == ["padded left"]


@pytest.mark.extended
def test_a_wrong_gradient_alone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    right = Qwen3ForCausalLM.forward

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = right(self, *args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            found.logits = found.logits * 0.5 + 0.5 * found.logits.detach()
        return found

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", wrong)
    rows = {one.layout: one for one in checks.check_model(str(tmp_path)).rows}
    assert rows["packed by position ids"].verdict == "right"
    assert rows["padded right"].verdict == "wrong"
    assert rows["padded right"].text.startswith("log-probs are right, the gradient of ")


def test_a_gradient_that_is_not_there_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3Config().save_pretrained(tmp_path)
    right = Qwen3ForCausalLM.forward

    def detached(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            kwargs["inputs_embeds"] = self.model.embed_tokens(kwargs.pop("input_ids")).detach()
        return right(self, *args, **kwargs)

    monkeypatch.setattr(Qwen3ForCausalLM, "forward", detached)
    row = checks.Architecture(str(tmp_path)).row("padded right")
    assert (row.verdict, row.text) == (
        "wrong",
        "log-probs are right, the gradient of model.embed_tokens.weight is off by 1",
    )


@pytest.mark.extended
def test_a_model_that_raises_is_refused_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3Config().save_pretrained(tmp_path)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("not here")

    monkeypatch.setattr(torch, "compile", refuse)
    found = checks.check_model(str(tmp_path))
    (row,) = [one for one in found.rows if one.verdict == "refused"]
    assert (row.layout, row.text) == ("compiled", "NotImplementedError: not here")
    assert found.exit_code == 0


@pytest.mark.parametrize("name", ["model", "hf"])
def test_what_is_no_model_is_refused(name: str, tmp_path: Path) -> None:
    asked = ["check", "hf:nobody/nothing"] if name == "hf" else ["check", "model", str(tmp_path / "nowhere")]
    done = CliRunner().invoke(main, asked)
    assert done.exit_code == 2
    assert "error: MODEL=" in done.output


def test_real_weights_are_those_of_the_first_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3Config(**SMALL, num_hidden_layers=3)
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(0.25)
    model.save_pretrained(tmp_path)
    found = checks.Architecture(str(tmp_path), real_weights=True)
    assert len(found.model.model.layers) == 2
    assert bool((found.model.model.layers[1].mlp.down_proj.weight == 0.25).all())
    assert found.row("padded right").verdict == "right"


def test_a_checkpoint_without_weights_has_no_real_ones(tmp_path: Path) -> None:
    Qwen3Config().save_pretrained(tmp_path / "none")
    done = CliRunner().invoke(main, ["check", "model", str(tmp_path / "none"), "--real-weights"])
    assert done.exit_code == 2
    assert "none: its weights cannot be loaded" in done.output
    Qwen3ForCausalLM(Qwen3Config(**SMALL, num_hidden_layers=1)).save_pretrained(tmp_path / "one")
    Qwen3Config(**SMALL, num_hidden_layers=2).save_pretrained(tmp_path / "one")
    done = CliRunner().invoke(main, ["check", "model", str(tmp_path / "one"), "--real-weights"])
    assert done.exit_code == 2
    assert "one has no weight for model.layers.1." in done.output


@pytest.mark.extended
def test_pytest_has_a_test_for_each_layout(pytester: pytest.Pytester) -> None:
    GPT2Config().save_pretrained(pytester.path / "gpt2")
    done = pytester.runpytest_subprocess("--regress-model", "gpt2", "-k", "padded or data", "-rA")
    done.assert_outcomes(passed=3, failed=1, deselected=7)
    done.stdout.fnmatch_lines(
        [
            "gpt2, padded left: log-prob of sample 0, token 1: *, alone *",
            "PASSED regress-model*gpt2*::data parallel",
        ]
    )
    done = pytester.runpytest_subprocess("--regress-model", "nowhere", "-k", "compiled")
    done.assert_outcomes(failed=1, deselected=10)
    done.stdout.fnmatch_lines(["*MODEL='nowhere': there is no such directory*"])
