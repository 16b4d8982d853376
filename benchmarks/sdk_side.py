"""Steps by an official SDK, in an environment that has nothing else: ``sdk_side.py ROWS``, a line on stdin for each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests" / "sdk"


def _weaver(given: dict[str, Any]) -> tuple[str, Callable[[], tuple[float, float]]]:
    import weaver_driver
    from weaver import types

    driver = weaver_driver.WeaverDriver(given["url"], given["key"], given["model"])
    data = [weaver_driver._datum(*row) for row in given["rows"]]

    def step() -> tuple[float, float]:
        passed = driver.trainer.forward_backward(data, loss_fn="importance_sampling", wait=True)
        updated = driver.trainer.optim_step(types.AdamParams(**given["adam"]), wait=True)
        return passed["result"]["metrics"]["loss:sum"], updated["metrics"]["grad_norm"]

    return f"nex-weaver {version('nex-weaver')}", step


def _tinker(given: dict[str, Any]) -> tuple[str, Callable[[], tuple[float, float]]]:
    import tinker_driver
    from tinker import types

    driver = tinker_driver.TinkerDriver(given["url"], given["key"], given["model"])
    data = [tinker_driver._datum(*row) for row in given["rows"]]

    def step() -> tuple[float, float]:
        passed = driver.trainer.forward_backward(data, loss_fn="importance_sampling")
        updated = driver.trainer.optim_step(types.AdamParams(**given["adam"]))  # both on their way
        return passed.result().metrics["loss:sum"], updated.result().metrics["grad_norm"]

    return f"tinker {version('tinker')}", step


def main(rows: str) -> None:
    """Answer each line on stdin with a line of JSON: loss and norm of the gradient."""
    sys.path.insert(0, str(TESTS))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what SDKs print is not an answer
    given = json.loads(Path(rows).read_text())
    try:
        name, step = _weaver(given)
    except ImportError:
        name, step = _tinker(given)
    print(json.dumps({"name": name}), file=answers, flush=True)
    for _ in sys.stdin:
        loss, norm = step()
        print(json.dumps({"loss": loss, "grad_norm": norm}), file=answers, flush=True)
    answers.close()
    os._exit(0)  # heartbeats of SDKs sleep on


if __name__ == "__main__":
    main(sys.argv[1])
