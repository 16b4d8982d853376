"""`python -m benchmarks [NAME...] [--sdk PYTHON]...`: run the named benchmarks, by default all of them.

``--sdk`` names the interpreter of an environment with nex-weaver or tinker, which `service` then times, too.
"""

from __future__ import annotations

import argparse
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
    "integrity",
    "packing",
    "pages",
    "ranks",
    "scale",
    "service",
    "trl",
)


def main(given: list[str]) -> None:
    """Run and print; a name that does not exist ends the program with the list of names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--sdk", action="append", default=[], metavar="PYTHON", dest="sdks")
    chosen = parser.parse_args(given)
    names: list[str] = chosen.names
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"no benchmark is called {unknown[0]}; choose from {', '.join(NAMES)}")
    torch.set_num_threads(1)
    console = Console(width=120)
    for name in names or NAMES:
        options = {"sdks": chosen.sdks} if name == "service" else {}
        import_module(f"benchmarks.{name}").run(**options).show(console)


if __name__ == "__main__":
    main(sys.argv[1:])
