"""`sandboxctl`, with the backend of these tests, and with one protection off where a control says.

WITHOUT=lock: who counts sandboxes does so beside others. WITHOUT=lease: nobody looks whether its
lease is over, nor whether the sandbox is still its own. PAUSE: seconds between a count and what was
counted, so that a race has room. MEET: the first that has counted waits there for the other servers
to have counted, too, so that nothing is left to chance; MEET_SECONDS: but no longer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping

from agent_sandbox.cli.ctl import main
from agent_sandbox.service import app
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.replicas.lease import Lease
from agent_sandbox.service.replicas.shared import Shared
from agent_sandbox.service.state import State
from agent_sandbox.service.values import Execution, Sandbox

from .directories import Directories


def _directories(_store: State, environ: Mapping[str, str], _limits: Limits) -> Directories:
    return Directories(environ["DIRECTORIES"])


@contextlib.contextmanager
def _beside_others(_: Shared) -> Iterator[None]:
    yield


def _meet() -> None:
    """Wait for the word that all are here. Only once: the name is not needed any more."""
    if name := os.environ.pop("MEET", ""):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(TimeoutError):
            sock.settimeout(float(os.environ["MEET_SECONDS"]))
            sock.connect(f"\0{name}")
            assert sock.recv(1)


def _slowly(self: Shared, sandbox: Sandbox) -> None:
    _meet()
    time.sleep(float(os.environ.get("PAUSE", "0")))
    self.store.put_sandbox(sandbox)


def _begin(self: Shared, execution: Execution) -> None:
    self.store.put_execution(execution)


def prepare() -> None:
    """What the environment says."""
    app.BACKENDS[Directories.name] = _directories
    Shared.entered = _slowly  # type: ignore[method-assign]
    without = os.environ.get("WITHOUT", "")
    if without == "lock":
        Shared.counting = _beside_others  # type: ignore[method-assign]
    elif without == "lease":
        Lease.held = Lease.renew = lambda _: True  # type: ignore[method-assign]
        Shared.begin = _begin  # type: ignore[method-assign]
    else:
        assert not without, without


if __name__ == "__main__":
    prepare()
    sys.exit(main())
