"""A command, from its start to its end and beyond: its state, its output, who waits for it."""

from __future__ import annotations

import asyncio

from ..backend.interface import Ended
from ..problems import Problem
from ..values import EXITED, FAILED, LOST, RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend.interface import Running, Sink
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
        # Why its end will not be seen; who starts it at the moment, and who waits for its end.
        self.lost = ""
        self.starter: asyncio.Task[object] | None = None
        self.waits: asyncio.Task[object] | None = None
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

    def loss(self) -> Ended | None:
        """Its end, if that is not to be seen."""
        return lost(self.lost) if self.lost else None

    def interrupt(self) -> None:
        """Have whoever starts it, or waits for its end, look at `lost`."""
        # Neither: it has ended, or will look before it waits.
        if self.lost and (task := self.starter or self.waits) is not None:
            task.cancel()

    def part(self) -> None:
        """It will be started again: nothing of the first time may reach the second."""
        if self.timer is not None:
            self.timer.cancel()
        if self.feeder is not None:
            self.feeder.cancel()
        self.running = self.timer = self.feeder = None
        self.lost, self.input_closed = "", False

    def sink(self) -> Sink:
        """Takes its output, as long as this is the time that counts."""
        attempt, append = self.execution.attempts, self.journal.append

        def take(stream: int, data: bytes) -> None:
            if self.execution.attempts == attempt:
                append(stream, data)

        return take

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


def lost(reason: str) -> Ended:
    """The end that nobody has seen."""
    return Ended(code=255, lost=True, error=reason)


def unwritten() -> Problem:
    """It has ended, but its record says otherwise: nobody would tell those who wait for that."""
    return Problem("STATE_UNAVAILABLE", "its end is not written down yet", rule="state",
                   hint="try again soon", retry_after=1.0)  # fmt: skip


async def close_input(running: Running) -> None:
    """The end of its input."""
    try:
        await running.close_input()
    except (BrokenPipeError, ConnectionError):
        # It has ended: nobody waits for the end of its input.
        return


def outcome(job: Job, ended: Ended, now: float) -> Execution:
    """The record of an end: what the backend saw, and what we did. Pure."""
    journal = job.journal
    exceeded = "disk" if job.cause == DISK else ended.exceeded
    state = LOST if ended.lost else EXITED if ended.started else FAILED
    return job.execution.replace(
        state=state, exit_code=None if ended.lost else ended.code, signal=ended.signal,
        timed_out=job.cause == TIME, oom_killed=ended.exceeded == "memory", exceeded=exceeded,
        truncated=journal.truncated, stdout_bytes=journal.bytes[1], stderr_bytes=journal.bytes[2],
        ended=now, cpu_ms=ended.cpu_ms, max_rss_kb=ended.max_rss_kb,
        error=ended.error or WORDS.get(job.cause, ""),
    )  # fmt: skip
