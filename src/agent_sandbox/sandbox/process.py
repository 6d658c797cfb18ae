"""A running sandbox, as the library hands it out."""

from __future__ import annotations

import _thread
import os
import select
import subprocess
import time

from ..errors import EXIT_SIGNAL_BASE, HostError
from ..launch import execute, sweeping
from . import containers, gitlog
from .prepare import start_failed
from .traffic import Traffic, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Iterable, Iterator
    from types import TracebackType
    from typing import IO

    from ..launch.helping import Helpers
    from ..launch.keeper import Keeper
    from ..launch.limits import Enforcer
    from ..launch.workspace import Workspace
    from ..policy.model import Plan
    from ..policy.triggers import Finding
    from .changes import Changes
else:
    import _signal

# What `exceeded` says when the process that held the mounts was killed.
KEEPER = "keeper"


def _end(handle: int) -> None:
    try:
        _signal.pidfd_send_signal(handle, _signal.SIGKILL)
    except ProcessLookupError:
        return


def _close(descriptors: Iterable[int]) -> None:
    for fd in descriptors:
        os.close(fd)


def sooner(one: float | None, other: float | None) -> float | None:
    """The shorter of two waits, where None is for ever."""
    given = [t for t in (one, other) if t is not None]
    return min(given) if given else None


class Process:
    """A running sandbox. Use it as a context manager, or call `wait` or `close`."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        *,
        status: execute.ChildStatus,
        init: int | None,
        space: Workspace,
        enforcer: Enforcer | None,
        keeper: Keeper,
        helpers: Helpers,
        changes: Changes,
        argv: tuple[str, ...],
        plan: Plan,
    ) -> None:
        self._popen = popen
        self._status = status
        self._sandboxed = execute.Sandboxed(popen.pid, init or popen.pid)
        self._space: Workspace | None = space
        self._enforcer = enforcer
        self._keeper = keeper
        self._helpers = helpers
        self._changes = changes
        self.argv = argv
        self.notices = plan.notices
        # The policy's own timeout, in seconds.
        self.limit = plan.limits.timeout
        # What bwrap wrote when its standard error is captured.
        self._said = ""
        self.timed_out = False
        self.exceeded = ""
        # What the run did to files that tools outside act on. Known when it has ended.
        self.changes: tuple[Finding, ...] = ()
        # Whom the command reached or was refused, where a proxy decides. Known when it has ended.
        self.network = Traffic()
        # What it asked of the container engine, where a filter decides. Known when it has ended.
        self.containers = containers.Containers()
        # What git had signed and handed in, with git_auth. Known when it has ended.
        self.git = gitlog.GitLog()
        self.stdin: IO[bytes] | None = popen.stdin
        self.stdout: IO[bytes] | None = popen.stdout
        self.stderr: IO[bytes] | None = popen.stderr
        if init is not None:
            self._tend(init)

    def _tend(self, init: int) -> None:
        """End the sandbox when its keeper dies, whatever the program does meanwhile.

        It may read the output for hours and never call `wait`, so a thread waits. It has
        descriptors of its own: the other ones may be closed, and their numbers used again.
        """
        kept: list[int] = []
        try:
            kept += [os.pidfd_open(init)]
            kept += [self._keeper.line()]
            _thread.start_new_thread(self._wait_for_keeper, (kept[0], kept[1]))
        except ProcessLookupError:
            # It has ended already.
            _close(kept)
        except (OSError, RuntimeError):
            # No descriptor or thread left: what nobody watches must not run.
            _close(kept)
            self.exceeded = KEEPER
            self._sandboxed.kill()

    def _wait_for_keeper(self, alive: int, line: int) -> None:
        poller = select.poll()
        poller.register(alive, select.POLLIN)
        # No event is asked for: POLLHUP comes in any case, and what is said is not ours.
        poller.register(line, 0)
        poller.poll()
        poller.unregister(line)
        if not poller.poll(0):
            # Nobody holds the mounts any more: a save outside would uncover what is hidden.
            self.exceeded = KEEPER
            _end(alive)
        _close((alive, line))

    @property
    def pid(self) -> int:
        """The pid of bwrap on the host."""
        return self._popen.pid

    def poll(self) -> int | None:
        """The exit code, or None while the command runs."""
        code = self._popen.poll()
        return None if code is None else self._finish(code)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; raises subprocess.TimeoutExpired."""
        return self._finish(self._popen.wait(timeout))

    def communicate(
        self, data: bytes | None = None, timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Send input, read all output, wait. Raises subprocess.TimeoutExpired."""
        out, err = self._popen.communicate(data, timeout)
        self._said = (err or b"").decode("utf-8", "replace").strip()
        self._finish(self._popen.returncode)
        return out or b"", err or b""

    def finish(self, data: bytes | None, timeout: float | None) -> tuple[bytes, bytes]:
        """Wait for the end under a timeout and the polled limits: ask first, kill later."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                return self.communicate(data, sooner(wait, self.poll_interval))
            except subprocess.TimeoutExpired:
                # communicate() keeps what it has read and written so far; it may be called again.
                data = None
            self.check_limits()
            if deadline is not None and time.monotonic() >= deadline:
                if self.timed_out:
                    self.kill()
                    deadline = None
                else:
                    self.timed_out = True
                    self.terminate()
                    deadline = time.monotonic() + execute.GRACE

    def lines(self) -> Iterator[bytes]:
        """Standard output line by line, as it comes."""
        if self.stdout is not None:
            yield from self.stdout

    def send_signal(self, number: int) -> None:
        """Signal the command itself, so that its handlers run."""
        if self._popen.poll() is None:
            self._sandboxed.send(number)

    def terminate(self) -> None:
        """Ask the command to end."""
        self.send_signal(15)

    def kill(self) -> None:
        """End every process inside at once."""
        if self._popen.poll() is None:
            self._sandboxed.kill()

    def check_limits(self) -> str:
        """Kill the command when a polled limit is exceeded; says which."""
        if self._enforcer is not None and not self.exceeded:
            self.exceeded = self._enforcer.exceeded() or ""
            if self.exceeded:
                self.kill()
        return self.exceeded

    @property
    def poll_interval(self) -> float | None:
        """How often `check_limits` must be called; None when the kernel enforces everything."""
        return None if self._enforcer is None else self._enforcer.poll

    def close(self) -> None:
        """Kill what still runs and clean up. Safe to call twice."""
        if self._space is None:
            return
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                stream.close()
        try:
            self._finish(self._popen.wait())
        except HostError:
            # It never started and somebody has already been told, or does not want to know.
            return

    def _finish(self, code: int) -> int:
        """Clean up once; the code of a command killed by a signal is 128 plus its number."""
        if code < 0:
            code = EXIT_SIGNAL_BASE - code
        if self._space is None:
            return code
        # bwrap may have been killed before it had tied its child's life to its own.
        self._sandboxed.finish()
        self._sandboxed.join()
        if self._sandboxed.init == self._popen.pid:
            # bwrap was killed before it could say who its child is.
            sweeping.end_orphans(os.path.basename(self._space.path))
        if self._enforcer is not None:
            self.exceeded = self.exceeded or self._enforcer.exceeded() or ""
            self._enforcer.close()
        self._helpers.ask()
        self.exceeded = self._keeper.dismiss() or self.exceeded
        self.notices += self._keeper.warnings
        said = self._helpers.finish()
        if "network" in said:
            self.network = parse(said["network"])
        if "docker" in said:
            self.containers = containers.parse(said["docker"])
        if "git_auth" in said:
            self.git = gitlog.parse(said["git_auth"])
        self.notices += self._helpers.warnings
        self.notices += containers.warnings(self.containers) + gitlog.notes(self.git)
        self.changes = self._changes.settle()
        sweeping.remove(self._space, keep=False)
        self._space = None
        if not self._status.reported_exit() and code != 0 and code < EXIT_SIGNAL_BASE:
            raise start_failed(code, self._said)
        return code

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()
