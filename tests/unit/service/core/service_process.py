"""Process of a service on a host that computes nothing, for tests that kill it: ``service_process.py SOCKET STATE``."""

from __future__ import annotations

import sys
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Listener
from pathlib import Path

from service_double import opened

from regress.service.core.executor import InProcess
from regress.service.core.service import CoreService

KEY = b"test"


def main(address: str, root: str) -> None:
    executor = InProcess(partial(opened, Path(root) / "executed"))
    with Listener(address, family="AF_UNIX", authkey=KEY) as listener:
        service = CoreService(executor, Path(root) / "state")
        with listener.accept() as client, suppress(EOFError):
            while True:
                method, arguments, settings = client.recv()
                try:
                    client.send((True, getattr(service, method)(*arguments, **settings)))
                except Exception as error:
                    client.send((False, error))
        service.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
