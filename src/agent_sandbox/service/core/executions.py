"""Commands: admitted, started, watched, ended, written down. Whoever asked may have gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal as signals
import time

from .. import limits as bounds
from ..backend.interface import Ended, Start
from ..problems import Problem
from ..replicas.interface import Elsewhere
from ..values import CREATE, EXEC, LOST, RUNNING, Execution
from . import access, ids, jobs
from .disk import Disks
from .jobs import Job
from .journal import Journal
from .kept import Kept, path_of
from .keys import Keys
from .later import Later
from .losses import Losses
from .orders import Order, note_start, result_of, target
from .queue import Share
from .sandboxes import wrong_state
from .wishes import Wish, fingerprint, repeatable, shortened

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend.interface import Running, Terminal
    from ..values import Agent
    from .context import Context, Live
    from .policy import Decision
    from .sandboxes import Sandboxes
    from .wishes import ExecWish, RunWish

log = logging.getLogger(__name__)
# A sandbox for one command expires so much later than its command, should all else fail.
ONE_SHOT_MARGIN = 60.0


class Executions:
    """All commands of the service."""

    def __init__(self, context: Context, sandboxes: Sandboxes) -> None:
        self._context = context
        self._sandboxes = sandboxes
        self.disks = Disks(context, self.end)
        self.losses = Losses(context, self.lose)
        self.kept = Kept(context)
        self.later = Later()
        self._keys: Keys[Job] = Keys(context, "execution", self.find)

    # --- to start one

    async def execute(self, agent: Agent, sandbox_id: str, wish: ExecWish, request_id: str) -> Job:
        """In a sandbox that exists."""
        context = self._context
        context.accept()
        bounds.check_scope(agent, EXEC)
        live = context.sandbox(agent, sandbox_id)
        order = Order(agent, wish, context.limits_of(agent), request_id)
        _usable(live)
        await self.disks.check(live)
        await self._place(order)
        # It has a place now, and gives it back itself.
        return await context.finish(self._begin(order, live, ids.new(ids.EXECUTION)))

    async def run(self, agent: Agent, wish: RunWish, *, key: str | None, request_id: str) -> Job:
        """In a sandbox of its own."""
        context = self._context
        context.accept()
        bounds.check_scope(agent, CREATE)
        bounds.check_scope(agent, EXEC)
        order = Order(agent, wish.command, context.limits_of(agent), request_id)
        if wish.retry:
            order.again = repeatable(wish)
        exec_id = ids.new(ids.EXECUTION)
        if key is None:
            # A wish that will be refused does not wait first.
            decision = await self._sandboxes.decide(agent, wish.sandbox)
            await self._place(order)
            return await context.finish(self._run(order, wish.sandbox, decision, exec_id))

        async def make(chosen: str) -> Job:
            decision = await self._sandboxes.decide(agent, wish.sandbox)
            await self._place(order)
            return await self._run(order, wish.sandbox, decision, chosen)

        job, new = await self._keys.once(agent.name, key, fingerprint(wish), id=exec_id, make=make)
        if not new:
            context.note(agent, "exec.start", target(job.execution), rule="idempotency.replay",
                         request_id=request_id)  # fmt: skip
        return job

    async def _place(self, order: Order) -> None:
        limits, begun = order.limits, time.monotonic()
        share = Share(
            running=limits.max_concurrent_execs_per_agent,
            queued=limits.max_queued_execs_per_agent, patience=limits.max_queue_seconds,
        )  # fmt: skip
        await self._context.places.take(order.agent.name, share)
        self._context.observe("queue", time.monotonic() - begun)

    async def _run(self, order: Order, wish: Wish, decision: Decision, exec_id: str) -> Job:
        try:
            live = await self._place_of_its_own(order, wish, decision)
        except BaseException:
            self._context.places.give(order.agent.name)
            raise
        return await self._begin(order, live, exec_id)

    async def _place_of_its_own(self, order: Order, wish: Wish, decision: Decision) -> Live:
        return await self._sandboxes.make(
            order.agent, wish, decision, ids.new(ids.SANDBOX), request_id=order.request_id,
            one_shot_seconds=order.timeout + ONE_SHOT_MARGIN,
        )  # fmt: skip

    async def _begin(self, order: Order, live: Live, exec_id: str) -> Job:
        """Start it; it has a place. On failure the place, and a sandbox of its own, are let go."""
        context, begun = self._context, time.monotonic()
        try:
            job = self._written(order, live, exec_id)
            try:
                await self._launch(order, live, job)
            except BaseException as error:
                self._failed(order, live, job, error)
                raise
        except BaseException:
            self._let_go(order, live)
            raise
        job.watch = context.spawn(self._watch(order, live, job))
        context.observe("start", time.monotonic() - begun)
        return job

    async def _launch(self, order: Order, live: Live, job: Job) -> None:
        """Have it run; or not, when its sandbox is lost meanwhile: then that is its end."""
        starting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        live.starting.add(starting)
        job.starter = asyncio.current_task()
        try:
            job.running = await self._started(order, live, job)
        except BaseException:
            if not job.lost:
                raise
            if job.starter is not None:
                # By us: see `lose`.
                job.starter.uncancel()
        finally:
            job.starter = None
            live.starting.discard(starting)
            starting.set_result(None)

    def _written(self, order: Order, live: Live, exec_id: str) -> Job:
        """Put it down, before anything runs: a line that cannot be written stops it."""
        context, wish, now = self._context, order.wish, self._context.clock()
        # It may have waited for its place while somebody deleted the sandbox.
        _usable(live)
        execution = Execution(
            id=exec_id, sandbox=live.sandbox.id, owner=live.sandbox.owner,
            command=shortened(wish.argv),
            cwd=wish.cwd, tty=wish.terminal is not None, background=wish.background,
            timeout=order.timeout, state=RUNNING, started=now,
        )  # fmt: skip
        journal = Journal(path_of(context, exec_id), limit=order.limits.max_output_bytes)
        job = Job(execution, journal)
        try:
            context.replicas.begin(execution)
            note_start(context, order, live.sandbox, execution)
        except BaseException:
            with contextlib.suppress(Exception):
                # It never ran. Its record goes, now or later, also one whose answer was lost.
                self.later.do(lambda: context.store.delete_execution(exec_id))
            raise
        context.jobs[exec_id] = live.jobs[exec_id] = job
        live.touch(now)
        return job

    async def _started(self, order: Order, live: Live, job: Job) -> Running:
        wish = order.wish
        start = Start(
            execution=job.id, argv=wish.argv, cwd=wish.cwd, terminal=wish.terminal,
            env={**live.sandbox.env, **wish.env},
            input=wish.stdin is not None or wish.keep_input or wish.terminal is not None,
        )  # fmt: skip
        backend = self._context.backend(live.sandbox.backend)
        return await backend.start(live.sandbox, start, job.sink())

    def _failed(self, order: Order, live: Live, job: Job, error: BaseException) -> None:
        words = error.message if isinstance(error, Problem) else "it could not be started"
        ended = Ended(code=126, error=words, started=False)
        self._conclude(order, live, job, ended)

    # --- to watch over one

    async def _watch(self, order: Order, live: Live, job: Job) -> None:
        given_up = False
        try:
            ended = await self._end_of(order, live, job)
            if ended.lost and self._may_again(order, job):
                live, failed = await self._again(order, live, job, ended.error)
                ended = failed or await self._end_of(order, live, job)
        except asyncio.CancelledError:
            given_up = True
            ended = Ended(code=137, signal="SIGKILL", error="it was killed, but has not ended")
        try:
            self._conclude(order, live, job, ended)
        finally:
            if given_up and live.removal is None and live.sandbox.id in self._context.live:
                # Whatever still runs in there must not stay.
                self._context.note(None, "sandbox.reap", {"type": "sandbox", "id": live.sandbox.id},
                                   reason="a command in it cannot be ended")  # fmt: skip
                self._sandboxes.remove(live)
            self._let_go(order, live)

    async def _end_of(self, order: Order, live: Live, job: Job) -> Ended:
        """Wait for it; whoever cancels that has given it up, or knows that it is lost."""
        running = job.running
        if running is None or job.loss() is not None:
            return job.loss() or jobs.lost("it was not started")
        loop = asyncio.get_running_loop()
        job.timer = loop.call_later(order.timeout, self.end, job, jobs.TIME)
        self.disks.watch(live)
        if order.wish.stdin is not None:
            job.feeder = self._context.spawn(self._feed(order.wish, job, running))
        if job.cause:
            # Its sandbox was removed, or the service stopped, while it started.
            self._context.spawn(self._kill(job, running))
        job.waits = asyncio.current_task()
        try:
            return await running.wait()
        except asyncio.CancelledError:
            if (lost := job.loss()) is None or job.waits is None:
                raise
            job.waits.uncancel()
            return lost
        except Exception:
            log.exception("execution %s: its end is not known", job.id)
            return job.loss() or Ended(code=125, error="its end is not known")
        finally:
            job.waits = None

    def lose(self, job: Job, reason: str) -> None:
        """Nobody will see its end: tell those who wait, now."""
        if job.ended or job.lost:
            return
        job.lost = reason
        # Later: it may be the one who starts it, or waits for it, that tells.
        asyncio.get_running_loop().call_soon(job.interrupt)

    # --- to start one again

    def _may_again(self, order: Order, job: Job) -> bool:
        """Only if the request asked for it, and nobody has ended it meanwhile."""
        return order.again is not None and not (job.cause or self._context.draining)

    async def _again(
        self, order: Order, old: Live, job: Job, why: str
    ) -> tuple[Live, Ended | None]:
        """Start it in a new sandbox; or why not: then the loss stands."""
        live = old
        try:
            self._part(order, old, job, why)
            wish = order.again or Wish()
            decision = await self._sandboxes.decide(order.agent, wish)
            live = await self._place_of_its_own(order, wish, decision)
            self._enter(order, live, job)
            await self._launch(order, live, job)
        except Exception as error:
            words = error.message if isinstance(error, Problem) else "it could not be started"
            if not isinstance(error, Problem):
                log.exception("execution %s: it cannot be started again", job.id)
            return live, jobs.lost(f"{why}; not run again: {words}")
        except BaseException:
            if live is not old:
                self._sandboxes.remove(live)
            raise
        return live, None

    def _part(self, order: Order, old: Live, job: Job, why: str) -> None:
        """The first time is over, and in the audit."""
        self._context.note(
            order.agent, "exec.end", target(job.execution), request_id=order.request_id,
            result={"state": LOST, "attempt": job.execution.attempts, "error": why},
        )  # fmt: skip
        job.part()
        old.jobs.pop(job.id, None)
        # Where a command was lost, no other will run; and what it takes up is for the next one.
        self.losses.lost(old.sandbox.id, why)

    def _enter(self, order: Order, live: Live, job: Job) -> None:
        """Put the second time down, before anything runs."""
        if job.cause or self._context.draining:
            raise Problem("WRONG_STATE", "it was ended meanwhile", rule="exec.state")
        execution = job.execution.replace(
            sandbox=live.sandbox.id, attempts=job.execution.attempts + 1, begins=job.journal.end
        )
        note_start(self._context, order, live.sandbox, execution)
        job.execution = execution
        job.journal.restart()
        live.jobs[job.id] = job
        self._context.store.put_execution(execution)

    # --- to write an end down

    def _conclude(self, order: Order, live: Live, job: Job, ended: Ended) -> None:
        """Write the end down, then tell those who wait."""
        context = self._context
        if job.timer is not None:
            job.timer.cancel()
        if job.feeder is not None:
            job.feeder.cancel()
        job.journal.close()
        execution = jobs.outcome(job, ended, context.clock())
        failure: BaseException | None = None
        try:
            self.later.do(
                # Record and line, or none: who takes over writes both of what has no end. Output
                # first: an end without it would look like that of a command that printed nothing.
                context.replicas.check,
                lambda: context.replicas.save(execution, job.journal),
                lambda: context.store.put_execution(execution),
                lambda: context.note(order.agent, "exec.end", target(execution),
                                     request_id=order.request_id, result=result_of(execution)),
            )  # fmt: skip
        except Exception as error:
            # An answer without its line in the audit would be a lie.
            # But without a lease there is nothing to write: another replica has done so, or will.
            if not (ended.lost and context.replicas.fenced()):
                log.exception("execution %s: its end cannot be written down", job.id)
                failure = error
        context.jobs.pop(job.id, None)
        live.jobs.pop(job.id, None)
        live.touch(execution.ended)
        job.conclude(execution, failure)
        context.observe("exec", max(execution.ended - execution.started, 0.0))
        if failure is None:
            self.kept.add(execution)

    def _let_go(self, order: Order, live: Live) -> None:
        """Give the place back; with a sandbox of its own, when that is gone."""
        if live.sandbox.one_shot and live.sandbox.id in self._context.live:
            self.disks.unwatch(live)

            # No line of its own: it goes with its command, whose end is written down. A failure
            # is in the log and in the sandbox's reason, and the reaper tries again.
            def removed(task: asyncio.Task[None]) -> None:
                self._context.places.give(order.agent.name)
                if not task.cancelled():
                    task.exception()

            self._sandboxes.remove(live).add_done_callback(removed)
        else:
            self._context.places.give(order.agent.name)

    async def _feed(self, wish: ExecWish, job: Job, running: Running) -> None:
        """Give a command the input that came with it."""
        async with job.input:
            try:
                await running.write(wish.stdin or b"")
            except (BrokenPipeError, ConnectionError):
                # It does not want to read all of it, or has ended.
                return
            if not (wish.keep_input or wish.terminal is not None):
                job.input_closed = True
                await jobs.close_input(running)

    # --- to end one

    def end(self, job: Job, cause: str) -> None:
        """End all of its processes, soon. The first cause stands."""
        if job.ended or job.cause:
            return
        job.cause = cause
        if job.running is not None:
            self._context.spawn(self._kill(job, job.running))

    async def _kill(self, job: Job, running: Running) -> None:
        try:
            async with asyncio.timeout(jobs.KILL_GRACE):
                await running.kill()
                await job.concluded()
        except Exception:
            log.exception("execution %s cannot be ended", job.id)
            if job.watch is not None:
                job.watch.cancel()

    async def kill(self, agent: Agent, exec_id: str, reason: str, request_id: str) -> Execution:
        """For its owner: end it. One that has ended already is no error."""
        bounds.check_scope(agent, EXEC)
        job = self.job(agent, exec_id)
        if not job.ended:
            request = {"signal": "SIGKILL", "tree": True}
            self._context.note(agent, "exec.signal", target(job.execution), request_id=request_id,
                               reason=reason, request=request)  # fmt: skip
            self.end(job, jobs.KILLED)
        return await job.wait()

    async def forget(self, agent: Agent, exec_id: str, request_id: str) -> None:
        """End it, and drop what is kept of it."""
        execution = await self.kill(agent, exec_id, "", request_id)
        self._context.note(agent, "exec.forget", target(execution), request_id=request_id)
        self.kept.forget(execution)

    # --- to find one, and to talk to it

    def find(self, exec_id: str) -> Job | None:
        """One by its id, whoever owns it."""
        if (job := self._context.jobs.get(exec_id)) is not None:
            return job
        if not ids.is_id(ids.EXECUTION, exec_id):
            return None
        execution = self._context.store.get_execution(exec_id)
        return None if execution is None else self._stored(execution)

    def _stored(self, execution: Execution) -> Job:
        context, path = self._context, path_of(self._context, execution.id)
        journal: Journal | None = None
        if context.replicas.shared:
            if (peer := context.replicas.whereabouts(None, "", execution.id)) is not None:
                raise Elsewhere(peer)
            # Its replica may just have been found to be gone, and it to be lost.
            execution, journal = context.replicas.saved(execution, path)
        job = Job(execution, journal or Journal.stored(path, execution.begins))
        if not job.ended and execution.id not in context.jobs:
            job.conclude(execution, jobs.unwritten())
        return job

    def job(self, agent: Agent, exec_id: str) -> Job:
        """One that the agent may see."""
        job = self._context.jobs.get(exec_id)
        if job is not None and access.may_see(agent, job.execution.owner):
            return job
        # From here on, what is another's and what does not exist take the same steps.
        owner = access.narrowed(agent, None)
        if ids.is_id(ids.EXECUTION, exec_id):
            execution = self._context.store.get_execution(exec_id, owner)
            if execution is not None:
                return self._stored(execution)
        raise access.absent("execution")

    async def stdin(
        self, agent: Agent, exec_id: str, data: bytes, *, eof: bool, request_id: str
    ) -> None:
        """Input. The audit has that there was some, once per request, and not what it was."""
        bounds.check_scope(agent, EXEC)
        job = self.job(agent, exec_id)
        running = job.command()
        bounds.check_upload(self._context.limits_of(agent), len(data))
        self._note_input(agent, job, "exec.stdin", request_id)
        async with job.input:
            if job.input_closed:
                raise Problem("WRONG_STATE", "the input of the command is closed",
                              rule="exec.stdin")  # fmt: skip
            try:
                if data:
                    await running.write(data)
            except (BrokenPipeError, ConnectionError):
                raise Problem("WRONG_STATE", "the command does not read its input any more",
                              rule="exec.stdin") from None  # fmt: skip
            if eof:
                # A terminal may get more after a Ctrl-D.
                job.input_closed = not job.execution.tty
                await jobs.close_input(running)

    async def resize(self, agent: Agent, exec_id: str, terminal: Terminal, request_id: str) -> None:
        """Another size of its terminal."""
        bounds.check_scope(agent, EXEC)
        job = self.job(agent, exec_id)
        if not job.execution.tty:
            raise Problem("WRONG_STATE", "the command has no terminal", rule="exec.tty")
        running = job.command()
        self._note_input(agent, job, "exec.resize", request_id)
        await running.resize(terminal)

    async def signal(self, agent: Agent, exec_id: str, number: int, request_id: str) -> None:
        """A signal for the command itself."""
        bounds.check_scope(agent, EXEC)
        job = self.job(agent, exec_id)
        try:
            name = signals.Signals(number).name
        except ValueError:
            raise Problem("INVALID", f"there is no signal {number}", field="signal",
                          rule="request") from None  # fmt: skip
        running = job.command()
        self._context.note(agent, "exec.signal", target(job.execution), request_id=request_id,
                           request={"signal": name})  # fmt: skip
        await running.signal(number)

    def _note_input(self, agent: Agent, job: Job, action: str, request_id: str) -> None:
        mark = f"{action} {request_id}"
        if not request_id or mark not in job.noted:
            self._context.note(agent, action, target(job.execution), request_id=request_id)
            job.noted.add(mark)


def _usable(live: Live) -> None:
    if live.sandbox.state != RUNNING:
        raise wrong_state(live.sandbox)
