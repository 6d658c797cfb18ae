"""Without a namespace of its own a command acts on no process but its own. By the filter alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from agent_sandbox.launch import seccomp
from agent_sandbox.pod import confine
from conftest import As

from .ground import Pod, play, run, sh

pytestmark = pytest.mark.kernel

SOURCE = str(Path(confine.__file__).parents[2])
# In a process namespace whose first process has our user: what can be done to that one, and to a
# neighbour. Signal 0 asks for the right alone. Prints the ways that worked.
TRY = """
import ctypes, fcntl, os, resource, select, signal, struct, sys, time
sys.path.insert(0, {source!r})
libc = ctypes.CDLL(None, use_errno=True)
neighbour = os.fork()
if not neighbour:
    select.select([], [], [])
if sys.argv[1] == "filtered":
    from agent_sandbox.launch import surface, syscalls
    from agent_sandbox.pod import confine
    machine = os.uname().machine
    syscalls.no_new_privileges(machine)
    confine.Filter(confine.extra_filter(machine, network=True)).load(machine)
else:
    from agent_sandbox.launch import surface
    machine = os.uname().machine
n = surface.numbers(machine)
attr = ctypes.create_string_buffer(struct.pack("IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0))
info = ctypes.create_string_buffer(struct.pack("iiiiii", 0, 0, -1, 0, 0, 0) + bytes(104))
def call(name, *words):
    if libc.syscall(n[name], *words) < 0:
        raise OSError(ctypes.get_errno(), name)
def limits(pid):
    resource.prlimit(pid, resource.RLIMIT_CORE, resource.prlimit(pid, resource.RLIMIT_CORE))
def by_handle(pid):
    signal.pidfd_send_signal(os.pidfd_open(pid), 0)
def by_directory(pid):
    signal.pidfd_send_signal(os.open(f"/proc/{{pid}}", os.O_RDONLY), 0)
WAYS = dict(
    scheduler=lambda p: os.sched_setscheduler(p, os.SCHED_BATCH, os.sched_param(0)),
    parameters=lambda p: os.sched_setparam(p, os.sched_param(0)),
    attributes=lambda p: call("sched_setattr", p, attr, 0),
    affinity=lambda p: os.sched_setaffinity(p, os.sched_getaffinity(p)),
    priority=lambda p: os.setpriority(os.PRIO_PROCESS, p, 1),
    io=lambda p: call("ioprio_set", 1, p, 2 << 13 | 5),
    limits=limits,
    pages=lambda p: call("migrate_pages", p, 0, None, None),
    signal=lambda p: os.kill(p, 0),
    thread=lambda p: call("tkill", p, 0),
    group=lambda p: call("tgkill", p, p, 0),
    queue=lambda p: call("rt_sigqueueinfo", p, 0, info),
    queue_thread=lambda p: call("rt_tgsigqueueinfo", p, p, 0, info),
    handle=by_handle, directory=by_directory,
)
own = dict(
    everybody=lambda: os.kill(-1, 0),
    user_priority=lambda: os.setpriority(os.PRIO_USER, 0, 1),
    user_io=lambda: call("ioprio_set", 3, os.getuid(), 2 << 13 | 5),
    process_io=lambda: call("ioprio_set", 1, 0, 2 << 13 | 5),
    descriptors=lambda: fcntl.fcntl(os.pipe()[0], 10, signal.SIGTERM),
)
def attempt(name, way, *words):
    try:
        way(*words)
    except (OSError, PermissionError):
        return
    print(name)
for name, way in WAYS.items():
    for who, pid in (("first", 1), ("neighbour", neighbour), ("self", 0)):
        attempt(f"{{name}}:{{who}}", way, pid)
for name, way in own.items():
    attempt(name, way)
os.kill(neighbour, 9)
"""
# What acts on the caller alone, and signals to others than the first process.
BY_NUMBER = (
    "scheduler", "parameters", "attributes", "affinity", "priority", "io", "limits", "pages",
)  # fmt: skip
SIGNALS = ("signal", "thread", "group", "queue", "queue_thread")
HANDLES = ("handle", "directory")
OWN = {"process_io"}
REFUSED = {"everybody", "user_priority", "user_io", "descriptors"}


def tried(runner: As, how: str) -> set[str]:
    options = ["--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
    script = TRY.format(source=SOURCE)
    done = runner.run(["bwrap", *options, "--", sys.executable, "-c", script, how], cwd="/")
    assert done.stderr == ""
    return set(done.stdout.split())


def test_cannot_act_on_processes_of_its_user(runner: As) -> None:
    free, kept = tried(runner, "free"), tried(runner, "filtered")
    # The control: the kernel itself asks for the same user, no more.
    ways = (*BY_NUMBER, *SIGNALS, *HANDLES)
    open_to = {f"{way}:{who}" for way in ways for who in ("first", "neighbour")}
    # Memory of others needs more: bwrap's first process is closed like the agent, and where the
    # kernel knows one node alone there is nothing to move.
    assert {one for one in open_to if not one.startswith("pages:")} <= free
    assert free >= REFUSED | OWN
    own = {f"{way}:self" for way in BY_NUMBER} & free
    assert {"scheduler:self", "affinity:self", "priority:self", "limits:self"} <= own
    # A shell ends its jobs by signals; a filter does not know which processes those are.
    ended = {f"{way}:neighbour" for way in SIGNALS}
    assert kept - {"signal:self"} == own | ended | OWN


def test_every_call_of_the_filter_is_one_that_the_machine_has() -> None:
    for machine in seccomp.MACHINES:
        for network in (False, True):
            assert len(confine.extra_filter(machine, network=network)) % 8 == 0


STARVE = """
import os, sys
def slow(pid):
    for act in (lambda: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
                lambda: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}),
                lambda: os.setpriority(os.PRIO_PROCESS, pid, 19)):
        try:
            act(); print("slowed")
        except PermissionError:
            print("kept")
for pid in map(int, sys.argv[1:]):
    slow(pid)
"""


def figures(pid: int) -> tuple[int, int, set[int]]:
    nice = os.getpriority(os.PRIO_PROCESS, pid)
    return os.sched_getscheduler(pid), nice, os.sched_getaffinity(pid)


def test_cannot_starve_the_agent_or_its_supervisor(rooted: Pod) -> None:
    """An idle agent on a full processor keeps no lease, and takes no SIGKILL either."""

    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        before = figures(pod.init)
        assert before[0] == os.SCHED_OTHER
        said = await sh(link, f"python3 -c '{STARVE}' 1 $PPID")
        assert said.split() == ["kept"] * 6
        assert figures(pod.init) == before
        # Its own it may have as it likes.
        assert (await sh(link, f"python3 -c '{STARVE}' 0")).split() == ["slowed"] * 3
        # The control: the same user, without a command's filter.
        assert pod.run("/usr/bin/python3", "-c", STARVE, "1").split() == ["slowed"] * 3
        assert figures(pod.init)[:2] == (os.SCHED_IDLE, 19)

    play(scene())


# --- the engine's signal

# A SIGTERM to the first process that says that it is the engine's: queued with a sender that the
# sender itself has written; of a descriptor, which has none.
FORGE = """
import ctypes, fcntl, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
info = struct.pack("iiiiii", 15, 0, -1, 0, 0, 0) + bytes(104)
number = {"x86_64": 129, "aarch64": 138}[os.uname().machine]
def queued():
    assert libc.syscall(number, 1, 15, info) == 0
def of_a_descriptor():
    reader, writer = os.pipe()
    fcntl.fcntl(reader, 10, signal.SIGTERM)
    fcntl.fcntl(reader, fcntl.F_SETOWN, 1)
    fcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)
    os.write(writer, b"x")
for way in (queued, of_a_descriptor):
    try:
        way(); print("sent")
    except (OSError, AssertionError):
        print("kept")
"""


def test_cannot_end_the_agent_by_a_signal_that_claims_to_be_the_engines(rooted: Pod) -> None:
    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        process, _ = await run(link, "python3", "-c", FORGE)
        assert process.out.split() == ["kept"] * 2
        # Not by the filter alone: somebody without one sends it, and the agent sees through it.
        assert pod.run("/usr/bin/python3", "-c", FORGE).split() == ["sent"] * 2
        assert (await link.hello()).sandbox == "sbx-1"
        assert (await sh(link, "echo on")) == "on\n"
        # The control: from outside it is heeded.
        os.kill(pod.init, signal.SIGTERM)
        assert await asyncio.to_thread(pod.ended, 20) == 0

    play(scene())


# With a full queue (RLIMIT_SIGPENDING counts by user) the kernel forgets who has sent a signal.
FORGET = """
import ctypes, os, signal, struct
libc = ctypes.CDLL(None, use_errno=True)
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
while libc.sigqueue(os.getpid(), 40, None) == 0:
    pass
info = struct.pack("iiiiii", 15, 0, -1, 0, 42, 0) + bytes(104)
number = {"x86_64": 129, "aarch64": 138}[os.uname().machine]
print("sent" if libc.syscall(number, 1, 15, info) == 0 else "kept", flush=True)
"""


def test_cannot_end_the_agent_by_a_signal_without_a_sender(rooted: Pod) -> None:
    """The agent cannot tell it from the engine's: so no command may send it any."""
    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        process, _ = await run(link, "python3", "-c", FORGET)
        assert process.out == "kept\n"
        assert (await sh(link, "echo on")) == "on\n"
        # The control: without a command's filter and domain that is the end.
        pod.run("/usr/bin/python3", "-c", FORGET)
        assert await asyncio.to_thread(pod.ended, 20) == 0

    play(scene())
