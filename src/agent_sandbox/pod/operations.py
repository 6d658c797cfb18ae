"""What the service may ask, in one table: what is answered at once, and what is done apart."""

from __future__ import annotations

import os
import select
import time

from ..policy.owned import PARTS, WORK
from ..record import Record
from . import desks, ending, figures, frames, spawn, supervise, terms
from .line import Gone

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal
    from collections.abc import Callable

    from .agent import Agent
    from .line import Line

    Document = dict[str, object]
    # For one command: kills for memory before it, processes of ours that are counted with its
    # own, and whether its supervisor may stay.
    Settled = tuple[int, int, bool]
else:
    import _signal

MOST_WORDS, MOST_VARIABLES = 100_000, 2_000
MOST_PIDS = 1 << 20
LONGEST_LEASE = 10.0 * 365 * 86400
SECONDS = 30.0
# How long commands that were told to end may take, before their supervisors are ended as well.
STOP_SECONDS = 5.0
# How long a supervisor waits for another command; the service gives up a little earlier.
STAY_SECONDS = terms.STAY_SECONDS
# What the service may have sent before it learned that a command had ended.
LATE = (frames.INPUT, frames.CLOSE, frames.SIGNAL, frames.SIZE, frames.KILL)


class Refused(Exception):
    """An answer that is a no."""

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.document: Document = {"code": code, "message": message, "field": field}


NO_ROOM = Refused("BACKEND_UNAVAILABLE", "the sandbox has no room for another process").document


class Request(Record):
    """What is asked."""

    operation: str
    fields: frames.Fields
    # Of a command.
    execution: str = ""


class Claim(Record):
    """What the pod has become."""

    sandbox: str
    pids: int = 0
    disk: int = 0
    network: str = "off"
    inner: bool = True


def parse(data: bytes) -> Request:
    """Read a request; BadFrame for one that the service would never send."""
    fields = frames.Fields(frames.document(data))
    operation = fields.word("operation", most=64)
    if operation != "exec" and operation not in AT_ONCE and operation not in APART:
        raise frames.BadFrame("an unknown operation")
    execution = fields.word("execution", "", most=256) if operation == "exec" else ""
    return Request(operation=operation, fields=fields, execution=execution)


def at_once(agent: Agent, request: Request) -> Document | None:
    """The answer; None: it is to be done apart."""
    agent.catch_up()
    if request.operation in AT_ONCE:
        return AT_ONCE[request.operation](agent, request.fields)
    if agent.claim is None:
        raise Refused("WRONG_STATE", "the pod has not been claimed")
    if request.operation == "exec" and not request.execution:
        raise frames.BadFrame("a command without a name")
    if request.execution and request.execution in agent.fates:
        # A request that was held up on a connection that has been given up.
        raise Refused("CONFLICT", "this command has been asked for before")
    if request.operation.startswith("files."):
        # Here rather than in the child: the next one has it already.
        from . import files  # noqa: F401
    return None


def apart(agent: Agent, request: Request, line: Line, bell: int, settled: Settled) -> int:
    """In a process of its own: do it, and say how that went."""
    if request.operation == "exec":
        return _commands(agent, request, line, bell, settled)
    return APART[request.operation](agent, request, line, bell)


# --- at once


def _hello(agent: Agent, fields: frames.Fields) -> Document:
    from .agent import guarantees

    fields.end()
    claim = agent.claim
    kept = guarantees(
        agent, wanted=claim is None or claim.inner, network=claim.network if claim else "off"
    )
    return {
        "version": terms.VERSION, "sandbox": claim.sandbox if claim else "", "inner": agent.form,
        "guarantees": kept,
    }  # fmt: skip


def _claim(agent: Agent, fields: frames.Fields) -> Document:
    from .agent import guarantees

    sandbox, lease = fields.word("sandbox", most=256), fields.seconds("lease")
    inner = fields.word("inner", most=16)
    claim = Claim(
        sandbox=sandbox, pids=fields.whole("pids", most=MOST_PIDS), disk=fields.whole("disk"),
        network=fields.word("network", most=16), inner=inner != "off",
    )  # fmt: skip
    fields.end()
    if not sandbox or inner not in terms.INNER or claim.network not in terms.NETWORKS:
        raise frames.BadFrame("a claim for nothing")
    if agent.claim not in (None, claim):
        raise Refused("CONFLICT", "the pod has been claimed by another sandbox")
    if inner == "required" and agent.form == terms.NONE:
        raise Refused("UNSUPPORTED", "bwrap cannot be used in this pod", "inner")
    if (agent.form == terms.NONE or not claim.inner) and agent.bounds.unkept:
        where = ", ".join(agent.bounds.unkept)[:200]
        raise Refused("UNSUPPORTED", f"nothing here keeps commands from writing to: {where}")
    agent.claim = claim
    agent.renew(min(lease, LONGEST_LEASE))
    return {"guarantees": guarantees(agent, wanted=claim.inner, network=claim.network)}


def _renew(agent: Agent, fields: frames.Fields) -> Document:
    lease = fields.seconds("lease")
    fields.end()
    if agent.claim is None:
        raise Refused("WRONG_STATE", "the pod has not been claimed")
    agent.renew(min(lease, LONGEST_LEASE))
    return {}


def _fate(agent: Agent, fields: frames.Fields) -> Document:
    execution = fields.word("execution", most=256)
    fields.end()
    # A dying process closes its connections before it tells its parent.
    agent.reap()
    return agent.fates.get(execution, {"state": "unknown"})


def _kill(agent: Agent, fields: frames.Fields) -> Document:
    execution = fields.word("execution", most=256)
    fields.end()
    agent.kill(execution)
    return {}


# --- apart


def _commands(agent: Agent, request: Request, line: Line, bell: int, settled: Settled) -> int:
    """Serve a command, and those that come after it on the same connection."""
    spare: spawn.Spare | None = None
    while True:
        code, held = _exec(agent, request, line, bell, given=settled, spare=spare)
        if code != supervise.AGAIN or agent.desk is None or held is None:
            return code
        agent.desk.send(desks.HAS_TOLD)
        spare = _spare(agent, held)
        following = _next(line, bell, spare)
        if following is None:
            # Whoever has asked meanwhile learns that nobody has heard it.
            return supervise.TOLD if ending.end_below() else supervise.STUCK
        request = following
        found = desks.ask(agent.desk, request.execution)
        if found is None:
            ending.end_below()
            return _no(line, Refused("CONFLICT", "this command has been asked for before"))
        settled = (*found, True)


def _spare(agent: Agent, held: spawn.Terms) -> spawn.Spare | None:
    """A sandbox for the next command, where one takes long to build."""
    if held.form == terms.NONE:
        return None
    try:
        return spawn.Spare(held, agent.bounds, agent.bundle)
    except OSError:
        # No process or no memory is left, now: the next command is started as the first one was.
        ending.end_below()
        return None


def _next(line: Line, bell: int, spare: spawn.Spare | None) -> Request | None:
    """The next command on this connection; None: the service has gone, or does not ask in time."""
    deadline = time.monotonic() + STAY_SECONDS
    try:
        while True:
            for kind, data in line.all():
                if kind == frames.REQUEST:
                    found = parse(data)
                    return found if found.execution else None
                if kind not in LATE:
                    return None
            poller = select.poll()
            poller.register(line, select.POLLIN)
            poller.register(bell, select.POLLIN)
            if spare is not None and spare.is_building:
                poller.register(spare.status, select.POLLIN)
            left = deadline - time.monotonic()
            ready = dict(poller.poll(max(0.0, left) * 1000))
            if left <= 0 or bell in ready:
                return None
            if spare is not None and spare.status in ready:
                spare.settle()
    except (Gone, frames.BadFrame):
        return None


def _exec(
    agent: Agent, request: Request, line: Line, bell: int, *, given: Settled,
    spare: spawn.Spare | None,
) -> tuple[int, spawn.Terms | None]:  # fmt: skip
    fields, claim = request.fields, agent.claim
    size = fields.whole("rows", most=0xFFFF), fields.whole("columns", most=0xFFFF)
    order = spawn.Order(
        execution=request.execution, argv=fields.words("argv", MOST_WORDS),
        env=fields.table("env", MOST_VARIABLES), cwd=fields.word("cwd", most=4096) or WORK,
        terminal=size if fields.switch("terminal") else None,
        input=fields.switch("input"),
    )  # fmt: skip
    fields.end()
    if claim is None or not order.argv:
        return supervise.STUCK, None
    kills, own, stays = given
    settled = spawn.Terms(
        form=agent.form if claim.inner else terms.NONE, network=claim.network != "off",
        pids=claim.pids + own if claim.pids else 0, disk=claim.disk, kills=kills, stays=stays,
    )  # fmt: skip
    cwd = order.cwd if order.cwd.startswith("/") else f"{WORK}/{order.cwd}"
    order = order.replace(cwd=cwd)
    if settled.form != terms.NONE and not _is_directory(cwd, agent.bundle.place):
        message = f"cannot enter '{cwd}': no such directory"
        ending.end_below()
        return _no(line, Refused("INVALID", message, "cwd")), None
    try:
        started = supervise.Supervisor(
            line, order, settled, agent.bounds, agent.bundle, spare=spare
        )
    except OSError:
        ending.end_below()
        return _say_no(line, NO_ROOM), None
    return started.run(bell), settled


def _is_directory(cwd: str, place: str) -> bool:
    """Whether a command could enter it. A link may change meanwhile: bwrap decides."""
    below = any(cwd == part or cwd.startswith(f"{part}/") for part in PARTS)
    return os.path.isdir(place + cwd if below and not os.path.isdir(cwd) else cwd)


def _files(agent: Agent, request: Request, line: Line, _: int) -> int:
    from . import files

    files.serve(request.operation, request.fields, line, agent.bundle.place)
    return supervise.TOLD


def _usage(agent: Agent, request: Request, line: Line, _: int) -> int:
    from . import files

    most = request.fields.whole("most")
    request.fields.end()
    disk = files.usage(agent.bundle.place, most, agent.executions())
    ours = len(agent.executions())
    inner = agent.claim is not None and agent.claim.inner and agent.form != terms.NONE
    found = sum(len(ending.descendants(pid)) for pid in agent.executions())
    # bwrap's own two are not the sandbox's.
    pids = max(0, found - 2 * ours) if inner else found
    return _yes(line, {"memory": figures.memory() or 0, "pids": pids, "disk": disk})


def _stop(agent: Agent, request: Request, line: Line, _: int) -> int:
    request.fields.end()
    handles = [handle for pid in agent.executions() if (handle := _open(pid)) is not None]
    for number in (_signal.SIGTERM, _signal.SIGKILL):
        for handle in handles:
            _send(handle, number)
        if _wait(handles, STOP_SECONDS):
            return _yes(line, {})
    return _no(line, Refused("BACKEND_UNAVAILABLE", "the sandbox's processes do not end"))


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def _send(handle: int, number: int) -> None:
    try:
        _signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return


def _wait(handles: list[int], seconds: float) -> bool:
    """Whether all of them end in time."""
    deadline = time.monotonic() + seconds
    for handle in handles:
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return False
    return True


def _hold(agent: Agent, request: Request, line: Line, _: int) -> int:
    request.fields.end()
    on = request.operation == "pause"
    if ending.hold(agent.executions(), on=on):
        return _yes(line, {})
    ending.hold(agent.executions(), on=False)
    return _no(line, Refused("BACKEND_UNAVAILABLE", "the sandbox's processes do not stop"))


def _yes(line: Line, document: Document) -> int:
    line.send(frames.text(frames.ANSWER, document), SECONDS)
    line.finish(SECONDS)
    return supervise.TOLD


def _no(line: Line, refusal: Refused) -> int:
    return _say_no(line, refusal.document)


def _say_no(line: Line, document: Document) -> int:
    line.send(frames.text(frames.REFUSAL, document), SECONDS)
    line.finish(SECONDS)
    return supervise.TOLD


AT_ONCE: dict[str, Callable[[Agent, frames.Fields], Document]] = {
    "hello": _hello, "claim": _claim, "renew": _renew, "fate": _fate,
    "kill": _kill,
}  # fmt: skip
FILES = ("entry", "read", "write", "delete", "make", "list", "pack", "unpack")
APART: dict[str, Callable[[Agent, Request, Line, int], int]] = {
    "usage": _usage, "stop": _stop, "pause": _hold, "resume": _hold,
    **{f"files.{name}": _files for name in FILES},
}  # fmt: skip
