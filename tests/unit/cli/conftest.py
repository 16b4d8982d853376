"""The real command on tiny runs, and what must be true of it whenever it refuses."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from regress.cli import main

SIZES = "{hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 8}"
SMALL = (
    f"model.config={SIZES}",
    "max_steps=2",
    "task.train_size=8",
    "task.eval_size=2",
    "data.prompts_per_step=2",
    "data.group_size=2",
    "data.max_completion_length=4",
)
FORMATS = ("safetensors", "pt", "jsonl")
ANYTHING = "…"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.stderr or result.exception
    assert "error:" not in result.stderr
    return result


def sentence_of(result: Result) -> str:
    """The one line that a refusal prints, without its mark."""
    if not isinstance(result.exception, SystemExit):
        raise AssertionError("a traceback, or no refusal") from result.exception  # noqa: TRY004
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


class Code:
    """Unpickling it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._mark),)


class Case:
    """A folder of a test in which an earlier run lies, and the command to run there.

    Attributes:
        folder: where the test may write; nothing in it may change when the command refuses.
        run: output directory of the earlier run, which every command is given too.
        code: an object to hide in a pickle.
    """

    def __init__(self, folder: Path, world: Path) -> None:
        self.folder, self.run, self._world = folder, folder / "run", world
        self.code = Code(folder / "executed")
        shutil.copytree(world / "safetensors", self.run)
        (self.run / "notes.txt").write_text("my notes")

    def train(self, *overrides: str) -> Result:
        return invoke("train", "--overwrite", *SMALL, f"output_dir={self.run}", *overrides)

    def trains(self, *overrides: str) -> Result:
        return succeeded(self.train(*overrides))

    def refuses(self, *overrides: str, says: str) -> None:
        """The command says this, exactly but for the places with an ellipsis, and leaves every file as it was."""
        before = self.files()
        result = self.train(*overrides)
        self.unchanged(before)
        self.says(sentence_of(result), says)

    def refuses_file(self, text: str, *overrides: str, says: str) -> None:
        """The same for a configuration file, ``my.yaml``, of this text."""
        (self.folder / "my.yaml").write_text(text)
        before = self.files()
        named = ("--config-path", "my.yaml", "--overwrite")
        result = invoke("train", *named, *SMALL, f"output_dir={self.run}", *overrides)
        self.unchanged(before)
        self.says(sentence_of(result), says)

    def says(self, sentence: str, expected: str) -> None:
        sentence = sentence.replace(str(self.folder), "TMP")
        pattern = ".*?".join(map(re.escape, expected.split(ANYTHING)))
        assert re.fullmatch(pattern, sentence), f"\n  it says {sentence}\n  and not {expected}"

    def files(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def unchanged(self, before: dict[Path, bytes]) -> None:
        """Every file is as it was; metrics may be those of the run that had begun."""
        after = self.files()
        for path, content in before.items():
            now = after.get(path, b"")
            assert path.name == "metrics.jsonl" or now == content, f"{path} was lost or changed"

    @property
    def executed(self) -> bool:
        """Return True if `code` was unpickled."""
        return (self.folder / "executed").exists()

    def checkpoint(self) -> Path:
        """Model and tokenizer of the earlier run, to be damaged."""
        return Path(shutil.copytree(self.run / "final", self.folder / "checkpoint"))

    def recording(self, format: str = "safetensors") -> Path:
        """A recorded dump of trajectories, to be damaged."""
        return Path(shutil.copytree(self._world / format / "debug_dump", self.folder / "recording"))

    def rollouts(self) -> Path:
        """Recorded rollouts of training and evaluation."""
        return Path(shutil.copytree(self._world / "rollouts", self.folder / "rollouts"))


@pytest.fixture(scope="session", autouse=True)
def _no_settings_from_outside() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("REGRESS_") or name in ("EXPERIMENT_PATH", "NCCL_ALGO", "DETERMINISTIC_MODE"):
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded run in each format, and recorded rollouts of training and evaluation."""
    folder = tmp_path_factory.mktemp("world")
    dumping = ("debug.enable_data_dump=true", "debug.dump_options={trajectory: true, loss: true}")
    for format in FORMATS:
        output = f"output_dir={folder / format}"
        succeeded(invoke("train", *SMALL, *dumping, f"debug.dump_format={format}", output))
    rollouts = ("rollout_mock.enable=true", f"rollout_mock.dump_dir={folder / 'rollouts'}")
    succeeded(
        invoke("train", *SMALL, *rollouts, "evaluation.every_n_steps=1", f"output_dir={folder / 'rolled'}")
    )
    return folder


@pytest.fixture
def case(tmp_path: Path, world: Path) -> Case:
    return Case(tmp_path, world)


@pytest.fixture(autouse=True)
def _process_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """The command sets environment variables and torch's switches for its own process, which here is ours."""
    environ, threads = dict(os.environ), torch.get_num_threads()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "GRPO_REGRESS_ALLOW_CODE", "1"
    )  # configurations of tests name code that no project lists
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def command() -> Callable[..., Result]:
    return invoke


@pytest.fixture
def sentence() -> Callable[[Result], str]:
    return sentence_of


@pytest.fixture
def small() -> tuple[str, ...]:
    return SMALL
