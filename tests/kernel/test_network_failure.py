"""Ports that lead inside, and what happens when a part of the network fails or dies."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.conftest import World, eventually
from kernel.internet import CURL, LOCAL_PORT, SITE, gate_of, helpers, proxy_of

if TYPE_CHECKING:
    from kernel.internet import Internet

pytestmark = [pytest.mark.kernel, pytest.mark.network]


# --- ports out


@pytest.mark.parametrize("mode", ["off", "public"])
def test_a_published_port_leads_inside(net: Internet, world: World, mode: str) -> None:
    """From the host's loopback to a server inside, which itself has no network with `off`."""
    flags = (f"--network={mode}", "--publish", "18080:8000")
    server = "import http.server\nhttp.server.test(http.server.SimpleHTTPRequestHandler, port=8000, bind='127.0.0.1')"
    world.write("hello.txt", "from inside\n")
    with net.popen(world, *world.argv(*flags, "python3", "-c", server)) as process:
        try:
            call = ("curl", "-sS", "-m", "5", "http://127.0.0.1:18080/hello.txt")
            assert eventually(lambda: net.run(world, *call).stdout == "from inside\n")
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.communicate(timeout=20)
    assert net.run(world, *call).returncode == 7
    assert eventually(lambda: not helpers(world))


def test_a_published_port_that_is_taken_stops_the_start(net: Internet, world: World) -> None:
    """Before the command runs, not at its end."""
    done = net.sh(world, "touch ran", "--network=off", "--publish", f"[::1]:{LOCAL_PORT}:80")
    assert done.returncode == 125
    assert "cannot publish port" in done.stderr
    assert not world.path("ran").exists()
    assert eventually(lambda: not helpers(world))


# --- when something fails or dies

BROKEN = {
    "": "",
    "the gate cannot join": "netns.join = boom",
    "there are no routes": "netns.add_routes = boom",
    "a listener cannot be made": "netns.listen_all = boom",
    "the gate dies": "netns.wait_for_loopback = lambda init: os._exit(0)",
    "the proxy ends at once": "was = egress.Proxy.__init__; egress.Proxy.__init__ = lambda self, told, line, **_: was(self, told, line, program='/dev/null')",
    "there is no interpreter": "sys.executable = '/nonexistent'",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_cannot_start_without_control(world: World, fault: str) -> None:
    """Whatever fails before the command is let go stops it. The control: nothing is broken."""
    code = (
        "import os, sys\n"
        "from agent_sandbox.launch import egress, netns\n"
        "from agent_sandbox.cli.run import main\n"
        "def boom(*_, **__): raise OSError(1, 'Not today')\n"
        f"{BROKEN[fault]}\n"
        "sys.exit(main(['--network=public', 'touch', 'ran']))\n"
    )
    done = world.python(code)
    assert done.returncode == (125 if fault else 0), done.stderr
    assert world.path("ran").exists() is (not fault)
    assert not fault or "cannot control the sandbox's network: " in done.stderr
    assert eventually(lambda: not helpers(world))
    assert world.workspaces() == []


def test_cannot_change_the_network_from_inside(net: Internet, world: World) -> None:
    """No route, address or interface can be changed. In a namespace of one's own, it can be."""
    tries = (
        "ip route del local default dev lo table local", "ip link set lo down",
        "ip addr add 192.0.2.1/32 dev lo", "ip link add dummy0 type dummy",
    )  # fmt: skip
    script = "; ".join(f"{one} 2>/dev/null && echo changed" for one in tries)
    done = net.sh(world, f"{script}; {CURL} http://site.example/", "--allow", "site.example")
    assert done.stdout == f"site.example at ::ffff:{SITE}\n", done.stderr
    control = world.outside("unshare", "-rn", "sh", "-c", f"{tries[2]} && echo changed")
    assert control.stdout == "changed\n", control.stderr


WAITING = (
    f"{CURL} http://site.example/; echo first; read go; {CURL} http://site.example/; echo $?; "
    f"{CURL} http://both.example:8443/ ; echo $?; exit 5"
)


def waiting(net: Internet, world: World) -> subprocess.Popen[str]:
    """A command that has used the network and waits for a line before it does so again."""
    flags = ("--allow", "site.example", "--allow", "both.example:8443")
    process = net.popen(world, *world.argv(*flags, "sh", "-c", WAITING))
    assert process.stdout is not None
    assert process.stdout.readline() == f"site.example at ::ffff:{SITE}\n"
    assert process.stdout.readline() == "first\n"
    return process


def test_a_killed_proxy_takes_the_network_and_nothing_else(net: Internet, world: World) -> None:
    """The command goes on without; nothing becomes reachable; the end says so."""
    with waiting(net, world) as process:
        (pid,) = proxy_of(world)
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not gate_of(net, world))
        out, err = process.communicate("go\n", timeout=60)
    codes = [line for line in out.splitlines() if line.isdigit()]
    assert len(codes) == 2
    assert "0" not in codes
    assert process.returncode == 5
    assert "proxy ended before the command did" in err
    assert eventually(lambda: not helpers(world))


def test_a_killed_gate_widens_nothing(net: Internet, world: World) -> None:
    """What the proxy has already goes on; a port that is needed later does not come."""
    with waiting(net, world) as process:
        (pid,) = gate_of(net, world)
        os.kill(pid, signal.SIGKILL)
        out, err = process.communicate("go\n", timeout=60)
    assert out.splitlines()[:2] == [f"site.example at ::ffff:{SITE}", "0"]
    assert out.splitlines()[-1] != "0"
    assert process.returncode == 5
    assert "sockets was killed" in err
    assert eventually(lambda: not helpers(world))


def test_nobody_outlives_a_killed_supervisor(net: Internet, world: World) -> None:
    """Gate, proxy, keeper and sandbox end by themselves."""
    with waiting(net, world) as process:
        (gate,) = gate_of(net, world)
        status = Path(f"/proc/{gate}/status").read_text()
        supervisor = int(status.partition("PPid:\t")[2].split()[0])
        os.kill(supervisor, signal.SIGKILL)
        process.communicate(timeout=20)
    assert eventually(lambda: not helpers(world))


def test_leaves_no_process_and_no_file(net: Internet, world: World) -> None:
    """After runs with and without traffic, and one that was ended."""
    net.sh(world, f"{CURL} http://site.example/", "--allow", "site.example")
    net.sh(world, "true", "--network=public")
    net.sh(world, "sleep 60", "--network=public", "--timeout", "0.2")
    assert eventually(lambda: not helpers(world))
    assert world.workspaces() == []


def test_a_command_that_ends_at_once_does_not_wait_for_the_proxy(
    net: Internet, world: World
) -> None:
    """Idle runs never load the proxy: its process says that there was nothing, and ends."""
    net.sh(world, "true", "--network=public")
    times = {}
    for mode in ("off", "allow"):
        tries = []
        for _ in range(7):
            begun = time.perf_counter()
            assert net.sandbox(world, f"--network={mode}", "true").returncode == 0
            tries.append(time.perf_counter() - begun)
        times[mode] = min(tries)
    # The bar is 30 ms; two cores and other tests may be at work.
    assert times["allow"] - times["off"] < 0.06, times
