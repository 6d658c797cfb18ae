"""Two network namespaces of the test's own, and the real proxy between them.

`inside` is what a sandbox has: every address is local, the real gate's listeners take them.
`outside` is the host: a loopback, an /etc/hosts of the test's, and servers that the test makes.
Neither needs rights. Sockets for the test are made by a small process in each namespace, and come
by descriptor: so a test is plain code with plain sockets on both sides.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # A process and the line that ends it.
    Holder = tuple[int, socket.socket]

SOURCE = Path(__file__).resolve().parents[2] / "src"
PROGRAM = SOURCE / "agent_sandbox" / "proxy" / "egress.py"
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
UNSHARE = {"x86_64": 272, "aarch64": 97}
MOUNT = {"x86_64": 165, "aarch64": 40}
MS_BIND = 4096
SIOCSIFFLAGS, IFF_UP_RUNNING = 0x8914, 0x41
SECONDS = 30.0
# What the host has of its own in `outside`; the name server is the test's, or nobody.
ETC = ("hosts", "resolv.conf")
RESOLVER = "127.0.0.9"
# What programs on this machine would add to a name that is not found.
SEARCH = "corp.test"
# For controls: the same proxy, without one of its protections.
WITHOUT = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from agent_sandbox.policy import network
from agent_sandbox.proxy import egress, streams
{{}}
egress.main()
"""
LISTENERS = (
    ("udp", "*", 53), ("tcp", "*", 53), ("tcp", "*", 80), ("tcp", "*", 443), ("tcp", "*", 22),
    ("tcp", "127.0.0.1", 3128),
)  # fmt: skip


# --- in the namespaces


def _enter(etc: str) -> None:
    from agent_sandbox.launch.syscalls import syscall

    machine = platform.machine()
    flags = CLONE_NEWUSER | CLONE_NEWNET | (CLONE_NEWNS if etc else 0)
    syscall(UNSHARE[machine], flags)
    with socket.socket() as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP_RUNNING))
    for name in ETC if etc else ():
        source, place = f"{etc}/{name}\0".encode(), os.path.realpath(f"/etc/{name}").encode()
        syscall(MOUNT[machine], source, place + b"\0", b"none\0", MS_BIND, 0)


def _make(kind: str, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    made = socket.socket(family, socket.SOCK_DGRAM if "udp" in kind else socket.SOCK_STREAM)
    if kind == "udp-listen":
        made.bind((address, port))
    elif kind == "listen":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((address, port))
        made.listen(4096)
    else:
        made.settimeout(SECONDS)
        made.connect((address, port))
    made.settimeout(None)
    return made


def _flood(address: str, port: int, count: int, data: bytes) -> tuple[int, list[Holder]]:
    """Begin as many connections as wanted; those that a listener has no room for wait.

    As many processes hold them as the limit on descriptors asks for: each ends with its line.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    begun = 0
    holders: list[Holder] = []
    while begun < count:
        part = min(count - begun, most - 100)
        mine, its = socket.socketpair()
        pid = os.fork()
        if not pid:
            for line in (mine, *(line for _, line in holders)):
                line.close()
            held = [_begin(address, port, data) for _ in range(part)]
            its.send(b"x" * bool(held))
            its.recv(1)
            os._exit(0)
        its.close()
        begun += part * len(mine.recv(1))
        holders.append((pid, mine))
    return begun, holders


def _begin(address: str, port: int, data: bytes) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((address, port))
    with contextlib.suppress(OSError):
        one.send(data)
    return one


def _let_go(holders: list[Holder]) -> None:
    """End those who hold connections, and wait until they have."""
    while holders:
        pid, line = holders.pop()
        line.close()
        os.waitpid(pid, 0)


def _serve(line: socket.socket) -> None:
    """Make sockets until nobody asks any more."""
    held: list[Holder] = []
    while data := line.recv(4096):
        order = json.loads(data)
        if order["kind"] == "spawn":
            # The proxy, in this namespace, with descriptors of the test's.
            _, fds, _, _ = socket.recv_fds(line, 1, 4)
            actions = [(os.POSIX_SPAWN_DUP2, fd, 50 + at) for at, fd in enumerate(fds)]
            program = (
                ["-c", WITHOUT.format(order["without"])] if order["without"] else [str(PROGRAM)]
            )
            argv = [sys.executable, "-I", "-S", *program, "50", "51", "52"]
            argv += order["arguments"]
            pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)
            for fd in fds:
                os.close(fd)
            line.send(str(pid).encode())
            continue
        if order["kind"] == "flood":
            data = order["data"].encode()
            begun, held = _flood(order["address"], order["port"], order["count"], data)
            line.send(str(begun).encode())
            continue
        if order["kind"] == "release":
            _let_go(held)
            line.send(b"ok")
            continue
        try:
            made = _make(order["kind"], order["address"], order["port"])
        except OSError as error:
            line.send(json.dumps([error.errno, str(error)]).encode())
            continue
        with made:
            socket.send_fds(line, [b"ok"], [made.fileno()])


def _gate(line: int, life: int, listeners: Sequence[tuple[str, str, int]]) -> None:
    """The real gate's work, in a namespace that is there already."""
    from agent_sandbox.launch import netns

    ipv6 = netns.has_ipv6()
    netns.add_routes(ipv6=ipv6)
    post = netns.Post(line, life, ipv6=ipv6)
    post.announce(netns.listen_all(listeners, ipv6=ipv6))
    post.serve()


def main() -> None:
    """A maker of sockets; with a gate beside it if there are descriptors for one."""
    sys.path.insert(0, str(SOURCE))
    orders = json.loads(sys.argv[1])
    _enter(orders["etc"])
    if orders["gate"] >= 0 and os.fork() == 0:
        _gate(orders["gate"], orders["life"], [tuple(row) for row in orders["listeners"]])
        os._exit(0)
    line = socket.socket(fileno=orders["line"])
    line.send(b"ready")
    _serve(line)
    os._exit(0)


# --- in the test


class Space:
    """A namespace, by the process that makes sockets in it."""

    def __init__(
        self, *, etc: str = "", gate: int = -1, life: int = -1,
        listeners: Sequence[tuple[str, str, int]] = (),
    ) -> None:  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        orders = {
            "line": theirs.fileno(), "etc": etc, "gate": gate, "life": life,
            "listeners": listeners,
        }  # fmt: skip
        fds = [fd for fd in (theirs.fileno(), gate, life) if fd >= 0]
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(orders)], pass_fds=fds, cwd="/"
        )
        theirs.close()
        self._line = ours
        self._line.settimeout(3 * SECONDS)
        self._lock = threading.Lock()
        assert self._line.recv(16) == b"ready", "no network namespace could be made"

    def _ask(self, kind: str, address: str = "", port: int = 0) -> socket.socket:
        order = json.dumps({"kind": kind, "address": address, "port": port}).encode()
        with self._lock:
            self._line.send(order)
            data, fds, _, _ = socket.recv_fds(self._line, 4096, 1)
        if not fds:
            raise OSError(*json.loads(data))
        made = socket.socket(fileno=fds[0])
        made.settimeout(SECONDS)
        return made

    def connect(self, address: str, port: int) -> socket.socket:
        """A client's connection in this namespace."""
        return self._ask("tcp", address, port)

    def udp(self, address: str, port: int) -> socket.socket:
        """A connected datagram socket."""
        return self._ask("udp", address, port)

    def udp_listen(self, address: str, port: int) -> socket.socket:
        """A server's datagram socket."""
        return self._ask("udp-listen", address, port)

    def listen(self, address: str, port: int) -> socket.socket:
        """A server's listener."""
        return self._ask("listen", address, port)

    def flood(self, address: str, port: int, count: int, data: str = "") -> int:
        """Hold so many connections; each sends a few bytes if it can."""
        order = {"kind": "flood", "address": address, "port": port, "count": count, "data": data}
        with self._lock:
            self._line.send(json.dumps(order).encode())
            return int(self._line.recv(64))

    def release(self) -> None:
        """Let the flood go."""
        with self._lock:
            self._line.send(json.dumps({"kind": "release"}).encode())
            self._line.recv(64)

    def spawn(self, fds: Sequence[int], arguments: Sequence[str] = (), without: str = "") -> int:
        """Start the proxy in this namespace."""
        order = {"kind": "spawn", "arguments": arguments, "without": without}
        with self._lock:
            self._line.send(json.dumps(order).encode())
            socket.send_fds(self._line, [b"x"], list(fds))
            return int(self._line.recv(64))

    def close(self) -> None:
        """End the process, and with it the namespace."""
        self._line.close()
        self._process.wait(SECONDS)


class Lab:
    """The proxy with everything around it; the report at the end."""

    def __init__(
        self, hosts: Mapping[str, Sequence[str]], allow: Sequence[str] = (),
        deny: Sequence[str] = (), *, mode: str = "allow", without: str = "",
        listeners: Sequence[tuple[str, str, int]] = LISTENERS, arguments: Sequence[str] = (),
        **orders: Any,
    ) -> None:  # fmt: skip
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._folder.chmod(0o755)
        etc = self._folder / "etc"
        etc.mkdir(mode=0o755)
        table = [f"{address} {name}\n" for name, found in hosts.items() for address in found]
        (etc / "hosts").write_text("".join(table))
        (etc / "resolv.conf").write_text(
            f"nameserver {RESOLVER}\nsearch {SEARCH}\noptions timeout:1 attempts:1\n"
        )
        gate, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        life, self._life = os.pipe()
        self.control = str(self._folder / "control")
        self.inside = Space(gate=gate.fileno(), life=life, listeners=listeners)
        self.outside = Space(etc=str(etc))
        gate.close()
        os.close(life)
        self._supervisor, theirs = socket.socketpair()
        self._supervisor.settimeout(SECONDS)
        told = {
            "mode": mode, "allow": [[text, "test"] for text in allow],
            "deny": [[text, "test"] for text in deny], "control": self.control, **orders,
        }  # fmt: skip
        memory = os.memfd_create("orders")
        os.write(memory, json.dumps(told).encode())
        passed = [memory, line.fileno(), theirs.fileno()]
        self.pid = self.outside.spawn(passed, arguments, without)
        for one in (line, theirs):
            one.close()
        os.close(memory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._life)
        self._supervisor.close()
        self.inside.close()
        self.outside.close()
        self._stack.close()

    def report(self) -> dict[str, Any]:
        """End the proxy, as a supervisor does."""
        self._supervisor.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := self._supervisor.recv(1 << 16):
            data += chunk
        report: dict[str, Any] = json.loads(data)
        return report

    def kill_supervisor(self) -> None:
        """What the proxy sees when its supervisor is gone."""
        self._supervisor.close()

    def resolve(self, name: str, kind: int = 1) -> str:
        """Ask the stub, as a program inside would."""
        from agent_sandbox.proxy import dns

        question = b"\x12\x34\x01\0\0\1\0\0\0\0\0\0" + dns.wire(name) + bytes((0, kind, 0, 1))
        with self.inside.udp("127.0.0.1", 53) as sock:
            sock.send(question)
            answer = sock.recv(512)
        assert answer[:2] == b"\x12\x34"
        assert answer[3] & 15 == 0, f"code {answer[3] & 15}"
        size = {1: 4, 28: 16}[kind]
        family = {1: socket.AF_INET, 28: socket.AF_INET6}[kind]
        return socket.inet_ntop(family, answer[-size:])

    def to(self, name: str, port: int, kind: int = 1) -> socket.socket:
        """A connection to a name from inside, as a program without any configuration makes it."""
        return self.inside.connect(self.resolve(name, kind), port)

    def proxy(self) -> socket.socket:
        """A connection to the proxy port."""
        return self.inside.connect("127.0.0.1", 3128)

    def order(self, **order: object) -> dict[str, Any]:
        """Speak to the control socket."""
        # The proxy is loaded with the first connection, or a moment later.
        until(lambda: os.path.exists(self.control))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(SECONDS)
            sock.connect(self.control)
            sock.sendall(json.dumps(order).encode() + b"\n")
            answer: dict[str, Any] = json.loads(everything(sock, b"\n"))
            return answer


def everything(sock: socket.socket, until: bytes = b"") -> bytes:
    """All that comes, or as much as ends in `until`; a reset is an end."""
    data = b""
    while not (until and data.endswith(until)):
        try:
            chunk = sock.recv(1 << 16)
        except ConnectionError:
            break
        if not chunk:
            break
        data += chunk
    return data


class Server:
    """Takes connections; keeps all that each has sent, and answers with a text and the end."""

    def __init__(self, listener: socket.socket, answer: bytes = b"", *, until: bytes = b"") -> None:
        self._listener = listener
        self._listener.settimeout(None)
        self._answer = answer
        self._until = until
        self._lock = threading.Condition()
        self.heard: list[bytes] = []
        self.count = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.count += 1
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client:
            client.settimeout(SECONDS)
            data = b""
            with contextlib.suppress(OSError):
                data = everything(client, self._until)
                client.sendall(self._answer)
                client.shutdown(socket.SHUT_WR)
            with self._lock:
                self.heard.append(data)
                self._lock.notify_all()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._listener.close()

    def wait(self, count: int = 1) -> list[bytes]:
        """What was heard, once so many connections have ended."""
        with self._lock:
            assert self._lock.wait_for(lambda: len(self.heard) >= count, SECONDS), self.heard
            return list(self.heard)


class Resolver:
    """A real name server outside: keeps what it was asked, and answers from a list, in order."""

    def __init__(self, sock: socket.socket, *addresses: str) -> None:
        self._sock = sock
        self._sock.settimeout(None)
        self._addresses = list(addresses)
        self.asked: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        from agent_sandbox.proxy import dns

        with contextlib.suppress(OSError):
            while True:
                data, client = self._sock.recvfrom(1024)
                if not data:
                    return
                question = dns.parse(data)
                self.asked.append(question.name)
                found = b""
                if question.kind == dns.A and self._addresses:
                    found = socket.inet_aton(self._addresses.pop(0))
                self._sock.sendto(dns.answer(question, found), client)

    def close(self) -> None:
        """End it."""
        # shutdown(2) wakes the thread, although a datagram socket has nothing to shut down.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(SECONDS)
        self._sock.close()


def hello(name: str | None) -> bytes:
    """A ClientHello as OpenSSL makes it."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


def until(condition: Any, seconds: float = SECONDS) -> Any:
    """Wait for something that has no event of its own."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    main()
