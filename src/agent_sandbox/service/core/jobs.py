"""A command, from its start to its end and beyond: its state, its output, who waits for it."""

from __future__ import annotations

import asyncio

from ..problems import Problem
from ..values import EXITED, FAILED, RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend.interface import Ended, Running
    from ..values import Execution
    from .journal import Journal

# Why a command was ended by us. The first cause stands.
TIME, DISK, KILLED, REMOVED, STOPPED = "time", "disk", "killed", "removed", "stopped"
WORDS = {
    REMOVED: "its sandbox was removed",
    STOPPED: "the service was stopped",
}
# A killed command that the backend does not report as ended within this time is given up.
KILL_GRACE = 10.0


class Job:
    """An execution with its output. Only the loop may use it."""

    def __init__(self, execution: Execution, journal: Journal) -> None:
        self.execution = execution
        self.journal = journal
        self.running: Running | None = None
        self.cause = ""
        # Input is written by one at a time, in the order of the requests.
        self.input = asyncio.Lock()
        self.input_closed = False
        # Requests whose input is in the audit already: a terminal sends every key by itself.
        self.noted: set[str] = set()
        self.feeder: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.watch: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self.ended = execution.state != RUNNING

    @property
    def id(self) -> str:
        """Its id."""
        return self.execution.id

    async def concluded(self) -> None:
        """Wait for its end. One who stops waiting changes nothing."""
        while not self.ended:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)

    async def wait(self) -> Execution:
        """Its end, which is written down by then; or the error that kept us from doing so."""
        await self.concluded()
        if self._failure is not None:
            raise self._failure
        return self.execution

    def command(self) -> Running:
        """What to send input and signals to; WRONG_STATE when there is nothing any more."""
        if self.running is None or self.ended:
            raise Problem("WRONG_STATE", "the command does not run", rule="exec.state")
        return self.running

    def conclude(self, execution: Execution, failure: BaseException | None = None) -> None:
        """It has ended, and that is written down (or could not be: `failure`)."""
        self.execution = execution
        self._failure = failure
        self.ended = True
        self.running = None
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)


def outcome(job: Job, ended: Ended, now: float) -> Execution:
    """The record of an end: what the backend saw, and what we did. Pure."""
    journal = job.journal
    exceeded = "disk" if job.cause == DISK else ended.exceeded
    return job.execution.replace(
        state=EXITED if ended.started else FAILED, exit_code=ended.code, signal=ended.signal,
        timed_out=job.cause == TIME, oom_killed=ended.exceeded == "memory", exceeded=exceeded,
        truncated=journal.truncated, stdout_bytes=journal.bytes[1], stderr_bytes=journal.bytes[2],
        ended=now, cpu_ms=ended.cpu_ms, max_rss_kb=ended.max_rss_kb,
        error=ended.error or WORDS.get(job.cause, ""),
    )  # fmt: skip
