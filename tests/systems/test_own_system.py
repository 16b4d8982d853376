"""The system of the how-to: it is short, it runs on two ranks, and what is wrong or not engaged is told."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from regress.cli import main

ROOT = Path(__file__).parents[2]


def code() -> str:
    text = (ROOT / "docs/howto/your-system.md").read_text()
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]  # type: ignore[index]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[int, str]]:
    """``run(source)``: exit code and output of the command, in a folder with the system; its ranks are processes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_system", raising=False)

    def command(source: str) -> tuple[int, str]:
        (tmp_path / "my_system.py").write_text(source)
        arguments = ["systems", "run", "my_system:Mine", "--golden-dir", str(ROOT / "golden")]
        done = CliRunner().invoke(main, arguments)
        sys.modules.pop("my_system", None)
        return done.exit_code, done.output + repr(done.exception)

    return command


def test_it_is_short() -> None:
    lines = [line for line in code().splitlines() if line.strip()]
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120


@pytest.mark.extended  # the page that it is about runs it, too
def test_it_is_exact(run: Callable[[str], tuple[int, str]]) -> None:
    code_, told = run(code())
    assert code_ == 0, told
    assert "fsdp2/sft/dense: exact" in told


@pytest.mark.extended
def test_a_factor_of_the_ranks_is_wrong(run: Callable[[str], tuple[int, str]]) -> None:
    found, told = run(code().replace("(2 * out.loss)", "(out.loss)"))
    assert found == 1
    assert "wrong: drift: loss" in told


@pytest.mark.extended
@pytest.mark.parametrize(
    ("recorded", "says"),
    [
        ("token_gradient=True", "nothing tells what the 2 ranks sh"),
        ('token_gradient=True, mesh={"dp": 2}', "the layout is not on: nothing is sharded"),
    ],
    ids=["unsaid", "said"],
)
def test_a_layout_that_is_off_is_no_green_row(
    run: Callable[[str], tuple[int, str]], recorded: str, says: str
) -> None:
    """Ranks that share nothing are refused as they are recorded, or else as the system says that it is not engaged."""
    source = code().replace("fully_shard(part)", "pass").replace("2 * ", "")
    found, told = run(source.replace("token_gradient=True", recorded))
    assert found == 2
    assert says in told
