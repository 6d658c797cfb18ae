"""Two sandboxes and the service that holds them: neither reaches the other, nor the service.

Each attack has a control: the same step works where nothing stands between.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.launch import kin
from agent_sandbox.service.backend.bwrap import BwrapBackend

from .lab import got, put

if TYPE_CHECKING:
    from .conftest import Bench
    from .lab import Lab

pytestmark = pytest.mark.kernel
# Listens in every way there is, and says what it was asked.
LISTEN = """
import os, socket, threading, time
one = socket.socket(socket.AF_UNIX); one.bind("\\0sbx-abstract"); one.listen()
two = socket.socket(socket.AF_UNIX); two.bind("/tmp/path.sock"); two.listen()
three = socket.socket(); three.bind(("127.0.0.1", 45671)); three.listen()
open("/workspace/secret", "w").write("of-b"); open("/home/agent/secret", "w").write("of-b")
print("up", os.getpid(), flush=True)
time.sleep(200)
"""
CONNECT = """
import socket
for what, family, where in (
    ("abstract", socket.AF_UNIX, "\\0sbx-abstract"), ("path", socket.AF_UNIX, "/tmp/path.sock"),
    ("loopback", socket.AF_INET, ("127.0.0.1", 45671)),
):
    try: socket.socket(family).connect(where); print(what, "reached")
    except OSError as e: print(what, "refused")
"""


def test_cannot_connect_to_another_sandbox(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        a, b = await lab.sandbox(), await lab.sandbox()
        there = await lab.start(b, "python3", "-c", LISTEN)
        await there.until("up")
        attack = (await lab.run(a, "python3", "-c", CONNECT))[0].out
        await there.running.kill()
        # A control: within one sandbox's command all three are reached.
        both = LISTEN.replace("time.sleep(200)", "") + CONNECT
        control = (await lab.run(a, "python3", "-c", both))[0].out
        return attack.split(), control.split()[2:]

    attack, control = bench.play(scene, LISTEN=LISTEN, CONNECT=CONNECT)
    assert attack == ["abstract", "refused", "path", "refused", "loopback", "refused"]
    assert control == ["abstract", "reached", "path", "reached", "loopback", "reached"]


def test_cannot_see_signal_or_trace_another_sandbox(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        a, b = await lab.sandbox(), await lab.sandbox()
        there = await lab.start(b, "sh", "-c", "echo up; exec sleep 111.1")
        await there.until("up")
        pid = kin.descendants(there.running.init or 0)[0]
        look = f"ps ax -o args; ls /proc/{pid}; kill -9 {pid}; kill -9 -1; echo after"
        said = await lab.sh(a, look)
        await asyncio.sleep(0.2)
        alive = pid in kin.descendants(there.running.init or 0)
        outside = got(f"/proc/{pid}/cmdline")
        # A control: whoever is not inside can.
        os.kill(pid, 9)
        ended = await there.end()
        return said, alive, "111.1" in outside, ended.code

    said, alive, control, code = bench.play(scene)
    assert "111.1" not in said
    assert alive
    assert control
    assert code == 137


def test_cannot_read_or_write_what_another_sandbox_has(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        a, b = await lab.sandbox(), await lab.sandbox("sbx-b")
        await lab.write(b, "/workspace/secret", b"word-of-b")
        place = f"{lab.data}/sandboxes/sbx-b"
        tries = (
            f"cat {place}/workspace/secret; cat ../sbx-b/workspace/secret; ls {lab.data};"
            f"echo x > {place}/workspace/new; mkdir -p {place}; ls -la / /home /workspace;"
            "grep -rs word-of-b /home /workspace /tmp /run /var /srv /root /mnt | head"
        )
        said = await lab.sh(a, tries)
        return said, got(f"{place}/workspace/secret"), os.listdir(f"{place}/workspace")

    said, control, left = bench.play(scene, timeout=300)
    assert "word-of-b" not in said
    assert control == "word-of-b"
    assert left == ["secret"]


def test_cannot_reach_the_service(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        for name in ("state.db", "lock", "token"):
            put(f"{lab.data}/{name}", "word-of-the-service")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"{lab.data}/service.sock")
        listener.listen()
        loopback = socket.socket()
        loopback.bind(("127.0.0.1", 0))
        loopback.listen()
        port = loopback.getsockname()[1]
        box = await lab.sandbox()
        code = (
            "import os, socket\n"
            "def reach(f, w):\n try: socket.socket(f).connect(w); print('reached', w)\n"
            " except OSError as e: print('refused')\n"
            f"reach(socket.AF_UNIX, {lab.data + '/service.sock'!r})\n"
            f"reach(socket.AF_INET, ('127.0.0.1', {port}))\n"
            "for name in ('state.db', 'token'):\n"
            f" try: print(open({lab.data + '/'!r} + name).read())\n"
            " except OSError: print('refused')\n"
            f"for what in ('environ', 'mem', 'fd', 'maps'):\n"
            f" try: print(os.listdir('/proc/{os.getpid()}/' + what))\n"
            " except OSError: print('refused')\n"
            "print(sorted(os.environ))"
        )
        said = (await lab.run(box, "python3", "-c", code))[0].out
        client = socket.socket(socket.AF_UNIX)
        client.connect(f"{lab.data}/service.sock")
        other = socket.socket()
        other.connect(("127.0.0.1", port))
        return said, os.environ["SERVER_SECRET"]

    said, control = bench.play(scene)
    assert said.count("refused") == 8
    assert "reached" not in said
    assert "word-of-the-service" not in said
    assert "SERVER_SECRET" not in said
    assert control == "hidden"


def test_inherits_no_descriptor_of_the_service(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        secret = put(f"{lab.data}/secret", "word-of-the-service")
        left = os.open(secret, os.O_RDONLY)
        listen = "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd')))"
        # As whoever started the service may have left it.
        os.set_inheritable(left, True)
        started = await asyncio.create_subprocess_exec(
            "python3", "-c", listen, stdout=-1, close_fds=False
        )
        control = (await started.communicate())[0].decode()
        backend = BwrapBackend(f"{lab.data}/second")
        lab.backend = backend
        box = await lab.sandbox()
        return (
            left,
            json.loads(control),
            json.loads((await lab.run(box, "python3", "-c", listen))[0].out),
        )

    left, control, inside = bench.play(scene)
    assert left in control
    # The last one is the directory that is being read.
    assert inside == [0, 1, 2, 3]


def test_has_no_rights_of_root(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        script = (
            "grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status;"
            "cat /etc/shadow; echo x > /etc/passwd; echo x > /usr/x; mount -t tmpfs x /tmp;"
            "unshare -U true; echo 1 > /proc/sys/kernel/core_pattern; mknod n c 1 3; chown 0 /tmp;"
            "chmod u+s /bin/true; touch f; chmod u+s f; stat -c %a f"
        )
        return await lab.sh(box, script)

    said = bench.play(scene)
    assert "CapEff:\t0000000000000000" in said
    assert "CapBnd:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert "Seccomp:\t2" in said
    for word in (
        "/etc/shadow",
        "/etc/passwd",
        "/usr/x",
        "mount",
        "unshare",
        "core_pattern",
        "mknod",
    ):
        assert any(word in line and line.startswith(("sh:", "cat:", "mount:", "unshare:", "mknod:"))
                   for line in said.splitlines()), (word, said)  # fmt: skip
    assert "644" in said


def test_knows_the_hosts_accounts_by_no_file(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        names = got("/etc/passwd")
        return await lab.sh(box, "cat /etc/passwd; getent passwd"), names

    said, names = bench.play(scene)
    host = {line.split(":")[0] for line in names.splitlines()}
    inside = {line.split(":")[0] for line in said.splitlines()}
    assert inside == {"root", "agent", "nobody"}
    assert host - inside


def test_what_the_host_saves_meanwhile_stays_covered(bench: Bench) -> None:
    if bench.identity.uid != 0:
        pytest.skip("who is not root cannot read it anyway")

    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        secret = put("/etc/agsbx-test-secret", "before")
        wait = "echo up; while [ ! -e /tmp/go ]; do sleep 0.01; done"
        try:
            seen = await lab.start(box, "sh", "-c", f"{wait}; cat {secret}; echo over")
            await seen.until("up")
            put(secret, "after")
            await asyncio.sleep(0.5)
            await lab.write(box, "/tmp/go", b"")
            await seen.end()
            other = await lab.sandbox()
            return seen.out, await lab.sh(other, f"cat {secret}"), got(secret)
        finally:
            os.unlink(secret)

    said, later, control = bench.play(scene)
    assert "after" not in said + later
    assert "over" in said
    assert control == "after"


def test_a_busy_sandbox_does_not_stop_another(bench: Bench) -> None:
    if bench.identity.uid != 0:
        pytest.skip("control groups are root's here; `probe` says so, which is tested")

    async def scene(lab: Lab) -> object:
        a, b = await lab.sandbox(cpus=0.5, pids=50), await lab.sandbox()
        bomb = ":(){ :|:& };:; while :; do :; done"
        busy = await lab.start(a, "bash", "-c", f"echo up; {bomb}", keeps=False)
        await asyncio.sleep(0.3)
        before = time.monotonic()
        codes = [(await lab.run(b, "true"))[1].code for _ in range(5)]
        seconds = time.monotonic() - before
        await busy.running.kill()
        await busy.end()
        return codes, seconds

    codes, seconds = bench.play(scene)
    assert codes == [0] * 5
    assert seconds < 20
