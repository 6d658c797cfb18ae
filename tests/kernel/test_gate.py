"""The gate by itself, with a stand-in for the proxy: routes, listeners, requests, its end."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from conftest import IS_ROOT, must_work

if TYPE_CHECKING:
    from kernel.conftest import World

pytestmark = [pytest.mark.kernel, pytest.mark.network]

# A supervisor and a proxy in one: a bare sandbox, a gate, and the proxy's end of its line.
DRIVER = """
import json, os, select, socket, subprocess, sys, threading, time
from agent_sandbox.launch import gate, netns

class Scene:
    def __init__(self, inside, listeners=(), capture=True):
        self.gate = gate.forked(gate.Orders(capture=capture, listeners=tuple(listeners)))
        self.line = socket.socket(fileno=os.dup(self.gate.line)); self.gate.forget_line()
        self.line.settimeout(20)
        status, end = os.pipe()
        block, self.go = os.pipe()
        self.bwrap = subprocess.Popen(
            ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL",
             "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--json-status-fd", str(end),
             "--block-fd", str(block), "/usr/bin/python3", "-c", inside],
            pass_fds=(end, block), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        os.close(end); os.close(block)
        said = b""
        while b"}" not in said: said += os.read(status, 4096)
        self.init = json.loads(said.split(b"}")[0] + b"}")["child-pid"]
        self.gate.attend(self.init)
        self.why = self.gate.ready()
        self.sockets = {}
        if self.why: return
        while True:
            message, fds, _, _ = socket.recv_fds(self.line, 256, 1)
            if message == b"ready": break
            self.sockets[message.decode()] = socket.socket(fileno=fds[0])
    def release(self):
        if self.go >= 0: os.write(self.go, b"x"); os.close(self.go)
        self.go = -1
    def ask(self, text):
        self.line.send(text.encode()); return self.answer()
    def answer(self):
        message, fds, _, _ = socket.recv_fds(self.line, 256, 1)
        return message.decode(), socket.socket(fileno=fds[0]) if fds else None
    def greet(self, listener):
        "Tell each caller which address it called."
        def serve():
            listener.setblocking(True)
            while True:
                try: caller, _ = listener.accept()
                except OSError: return
                caller.sendall(caller.getsockname()[0].encode()); caller.close()
        threading.Thread(target=serve, daemon=True).start()
    def end(self):
        self.release()
        out = self.bwrap.communicate(timeout=30)[0]
        self.gate.dismiss()
        return out

def show(value): print(json.dumps(value))
"""
CALLS = """
import json, socket, sys, time
found = {}
for family, address, port in %r:
    begun = time.monotonic()
    try:
        s = socket.socket(family); s.settimeout(5); s.connect((address, port)); found[address] = s.recv(99).decode()
    except OSError as error: found[address] = type(error).__name__
    assert time.monotonic() - begun < 2
print(json.dumps(found))
"""
V4, V6 = 2, 10


def drive(world: World, code: str, *before: str) -> Any:
    """Run a supervisor of our own as the identity; returns what it shows."""
    script = world.write("driver.py", DRIVER + code)
    env = {"PYTHONPATH": str(world.runner.source)}
    done = world.outside(*before, world.runner.python, str(script), env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_takes_every_address_on_a_port_it_listens_on(world: World) -> None:
    """Public, private, metadata and loopback addresses, v4 and v6: with what was asked for."""
    called = ["93.184.216.34", "10.0.0.5", "169.254.169.254", "127.0.0.1", "127.8.8.8", "255.1.2.3"]
    called6 = ["2606:4700::1", "::1", "2001:2::77", "fd00::1"]
    calls = [(V4, a, 80) for a in called] + [(V6, a, 80) for a in called6]
    found = drive(
        world,
        f"s = Scene({CALLS % (calls,)!r}, [('tcp', '*', 80)])\n"
        "s.greet(s.sockets['listener tcp * 80'])\n"
        "print(s.end())\n",
    )
    wanted = {a: f"::ffff:{a}" for a in called} | {a: a for a in called6}
    assert found == wanted


def test_refuses_a_port_that_nobody_takes_at_once(world: World) -> None:
    """No time limit to wait for: the kernel answers. Without the routes nothing is reachable."""
    calls = [(V4, "93.184.216.34", 81), (V6, "2606:4700::1", 8080)]
    code = "s = Scene({!r}, [('tcp', '*', 80)], capture={})\nprint(s.end())\n"
    taken = drive(world, code.format(CALLS % (calls,), True))
    assert set(taken.values()) == {"ConnectionRefusedError"}
    alone = drive(world, code.format(CALLS % (calls,), False))
    assert set(alone.values()) == {"OSError"}


def test_answers_to_datagrams_can_come_from_the_address_that_was_asked(world: World) -> None:
    """A resolver that is asked at any address must answer from there."""
    ask = (
        "import json, socket\n"
        "out = []\n"
        "for family, address in ((2, '8.8.8.8'), (10, '2001:db8::53')):\n"
        "    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(5); s.connect((address, 53)); s.send(b'q')\n"
        "    out.append(s.recv(9).decode())\n"
        "print(json.dumps(out))\n"
    )
    found = drive(
        world,
        f"s = Scene({ask!r}, [('udp', '*', 53)])\n"
        "u = s.sockets['listener udp * 53']; u.setblocking(True)\n"
        "def serve():\n"
        "    for _ in range(2):\n"
        "        data, extra, _, peer = u.recvmsg(99, 512)\n"
        "        u.sendmsg([b'answer'], [e for e in extra if e[0] == socket.IPPROTO_IPV6], 0, peer)\n"
        "threading.Thread(target=serve, daemon=True).start()\n"
        "print(s.end())\n",
    )
    assert found == ["answer", "answer"]


def test_binds_and_connects_on_request(world: World) -> None:
    """Listeners on single addresses leave the port free elsewhere; servers inside are reached."""
    inside = (
        "import socket\n"
        "server = socket.create_server(('127.0.0.1', 8443))\n"
        "other = socket.create_server(('::1', 9000), family=socket.AF_INET6)\n"
        "print('up', flush=True)\n"
        "for one in (server, other):\n"
        "    caller, _ = one.accept(); caller.sendall(b'inside'); caller.close()\n"
        "for family, address in ((2, '198.18.0.9'), (10, '2001:2::9')):\n"
        "    c = socket.socket(family); c.connect((address, 8443)); print(c.recv(99).decode())\n"
    )
    found = drive(
        world,
        f"s = Scene({inside!r})\n"
        "bound = [s.ask('1 bind 198.18.0.9 8443'), s.ask('2 bind 2001:2::9 8443')]\n"
        "for _, one in bound: s.greet(one)\n"
        "taken = s.ask('3 bind 198.18.0.9 8443')[0]\n"
        "nobody = s.ask('4 connect 127.0.0.1 5')[0]\n"
        "s.release(); s.bwrap.stdout.readline()\n"
        "reached = [s.ask('5 connect 127.0.0.1 8443'), s.ask('6 connect ::1 9000')]\n"
        "for _, one in reached: one.setblocking(True)\n"
        "said = [one.makefile().read() for _, one in reached]\n"
        "show([[t for t, _ in bound], taken, nobody, [t for t, _ in reached], said, s.end().split()])\n",
    )
    assert found == [
        ["1 ok", "2 ok"], "3 error Address already in use", "4 error Connection refused",
        ["5 ok", "6 ok"], ["inside", "inside"], ["198.18.0.9", "2001:2::9"],
    ]  # fmt: skip


def test_a_connection_that_hangs_holds_nobody_up_and_ends(world: World) -> None:
    """Later requests are answered first; the hanging one gets an error after its time."""
    inside = (
        "import socket, sys\n"
        "server = socket.socket(); server.bind(('127.0.0.1', 8000)); server.listen(0)\n"
        "print('up', flush=True); sys.stdin.read()\n"
    )
    found = drive(
        world,
        "netns.CONNECT_SECONDS = 1.0\n"
        f"s = Scene({inside!r})\n"
        "s.release(); s.bwrap.stdout.readline()\n"
        # More than the queue of connections that nobody accepts holds.
        "for number in range(1, 6): s.line.send(f'{number} connect 127.0.0.1 8000'.encode())\n"
        "s.line.send(b'9 connect 127.0.0.1 5')\n"
        "show([s.answer()[0] for _ in range(6)])\n"
        "s.bwrap.stdin.close(); s.gate.dismiss(); s.bwrap.wait()\n",
    )
    late = [text for text in found if text.endswith("error timed out")]
    assert late
    assert found.index("9 error Connection refused") < found.index(late[0])
    assert sorted(text.split()[0] for text in found) == ["1", "2", "3", "4", "5", "9"]


def test_takes_nonsense_for_nothing(world: World) -> None:
    """The proxy speaks to hostile peers: whatever it was made to send, the gate goes on."""
    found = drive(
        world,
        "s = Scene('')\n"
        "for text in (b'1', b'x bind 127.0.0.1 80', b'1 bind 127.0.0.1 0', b'1 bind 127.0.0.1 65536',\n"
        "    b'1 exec /bin/sh 1', b'\\xff' * 300, b'1 bind 127.0.0.1 -5', '1 bind ٣ ٣'.encode()): s.line.send(text)\n"
        "show([s.ask('1 bind 300.1.1.1 80')[0][:7], s.ask('2 bind example.com 80')[0][:7], s.ask('3 bind 10.1.1.1 80')[0]])\n"
        "s.end()\n",
    )
    assert found == ["1 error", "2 error", "3 ok"]


def test_without_ipv6_there_is_ipv4(world: World) -> None:
    """A kernel without IPv6: ::1 is left out, and the wildcard is the one of IPv4."""
    calls = [(V4, "93.184.216.34", 80), (V6, "2606:4700::1", 80)]
    found = drive(
        world,
        "netns.has_ipv6 = lambda: False\n"
        f"s = Scene({CALLS % (calls,)!r}, [('tcp', '*', 80), ('tcp', '::1', 5000), ('tcp', '127.0.0.1', 5000)])\n"
        "s.greet(s.sockets['listener tcp * 80'])\n"
        "show([sorted(s.sockets), json.loads(s.end())])\n",
    )
    assert found == [
        ["listener tcp * 80", "listener tcp 127.0.0.1 5000"],
        {"93.184.216.34": "93.184.216.34", "2606:4700::1": "OSError"},
    ]


def test_ends_with_the_supervisor_and_with_the_proxy(world: World) -> None:
    """Whoever of them is gone, nobody is left to hold sockets of the sandbox."""
    found = drive(
        world,
        "def gone(pid):\n"
        "    handle = os.pidfd_open(pid); poller = select.poll(); poller.register(handle, select.POLLIN)\n"
        "    return lambda: bool(poller.poll(10000))\n"
        "a = Scene(''); wait = gone(a.gate._pid); a.line.close(); first = wait(); a.end()\n"
        "b = Scene(''); wait = gone(b.gate._pid); os.close(b.gate._life); b.gate._life = -1; second = wait(); b.end()\n"
        "show([first, second])\n",
    )
    assert found == [True, True]


def test_cannot_cut_the_host_off(world: World) -> None:
    """A gate that is sent to a process with the network of its own host refuses.

    In a namespace of the test's making, which stands for the host's.
    """
    must_work(shutil.which("unshare") and shutil.which("ip"), "needs unshare and ip")
    found = drive(
        world,
        "import fcntl\n"
        "subprocess.run(['ip', 'link', 'set', 'lo', 'up'], check=True)\n"
        "g = gate.forked(gate.Orders(capture=True, listeners=(('tcp', '*', 80),)))\n"
        "g.attend(os.getpid()); why = g.ready(); g.dismiss()\n"
        "refused = subprocess.run(['ip', 'route', 'show', 'table', 'local', 'default'], capture_output=True, text=True).stdout\n"
        # The control: the routes can be made here.
        "netns.add_routes(ipv6=False)\n"
        "made = subprocess.run(['ip', 'route', 'show', 'table', 'local', 'default'], capture_output=True, text=True).stdout\n"
        "show([why, refused, made.split()[:2]])\n",
        "unshare", "-rn",
    )  # fmt: skip
    assert found == ["the sandbox has no network namespace of its own", "", ["local", "default"]]


def test_cannot_be_traced_by_its_own_user(world: World) -> None:
    """Not dumpable: its descriptors are nobody's but root's to take. The control is the driver."""
    found = drive(
        world,
        "s = Scene('')\n"
        "show([os.stat(f'/proc/{s.gate._pid}/fd').st_uid, os.stat('/proc/self/fd').st_uid])\n"
        "s.end()\n",
    )
    assert found == [0, world.runner.uid]


def test_holds_nothing_of_the_supervisor(world: World) -> None:
    """Three descriptors for its work, and /dev/null: no terminal, no pipe of somebody else."""
    must_work(IS_ROOT, "only root may look into a process that is not dumpable")
    script = world.write(
        "driver.py",
        DRIVER + "os.dup2(os.open('/etc/passwd', os.O_RDONLY), 77)\n"
        "s = Scene('', [('tcp', '*', 80)])\n"
        "print(s.gate._pid, flush=True); sys.stdin.read(); s.end()\n",
    )
    with world.runner.popen(
        [world.runner.python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=world.env({"PYTHONPATH": str(world.runner.source)}),
    ) as process:  # fmt: skip
        assert process.stdout is not None
        at = f"/proc/{int(process.stdout.readline())}/fd"
        found = sorted(os.readlink(f"{at}/{fd}").split(":")[0] for fd in os.listdir(at))
        process.communicate()
    assert found == ["/dev/null", "/dev/null", "/dev/null", "pipe", "pipe", "socket"]


def test_many_listeners_are_more_than_a_default_limit(world: World) -> None:
    """2,000 listeners, with the limit of descriptors that most shells have."""
    found = drive(
        world,
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "wanted = [('tcp', f'10.0.{n // 256}.{n % 256}', 8000) for n in range(2000)]\n"
        "s = Scene('', wanted)\n"
        "show(len(s.sockets))\n"
        "s.end()\n",
    )
    assert found == 2000
