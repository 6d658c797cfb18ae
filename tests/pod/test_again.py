"""Commands one after another on one connection: the next one is as alone as the first."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from agent_sandbox.pod import frames, inner, terms
from agent_sandbox.service.backend import pod_link
from agent_sandbox.service.backend.interface import Ended, Start, Terminal
from agent_sandbox.service.backend.pod_link import PodLink
from agent_sandbox.service.backend.pod_wire import Peer, connect, request
from agent_sandbox.service.problems import Problem

from .ground import SECONDS, Pod, Process, alive, gone, idle, living, play, run, sh, start
from .test_attacks import LOOK

pytestmark = pytest.mark.kernel


async def warm(pod: Pod, form: str, **fields: Any) -> PodLink:
    """A link on which a command has ended, so that the next one finds somebody waiting."""
    link = await pod.claimed(inner=form, **fields)
    assert (await run(link, "true"))[1].code == 0
    assert len(link._kept) == 1
    return link


async def waiting(pod: Pod) -> list[int]:
    """The supervisors, as soon as there is one and all processes below it are there."""
    deadline = time.monotonic() + SECONDS
    while not (found := pod.supervisors()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return found


def test_a_connection_serves_one_command_after_another(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        (first,) = await waiting(pod)
        for n in range(5):
            process, ended = await run(link, "sh", "-c", f"echo {n}; echo e >&2; exit {n}")
            assert (process.out, process.err, ended.code) == (f"{n}\n", "e\n", n)
        assert pod.supervisors() == [first]

    play(scene())


PROBE = """
env | sort; pwd; umask; ls /proc/self/fd; grep -E '^(Sig|Cap|Seccomp:|NoNewPrivs)' /proc/self/status
ulimit -a; id; cat /proc/self/oom_score_adj; ls -l /proc/self/ns | wc -l; echo "$0" "$@"
cat; test -e /opt/agent-sandbox/bin/python3 && find /opt/agent-sandbox -type f -size +0 | wc -l
"""


def test_a_command_cannot_tell_whether_it_is_the_first(pod: Pod, form: str) -> None:
    """Variables, directory, descriptors, signals, rights, limits, arguments."""

    async def scene() -> None:
        link = await pod.claimed(inner=form, pids=100, disk=1 << 30)
        words = ("sh", "-c", PROBE, "a b", "", "'", '"$(id)\\', "\n\t*", "é", "\udcff")
        env = {"A": "it's", "B": "$HOME`id`\n\\", "EMPTY": "", "IFS": "x", "C": "\udc80\udc81"}
        first, one = await run(link, *words, env=env, cwd="/tmp")
        again, other = await run(link, *words, env=env, cwd="/tmp")
        assert len(link._kept) == 1
        assert one.code == other.code
        assert again.said == first.said
        assert b"\xff" in first.said[1]

    play(scene())


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (("printenv", "not-a-name"), {"not-a-name": "on"}),
        (("sh", "-c", "echo on " + "#" * 100_000), {}),
        (("-x",), {"PATH": "/workspace"}),
    ],
)  # fmt: skip
def test_what_a_shell_cannot_say_is_started_as_before(
    pod: Pod, form: str, argv: tuple[str, ...], env: dict[str, str]
) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        assert (await sh(link, "printf '#!/bin/sh\necho on\n' > ./-x; chmod 755 ./-x")) == ""
        process, ended = await run(link, *argv, env=env)
        assert (process.out, process.err, ended.code) == ("on\n", "", 0)

    play(scene())


def test_input_and_terminals_work_after_another_command(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        data = os.urandom(1 << 20)
        process = await start(link, "cat", input=True)
        await process.running.write(data)
        await process.running.close_input()
        assert (await process.end()).code == 0
        assert process.said[1] == data
        assert (await run(link, "cat"))[0].out == ""
        process, ended = await run(link, "sh", "-c", "test -t 0 && stty size", terminal=Terminal())
        assert (process.out.split(), ended.code) == (["24", "80"], 0)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("no-such-command",), 127, "command not found"),
        (("/etc/passwd",), 126, "cannot execute"),
        (("/workspace/no/such",), 127, "command not found"),
    ],
)
def test_a_later_command_that_cannot_be_executed_never_ran(
    pod: Pod, form: str, argv: tuple[str, ...], code: int, words: str
) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        process, ended = await run(link, *argv)
        assert (ended.code, ended.started) == (code, False)
        assert process.err == f"{argv[0]}: {words}\n"
        # A command may end with the same code, and say what it likes.
        process, ended = await run(link, "sh", "-c", f"echo {words} >&2; exit {code}")
        assert (ended.code, ended.started, process.err) == (code, True, f"{words}\n")

    play(scene())


def test_a_directory_that_is_not_there_is_refused_later_as_well(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        with pytest.raises(Problem) as caught:
            await run(link, "true", cwd="/workspace/missing")
        assert (caught.value.code, caught.value.field) == ("INVALID", "cwd")
        assert (await sh(link, "mkdir here; cd here; pwd")) == "/workspace/here\n"
        assert (await run(link, "pwd", cwd="here"))[0].out == "/workspace/here\n"

    play(scene())


def test_what_a_command_has_used_is_its_own(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        code = "x = bytearray(200 << 20)\nimport time\nwhile time.process_time() < 0.5: pass"
        _, much = await run(link, "python3", "-c", code)
        _, little = await run(link, "true")
        assert (much.cpu_ms >= 500, much.max_rss_kb >= 200 << 10) == (True, True)
        assert (little.cpu_ms < 400, little.max_rss_kb < 100 << 10) == (True, True)

    play(scene())


def test_a_later_command_leaves_nothing_behind(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        word = f"7{os.getpid()}7"
        process = await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        await process.running.kill()
        assert (await process.end()).signal == "SIGKILL"
        assert living(word) == []
        process, ended = await run(link, "sh", "-c", f"setsid sleep {word} & echo on")
        assert (process.out, ended.code, living(word)) == ("on\n", 0, [])
        await idle(link)

    play(scene())


def test_a_later_command_whose_supervisor_is_killed_was_killed(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        word = f"3{os.getpid()}8"
        process = await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        (supervisor,) = pod.supervisors()
        os.kill(supervisor, signal.SIGKILL)
        ended = await process.end()
        assert (ended.code, ended.signal, ended.lost) == (137, "SIGKILL", False)
        assert await asyncio.to_thread(gone, word)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


def test_a_later_command_ends_with_its_connection(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        word = f"6{os.getpid()}9"
        await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        link.lost("the node has gone")
        assert await asyncio.to_thread(gone, word)

    play(scene())


def test_a_killed_supervisor_that_waits_costs_nothing(pod: Pod, form: str) -> None:
    """The connection is found dead, or the agent says that it has never heard of the command."""

    async def scene() -> None:
        link = await warm(pod, form)
        for _ in range(5):
            (supervisor,) = await waiting(pod)
            os.kill(supervisor, signal.SIGKILL)
            assert (await sh(link, "echo on | tee -a /workspace/ran")) == "on\n"
        assert (await sh(link, "cat ran")) == "on\n" * 5

    play(scene())


def test_nobody_waits_for_ever(pod: Pod, form: str) -> None:
    """Neither a supervisor nor its sandbox; and the service does not count on it that long."""

    async def scene() -> None:
        link = await warm(pod, form)
        await waiting(pod)
        (wire, _), *_ = link._kept
        deadline = time.monotonic() + SECONDS
        began = time.monotonic()
        while pod.supervisors():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        assert time.monotonic() - began > terms.COUNTED_SECONDS
        assert link._again() is None
        assert not wire.is_alive
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


def test_few_wait(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        found = await asyncio.gather(*(run(link, "sleep", "0.5") for _ in range(9)))
        assert {ended.code for _, ended in found} == {0}
        deadline = time.monotonic() + 5
        while len(pod.supervisors()) > pod_link.MOST_KEPT:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert len(link._kept) == pod_link.MOST_KEPT

    play(scene())


def test_a_lease_ends_what_waits(pods: Any, form: str) -> None:
    async def scene() -> int:
        pod = pods()
        link = await warm(pod, form)
        (supervisor,) = await waiting(pod)
        await link.renew(0.5)
        assert await asyncio.to_thread(pod.ended) == 0
        return int(supervisor)

    assert not os.path.exists(f"/proc/{play(scene())}")


def test_stop_leaves_those_that_wait(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        await idle(link)
        await link.stop()
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


# --- attacks


def test_cannot_look_into_a_sandbox_that_waits(pod: Pod, form: str) -> None:
    """Nor into whoever waits with it. Both are there, and of the same user."""

    async def scene() -> None:
        idle = await warm(pod, form)
        await waiting(pod)
        link = pod.link()
        script = f"""
import os, subprocess, sys
# As /proc numbers them: itself, and the first process of its own sandbox.
own = open("/proc/self/stat").read().rpartition(")")[2].split()[1], os.readlink("/proc/self")
for pid in os.listdir("/proc"):
    if pid.isdigit() and pid not in own:
        said = subprocess.run([sys.executable, "-c", {LOOK!r}, pid], capture_output=True, text=True)
        print(pid, *said.stdout.split()) if said.stdout else None
print("done")
"""
        process, _ = await run(link, "python3", "-c", script)
        lines = [line.split() for line in process.out.splitlines()]
        assert lines == [["done"]]
        # The control: it finds itself open.
        process, _ = await run(link, "python3", "-c", LOOK, "self")
        assert {"memory", "environ", "descriptors"} <= set(process.out.split())
        assert (await sh(idle, "echo on")) == "on\n"

    play(scene())


def test_a_command_is_begun_once(pod: Pod, form: str) -> None:
    """A request that was held up, and comes after the service has asked again elsewhere."""

    async def scene() -> None:
        link = await warm(pod, form)
        order = Start(execution="exc-once", argv=("sh", "-c", "echo ran >> ran"))
        peer = Peer(dial=pod.dial, fingerprint=pod.fingerprint(), identity=pod.identity)

        def asked(name: str) -> bytes:
            return request(
                "exec", execution=name, argv=list(order.argv), env={}, cwd="", input=False,
                terminal=False, rows=0, columns=0,
            )  # fmt: skip

        async def ask(wire: Any, name: str) -> Any:
            await wire.send(asked(name))
            try:
                await wire.document(frames.ANSWER)
            except Problem as problem:
                return problem.code
            while (await wire.next())[0] != frames.ENDED:
                pass
            return "ended"

        fresh, stale = await connect(peer), await connect(peer)
        # `stale` has served one, so a supervisor reads it, not the agent.
        assert await ask(stale, "exc-before") == "ended"
        assert await ask(fresh, "exc-once") == "ended"
        assert await ask(stale, "exc-once") == "CONFLICT"
        late = await connect(peer)
        assert await ask(late, "exc-once") == "CONFLICT"
        for wire in (fresh, stale, late):
            wire.abort()
        assert (await sh(link, "cat ran")) == "ran\n" * 2

    play(scene())


def test_late_words_for_a_command_that_has_ended_do_not_reach_the_next(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        ((wire, _),) = link._kept
        await wire.send(
            frames.frame(frames.INPUT, b"late\n"), frames.frame(frames.SIGNAL, b"\x09"),
            frames.frame(frames.CLOSE), frames.frame(frames.KILL),
        )  # fmt: skip
        process = await start(link, "cat", input=True)
        await process.running.write(b"mine\n")
        await process.running.close_input()
        ended = await process.end()
        assert (process.out, ended.code) == ("mine\n", 0)

    play(scene())


def test_the_fate_of_a_later_command_is_known(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await warm(pod, form)
        process = Process()
        process.running = await link.start(
            Start(execution="exc-f", argv=("sleep", "1000")), process.sink
        )
        assert (await link._fate("exc-f"))["state"] == "running"
        await process.running.kill()
        assert isinstance(await process.end(), Ended)
        assert (await link._fate("exc-f"))["state"] in ("running", "told")
        assert (await link._fate("exc-never"))["state"] == "unknown"

    play(scene())


# --- what is said to the starter


def test_the_line_for_the_starter_is_quoted() -> None:
    found = inner.line(("a'b", "$x"), {"N": "'"}, "/it's", reads=False)
    assert found == (
        b"cd -P -- '/it'\\''s' || exit 1\nunset OLDPWD\nexport N=''\\'''\n"
        b"exec 'a'\\''b' '$x' </dev/null 3<&- 4<&- 5<&- 6<&-\n"
    )
    assert inner.line(("a",), {"n-m": ""}, "/", reads=True) is None
    assert inner.line(("a",), {"é": ""}, "/", reads=True) is None
    assert inner.line(("-a",), {}, "/", reads=True) is None
    assert inner.line(("a" * inner.MOST_LINE,), {}, "/", reads=True) is None
