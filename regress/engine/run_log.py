"""Lines that a run prints beside its progress: one logger, in the words that the documents of its users look for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from regress.engine.config.config_schema import Config

LOGGER = logging.getLogger("regress")

LENGTHS, TRACKER, CURRICULUM = "lengths", "tracking resumed", "curriculum"
"""Subjects of lines: words by which logs are searched; lines about checkpoints hold the word itself."""
_CHINESE = {
    LENGTHS: "🔧 同步长度配置 (lengths)",
    TRACKER: "WandB恢复 (tracking resumed)",
    CURRICULUM: "课程学习 (curriculum)",
}

MOCK = "[Rollout Mock]"
_MEGABYTE = 1e6


class _ConsoleHandler(logging.Handler):
    """Prints records without breaking a progress bar; what the console cannot encode is escaped."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        encoding = self._console.encoding or "utf-8"
        text = self.format(record).encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


@contextmanager
def printed(console: Console, main: bool) -> Iterator[None]:
    """Print what the program logs, from the level info up, on the rank that writes the files."""
    if not main:
        yield
        return
    handler, level = _ConsoleHandler(console), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(min(level, logging.INFO) if level else logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)


def subject(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return a subject in the language of the locale: Chinese with the English word, or English."""
    locale = next((environ[key] for key in ("LC_ALL", "LC_MESSAGES", "LANG") if environ.get(key)), "")
    return _CHINESE[name] if locale.lower().startswith("zh") else name


def sampled_hotter(temperature: float) -> None:
    """Log that completions are drawn from another distribution than the one that a service trains."""
    if temperature != 1.0:
        LOGGER.info(
            "rollout_worker.temperature=%g is that of the service's sampler; log-probs of the training are at 1, as "
            "its protocol defines them",
            temperature,
        )


def lengths(config: Config) -> None:
    """Log the lengths that every part of the run uses."""
    data = config.data
    LOGGER.info(
        "%s: data.max_prompt_length=%d data.max_completion_length=%d data.max_seq_length=%d (%s)",
        subject(LENGTHS),
        data.max_prompt_length,
        data.max_completion_length,
        data.max_seq_length,
        data.length_allocation_strategy or "no strategy",
    )


def curriculum(text: str) -> None:
    """Log the start, an advancement or a step back of the curriculum."""
    LOGGER.info("%s: %s", subject(CURRICULUM), text)


def tracking_resumed(state: Mapping[str, Any], project: str | None) -> None:
    """Log under which id and segment the metrics of a resumed run go on; ``state`` is that of its log."""
    if state:
        named = "" if project is None else f", project {project}"
        LOGGER.info("%s: run id %s, segment %d%s", subject(TRACKER), state["run_id"], state["segment"], named)


def rollout_mock(config: Config) -> None:
    """Log that rollouts are recorded or replayed."""
    LOGGER.info(
        "%s Rollout Mock enabled: mode=%s, dir=%s",
        MOCK,
        config.rollout_mock.mode,
        config.rollout_mock.dump_dir,
    )


def dumped(step: int, path: object, samples: int, size: int) -> None:
    """Log a recorded step; ``size`` in bytes."""
    LOGGER.info("%s Dumped step %d: %s (samples=%d, size=%s)", MOCK, step, path, samples, megabytes(size))


def loaded(step: int, path: object, samples: int) -> None:
    """Log a replayed step."""
    LOGGER.info("%s Loaded step %d: %s (samples=%d)", MOCK, step, path, samples)


def megabytes(size: int) -> str:
    """Return a number of bytes for people to read."""
    return f"{size / _MEGABYTE:.2f}MB" if size >= _MEGABYTE / 100 else f"{size} bytes"
