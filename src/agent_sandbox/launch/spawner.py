"""The one thread that starts sandboxes.

It gives up authority once (session keyring, no_new_privs, Landlock scopes: all belong to a thread
and pass to its children) while the rest of the program keeps its own. It stays alive as long as the
program, because bwrap's --die-with-parent follows the *thread* that started it (prctl(2),
PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import _thread
import os

from ..errors import HostError, reason
from . import landlock, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")


class _Request:
    """A job for the thread, and what became of it."""

    def __init__(self, job: Callable[[], object]) -> None:
        self.job = job
        self.begun = False
        self.over = False
        self.result: object = None
        self.failure: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def run(self) -> None:
        """On the thread."""
        try:
            self.result = self.job()
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            self.failure = error
        self.over = True
        self._done.release()

    def wait(self) -> None:
        """Until it is over; a signal handler may raise instead, at any point."""
        if not self.over:
            self._done.acquire()


class Spawner:
    """Runs start-up calls on a thread of reduced authority, one at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.scoped = False
        # A request is in here, or has begun, from the moment that it was made: whoever is
        # interrupted can tell.
        self._requests: list[_Request] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        _thread.start_new_thread(self._loop, ())
        self.call(self._shed)

    def _shed(self) -> None:
        machine = os.uname().machine
        try:
            syscalls.join_new_keyring(machine)
            self.scoped = landlock.restrict(machine)
        except OSError as error:
            raise HostError(
                f"cannot give up keyring and scopes before the start: {reason(error)}",
                hint="run 'sandboxctl doctor'",
                code="landlock-failed",
            ) from error

    def _loop(self) -> None:
        while True:
            os.eventfd_read(self._bell)
            while self._requests:
                request = self._requests[0]
                request.begun = True
                del self._requests[0]
                request.run()

    def call(self, job: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Run `job` on the thread and return what it returns, or raise what it raises.

        A signal handler may raise meanwhile (KeyboardInterrupt). The job is not left half way for
        that: what it has started is undone.
        """
        request = _Request(job)
        try:
            self._requests.append(request)
            os.eventfd_write(self._bell, 1)
            request.wait()
        except BaseException:
            self._see_through(request)
            if request.over and request.failure is None and undo is not None:
                undo(request.result)  # type: ignore[arg-type]
            raise
        if request.failure is not None:
            raise request.failure
        return request.result  # type: ignore[return-value]

    def _see_through(self, request: _Request) -> None:
        """Wait for a request if it was made, whatever handlers raise."""
        while not request.over and (request.begun or request in self._requests):
            try:
                os.eventfd_write(self._bell, 1)
                request.wait()
            except BaseException:  # noqa: BLE001, S112 - the first one is raised already
                continue


class Detached(Spawner):
    """A spawner for a service: what it starts has none of the service's directory and umask."""

    def _shed(self) -> None:
        # For this thread alone (unshare(2), CLONE_FS): both belong to the whole program otherwise.
        syscalls.unshare_directory(os.uname().machine)
        os.chdir("/")
        os.umask(0o022)
        super()._shed()


_current: Spawner | None = None
_creation = _thread.allocate_lock()


def spawner() -> Spawner:
    """The program's spawner; a fork starts anew, since threads do not survive it."""
    global _current  # noqa: PLW0603 - one per process by nature
    with _creation:
        if _current is None or _current.pid != os.getpid():
            _current = Spawner()
        return _current
