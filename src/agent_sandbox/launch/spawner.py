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


class Spawner:
    """Runs start-up calls on a thread of reduced authority, one at a time."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.scoped = False
        self._turn = _thread.allocate_lock()
        self._go = _thread.allocate_lock()
        self._done = _thread.allocate_lock()
        self._go.acquire()
        self._done.acquire()
        self._job: Callable[[], object] = self._shed
        self._failure: BaseException | None = None
        self._result: object = None
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
            self._go.acquire()
            try:
                self._result, self._failure = self._job(), None
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._result, self._failure = None, error
            self._done.release()

    def call(self, job: Callable[[], T]) -> T:
        """Run `job` on the thread and return what it returns, or raise what it raises."""
        with self._turn:
            self._job = job
            self._go.release()
            self._done.acquire()
            failure, result = self._failure, self._result
            self._failure = self._result = None
        if failure is not None:
            raise failure
        return result  # type: ignore[return-value]


_current: Spawner | None = None
_creation = _thread.allocate_lock()


def spawner() -> Spawner:
    """The program's spawner; a fork starts anew, since threads do not survive it."""
    global _current  # noqa: PLW0603 - one per process by nature
    with _creation:
        if _current is None or _current.pid != os.getpid():
            _current = Spawner()
        return _current
