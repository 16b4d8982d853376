"""Metrics of a run: written to its own files, and to any tracker that accelerate knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from regress.engine.config import flat
from regress.engine.config.schema import Config
from regress.engine.outputs import Outputs
from regress.errors import ConfigError
from regress.redaction import redacted_tree

Log = Callable[[int, Mapping[str, float | str]], None]
"""Function ``log(step, metrics)``; call it once a step, because trackers refuse to go back."""


@contextmanager
def tracking(config: Config, outputs: Outputs) -> Iterator[Log]:
    """Open the trackers that ``tracking.trackers`` names; close them at the end, whatever happens.

    Raises:
        ConfigError: if one is unknown or not installed.
    """
    with ExitStack() as resources:
        logs: list[Log] = [outputs.log]
        logs += [resources.enter_context(_tracker(name, config)) for name in config.tracking.trackers]

        def log(step: int, metrics: Mapping[str, float | str]) -> None:
            for write in logs:
                write(step, metrics)

        yield log


@contextmanager
def _tracker(name: str, config: Config) -> Iterator[Log]:
    if name not in LOGGER_TYPE_TO_CLASS:
        near = get_close_matches(name, LOGGER_TYPE_TO_CLASS, n=1) or sorted(LOGGER_TYPE_TO_CLASS)
        raise ConfigError(
            f"tracking.trackers: accelerate knows no tracker {name!r}; did you mean {', '.join(near)}?"
        )
    kind: Any = LOGGER_TYPE_TO_CLASS[name]
    try:
        directory = (f"{config.output_dir}/{name}",) if kind.requires_logging_directory else ()
        tracker: GeneralTracker = kind(config.exp_name, *directory)
        tracker.start()
    except ImportError as error:
        raise ConfigError(
            f"tracking.trackers: {name} is not installed ({error}); run pip install 'grpo-regress[{name}]'"
        ) from error
    try:
        tracker.store_init_configuration(redacted_tree(flat(config)))
        yield lambda step, metrics: tracker.log(dict(metrics), step=step)
    finally:
        tracker.finish()
