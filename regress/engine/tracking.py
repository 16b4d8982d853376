"""Metrics of a run: ``metrics.jsonl`` always, and any tracker that accelerate knows beside it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from regress.engine.config import flat
from regress.engine.config.schema import Config
from regress.errors import ConfigError, RegressError

Log = Callable[[int, Mapping[str, float]], None]
"""``log(step, metrics)``; call it once a step, because trackers refuse to go back."""


@contextmanager
def tracking(config: Config) -> Iterator[Log]:
    """Open the run's metrics file and its trackers; they are closed in the end, whatever happens.

    Raises:
        ConfigError: if ``tracking.trackers`` names one that is unknown or not installed.
        RegressError: if the output directory cannot be written.
    """
    output = Path(config.output_dir)
    with ExitStack() as resources:
        logs = [resources.enter_context(_metrics_file(output))]
        logs += [resources.enter_context(_tracker(name, config, output)) for name in config.tracking.trackers]

        def log(step: int, metrics: Mapping[str, float]) -> None:
            for write in logs:
                write(step, metrics)

        yield log


@contextmanager
def _metrics_file(output: Path) -> Iterator[Log]:
    """One line of strict JSON a step, flushed as it is written; what is not finite is null."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / "metrics.jsonl").open("w")
    except OSError as error:
        raise RegressError(
            f"output_dir={str(output)!r} cannot be written ({error.strerror}); choose another output_dir"
        ) from error

    def log(step: int, metrics: Mapping[str, float]) -> None:
        finite = {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        file.flush()

    with file:
        yield log


@contextmanager
def _tracker(name: str, config: Config, output: Path) -> Iterator[Log]:
    if name not in LOGGER_TYPE_TO_CLASS:
        near = get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1) or sorted(LOGGER_TYPE_TO_CLASS)
        raise ConfigError(
            f"tracking.trackers: accelerate knows no tracker {name!r}; did you mean {', '.join(near)}?"
        )
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    try:
        directory = (str(output / name),) if kind.requires_logging_directory else ()
        tracker: GeneralTracker = kind(config.exp_name, *directory)
        tracker.start()
    except ImportError as error:
        raise ConfigError(
            f"tracking.trackers: {name} is not installed ({error}); run pip install 'grpo-regress[{name}]'"
        ) from error
    try:
        tracker.store_init_configuration(flat(config))
        yield lambda step, metrics: tracker.log(dict(metrics), step=step)
    finally:
        tracker.finish()
