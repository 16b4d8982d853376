"""`python -m benchmarks [NAME...]`: run the named benchmarks, by default all of them."""

from __future__ import annotations

import sys
from importlib import import_module

import torch
from rich.console import Console

NAMES = (
    "checkpoint_overhead",
    "collection",
    "compare",
    "dump_overhead",
    "guard",
    "packing",
    "ranks",
    "scale",
    "trl",
)


def main(names: list[str]) -> None:
    """Run and print; a name that does not exist ends the program with the list of names."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark is called {unknown[0]}; choose from {', '.join(NAMES)}")
    torch.set_num_threads(1)
    console = Console(width=120)
    for name in names or NAMES:
        import_module(f"benchmarks.{name}").run().show(console)


if __name__ == "__main__":
    main(sys.argv[1:])
