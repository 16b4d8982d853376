"""These tests run the released TRL and verl, and only where both are installed: ``tox run -e parity``."""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("trl") and find_spec("verl") else ["*"]

if not collect_ignore_glob:
    # what these packages warn about when they are imported is not ours to mend
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("trl", "verl.trainer.ppo.ray_trainer", "verl.workers.utils.losses"):
            import_module(name)
    # by its own name: verl installs a package called `tests`, which hides ours
    sys.path.insert(0, str(Path(__file__).parent))
    from parity_world import DEVIATIONS, World, make_world

    @pytest.fixture(scope="session")
    def world(tmp_path_factory: pytest.TempPathFactory) -> World:
        return make_world(tmp_path_factory.mktemp("model"))

    def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
        for column, what in enumerate(
            ("advantages, absolute", "loss, absolute", "gradients, relative L2"), start=1
        ):
            if DEVIATIONS:
                worst = max(DEVIATIONS, key=lambda deviation: deviation[column])
                terminalreporter.write_line(
                    f"worst of {len(DEVIATIONS)} comparisons: {what} {worst[column]:.1e} ({worst[0]})"
                )
