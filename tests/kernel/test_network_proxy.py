"""The network that asks, end to end: real clients in real sandboxes, on an internet of its own."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kernel.conftest import World, eventually
from kernel.internet import BARE, CURL, LOCAL_PORT, PRIVATE, SITE, SITE6, helpers

if TYPE_CHECKING:
    from kernel.internet import Internet

pytestmark = [pytest.mark.kernel, pytest.mark.network]

LOCAL = f"http://127.0.0.1:{LOCAL_PORT}/"


def certificate(net: Internet, world: World) -> str:
    """The servers' certificate, where a sandbox sees it."""
    return str(world.write("public.pem", (net.base / "public.pem").read_text()))


# --- clients


def test_can_reach_an_allowed_host_without_any_setting(net: Internet, world: World) -> None:
    """By name, on 80 and 443, IPv4 and IPv6; the server sees the name that was asked for."""
    pem = certificate(net, world)
    script = (
        f"{CURL} http://site.example/; {CURL} http://six.example/; "
        f"{CURL} --cacert {pem} https://site.example/; {CURL} -6 --cacert {pem} https://six.example/"
    )
    done = net.sh(world, script, "--allow", "site.example", "--allow", "six.example")
    assert done.stdout.splitlines() == [
        f"site.example at ::ffff:{SITE}", f"six.example at {SITE6}",
        f"site.example at ::ffff:{SITE}", f"six.example at {SITE6}",
    ], done.stderr  # fmt: skip
    assert done.returncode == 0
    assert done.stderr == ""


def test_can_reach_an_allowed_host_through_the_proxy_variables(net: Internet, world: World) -> None:
    """HTTP, CONNECT and SOCKS on one port."""
    pem = certificate(net, world)
    socks = f"{CURL} --socks5-hostname 127.0.0.1:3128"
    script = (
        f"curl -sS -v http://site.example/ 2>&1 | grep -ci 'connected to 127.0.0.1.*3128'; "
        f"curl -sS --cacert {pem} https://site.example/; {socks} http://site.example/"
    )
    done = net.sh(world, script, "--allow", "site.example")
    assert done.stdout.splitlines() == ["1", *[f"site.example at ::ffff:{SITE}"] * 2], done.stderr


def test_can_reach_a_high_port_that_a_rule_names(net: Internet, world: World) -> None:
    """The port is taken on the stand-in address alone, before the name is answered."""
    script = f"{CURL} http://site.example:8080/; {CURL} http://site.example:9000/"
    done = net.sh(world, script, "--allow", "site.example:8080")
    assert done.stdout == f"site.example:8080 at ::ffff:{SITE}\n"
    assert "port 9000" in done.stderr


def test_can_reach_an_allowed_address(net: Internet, world: World) -> None:
    """Literals and networks; what is not public has to be named by its address."""
    script = f"{CURL} http://{SITE}/; {CURL} 'http://[{SITE6}]/'; {CURL} http://{PRIVATE}:8080/"
    flags = ("--allow", "93.184.216.0/24", "--allow", f"[{SITE6}]", "--allow", f"{PRIVATE}:8080")
    done = net.sh(world, script, *flags)
    assert done.stdout.splitlines() == [
        f"{SITE} at ::ffff:{SITE}", f"[{SITE6}] at {SITE6}", f"{PRIVATE}:8080 at ::ffff:{PRIVATE}",
    ], done.stderr  # fmt: skip


def test_can_reach_any_of_a_thousand_addresses(net: Internet, world: World) -> None:
    """A network of 256 with five ports: more listeners than the usual limit of descriptors."""
    flags = [f"--allow=10.77.0.0/24:{port}" for port in (8080, 8443, 9000, 9001, 9002)]
    script = f"{CURL} http://{PRIVATE}:8080/; {CURL} http://{PRIVATE}:9000/"
    argv = world.argv(*flags, "sh", "-c", script)
    done = net.run(world, "sh", "-c", 'ulimit -S -n 1024; exec "$@"', "sh", *argv)
    assert done.stdout.splitlines() == [
        f"{PRIVATE}:{p} at ::ffff:{PRIVATE}" for p in (8080, 9000)
    ], done.stderr


def test_can_reach_one_named_service_on_the_host(net: Internet, world: World) -> None:
    """`localhost:PORT`, and no other port there."""
    script = f"{CURL} {LOCAL}; {CURL} http://localhost:{LOCAL_PORT}/; {CURL} http://127.0.0.1:80/"
    done = net.sh(world, script, "--allow", f"localhost:{LOCAL_PORT}")
    assert done.stdout.splitlines()[:2] == [
        f"{h}:{LOCAL_PORT} at ::1" for h in ("127.0.0.1", "localhost")
    ]
    assert "refused" in done.stdout.splitlines()[2]


def test_large_bodies_arrive_whole_both_ways(net: Internet, world: World) -> None:
    """More than any buffer holds."""
    script = (
        f"{CURL} http://site.example/size=30000000 | wc -c; "
        f"head -c 5000000 /dev/urandom > up; {CURL} --data-binary @up http://site.example/ | cmp - up && echo same"
    )
    done = net.sh(world, script, "--allow", "site.example")
    assert done.stdout.split() == ["30000000", "same"], done.stderr


def test_a_server_inside_keeps_its_ports(net: Internet, world: World) -> None:
    """8080 and every other port that nobody has named is the command's own."""
    script = (
        "python3 -m http.server 8080 --bind 0.0.0.0 >/dev/null 2>&1 & "
        f"for i in $(seq 100); do {CURL} http://127.0.0.1:8080/ >/dev/null 2>&1 && break; sleep 0.05; done; "
        "curl -sS http://localhost:8080/ | grep -q listing && echo served; kill $!"
    )
    done = net.sh(world, script, "--network=public")
    assert done.stdout == "served\n", done.stderr


# --- refusals


def test_a_refusal_explains_itself(net: Internet, world: World) -> None:
    """HTTP in a page, TLS by an alert, SSH by a text; at the end one line with all of them."""
    pem = certificate(net, world)
    ssh = (
        "import socket; s = socket.create_connection(('other.example', 22)); s.sendall(b'SSH-2.0-x\\r\\n'); "
        "data = b''\nwhile chunk := s.recv(999): data += chunk\nprint(b'other.example:22' in data)"
    )
    script = (
        f"{CURL} -w '%{{http_code}}\\n' http://other.example/; {CURL} --cacert {pem} https://other.example/; "
        f'{BARE} python3 -c "{ssh}"; curl -sS --cacert {pem} https://other.example/; exit 7'
    )
    done = net.sh(world, script, "--allow", "site.example")
    assert done.returncode == 7
    lines = done.stdout.splitlines()
    assert "other.example:80 is refused" in lines[0]
    assert "--allow" in lines[1]
    assert lines[2] == "see /run/agent-sandbox/README.md"
    assert lines[3:] == ["403", "True"]
    assert "access denied" in done.stderr
    assert "CONNECT tunnel failed, response 403" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("agent-sandbox: notice: 3 hosts refused: other.example:443, ")
    assert "(allow with --allow other.example:443 " in last


def test_an_uncaptured_port_is_refused_at_once(net: Internet, world: World) -> None:
    """Nobody waits for a time limit."""
    script = (
        f"{BARE} python3 -c \"\nimport socket, time\nfor host in ('other.example', '{SITE}', '2606:4700::1'):\n"
        "    begun = time.monotonic()\n"
        "    try: socket.create_connection((host, 8081)); print('connected')\n"
        "    except ConnectionRefusedError: print('refused')\n"
        '    assert time.monotonic() - begun < 1\n"'
    )
    done = net.sh(world, script, "--network=public")
    assert done.stdout.split() == ["refused"] * 3, done.stderr


@pytest.mark.parametrize(
    ("flags", "url"),
    [
        (("--network=allow",), "http://site.example/"),
        (("--network=allow",), f"http://{SITE}/"),
        (("--network=allow",), f"http://[{SITE6}]/"),
        (("--network=allow",), f"http://[::ffff:{SITE}]/"),
        (("--allow", "site.example"), "http://other.example/"),
        (("--allow", "site.example"), f"http://{SITE}/"),
        (("--network=public",), f"http://{PRIVATE}/"),
        (("--network=public",), "http://inner.example/"),
        (("--network=public", "--allow", "inner.example"), "http://inner.example/"),
        (("--network=public", "--deny", "site.example"), "http://site.example/"),
        (("--network=public",), "http://10.77.0.1/"),
        (("--network=public",), "http://93.184.216.1:80/"),
        (("--network=learn",), "http://loop.example/"),
    ],
)
def test_cannot_reach_what_the_policy_refuses(
    net: Internet, world: World, flags: tuple[str, ...], url: str
) -> None:
    """Directly, through the proxy port and by SOCKS. The control: nothing but the policy differs."""
    here = net.run(world, "sh", "-c", f"{CURL} -o /dev/null -w '%{{http_code}}' {url}")
    # Addresses of the host itself and its loopback have no server on 80: there the refusal counts.
    own = any(part in url for part in ("10.77.0.1", "216.1:", "loop."))
    assert here.stdout == ("000" if own else "200"), here.stderr
    tries = ("", "-x http://127.0.0.1:3128", "--socks5-hostname 127.0.0.1:3128")
    script = "; ".join(f"{CURL} -o /dev/null -w '%{{http_code}}\\n' {how} '{url}'" for how in tries)
    done = net.sh(world, script, *flags)
    assert "200" not in done.stdout
    assert done.stdout.split()[:2] == ["403", "403"], (done.stdout, done.stderr)
    assert "refused" in done.stderr.splitlines()[-1]


def test_cannot_reach_services_on_the_hosts_loopback(net: Internet, world: World) -> None:
    """By any spelling of it. With the host's network, the control, each of them works."""
    urls = (
        LOCAL,
        f"http://localhost:{LOCAL_PORT}/",
        f"http://[::1]:{LOCAL_PORT}/",
        f"http://loop.example:{LOCAL_PORT}/",
    )
    script = "; ".join(
        f"{CURL} -x 'http://127.0.0.1:3128' --noproxy '' '{u}' -w '%{{http_code}}\\n' -o /dev/null"
        for u in urls
    )
    for mode in ("--network=public", "--network=learn", "--allow=site.example"):
        done = net.sh(world, script, mode)
        assert set(done.stdout.split()) == {"403"}, (mode, done.stdout, done.stderr)
    control = "; ".join(f"{CURL} '{u}' -w '%{{http_code}}\\n' -o /dev/null" for u in urls[1:3])
    assert set(net.sh(world, control, "--network=on").stdout.split()) == {"200"}


def listening(net: Internet) -> set[str]:
    """Addresses and ports on which somebody listens on the host, TCP and UDP."""
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{net.host}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" or table.startswith("udp"):
                found.add(f"{table} {fields[1]}")
    return found


def test_cannot_reach_another_sandbox(net: Internet, world: World) -> None:
    """Nothing of a sandbox's network is on the host, so no other sandbox finds it there.

    The control: from the same sandbox it is reached.
    """
    server = "echo up; exec python3 -m http.server 8000 --bind 127.0.0.1"
    call = f"{CURL} -o /dev/null -w '%{{http_code}}' http://127.0.0.1:8000/"
    before = listening(net)
    argv = world.argv("--network=public", "sh", "-c", f"({server}) & read go; {call}; kill $!")
    with net.popen(world, *argv) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert listening(net) == before
        proxied = call.replace("curl", "curl --noproxy '' -x http://127.0.0.1:3128")
        other = net.sh(world, f"{call}; {proxied}", "--network=public")
        assert other.stdout == "000403", other.stderr
        out, _ = process.communicate("go\n", timeout=30)
    assert out == "200"


# --- names


def test_names_come_from_the_stub_alone(net: Internet, world: World) -> None:
    """Our own resolv.conf, hosts and nsswitch.conf; none of the host's names."""
    done = net.sh(
        world,
        "cat /etc/resolv.conf; grep -c example /etc/hosts; grep ^hosts /etc/nsswitch.conf; getent ahostsv4 site.example",
        "--network=public",
    )
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "nameserver 127.0.0.1",
        "options timeout:2 attempts:1",
        "0",
        "hosts: files dns",
    ]
    assert lines[4].startswith(("198.18.", "198.19."))
    # The control: the host's own file has it.
    assert SITE in net.run(world, "getent", "hosts", "site.example").stdout


def test_cannot_carry_data_out_in_questions(net: Internet, world: World) -> None:
    """Allowed or not, by the C library or by hand: none arrives. With the host's network all do."""

    def asked() -> int:
        return int(net.run(world, "curl", "-sS", f"http://{SITE}/questions").stdout)

    by_hand = (
        "import socket\n"
        f"for address in ('{SITE}', '8.8.8.8', '127.0.0.53'):\n"
        "    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)\n"
        "    s.sendto(b'\\1\\2\\1\\0\\0\\1' + bytes(6) + b'\\4data\\3com\\0\\0\\1\\0\\1', (address, 53))\n"
        "    try: print(s.recv(99)[:2])\n"
        "    except OSError: print('none')\n"
    )
    world.write("ask.py", by_hand)
    script = "for i in 1 2 3; do getent hosts secret$i.site.example; getent hosts x$i.com; done; python3 ask.py"
    before = asked()
    for flags in (
        ("--network=public",),
        ("--allow", "*.com"),
        ("--network=allow",),
        ("--network=off",),
    ):
        done = net.sh(world, script, *flags)
        assert ("secret1.site.example" in done.stdout) is (flags != ("--network=off",))
    assert asked() == before
    net.sh(world, script, "--network=on")
    assert asked() > before + 6


def test_variables_name_our_proxy_and_no_other(net: Internet, world: World) -> None:
    """The user's own proxy is not there; with the host's network it is."""
    argv = (
        "env",
        "HTTPS_PROXY=http://corp:1",
        "NO_PROXY=x",
        *world.argv("--network=public", "env"),
    )
    found = dict(line.split("=", 1) for line in net.run(world, *argv).stdout.splitlines())
    for name in (
        "HTTP_PROXY",
        "http_proxy",
        "HTTPS_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        assert found[name] == "http://127.0.0.1:3128"
    assert found["NO_PROXY"] == found["no_proxy"] == "localhost,127.0.0.1,::1"
    assert found["NODE_USE_ENV_PROXY"] == "1"
    shared = ("env", "HTTPS_PROXY=http://corp:1", *world.argv("--network=on", "env"))
    assert "HTTPS_PROXY=http://corp:1" in net.run(world, *shared).stdout.splitlines()


# --- what is told


def test_a_report_lists_every_host(net: Internet, world: World) -> None:
    """With rule, count and bytes."""
    script = f"{CURL} http://site.example/ http://site.example/ >/dev/null; {CURL} http://other.example/ >/dev/null"
    path = world.base / "report.json"
    net.sh(world, script, "--allow", "site.example", "--report", str(world.path("~/report.json")))
    found = json.loads(world.path("~/report.json").read_text())["network"]
    by_host = {one["host"]: one for one in found}
    assert by_host["site.example"]["allowed"] is True
    assert by_host["site.example"]["count"] == 2
    assert by_host["site.example"]["rule"] == "site.example"
    assert by_host["site.example"]["received"] > 0
    assert by_host["other.example"]["allowed"] is False
    assert not path.exists()


def test_learn_prints_the_list_that_would_have_sufficed(net: Internet, world: World) -> None:
    """And it suffices."""
    script = f"{CURL} http://site.example/; {CURL} http://both.example:8443/"
    done = net.sh(world, script, "--network=learn", "--allow", "both.example:8443")
    (line,) = [x for x in done.stderr.splitlines() if "would have sufficed" in x]
    flags = line.partition("sufficed: ")[2].split()
    assert "--network=allow" in flags
    again = net.sh(world, script, *flags)
    assert again.stdout == done.stdout != ""
    assert again.stderr == ""


def test_a_library_gets_the_same(net: Internet, world: World) -> None:
    """Through the keeper's server, from a thread and from asyncio; nothing is left."""
    code = (
        "import asyncio, json, sys\n"
        "from agent_sandbox import Policy, Sandbox\n"
        "s = Sandbox(Policy(project=sys.argv[1], network='allow', allow=['site.example']))\n"
        f"argv = ['sh', '-c', '{CURL} http://site.example/; {CURL} http://other.example/ >/dev/null']\n"
        "found = [s.run(argv, capture=True), asyncio.run(s.arun(argv, capture=True))]\n"
        "with s.popen(['true']) as idle: idle.wait()\n"
        "print(json.dumps([[r.stdout, r.code, [[c.name, c.allowed] for c in r.network.contacts]] for r in found] + [len(idle.network.contacts)]))\n"
    )
    env = f"PYTHONPATH={world.runner.source}"
    done = net.run(world, "env", env, world.runner.python, "-c", code, str(world.project))
    assert done.returncode == 0, done.stderr
    one = [
        f"site.example at ::ffff:{SITE}\n", 0, [["other.example:80", False], ["site.example:80", True]],
    ]  # fmt: skip
    assert json.loads(done.stdout) == [one, one, 0]
    assert eventually(lambda: not helpers(world))


def test_a_wrapped_command_has_the_same_network(net: Internet, world: World) -> None:
    """`wrap` hands gate and proxy to a supervisor in another process."""
    code = (
        "import subprocess, sys\n"
        "from agent_sandbox import Policy, Sandbox\n"
        "s = Sandbox(Policy(project=sys.argv[1], allow=['site.example']))\n"
        f"with s.wrap(['sh', '-c', '{CURL} http://site.example/; {CURL} http://other.example/']) as w:\n"
        "    sys.exit(subprocess.run(w.argv, pass_fds=w.fds, env=w.env).returncode)\n"
    )
    env = f"PYTHONPATH={world.runner.source}"
    done = net.run(world, "env", env, world.runner.python, "-c", code, str(world.project))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"site.example at ::ffff:{SITE}\n")
    assert "other.example:80 is refused" in done.stdout
    assert eventually(lambda: not helpers(world))
