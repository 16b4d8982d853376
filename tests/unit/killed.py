"""Work that is killed before one of its file operations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}
WRITING = os.O_WRONLY | os.O_RDWR
KILLED = 9


def killed_at(number: int, work: Callable[[], object]) -> bool:
    """Do the work in a process that ends at once before one of its file operations; return True if it did."""
    child = os.fork()
    if child == 0:
        left = number

        def count(event: str, args: Any = ()) -> None:
            nonlocal left
            if event in OPERATIONS or (event == "open" and args[2] & WRITING):
                left -= 1
                if left < 0:
                    os._exit(KILLED)

        known = os.write

        def counted(handle: int, data: Any) -> int:
            count("os.rename")
            return known(handle, data)

        try:
            os.write, os.fsync = counted, lambda _: count("os.rename")  # a kill leaves what was written
            sys.addaudithook(count)
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED
