"""Secrets through the real proxy: TLS opened for hosts that have one, plain listeners, upgrades.

The servers are the test's own, with an authority of the test's own that the proxy is told to trust.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import cryptography
import pytest

from agent_sandbox.proxy import issuing

from .lab import LISTENERS, SECONDS, Lab, everything, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WEB, OTHER = "127.0.0.2", "127.0.0.3"
OPENED, PLAIN, BASED = "opened.test", "plain.test", "based.test"
STAND_IN, REAL = "sk-placeholder-0123456789", "sk-the-real-value-987654"
BASE_PORT = 3129
LIBRARY = str(Path(cryptography.__file__).parents[1])
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"


class TlsServer:
    """Answers over TLS; keeps what it has heard."""

    def __init__(
        self, listener: socket.socket, pem: bytes, path: Path,
        talk: Callable[[ssl.SSLSocket], bytes] | None = None,
    ) -> None:  # fmt: skip
        path.write_bytes(pem)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(path)
        self._listener = listener
        self.talk = talk or self._plain
        self.heard: list[bytes] = []
        self.protocols: list[str | None] = []
        self.answer = OK
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(SECONDS)
        with (
            contextlib.suppress(OSError),
            self._context.wrap_socket(client, server_side=True) as tls,
        ):
            self.protocols.append(tls.version())
            said = self.talk(tls)
            if said:
                self.heard.append(said)

    def _plain(self, tls: ssl.SSLSocket) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data:
            data += tls.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        wanted = 0
        for line in head.split(b"\r\n"):
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                wanted = int(value)
        while len(body) < wanted or (b"chunked" in head and not body.endswith(b"0\r\n\r\n")):
            body += tls.recv(1 << 16)
        # Before the answer: who has read that may look.
        self.heard.append(head + b"\r\n\r\n" + body)
        tls.sendall(self.answer)
        tls.unwrap()
        return b""


class World:
    """A lab with secrets, and its servers."""

    def __init__(self, lab: Lab, folder: Path, leaves: Any, bundle: Path) -> None:
        self.lab = lab
        self.web = TlsServer(lab.outside.listen(WEB, 443), leaves[OPENED], folder / "o.pem")
        self.other = TlsServer(lab.outside.listen(OTHER, 443), leaves[BASED], folder / "b.pem")
        until(bundle.read_text)
        self.bundle = bundle

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.web.close()
        self.other.close()

    def context(self) -> ssl.SSLContext:
        """As a program inside has it, by SSL_CERT_FILE."""
        return ssl.create_default_context(cafile=str(self.bundle))

    def tls(self, name: str, context: ssl.SSLContext | None = None) -> ssl.SSLSocket:
        """A connection from inside."""
        return (context or self.context()).wrap_socket(self.lab.to(name, 443), server_hostname=name)

    def ask(self, name: str, *fields: str, context: ssl.SSLContext | None = None) -> bytes:
        """A request from inside, over TLS."""
        with self.tls(name, context) as sock:
            sock.sendall(request(name, *fields))
            return everything(sock)


def request(host: str, *fields: str, line: str = "GET / HTTP/1.1") -> bytes:
    return "\r\n".join((line, f"Host: {host}", *fields, "", "")).encode()


def row(host: str, **more: object) -> dict[str, object]:
    return {
        "host": host, "port": 443, "header": "x-api-key", "format": "", "placeholder": STAND_IN,
        "value": REAL, "base_port": 0, **more,
    }  # fmt: skip


def lab_of(folder: Path, secrets: list[dict[str, object]], ca: str, **more: Any) -> Lab:
    bundle = folder / "bundle.pem"
    bundle.touch()
    bundle.chmod(0o666)
    opened = any(not one["base_port"] for one in secrets)
    hosts = {OPENED: [WEB], PLAIN: [WEB], BASED: [OTHER], "wrong.test": [WEB]}
    listeners = (*LISTENERS, ("tcp", "127.0.0.1", BASE_PORT), ("tcp", "127.0.0.1", BASE_PORT + 1))
    return Lab(
        hosts, [OPENED, PLAIN, BASED, "wrong.test", WEB, OTHER], listeners=listeners,
        arguments=["certified"] if opened else [], secrets=secrets, ca=ca, bundle=str(bundle),
        **{"library": LIBRARY, **more},
    )  # fmt: skip


@pytest.fixture(scope="module")
def site() -> issuing.Issued:
    """An authority of the test's, for the servers."""
    return issuing.issue([OPENED, PLAIN, BASED], 2)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, site: issuing.Issued) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("secrets")
    secrets = [row(OPENED), row("wrong.test"), row(BASED, base_port=BASE_PORT)]
    with (
        lab_of(folder, secrets, site.certificate) as lab,
        World(lab, folder, site.leaves, folder / "bundle.pem") as found,
    ):
        yield found


# --- what works


def test_a_value_is_put_into_its_header_over_tls(world: World) -> None:
    assert world.ask(OPENED, f"X-Api-Key: {STAND_IN}", "X-Other: 1").endswith(b"hi")
    head = world.web.heard[-1].decode()
    assert f"X-Api-Key: {REAL}\r\n" in head
    assert "X-Other: 1\r\n" in head
    assert f"Host: {OPENED}\r\n" in head
    assert STAND_IN not in head


def test_a_request_without_a_placeholder_is_left_alone(world: World) -> None:
    assert world.ask(OPENED, "X-Api-Key: mine").endswith(b"hi")
    assert b"X-Api-Key: mine\r\n" in world.web.heard[-1]


def test_a_base_url_needs_no_certificate_inside(world: World) -> None:
    with world.lab.inside.connect("127.0.0.1", BASE_PORT) as sock:
        sock.sendall(request(f"127.0.0.1:{BASE_PORT}", f"x-api-key: {STAND_IN}"))
        assert everything(sock).endswith(b"hi")
    head = world.other.heard[-1].decode()
    assert f"x-api-key: {REAL}\r\n" in head
    assert f"Host: {BASED}\r\n" in head


@pytest.mark.parametrize("chunked", [False, True])
def test_bodies_arrive_whole(world: World, chunked: bool) -> None:
    body = bytes(range(256)) * 4000
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(body)}"
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    with world.tls(OPENED) as sock:
        head = request(OPENED, framing, f"X-Api-Key: {STAND_IN}", line="POST /up HTTP/1.1")
        sock.sendall(head + sent)
        assert everything(sock).endswith(b"hi")
    assert world.web.heard[-1].partition(b"\r\n\r\n")[2] == sent


def test_large_answers_arrive_whole(world: World) -> None:
    body = bytes(range(256)) * 40000
    world.web.answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    try:
        with world.tls(OPENED) as sock:
            sock.sendall(request(OPENED))
            parts = list(iter(lambda: sock.recv(1 << 16), b""))
        assert b"".join(parts).partition(b"\r\n\r\n")[2] == body
    finally:
        world.web.answer = OK


def test_a_tunnel_through_the_proxy_port_is_opened_too(world: World) -> None:
    sock = world.lab.proxy()
    sock.sendall(f"CONNECT {OPENED}:443 HTTP/1.1\r\n\r\n".encode())
    assert b" 200 " in everything(sock, b"\r\n\r\n")
    with world.context().wrap_socket(sock, server_hostname=OPENED) as tls:
        tls.sendall(request(OPENED, f"X-Api-Key: {STAND_IN}"))
        assert everything(tls).endswith(b"hi")
    assert REAL.encode() in world.web.heard[-1]


@pytest.mark.parametrize("door", ["tls", "base"])
def test_websockets_pass_with_a_value_in_their_handshake(world: World, door: str) -> None:
    def talk(tls: ssl.SSLSocket) -> bytes:
        head = everything(tls, b"\r\n\r\n")
        tls.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        said = tls.recv(100)
        tls.sendall(b"echo " + said)
        return head + said

    server = world.web if door == "tls" else world.other
    before, server.talk = server.talk, talk
    fields = ("Connection: Upgrade", "Upgrade: websocket", f"X-Api-Key: {STAND_IN}")
    try:
        if door == "tls":
            sock: socket.socket = world.tls(OPENED)
        else:
            sock = world.lab.inside.connect("127.0.0.1", BASE_PORT)
        with sock:
            sock.sendall(request(OPENED if door == "tls" else f"localhost:{BASE_PORT}", *fields))
            assert everything(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
            sock.sendall(b"frame")
            assert sock.recv(100) == b"echo frame"
        until(lambda: server.heard and server.heard[-1].endswith(b"frame"))
        assert REAL.encode() in server.heard[-1]
    finally:
        server.talk = before


# --- what must not


def test_other_hosts_keep_their_own_tls(world: World, site: issuing.Issued, tmp_path: Path) -> None:
    """Control: the same client, the same server, and no secret for this name."""
    own = tmp_path / "site.pem"
    own.write_text(site.certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        world.ask(OPENED, context=ssl.create_default_context(cafile=str(own)))
    leaf = ssl.create_default_context(cafile=str(own))
    leaf.check_hostname = False
    assert world.ask(PLAIN, f"X-Api-Key: {STAND_IN}", context=leaf).endswith(b"hi")
    assert STAND_IN.encode() in world.web.heard[-1]
    assert REAL.encode() not in world.web.heard[-1]


def test_cannot_send_a_value_to_a_server_that_cannot_prove_its_name(world: World) -> None:
    """The server at that address has a certificate for other names."""
    before = len(world.web.heard)
    answer = world.ask("wrong.test", f"X-Api-Key: {STAND_IN}")
    assert answer.startswith(b"HTTP/1.1 502 ")
    assert b"certificate does not hold" in answer
    assert len(world.web.heard) == before
    # Control: where the name is proved, it is sent.
    world.ask(OPENED, f"X-Api-Key: {STAND_IN}")
    assert REAL.encode() in world.web.heard[-1]


@pytest.mark.parametrize("method", ["TRACE", "TRACK", "CONNECT"])
@pytest.mark.parametrize("door", ["tls", "base"])
def test_cannot_have_the_request_repeated(world: World, method: str, door: str) -> None:
    """A server that obeys TRACE answers with the head that it got, value and all."""
    before = len(world.web.heard), len(world.other.heard)
    where = f"{OPENED}:443" if method == "CONNECT" else "/"
    line = f"{method} {where} HTTP/1.1"
    if door == "tls":
        sock: socket.socket = world.tls(OPENED)
        host = OPENED
    else:
        sock, host = world.lab.inside.connect("127.0.0.1", BASE_PORT), f"localhost:{BASE_PORT}"
    with sock:
        sock.sendall(request(host, f"X-Api-Key: {STAND_IN}", line=line))
        assert everything(sock).startswith((b"HTTP/1.1 405 ", b"HTTP/1.1 400 "))
    assert before == (len(world.web.heard), len(world.other.heard))


@pytest.mark.parametrize(
    "host", ["plain.test", "evil.test", f"{OPENED}:80", f"x@{OPENED}", "127.0.0.1"]
)
def test_cannot_name_another_host_inside(world: World, host: str) -> None:
    before = len(world.web.heard)
    with world.tls(OPENED) as sock:
        sock.sendall(request(host, f"X-Api-Key: {STAND_IN}"))
        assert everything(sock).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))
    assert len(world.web.heard) == before


def test_cannot_name_another_host_at_a_base_url(world: World) -> None:
    before = len(world.other.heard)
    for head in (
        request("evil.test"), request(f"127.0.0.1:{BASE_PORT}", line="GET http://e.test/ HTTP/1.1"),
    ):  # fmt: skip
        with world.lab.inside.connect("127.0.0.1", BASE_PORT) as sock:
            sock.sendall(head)
            assert everything(sock).startswith((b"HTTP/1.1 403 ", b"HTTP/1.1 400 "))
    assert len(world.other.heard) == before


def test_cannot_smuggle_a_second_request(world: World) -> None:
    before = len(world.web.heard)
    second = request(OPENED, f"X-Api-Key: {STAND_IN}", line="GET /second HTTP/1.1")
    with world.tls(OPENED) as sock:
        sock.sendall(request(OPENED) + second)
        everything(sock)
    assert b"/second" not in b"".join(world.web.heard[before:])
    with world.tls(OPENED) as sock:
        both = ("Content-Length: 5", "Transfer-Encoding: chunked")
        sock.sendall(request(OPENED, *both, line="POST / HTTP/1.1") + b"0\r\n\r\n" + second)
        assert everything(sock).startswith(b"HTTP/1.1 400 ")
    assert b"/second" not in b"".join(world.web.heard[before:])


def test_cannot_get_a_value_over_plain_http(world: World) -> None:
    """Port 80 of the same host: no value goes where it could be read on the way."""
    listener = world.lab.outside.listen(WEB, 80)
    with listener, world.lab.to(OPENED, 80) as sock:
        sock.sendall(request(OPENED, f"X-Api-Key: {STAND_IN}"))
        client, _ = listener.accept()
        with client:
            data = everything(client, b"\r\n\r\n")
            client.sendall(OK)
    assert STAND_IN.encode() in data
    assert REAL.encode() not in data


def test_cannot_use_the_certificate_for_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority says itself whom it may vouch for: even its key is of no use elsewhere."""
    stolen: dict[str, bytes] = {}
    original = issuing._leaf

    def steal(host: str, issuer: Any, signer: Any, days: int) -> bytes:
        for name in ("b.test", "ba.test", host):
            stolen[name] = original(name, issuer, signer, days)
        return stolen[host]

    monkeypatch.setattr(issuing, "_leaf", steal)
    context = ssl.create_default_context(cadata=issuing.issue(["a.test"], 2).certificate)
    taken = {}
    for name, pem in stolen.items():
        signed = tmp_path / f"{name}.pem"
        signed.write_bytes(pem)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(signed)
        taken[name] = _shake(server, context, name)
    refused = "permitted subtree violation"
    assert taken == {"a.test": "", "b.test": refused, "ba.test": refused}


def _shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> str:
    """Why a client does not take a server's certificate; empty if it does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for end in (one, other):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return ""


def test_without_certificates_the_command_is_not_let_go(tmp_path: Path) -> None:
    """The supervisor hears why, in place of the word that lets it go. Control: it hears that."""
    for library, first in (("/nowhere", b"no certificates: ModuleNotFoundError"), (LIBRARY, b"\n")):
        with lab_of(tmp_path, [row(OPENED)], "", library=library) as lab:
            assert lab._supervisor.recv(100).startswith(first)


# --- the end of a connection


def test_denying_a_host_ends_what_goes_there(tmp_path: Path, site: issuing.Issued) -> None:
    started = threading.Event()

    def talk(tls: ssl.SSLSocket) -> bytes:
        head = everything(tls, b"\r\n\r\n")
        tls.sendall(b"HTTP/1.1 200 OK\r\n\r\nbegun")
        started.set()
        everything(tls)
        return head

    with (
        lab_of(tmp_path, [row(OPENED)], site.certificate) as lab,
        World(lab, tmp_path, site.leaves, tmp_path / "bundle.pem") as world,
    ):
        world.web.talk = talk
        with world.tls(OPENED) as sock:
            sock.sendall(request(OPENED))
            assert everything(sock, b"begun").endswith(b"begun")
            assert lab.order(do="deny", rules=[OPENED])["ok"]
            with contextlib.suppress(ssl.SSLError):
                assert sock.recv(100) == b""
        with pytest.raises((ssl.SSLError, ConnectionError)):
            world.tls(OPENED)


def test_budgets_hold_for_hosts_with_a_secret(tmp_path: Path, site: issuing.Issued) -> None:
    budgets = [
        {"host": OPENED, "source": "b", "requests": 0, "upload": 3000, "total": 0},
        {"host": BASED, "source": "b", "requests": 2, "upload": 0, "total": 0},
    ]
    secrets = [row(OPENED), row(BASED, base_port=BASE_PORT)]
    with (
        lab_of(tmp_path, secrets, site.certificate, budgets=budgets) as lab,
        World(lab, tmp_path, site.leaves, tmp_path / "bundle.pem") as world,
    ):
        assert world.ask(OPENED).endswith(b"hi")
        with contextlib.suppress(OSError), world.tls(OPENED) as sock:
            head = request(OPENED, "Content-Length: 90000", line="POST / HTTP/1.1")
            sock.sendall(head + b"x" * 90000)
            assert b"200 OK" not in everything(sock)
        statuses = []
        for _ in range(3):
            with lab.inside.connect("127.0.0.1", BASE_PORT) as plain:
                plain.sendall(request(f"localhost:{BASE_PORT}"))
                statuses.append(everything(plain)[9:12])
        assert statuses == [b"200", b"200", b"403"]
        assert sum(len(h) for h in world.web.heard) < 3000
        refused = [h for h in lab.report()["hosts"] if not h["allowed"]]
    assert {(h["host"], h["rule"]) for h in refused} == {
        (OPENED, f"budget {OPENED}"), (BASED, f"budget {BASED}"),
    }  # fmt: skip
    assert all("is used up" in h["reason"] for h in refused)
