"""A running sandbox, as the library hands it out."""

from __future__ import annotations

import subprocess
import time

from ..errors import EXIT_SIGNAL_BASE, HostError
from ..launch import execute, workspace
from .prepare import start_failed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType
    from typing import IO

    from ..launch.keeper import Keeper
    from ..launch.limits import Enforcer
    from ..launch.workspace import Workspace
    from ..policy.model import Plan
    from ..policy.triggers import Finding
    from .changes import Changes


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
        self.stdin: IO[bytes] | None = popen.stdin
        self.stdout: IO[bytes] | None = popen.stdout
        self.stderr: IO[bytes] | None = popen.stderr

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
        if self._enforcer is not None:
            self.exceeded = self.exceeded or self._enforcer.exceeded() or ""
            self._enforcer.close()
        self.exceeded = self._keeper.dismiss() or self.exceeded
        self.changes = self._changes.settle()
        workspace.remove(self._space, keep=False)
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
