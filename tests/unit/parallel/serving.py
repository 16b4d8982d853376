"""A program that starts ranks once and lets them run one function after the other.

Usage: serving.py WORLD_SIZE FOLDER. Every rank connects to the socket FOLDER/socket, says its number, and then
answers jobs ``(file, function, arguments)`` with ``(True, result)`` or ``(False, traceback)``.
"""

from __future__ import annotations

import datetime
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import regress.engine.model_loading  # imported before the ranks are forked
import regress.parallel.context_parallel
import regress.parallel.expert_parallel  # noqa: F401  # loaded before it forks


@cache
def module_at(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(path).stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def serve(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", world_size)
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    with Client(f"{folder}/socket", family="AF_UNIX") as connection:
        connection.send(rank)
        while True:
            try:
                path, name, arguments = connection.recv()
            except EOFError:
                return
            connection.send(answer(getattr(module_at(path), name), arguments))


def answer(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, function(*arguments)
    except Exception:
        return False, traceback.format_exc()


if __name__ == "__main__":
    world_size, folder = int(sys.argv[1]), sys.argv[2]
    for rank in range(world_size):
        if os.fork() == 0:
            try:
                serve(rank, world_size, folder)
            finally:
                os._exit(0)
    for _ in range(world_size):
        os.wait()
