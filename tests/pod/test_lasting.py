"""The agent outlasts what strangers and commands do to it, and its kills hold."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.service.backend import pod_running
from agent_sandbox.service.problems import Problem
from conftest import As

from .conftest import Pods, factory
from .ground import Pod, alive, gone, idle, living, play, run, sh, start

pytestmark = pytest.mark.kernel
PTRACE_ATTACH = 16
WALL = 0x40000000


@pytest.fixture
def made(superuser: As, built: Path, pem: bytes) -> Iterator[Pods]:
    """Makes agents with a user of their own, whose processes can be counted."""
    yield from factory(superuser, built, pem)


def knock(port: int) -> None:
    """Connect, and be gone before anybody has looked: a reset, not an end."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.connect(("127.0.0.1", port))


def test_cannot_end_the_agent_by_connections_that_are_gone(pod: Pod) -> None:
    """Anybody may connect. It took 66 of these."""

    async def scene() -> None:
        link = await pod.claimed()
        for _ in range(1000):
            knock(pod.port)
        assert (await link.hello()).sandbox == "sbx-1"
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())
    assert pod.process.poll() is None


# Fills what there is of processes, and goes on when one becomes free.
BOMB = """
import os, time
count = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
    except OSError:
        if count:
            print("full", flush=True)
        count = 0
        time.sleep(0.001)
"""


def test_cannot_end_the_agent_by_leaving_it_no_process(made: Pods) -> None:
    """The engine's own bound on a pod's processes holds for the agent as well."""
    pod = made(before=("prlimit", "--nproc=40:40"))

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        process = await start(link, "python3", "-c", BOMB)
        await process.until("full")
        with pytest.raises(Problem) as caught:
            await run(link, "true")
        assert "no room" in caught.value.message
        assert (await link.hello()).sandbox == "sbx-1"
        # It can be stopped all the same, and then there is room again.
        await link.stop()
        assert (await process.end()).signal == "SIGKILL"
        await idle(link)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())
    assert pod.process.poll() is None


def halt(pod: Pod) -> None:
    """As a command can where the kernel has no scopes for signals: stop every supervisor."""
    for pid in pod.supervisors():
        os.kill(pid, signal.SIGSTOP)


def test_cannot_survive_a_kill_by_stopping_the_supervisor(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        word = f"5{os.getpid()}3"
        process = await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        halt(pod)
        begun = time.monotonic()
        ended = await process.end()
        # Not only when somebody asks, and before the service has to insist.
        assert (ended.code, ended.signal, ended.lost) == (137, "SIGKILL", False)
        assert time.monotonic() - begun < pod_running.KILL_SECONDS
        assert await asyncio.to_thread(gone, word)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


def seize(pid: int) -> None:
    """Hold a process so that it does nothing more, though no signal has stopped it."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.ptrace(PTRACE_ATTACH, pid, None, None) == 0, os.strerror(ctypes.get_errno())
    os.waitpid(pid, WALL)


def test_cannot_survive_a_kill_by_keeping_the_supervisor_from_it(
    made: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service insists: the agent itself ends both."""
    monkeypatch.setattr(pod_running, "KILL_SECONDS", 1.0)
    pod = made()

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        word = f"6{os.getpid()}2"
        process = await start(link, "sleep", word)
        await alive(word, 1)
        (supervisor,) = pod.supervisors()
        seize(supervisor)
        # The control: nothing but a kill that is insisted on ends it.
        await asyncio.sleep(2.5)
        assert living(word)
        await process.running.kill()
        # Its tracer is told first, and has to look.
        async with asyncio.timeout(20):
            while not os.waitpid(supervisor, WALL | os.WNOHANG)[0]:  # noqa: ASYNC110, ASYNC222
                await asyncio.sleep(0.01)
        ended = await process.end()
        assert (ended.code, ended.signal, ended.lost) == (137, "SIGKILL", False)
        assert await asyncio.to_thread(gone, word)

    play(scene())
