"""Log every optimizer step of a script: hashes of what goes in and comes out. Runs in the script's own interpreter.

Python imports it first because its folder heads PYTHONPATH. It knows nothing of this package, waits until the script
has imported torch, and then lets the module of that name that it hides, if there is one, run as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec
from os import environ, getpid, kill
from pathlib import Path
from typing import Any


class _AfterTorch(MetaPathFinder, Loader):
    """Registers hooks as soon as torch's optimizers are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Stand in for ``torch.optim`` once."""
        if name != "torch.optim":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._real = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: Any) -> Any:
        """Leave it to the real loader."""
        return self._real.create_module(spec)

    def exec_module(self, module: Any) -> None:
        """Run the module, then register."""
        self._real.exec_module(module)
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        log = _Log()
        register_optimizer_step_pre_hook(log.before)
        register_optimizer_step_post_hook(log.after)


class _Log:
    def __init__(self) -> None:
        rank = environ.get("RANK", "0")
        self._path = Path(environ["GRPO_REGRESS_STEP_LOG"]) / f"rank{rank}.jsonl"
        self._stop = int(environ.get("GRPO_REGRESS_STOP_AFTER", "0")) if rank == "0" else 0
        self._count = 0
        self._line: dict[str, Any] = {}

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Note weights, gradients, moments and rates before a step."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._line = {
            "rates": [float(group.get("lr", 0.0)) for group in optimizer.param_groups],
            "weights": _hash(parameters),
            "moments": _hash(_moments(optimizer, parameters)),
            "gradients": _hash([p.grad for p in parameters if p.grad is not None]),
        }

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Write the line of a step, and stop the script where it is to."""
        import json

        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        line = {**self._line, "updated": _hash(parameters)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._count += 1
        if self._count == self._stop:
            kill(getpid(), int(environ["GRPO_REGRESS_STOP_SIGNAL"]))


def _moments(optimizer: Any, parameters: Iterable[Any]) -> Iterator[Any]:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        yield from (state[name] for name in sorted(state) if hasattr(state[name], "detach"))


def _hash(tensors: Iterable[Any]) -> str:
    import hashlib

    digest = hashlib.sha256()
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        plain = local.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(
            plain.flatten().view(plain.new_zeros(0).char().dtype).numpy().tobytes() if plain.numel() else b""
        )
    return digest.hexdigest()[:16]


if "GRPO_REGRESS_STEP_LOG" in environ:
    sys.meta_path.insert(0, _AfterTorch())
sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
_own = sys.modules.pop(__name__, None)
with suppress(ImportError):  # the one that this one hides
    import_module("sitecustomize")
if _own is not None:
    sys.modules.setdefault(__name__, _own)
