"""What a command may try against its agent, its lease and its network. Each with a control."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.pod import confine, terms
from agent_sandbox.service.backend import pod_identity
from agent_sandbox.service.backend.pod_link import PodLink
from agent_sandbox.service.problems import Problem

from .ground import Pod, alive, gone, idle, living, play, run, sh, start

pytestmark = pytest.mark.kernel

# Looks into a process in every way that there is; prints the ways that worked.
LOOK = """
import ctypes, os, sys
pid = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
def memory():
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb") as mem:
        for line in maps:
            if " r" in line:
                mem.seek(int(line.split("-")[0], 16)); return bool(mem.read(16))
def environ():
    return open(f"/proc/{pid}/environ", "rb").read() is not None
def descriptors():
    return [os.stat(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd") if int(fd) < 3]
def take():
    handle = os.pidfd_open(int(pid))
    for fd in range(20):
        if libc.syscall(438, handle, fd, 0) >= 0: return True
def trace():
    return libc.ptrace(16, int(pid), 0, 0) == 0
for way in (memory, environ, descriptors, take, trace):
    try:
        if way(): print(way.__name__)
    except (OSError, ValueError):
        pass
"""
WAYS = {"memory", "environ", "descriptors", "take", "trace"}
PYTHON = "/usr/bin/python3"


def looked(pod: Pod, pid: int) -> set[str]:
    """What an unconfined process of the pod's user can see of another one."""
    return set(pod.run(PYTHON, "-c", LOOK, pod.number(pid)).split())


async def other_process(pod: Pod, word: str) -> tuple[subprocess.Popen[str], int]:
    """A process of the same user in the pod, as an exec of the engine is."""
    started = pod.popen("sleep", word)
    while not (found := [pid for pid in living(word) if name_of(pid) == "sleep"]):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return started, found[0]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def end(started: subprocess.Popen[str], pid: int) -> None:
    """End it; whoever has entered the pod for it stops with it when it is traced."""
    os.kill(pid, signal.SIGKILL)
    started.kill()
    started.wait()


def test_cannot_look_into_the_agent(rooted: Pod) -> None:
    """Same user, no filter, no domain: the agent itself keeps them out."""

    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        assert looked(pod, pod.init) == set()
        # Its supervisors are copies of it, key and all.
        process = await start(link, "sleep", "1000")
        assert [looked(pod, pid) for pid in pod.supervisors()] == [set()]
        await process.running.kill()
        await process.end()
        # The control: another process of the same user in the same pod is open.
        started, pid = await other_process(pod, f"8{os.getpid()}8")
        # Where Yama is on, only a parent may attach; reading is decided before that.
        assert {"environ", "descriptors"} <= looked(pod, pid) <= WAYS
        end(started, pid)

    play(scene())


def test_cannot_look_into_the_agent_from_inside(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, ended = await run(link, "python3", "-c", LOOK, "1")
        assert (set(process.out.split()), ended.code) == (set(), 0)
        # The control: it finds itself open.
        process, _ = await run(link, "python3", "-c", LOOK, "self")
        assert {"memory", "environ", "descriptors"} <= set(process.out.split())

    play(scene())


def test_cannot_look_into_what_the_engine_has_started_in_the_pod(rooted: Pod) -> None:
    """Without an inner layer: it has the same user, and a network that commands must not have."""

    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        started, pid = await other_process(pod, f"9{os.getpid()}9")
        process, _ = await run(link, "python3", "-c", LOOK, pod.number(pid))
        assert set(process.out.split()) == set()
        # The control: the same user without a command's confinement.
        assert {"environ", "descriptors"} <= looked(pod, pid)
        end(started, pid)

    play(scene())


# --- the agent's port


def speak(port: int, context: ssl.SSLContext | None) -> bytes:
    """What the agent answers to a hello."""
    message = b'Q\x00\x00\x00\x15{"operation":"hello"}'
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            with context.wrap_socket(plain) if context is not None else plain as sock:
                sock.sendall(message)
                return sock.recv(1 << 16)
        except OSError:
            return b""


def test_cannot_speak_to_the_agent_without_the_services_certificate(pod: Pod, pem: bytes) -> None:
    pod.fingerprint()
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    # Another installation's service, whose authority this agent does not know.
    other = pod_identity.contexts(pod_identity.make()).client
    assert speak(pod.port, None) == b""
    assert speak(pod.port, nobody) == b""
    assert speak(pod.port, other) == b""
    assert b"guarantees" in speak(pod.port, pod_identity.contexts(pem).client)


def test_cannot_speak_to_the_agent_with_its_own_certificate(pod: Pod, tmp_path: Path) -> None:
    """An agent's certificate makes nobody a service: the authority has not signed it."""
    pod.fingerprint()
    files = tmp_path / "key", tmp_path / "certificate"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=agent-sandbox service", "-keyout", files[0], "-out", files[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(files[1], files[0])
    assert speak(pod.port, context) == b""


def test_cannot_crowd_the_service_out(pod: Pod) -> None:
    """Strangers take each other's places, never those of connections that are known."""

    async def scene() -> None:
        link = await pod.claimed()
        strangers = [socket.create_connection(("127.0.0.1", pod.port)) for _ in range(300)]
        try:
            assert (await sh(link, "echo on")) == "on\n"
            assert (await link.hello()).sandbox == "sbx-1"
        finally:
            for one in strangers:
                one.close()

    play(scene())


def test_cannot_stand_in_for_the_agent(pod: Pod, pem: bytes) -> None:
    """Another listener is not taken for it: its certificate is not the one from the log."""

    async def scene() -> None:
        pod.fingerprint()
        link = pod.link("0" * 64)
        with pytest.raises(Problem) as caught:
            await link.hello()
        assert "certificate" in caught.value.message

    play(scene())


# --- its end


ESCAPE = """
import os, sys, time
word = sys.argv[1]
# A chain: each link lives for a moment, has a session of its own, and leaves the next one behind.
for _ in range(5):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execvp("sleep", ["sleep", word])
if os.fork() == 0:
    while True:
        if os.fork():
            os._exit(0)
        os.setsid()
print("away", flush=True)
time.sleep(1000)
"""


def test_cannot_survive_a_kill(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form, pids=60)
        word = f"4{os.getpid()}4"
        process = await start(link, "python3", "-c", ESCAPE, word)
        await process.until("away")
        await alive(word, 5)
        await process.running.kill()
        assert (await process.end()).signal == "SIGKILL"
        # Told means done: nothing is left, not only soon.
        assert living(word) == []
        await idle(link)

    play(scene())


def test_cannot_survive_by_killing_the_supervisor(pod: Pod) -> None:
    """Without an inner layer or signal scopes a command can reach it; the agent clears up."""

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        word = f"3{os.getpid()}5"
        process = await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        (supervisor,) = pod.supervisors()
        os.kill(supervisor, signal.SIGKILL)
        ended = await process.end()
        assert (ended.code, ended.signal, ended.lost) == (137, "SIGKILL", False)
        assert await asyncio.to_thread(gone, word)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


def test_cannot_signal_the_agent_or_another_command(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        other = await start(link, "sh", "-c", "echo on; sleep 1000")
        await other.until("on")
        process, _ = await run(link, "python3", "-c", KILL_ALL)
        assert "killed" not in process.out
        assert (await link.hello()).sandbox == "sbx-1"
        assert not other.running._ended.done()  # type: ignore[attr-defined]
        # The control: its own child can be reached.
        assert (await sh(link, "sleep 1000 & kill -9 $! && echo killed")) == "killed\n"
        await other.running.kill()
        await other.end()

    play(scene())


KILL_ALL = """
import os, signal
for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid not in (os.getpid(), os.getppid()):
        try:
            os.kill(pid, signal.SIGKILL); print("killed", pid)
        except OSError:
            pass
"""


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "CHLD"])
def test_cannot_end_the_agent_by_a_signal_that_it_may_send(rooted: Pod, name: str) -> None:
    """A kernel before 6.12 does not keep commands from it; here somebody unconfined sends it."""

    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        assert pod.run("sh", "-c", f"kill -{name} 1 && echo sent") == "sent\n"
        # What was sent before the question is taken before or with it.
        assert (await link.hello()).sandbox == "sbx-1"
        assert (await sh(link, "echo on")) == "on\n"
        # The control: from outside it is heeded.
        os.kill(pod.init, signal.SIGTERM)
        assert await asyncio.to_thread(pod.ended, 20) == 0

    play(scene())


LIMITS = """
import os, resource, sys
for pid in map(int, sys.argv[1:]):
    held = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    try:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, held); print("set", pid)
    except PermissionError:
        print("kept", pid)
"""


def test_cannot_set_limits_of_the_agent_or_its_supervisor(rooted: Pod) -> None:
    """With no descriptors left they would find no process to end."""

    pod = rooted

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        said = await sh(link, f"python3 -c '{LIMITS}' 1 $PPID 0")
        assert [line.split()[0] for line in said.splitlines()] == ["kept", "kept", "set"]
        # The control: the kernel itself lets the same user do it.
        assert pod.run(PYTHON, "-c", LIMITS, "1") == "set 1\n"

    play(scene())


def test_cannot_outlive_the_lease(pods: Any, form: str) -> None:
    async def scene() -> None:
        pod = pods()
        link = await pod.claimed(inner=form, lease_seconds=600.0)
        word = f"2{os.getpid()}6"
        process = await start(link, "python3", "-c", ESCAPE, word)
        await process.until("away")
        # The control: longer than the next lease, and still there.
        await asyncio.sleep(1.5)
        assert living(word)
        await link.renew(1.0)
        assert await asyncio.to_thread(pod.ended) == 0
        assert living(word) == []
        assert (await process.end()).lost

    play(scene())


def test_a_pod_that_nobody_claims_ends_by_itself(pods: Any) -> None:
    pod = pods(unclaimed=1)
    assert pod.ended() == 0


def test_the_engines_request_to_end_is_heeded_at_once(pod: Pod) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner="off")
        word = f"1{os.getpid()}7"
        await start(link, "sleep", word)
        os.kill(pod.init, signal.SIGTERM)
        assert await asyncio.to_thread(pod.ended, 20) == 0
        assert living(word) == []

    play(scene())


# --- the network

OPEN = """
import socket
for name in ("AF_INET", "AF_INET6", "AF_PACKET", "AF_VSOCK", "AF_ALG", "AF_UNIX"):
    try:
        socket.socket(getattr(socket, name), socket.SOCK_STREAM); print(name)
    except OSError:
        pass
"""
REACH = """
import socket, sys
try:
    socket.create_connection(("127.0.0.1", int(sys.argv[1])), 10); print("reached")
except OSError as error:
    print(error)
"""


def test_cannot_open_a_network_when_it_is_off(pods: Any, form: str) -> None:
    async def scene() -> None:
        pod, free = pods(), pods()
        link = await pod.claimed(inner=form, network="off")
        process, _ = await run(link, "python3", "-c", REACH, str(pod.port))
        assert "reached" not in process.out
        process, _ = await run(link, "python3", "-c", OPEN)
        families = set(process.out.split())
        assert "AF_UNIX" in families
        if form == "off":
            assert families == {"AF_UNIX"}
        # The control: with a network the same programs get through.
        link = await free.claimed(inner=form, network="public")
        process, _ = await run(link, "python3", "-c", REACH, str(free.port))
        assert "reached" in process.out
        process, _ = await run(link, "python3", "-c", OPEN)
        assert {"AF_INET", "AF_UNIX"} <= set(process.out.split())

    play(scene())


def test_cannot_reach_abstract_sockets_of_the_pod(pods: Any, form: str) -> None:
    """A network namespace, or a Landlock scope, keeps them apart."""

    async def scene() -> None:
        pod = pods()
        link = await pod.claimed(inner=form)
        name = f"\0agsbx-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name)
            server.listen()
            code = (
                "import socket,sys\ns=socket.socket(socket.AF_UNIX)\n"
                f"try:\n s.connect({name!r}); print('reached')\nexcept OSError as e: print(e)"
            )
            process, _ = await run(link, "python3", "-c", code)
            assert "reached" not in process.out
            # The control.
            assert "reached" in pod.owner.run([PYTHON, "-c", code]).stdout

    play(scene())


# --- files and limits


def test_cannot_write_anywhere_but_its_own_directories(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        places = "/ /etc /usr /opt/agent-sandbox /opt/agent-sandbox/bin /home /sys /proc/sys"
        said = await sh(link, f"for d in {places}; do touch $d/x 2>/dev/null && echo $d; done")
        assert said == ""
        own = "/workspace /home/agent /tmp"
        said = await sh(link, f"for d in {own}; do touch $d/x && echo $d; done")
        assert said.split() == own.split()

    play(scene())


def test_the_bundle_is_hidden_with_an_inner_layer(pod: Pod) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner="required")
        said = await sh(link, f"find {terms.ROOT} {terms.PLACE} -type f -size +0")
        assert said == ""
        assert (await sh(link, "ls /workspace; echo x > /workspace/f; cat /workspace/f")) == "x\n"

    play(scene())
    assert (pod.data / "workspace" / "f").read_text() == "x\n"


def test_cannot_start_more_processes_than_allowed(pods: Any, form: str) -> None:
    async def scene() -> None:
        bounded, free = pods(), pods()
        script = "n=0; while [ $n -lt 80 ]; do sleep 1000 & n=$((n+1)); done; echo all"
        link = await bounded.claimed(inner=form, pids=20)
        process, ended = await run(link, "sh", "-c", script)
        assert "all" not in process.out
        assert ended.code != 0
        link = await free.claimed(inner=form)
        process, _ = await run(link, "sh", "-c", script)
        assert "all" in process.out

    play(scene())


def test_cannot_write_a_file_beyond_the_disk_limit(pods: Any, form: str) -> None:
    async def scene() -> None:
        bounded, free = pods(), pods()
        link = await bounded.claimed(inner=form, disk=1 << 20)
        _, ended = await run(link, "sh", "-c", "exec head -c 3000000 /dev/zero > f")
        assert ended.signal == "SIGXFSZ"
        link = await free.claimed(inner=form)
        _, ended = await run(link, "sh", "-c", "exec head -c 3000000 /dev/zero > f")
        assert ended.code == 0

    play(scene())


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("unshare", "unshare -U true"), ("mount", "mount -t tmpfs none /workspace"),
        ("keys", "python3 -c 'import ctypes as c; exit(c.CDLL(None).syscall(250, 0, -3, 0) < 0)'"),
    ],
)  # fmt: skip
def test_cannot_make_calls_that_the_filter_refuses(
    pod: Pod, form: str, name: str, call: str
) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        _, ended = await run(link, "sh", "-c", f"{call} 2>/dev/null")
        assert ended.code != 0
        said = await sh(link, "grep Seccomp: /proc/self/status; grep NoNewPrivs /proc/self/status")
        assert said.split() == ["Seccomp:", "2", "NoNewPrivs:", "1"]

    play(scene())


def test_no_descriptor_of_the_agent_reaches_a_command(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        said = await sh(link, "ls /proc/self/fd")
        # The last is that of the directory itself.
        assert said.split() == ["0", "1", "2", "3"]

    play(scene())


def test_the_extra_filter_refuses_other_families_and_tracing() -> None:
    program = confine.extra_filter("x86_64", network=False)
    free = confine.extra_filter("x86_64", network=True)
    assert len(program) % 8 == 0
    assert len(free) < len(program)


def test_an_agent_says_one_line_and_nothing_else(pod: Pod) -> None:
    async def scene() -> None:
        link = await pod.claimed()
        await sh(link, "echo noise; echo noise >&2")
        await link.renew(0.5)
        await asyncio.to_thread(pod.ended)

    play(scene())
    out, err = pod.process.communicate()
    assert (out, err) == ("", "")


def test_a_link_of_another_service_cannot_be_made(pods: Any) -> None:
    async def scene() -> None:
        pod = pods()
        known = pod.fingerprint()
        other = PodLink(pod.dial, known, pod_identity.contexts(pod_identity.make()))
        try:
            with pytest.raises(Problem) as caught:
                await other.hello()
            assert caught.value.code == "BACKEND_UNAVAILABLE"
        finally:
            await other.close()

    play(scene())
