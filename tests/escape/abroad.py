"""What attacks on the network aim at: an isolated internet with servers that keep what they hear.

Sandboxes run on its host. Servers and the name server run in the test's own process, on sockets
that were made in the other namespaces: so the verdict is found outside.
"""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.proxy import dns
from conftest import IS_ROOT, must_work
from escape.attack import Attack, Run, finish
from kernel.conftest import eventually
from kernel.internet import Internet, helpers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from escape.attack import Scene, Step, Verdict

CLONE_NEWNET = 0x40000000
SITE, SITE6 = "93.184.216.34", "2606:4700:0:1::34"
LAN = "10.77.0.2"
# The host's own addresses on that cable.
OWN, OWN_LAN = "93.184.216.1", "10.77.0.1"
METADATA = "169.254.169.254"
# Above what Internet sets up. The kernel gives new namespaces to nobody for ping.
MORE = f"""
nsenter -t {{site}} -n ip addr add {METADATA}/32 dev cable
nsenter -t {{host}} -n ip route add {METADATA}/32 dev cable
nsenter -t {{host}} -n sh -c 'echo 0 2147483647 > /proc/sys/net/ipv4/ping_group_range'
"""
SECONDS = 10.0
IDLE_SECONDS = 0.3
SETTLED_SECONDS = 0.4
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
PORTS = (22, 80, 443, 8080)


class Here:
    """The internet of this test module."""

    net: Internet | None = None
    names: NameServer | None = None


@pytest.fixture(scope="module")
def abroad(places: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    """An internet for the module's attacks."""
    must_work(IS_ROOT, "needs root for network namespaces of its own")
    base = places / request.module.__name__
    base.mkdir()
    base.chmod(0o755)
    Here.net = Internet(base, ports="")
    try:
        script = MORE.format(host=Here.net.host, site=Here.net.site)
        subprocess.run(["sh", "-ec", script], check=True, capture_output=True)
        with on_site():
            Here.names = NameServer(bound(SITE, 53, socket.SOCK_DGRAM))
        yield
    finally:
        if Here.names is not None:
            Here.names.close()
        Here.net.end()


def net() -> Internet:
    """The internet of this module."""
    assert Here.net is not None
    return Here.net


def names() -> NameServer:
    """Its name server."""
    assert Here.names is not None
    return Here.names


# --- namespaces -----------------------------------------------------------------------------------


@contextlib.contextmanager
def within(pid: int) -> Iterator[None]:
    """Make sockets in the network namespace of a process. Only this thread goes there."""
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        assert libc.setns(there, CLONE_NEWNET) == 0
        try:
            yield
        finally:
            assert libc.setns(here, CLONE_NEWNET) == 0
    finally:
        os.close(here)
        os.close(there)


def on_site() -> contextlib.AbstractContextManager[None]:
    """Where the public addresses are."""
    return within(net().site)


def on_host() -> contextlib.AbstractContextManager[None]:
    """Where sandboxes are started."""
    return within(net().host)


def bound(address: str, port: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A server's socket; '' is every address of both families."""
    family = socket.AF_INET6 if ":" in address or not address else socket.AF_INET
    made = socket.socket(family, kind)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind((address or "::", port))
    if kind == socket.SOCK_STREAM:
        made.listen(512)
    return made


# --- servers --------------------------------------------------------------------------------------


class NameServer:
    """A real name server: keeps what it was asked; a name with two addresses has them in turns."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.asked: list[str] = []
        self.table: dict[str, list[str]] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, client = self._sock.recvfrom(1500)
                if not data:
                    return
                with contextlib.suppress(dns.Malformed):
                    self._sock.sendto(self._answer(dns.parse(data)), client)

    def _answer(self, question: dns.Question) -> bytes:
        self.asked.append(question.name)
        known = self.table.get(question.name.lower())
        if known is None:
            return dns.answer(question, code=dns.NXDOMAIN)
        if question.kind != dns.A:
            return dns.answer(question)
        # The next question gets the next one.
        known.append(known.pop(0))
        return dns.answer(question, socket.inet_aton(known[-1]))

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._sock.close()


class Recorder:
    """A server that keeps what each client has sent, answers requests, and ends with its client."""

    def __init__(self, listener: socket.socket, pid: int) -> None:
        self._listener = listener
        self._pid = pid
        self._lock = threading.Condition()
        self._talks: list[threading.Thread] = []
        self._knocks: set[bytes] = set()
        self.heard: list[bytearray] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                talk = threading.Thread(target=self._talk, args=(client,), daemon=True)
                self._talks.append(talk)
                talk.start()

    def _talk(self, client: socket.socket) -> None:
        data = bytearray()
        answered = 0
        with client, contextlib.suppress(OSError):
            client.settimeout(SECONDS)
            self.heard.append(data)
            while chunk := client.recv(1 << 16):
                data += chunk
                if data.startswith(b"knock"):
                    self.heard.remove(data)
                    with self._lock:
                        self._knocks.add(bytes(data))
                        self._lock.notify_all()
                    return
                while answered < data.count(b"\r\n\r\n"):
                    client.sendall(ANSWER)
                    answered += 1
                    # Who goes on does so at once.
                    client.settimeout(IDLE_SECONDS)
                if answered and b"connection: close" in data.lower():
                    return

    def settle(self) -> list[bytes]:
        """All that was said by those who came before this call and have ended."""
        knock = b"knock" + secrets.token_bytes(8)
        with within(self._pid), socket.socket(self._listener.family) as sock:
            sock.settimeout(SECONDS)
            name = self._listener.getsockname()
            sock.connect(("::1", name[1]) if name[0] == "::" else name)
            sock.sendall(knock)
            with self._lock:
                assert self._lock.wait_for(lambda: knock in self._knocks, SECONDS)
        for talk in list(self._talks):
            talk.join(SECONDS)
        return [bytes(one) for one in self.heard]

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


# --- steps ----------------------------------------------------------------------------------------


def served(*ports: int, at: str = "", own: bool = False) -> Step:
    """Servers of the site, or of the host itself."""

    def setup(scene: Scene) -> None:
        pid = net().host if own else net().site
        for port in ports or PORTS:
            with within(pid):
                recorder = Recorder(bound(at, port), pid)
            scene.kept.setdefault("recorders", []).append(recorder)
            scene.cleanup.callback(recorder.close)

    return setup


def named(**table: Sequence[str]) -> Step:
    """What the name server knows; `a_b` is a.b."""

    def setup(scene: Scene) -> None:
        names().table = {name.replace("_", "."): list(found) for name, found in table.items()}
        names().asked.clear()
        scene.cleanup.callback(names().table.clear)

    return setup


def searching(domain: str) -> Step:
    """A search domain in the host's settings."""

    def setup(scene: Scene) -> None:
        path = net().base / "resolv.conf"
        before = path.read_text()
        # In place: the file is mounted.
        path.write_text(before + f"search {domain}\n")
        scene.cleanup.callback(path.write_text, before)

    return setup


def listening(
    kind: int, address: str = SITE, port: int = 0, *, own: bool = False, proto: int = 0
) -> Step:
    """Somebody who waits for datagrams."""

    def setup(scene: Scene) -> None:
        with on_host() if own else on_site():
            if proto:
                made = socket.socket(socket.AF_INET, kind, proto)
            else:
                made = bound(address, port, kind)
        made.setblocking(False)
        scene.kept.setdefault("datagrams", []).append(made)
        scene.cleanup.callback(made.close)

    return setup


# --- verdicts -------------------------------------------------------------------------------------


def said(scene: Scene) -> list[bytes]:
    """What the servers have heard, one by one."""
    return [data for one in scene.kept.get("recorders", ()) for data in one.settle()]


def reached(scene: Scene) -> bool:
    """Whether any server had a client, or a datagram arrived."""
    if said(scene):
        return True
    for one in scene.kept.get("datagrams", ()):
        with contextlib.suppress(BlockingIOError):
            one.recv(1)
            return True
    return False


def heard(text: bytes) -> Verdict:
    """Whether a server was told this."""
    return lambda scene: any(text in data for data in said(scene))


def asked(scene: Scene) -> bool:
    """Whether the name server was asked for something with the scene's token in it."""
    return any(scene.token in name for name in names().asked)


# --- drives ---------------------------------------------------------------------------------------


def there(scene: Scene, argv: Sequence[str]) -> Run:
    """Start the sandbox on the internet's host."""
    return finish(net().popen(scene, *argv))


def watched(measure: Callable[[int], bool]) -> Callable[[Scene, list[str]], Run]:
    """The same; when the script says `done`, look at the proxy, then let the script end.

    `measure` says whether all is well. What it found is in `scene.kept`.
    """

    def drive(scene: Scene, argv: list[str]) -> Run:
        process = net().popen(scene, *argv)
        text = ""
        assert process.stdout is not None
        while line := process.stdout.readline():
            text += line
            if line == "done\n":
                pids = proxies(scene)
                scene.kept["unwell"] = not (len(pids) == 1 and measure(pids[0]))
                break
        end = finish(process)
        return Run(code=end.code, text=text + end.text)

    return drive


def proxies(scene: Scene) -> list[int]:
    """The proxy of this scene, real or weak."""
    programs = (b"/proxy/egress.py\0", b"/weak_proxy.py\0")
    found = []
    for pid in helpers(scene):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
            found += [pid] if any(program in line for program in programs) else []
    return found


def unwell(scene: Scene) -> bool:
    """Whether the proxy was not as it should be, when it was looked at."""
    return bool(scene.kept.get("unwell", False))


def peak_below(mebibytes: int) -> Callable[[int], bool]:
    """The most memory that the proxy has ever had."""

    def measure(pid: int) -> bool:
        with open(f"/proc/{pid}/status", encoding="ascii") as file:
            fields: dict[str, Any] = dict(line.split(":", 1) for line in file)
        return int(fields["VmHWM"].split()[0]) < mebibytes << 10

    return measure


def descriptors(pid: int) -> int:
    """How many the proxy has."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def descriptors_below(most: int, seconds: float) -> Callable[[int], bool]:
    """They become few, at the latest after some time."""
    return lambda pid: eventually(lambda: descriptors(pid) < most, seconds)


def descriptors_stay_below(most: int, least: int) -> Callable[[int], bool]:
    """They have become many, and then no more."""

    def measure(pid: int) -> bool:
        seen = [(time.monotonic(), descriptors(pid))]

        def is_settled() -> bool:
            now, count = time.monotonic(), descriptors(pid)
            if count != seen[-1][1]:
                seen[-1] = (now, count)
            return count > least and now - seen[-1][0] > SETTLED_SECONDS

        return eventually(is_settled) and descriptors(pid) < most

    return measure


# --- attacks ----------------------------------------------------------------------------------------

PUBLIC = ("--network=public",)
# A host that the attacker does not want.
ALLOWED = ("--allow", "site.example")
ELSEWHERE = ("--allow", "elsewhere.example")
# All of it can be done by anybody inside; nothing here is ours.
LIB = f"""
import os, socket, struct
SITE, SITE6, LAN, OWN, OWN_LAN, METADATA = {SITE!r}, {SITE6!r}, {LAN!r}, {OWN!r}, {OWN_LAN!r}, {METADATA!r}
def talk(s, *parts):
    s.settimeout(5)
    for part in parts: s.sendall(part)
    try: s.shutdown(socket.SHUT_WR)
    except OSError: pass
    got = b""
    while chunk := s.recv(65536): got += chunk
    print(got[:300])
def tcp(address, port, *parts):
    try: talk(socket.create_connection((address, port), 5), *parts)
    except (OSError, UnicodeError) as error: print(address, port, error)
def get(host, path="/", more=""):
    return f"GET {{path}} HTTP/1.1\\r\\nHost: {{host}}\\r\\n{{more}}\\r\\n".encode()
def proxied(first, answer, *parts):
    try:
        s = socket.create_connection(("127.0.0.1", 3128), 5); s.settimeout(5)
        s.sendall(first)
        if answer:
            granted = s.recv(4096); print(granted[:60])
            if not granted.startswith(answer): return
        talk(s, *parts)
    except OSError as error: print(error)
def connect(target, *parts): proxied(b"CONNECT " + target + b" HTTP/1.1\\r\\n\\r\\n", b"HTTP/1.1 200", *parts)
def socks5(form, host, port, *parts):
    address = (bytes((len(host),)) if form == 3 else b"") + host
    s = socket.create_connection(("127.0.0.1", 3128), 5); s.settimeout(5)
    try:
        s.sendall(b"\\5\\1\\0"); s.recv(2)
        s.sendall(bytes((5, 1, 0, form)) + address + struct.pack("!H", port))
        granted = s.recv(64); print(granted)
        if granted[1:2] == b"\\0": talk(s, *parts)
    except OSError as error: print(error)
def socks4(address, port, name=b"", *parts):
    head = b"\\4\\1" + struct.pack("!H", port) + address + b"\\0" + (name + b"\\0" if name else b"")
    proxied(head, b"\\0\\x5a", *parts)
def hello(name):
    import ssl
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    try: context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError: return out.read()
v4 = lambda text: socket.inet_pton(socket.AF_INET, text)
v6 = lambda text: socket.inet_pton(socket.AF_INET6, text)
"""


def attack(name: str, what: str, script: str, without: str, **more: object) -> Attack:
    """One that is tried on the internet of this module."""
    fields = {"invariant": 10, "python": True, "drive": there, "escaped": reached, **more}
    return Attack(name=name, what=what, script=LIB + script, without=without, **fields)  # type: ignore[arg-type]
