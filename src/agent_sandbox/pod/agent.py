"""The agent itself: one loop that accepts connections, keeps the lease, and forks for all work.

It holds connections until their first message is whole. What takes long is done in a process of
its own, which takes the connection over; this one never waits.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import time

from ..launch import syscalls
from ..record import Record
from . import desks, ending, figures, frames, operations, spawn, supervise, terms
from .desks import Desks
from .line import Gone, Line

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal as _signal

    from .confine import Bounds
    from .inner import Bundle
    from .operations import Claim, Settled
else:
    import _signal

# Connections that have not shown a certificate yet, and those that have and wait. Whoever comes
# beyond that takes the place of the eldest: a command can fill the first, never the second.
MOST_STRANGERS, MOST_IDLE = 32, 16
# Supervisors that may wait for another command. Each has a sandbox that is built already.
MOST_STAYING = 4
# How long a handshake or a request may take, in seconds.
SECONDS = 10.0
BACKLOG = 64
# Executions that are remembered for the service to ask about.
MOST_FATES = 1024
LONGEST = 5.0
# Between two looks for processes that nobody owns, in seconds.
STRAY_SECONDS = 1.0
ENDED_BY_LEASE = 0
# signalfd4(2), and where signalfd_siginfo has how it was sent, and by whom.
SYS_SIGNALFD4 = {"x86_64": 289, "aarch64": 74}
SIGNAL_BYTES, SENT, SENDER = 128, slice(8, 12), slice(12, 16)


class Guest:
    """A connection before its request."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.line = Line(sock)
        self.is_known = False
        self.since = time.monotonic()
        # Since when a request is on its way; 0.0: none is.
        self.begun = 0.0


class Work(Record):
    """A process of ours that serves one request, or commands one after another."""

    # The command that it serves now.
    execution: str = ""
    # Kills for memory before it began.
    kills: int = 0
    # Whether it may wait for another command.
    stays: bool = False


class Agent:
    """All of it."""

    def __init__(
        self, bundle: Bundle, bounds: Bounds, form: str, context: ssl.SSLContext, lease: float
    ) -> None:
        self.bundle, self.bounds, self.form = bundle, bounds, form
        self.machine = os.uname().machine
        self.claim: Claim | None = None
        self.fates: dict[str, dict[str, object]] = {}
        self.works: dict[int, Work] = {}
        self._context = context
        self._ends = now() + lease
        self._guests: dict[int, Guest] = {}
        # Not epoll: the kernel counts its entries by user, and commands could use them up.
        self._poll = select.poll()
        # To those that stay; in one of those, its own end.
        self._desks = Desks(self._poll)
        self.desk: socket.socket | None = None
        self._bell, self._ring = os.pipe()
        self._is_told_to_end = False
        self._next_look = 0.0

    # --- life

    def listen(self, port: int) -> None:
        """Take connections, of both families where there are two."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        address = "::" if family == socket.AF_INET6 else "0.0.0.0"  # noqa: S104 - the pod's own
        self._listener = socket.create_server(
            (address, port), family=family, backlog=BACKLOG,
            dualstack_ipv6=family == socket.AF_INET6,
        )  # fmt: skip
        self._listener.settimeout(0)
        self._poll.register(self._listener, select.POLLIN)
        for end in (self._bell, self._ring):
            os.set_blocking(end, False)
        self._poll.register(self._bell, select.POLLIN)
        # By default Python would end with it, and a command may have the right to send it.
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)
        self._orders = self._listen_for_the_end()
        self._poll.register(self._orders, select.POLLIN)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.set_wakeup_fd(self._ring, warn_on_full_buffer=False)

    def _listen_for_the_end(self) -> int:
        """SIGTERM, with its sender: a handler in Python is not told who that is."""
        _signal.pthread_sigmask(_signal.SIG_BLOCK, (_signal.SIGTERM,))
        mask = (1 << _signal.SIGTERM - 1).to_bytes(8, "little")
        flags = os.O_CLOEXEC | os.O_NONBLOCK
        return syscalls.syscall(SYS_SIGNALFD4[self.machine], -1, mask, len(mask), flags)

    def _heed(self) -> None:
        """The engine is in no process namespace of ours: its number is 0. A command's is not.

        Only of a plain kill(2) (SI_USER is 0) does the kernel fill that in: sigqueue(3) lets the
        sender write it, and a signal of a descriptor (F_SETSIG) has none.
        """
        try:
            told = os.read(self._orders, SIGNAL_BYTES)
        except BlockingIOError:
            return
        self._is_told_to_end = self._is_told_to_end or not any(told[SENT] + told[SENDER])

    def run(self) -> int:
        """Until the lease is over, or the engine says so."""
        # What the start has left: a bwrap that failed leaves its child to us.
        self.reap()
        while not self._is_told_to_end:
            left = self._ends - now()
            if left <= 0:
                break
            for fd, _ in self._poll.poll(self._pause(left) * 1000):
                self._attend(fd)
            self._dismiss()
            if self.works or self._next_look:
                self._look()
        # As the pod's first process we take everything with us; elsewhere it has to be done.
        ending.end_below()
        return ENDED_BY_LEASE

    def _pause(self, left: float) -> float:
        """How long to wait. A machine may sleep meanwhile, so no longer than the bound."""
        if self.works or self._next_look:
            left = min(left, max(0.0, self._next_look - time.monotonic()))
        return min(left, LONGEST)

    def renew(self, seconds: float) -> None:
        """The lease ends so many seconds from now."""
        self._ends = now() + seconds

    def _attend(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif fd == self._orders:
            self._heed()
        elif fd == self._bell:
            os.read(self._bell, 4096)
            self.reap()
        elif fd in self._desks:
            self._listen(fd)
        elif fd in self._guests:
            try:
                self._hear(self._guests[fd])
            except Exception:  # noqa: BLE001 - no guest may end the agent, whatever it has found
                self._drop(fd)

    # --- guests

    def _accept(self) -> None:
        try:
            plain, _ = self._listener.accept()
        except OSError:
            return
        try:
            plain.settimeout(0)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock = self._context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):
            # Whoever connects may have closed it already: then every call on it fails.
            plain.close()
            return
        self._guests[sock.fileno()] = Guest(sock)
        self._poll.register(sock, select.POLLIN)
        self._make_room(MOST_STRANGERS, is_known=False)

    def _make_room(self, most: int, *, is_known: bool) -> None:
        same = [fd for fd, guest in self._guests.items() if guest.is_known == is_known]
        if len(same) > most:
            self._drop(min(same, key=lambda fd: self._guests[fd].since))

    def _hear(self, guest: Guest) -> None:
        if not guest.is_known:
            self._greet(guest)
            if not guest.is_known:
                return
        guest.begun = guest.begun or time.monotonic()
        for kind, data in guest.line.take():
            if kind != frames.REQUEST:
                raise Gone("not a request")
            self._serve(guest, data)
            return
        if guest.line.is_empty:
            guest.begun = 0.0

    def _greet(self, guest: Guest) -> None:
        """Go on with the handshake. Without a certificate of the service it never ends well."""
        sock = guest.line.sock
        events = select.POLLIN
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLWantWriteError:
            events |= select.POLLOUT
        except OSError as error:
            raise Gone(str(error)) from error
        else:
            guest.is_known, guest.since = True, time.monotonic()
            self._make_room(MOST_IDLE, is_known=True)
        self._poll.modify(sock, events)

    def _dismiss(self) -> None:
        """Send away who takes too long."""
        too_late = time.monotonic() - SECONDS
        for fd, guest in list(self._guests.items()):
            slow = 0.0 < guest.begun < too_late
            if slow or (not guest.is_known and guest.since < too_late):
                self._drop(fd)

    def _drop(self, fd: int) -> None:
        guest = self._guests.pop(fd)
        self._poll.unregister(fd)
        guest.line.abandon()

    # --- requests

    def _serve(self, guest: Guest, data: bytes) -> None:
        fd = guest.line.fileno()
        try:
            request = operations.parse(data)
        except frames.BadFrame as error:
            raise Gone(str(error)) from error
        try:
            answer = operations.at_once(self, request)
        except frames.BadFrame as error:
            raise Gone(str(error)) from error
        except operations.Refused as refusal:
            answer = refusal.document
        if answer is None:
            try:
                self._fork(fd, request)
            except OSError:
                answer = self._has_no_room(request)
            else:
                return
        kind = frames.REFUSAL if "code" in answer else frames.ANSWER
        guest.line.say(frames.text(kind, answer))
        # A few bytes on a connection that has carried nothing: they fit.
        guest.line.flush()
        guest.begun = 0.0

    def _has_no_room(self, request: operations.Request) -> dict[str, object]:
        """The pod has no process or memory left for this. To stop all of it makes some."""
        if request.operation != "stop" or not ending.end_below():
            return operations.NO_ROOM
        for work in self.works.values():
            if work.execution:
                self.remember(work.execution, {"state": "killed", "exceeded": ""})
        self.works.clear()
        return {}

    def _fork(self, fd: int, request: operations.Request) -> None:
        stays = bool(request.execution) and self._may_stay()
        work = Work(execution=request.execution, kills=figures.kills(), stays=stays)
        ours, theirs = desks.pair() if stays else (None, None)
        pid = os.fork()
        # The line's bytes and keys go to the child; here it must not say a word any more.
        line = self._guests.pop(fd).line
        if pid:
            self._poll.unregister(fd)
            self.works[pid] = work
            if work.execution:
                self.remember(work.execution, {"state": "running"})
            line.abandon()
            if ours is not None and theirs is not None:
                theirs.close()
                self._desks.add(ours, pid)
            return
        code = supervise.STUCK
        try:
            _signal.set_wakeup_fd(-1)
            bell = supervise.become(self.machine)
            self._leave()
            if ours is not None:
                ours.close()
            self.desk = theirs
            settled = self.settled(work)
            code = operations.apart(self, request, line, bell, settled)
        except BaseException:  # noqa: BLE001, S110 - nothing may run on in this process
            pass
        finally:
            if code not in (supervise.TOLD, supervise.UNHEARD):
                ending.end_below()
            os._exit(code)

    def _leave(self) -> None:
        """In a child: what is the agent's own is not for it."""
        self._listener.close()
        for end in (self._bell, self._ring, self._orders):
            os.close(end)
        for guest in self._guests.values():
            guest.line.abandon()
        self._desks.close()

    # --- supervisors that stay

    def _may_stay(self) -> bool:
        return sum(work.stays for work in self.works.values()) < MOST_STAYING

    def settled(self, work: Work, pid: int = 0) -> Settled:
        """What holds for a command that begins now, in that process."""
        others = [one for number, one in self.works.items() if number != pid]
        running = sum(bool(one.execution) for one in others)
        waiting = sum(not one.execution and one.stays for one in others)
        own = 1 + spawn.OWN_PROCESSES * (running + 1) + spawn.SPARE_PROCESSES * waiting
        return (work.kills, own, work.stays)

    def catch_up(self) -> None:
        """Hear what was said before now: who asks about a command must not learn what was."""
        self._listen()

    def _listen(self, *fds: int) -> None:
        for pid, said in self._desks.hear(*fds):
            work = self.works.get(pid)
            if work is None:
                continue
            if said == desks.HAS_TOLD:
                if work.execution:
                    self.remember(work.execution, {"state": "told"})
                self.works[pid] = Work(stays=True)
            else:
                self._desks.answer(pid, self._begin(pid, desks.asked(said)))

    def _begin(self, pid: int, execution: str) -> bytes:
        """Let a supervisor begin another command, if nobody ever has."""
        if execution in self.fates:
            return desks.NO
        work = Work(execution=execution, kills=figures.kills(), stays=True)
        kills, own, _ = self.settled(work, pid)
        self.works[pid] = work
        self.remember(execution, {"state": "running"})
        return desks.yes(kills, own)

    # --- processes

    def remember(self, execution: str, fate: dict[str, object]) -> None:
        """What became of an execution, for a service that has lost its connection."""
        self.fates.pop(execution, None)
        self.fates[execution] = fate
        while len(self.fates) > MOST_FATES:
            del self.fates[next(iter(self.fates))]

    def reap(self) -> None:
        """Take the status of whoever has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            for fd in self._desks.of(pid):
                # Its last words come before its end.
                self._listen(fd)
            work = self.works.pop(pid, None)
            if work is not None:
                self._next_look = 1e-9
                if work.execution:
                    self.remember(work.execution, _fate(status, work))

    def _look(self) -> None:
        """Every now and then: end what nobody else does."""
        at = time.monotonic()
        if at < self._next_look:
            return
        self._next_look = at + STRAY_SECONDS if self.works else 0.0
        try:
            self._look_for_strays()
        except OSError:
            # No descriptor, no memory: the next look may find some.
            self._next_look = at + STRAY_SECONDS

    def _look_for_strays(self) -> None:
        """End what was left to us: its supervisor was killed, by its command or for memory.

        One that is stopped is ended as well. Nobody but a command does that, where the kernel has
        no scopes for signals (6.12); and it would see neither a kill nor the service's end. We, as
        the first process, cannot be stopped.
        """
        for pid in self.works:
            if ending.is_halted(pid):
                self._end(pid)
        strays = ending.descendants(os.getpid(), frozenset(self.works))
        for pid in strays:
            self._end(pid)

    def _end(self, pid: int) -> None:
        """End a child, or what is below; its number is not another's until we take its status."""
        # What it leaves becomes ours, and it may have forked meanwhile.
        self._next_look = 1e-9
        try:
            os.kill(pid, _signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def kill(self, execution: str) -> None:
        """End a command whose supervisor does not: that one first, then what it leaves to us."""
        for pid, work in self.works.items():
            if work.execution == execution:
                self._end(pid)

    def executions(self) -> list[int]:
        """The supervisors of commands."""
        return [pid for pid, work in self.works.items() if work.execution]


def _fate(status: int, work: Work) -> dict[str, object]:
    code = os.waitstatus_to_exitcode(status)
    if code == supervise.TOLD:
        return {"state": "told"}
    if code in (supervise.UNHEARD, supervise.STUCK):
        return {"state": "unheard"}
    exceeded = "memory" if figures.kills() > work.kills else ""
    return {"state": "killed", "exceeded": exceeded}


def now() -> float:
    """Seconds that go on while the machine sleeps: a lease is over when its time is."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def guarantees(agent: Agent, *, wanted: bool, network: str) -> dict[str, str]:
    """What keeps what in this pod."""
    inner = wanted and agent.form != terms.NONE
    kept = {"off": "netns" if inner else "seccomp"}
    return {
        "filesystem": "bwrap" if inner else "pod",
        "network": kept.get(network, "pod"),
        "processes": "pidns" if inner else agent.bounds.kept_apart,
        "syscalls": "seccomp", "memory": "cgroup", "cpus": "cgroup", "pids": "rlimit",
        "disk": "kubelet+server",
    }  # fmt: skip
