"""The real proxy between two namespaces: what passes, and what cannot."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.proxy import dns

from .conftest import WEB
from .lab import everything, hello

if TYPE_CHECKING:
    from .conftest import World

GET = b"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"


def talk(sock: socket.socket, data: bytes) -> bytes:
    """Send, and hear to the end."""
    with sock:
        sock.sendall(data)
        return everything(sock)


def socks5(host: bytes, port: int, command: int = 1) -> bytes:
    return bytes((5, command, 0)) + host + port.to_bytes(2, "big")


def named(name: bytes) -> bytes:
    return b"\3" + bytes((len(name),)) + name


def socks(world: World, request: bytes) -> tuple[socket.socket, bytes]:
    """A SOCKS 5 handshake: the connection and the answer to the request."""
    sock = world.lab.proxy()
    sock.sendall(b"\5\1\0")
    assert sock.recv(2) == b"\5\0"
    sock.sendall(request)
    return sock, sock.recv(10)


# --- what passes


@pytest.mark.parametrize("kind", [dns.A, dns.AAAA])
def test_http_passes_without_any_configuration(world: World, kind: int) -> None:
    assert talk(world.lab.to("good.test", 80, kind), GET).endswith(b"hi")
    assert world.web.wait()[-1] == GET[:-2] + b"Connection: close\r\n\r\n"


def test_names_are_compared_without_case_and_final_dot(world: World) -> None:
    data = b"GET / HTTP/1.1\r\nHost: GOOD.test.:80\r\n\r\n"
    assert talk(world.lab.to("Good.TEST", 80), data).endswith(b"hi")


def test_http_1_0_without_a_host_gets_the_one_that_was_asked_for(world: World) -> None:
    assert talk(world.lab.to("good.test", 80), b"GET /old HTTP/1.0\r\n\r\n").endswith(b"hi")
    assert b"Host: good.test\r\n" in world.web.heard[-1]


@pytest.mark.parametrize("kind", [dns.A, dns.AAAA])
def test_tls_passes_byte_by_byte(world: World, kind: int) -> None:
    data = hello("good.test") + b"\x17\3\3\0\1x"
    before = len(world.tls.heard)
    with world.lab.to("good.test", 443, kind) as sock:
        for at in range(0, len(data), 100):
            sock.sendall(data[at : at + 100])
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    assert world.tls.wait(before + 1)[-1] == data


def test_the_proxy_port_speaks_http_and_socks(world: World) -> None:
    lab = world.lab
    absolute = b"GET http://good.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n"
    assert talk(lab.proxy(), absolute).endswith(b"hi")
    with lab.proxy() as sock:
        sock.sendall(b"CONNECT good.test:80 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert talk(sock, GET).endswith(b"hi")
    stand_in = socket.inet_aton(lab.resolve("good.test"))
    for host in (named(b"good.test"), named(b"GOOD.test."), b"\1" + stand_in):
        sock, answer = socks(world, socks5(host, 80))
        assert answer[:2] == b"\5\0"
        assert talk(sock, GET).endswith(b"hi")
    sock = lab.proxy()
    sock.sendall(b"\4\1\0\x50\0\0\0\1\0good.test\0")
    assert sock.recv(8)[1] == 0x5A
    assert talk(sock, GET).endswith(b"hi")


def test_other_ports_pass_as_they_are_and_may_be_half_closed(world: World) -> None:
    data = b"\0\1\2" * 100_000
    before = len(world.dev.heard)
    with world.lab.to("dev.test", 7000) as sock:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    assert world.dev.wait(before + 1)[-1] == data


def test_a_port_of_the_commands_own_stays_free(world: World) -> None:
    """Only the stand-in address is taken: a development server inside can have the port."""
    world.lab.resolve("dev.test")
    with world.lab.inside.listen("127.0.0.1", 7000) as own:
        assert own.getsockname() == ("127.0.0.1", 7000)
    with pytest.raises(ConnectionRefusedError):
        world.lab.to("good.test", 7000).close()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_one_service_on_the_host_can_be_named(world: World, address: str) -> None:
    before = len(world.local.heard)
    with world.lab.inside.connect(address, 5000) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: whatever\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        everything(sock)
    assert b"whatever" in world.local.wait(before + 1)[-1]


def test_answers_of_the_stub_come_from_where_the_question_went(world: World) -> None:
    """A connected socket hears nobody else."""
    for server in ("9.9.9.9", "127.0.0.53", "2001:4860:4860::8888", "::1"):
        with world.lab.inside.udp(server, 53) as sock:
            sock.send(b"\0\7\1\0\0\1\0\0\0\0\0\0" + dns.wire("good.test") + b"\0\1\0\1")
            assert sock.recv(512)[:2] == b"\0\7"


def test_the_stub_answers_over_tcp(world: World) -> None:
    question = b"\0\7\1\0\0\1\0\0\0\0\0\0" + dns.wire("good.test") + b"\0\1\0\1"
    with world.lab.inside.connect("8.8.8.8", 53) as sock:
        for _ in range(3):
            sock.sendall(len(question).to_bytes(2, "big") + question)
            size = int.from_bytes(sock.recv(2), "big")
            assert sock.recv(size)[:2] == b"\0\7"


# --- what cannot


HTTP_403 = {
    "another host": ("evil.test", GET.replace(b"good", b"evil")),
    "a denied host": ("bad.wild.test", GET.replace(b"good.test", b"bad.wild.test")),
    "another Host": ("good.test", GET.replace(b"good", b"evil")),
    "another allowed Host": ("good.test", GET.replace(b"good", b"also")),
    "an address as Host": ("good.test", GET.replace(b"good.test", WEB.encode())),
    "another port in Host": ("good.test", GET.replace(b"good.test", b"good.test:81")),
    "another absolute target": ("good.test", GET.replace(b" /", b" http://evil.test/")),
    "a Host with NUL's cousin": ("good.test", GET.replace(b"good.test", b"good.test%00.evil.test")),
    "the host's loopback by name": ("rebound.test", GET.replace(b"good", b"rebound")),
    "the same, mapped": ("mapped.test", GET.replace(b"good", b"mapped")),
    "metadata by name": ("meta.test", GET.replace(b"good", b"meta")),
    "the LAN by name": ("lan.test", GET.replace(b"good", b"lan")),
}  # fmt: skip


@pytest.mark.parametrize("what", HTTP_403)
def test_cannot_reach_with_http(world: World, what: str) -> None:
    name, data = HTTP_403[what]
    before = world.reached()
    answer = talk(world.lab.to(name, 80), data)
    assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n"), answer
    assert b"X-Agent-Sandbox-Rule" in answer
    assert world.reached() == before


HINTS = {"another host": True, "a denied host": False, "another Host": False,
         "the LAN by name": False, "metadata by name": False}  # fmt: skip


@pytest.mark.parametrize("what", HINTS)
def test_a_rule_is_suggested_only_where_it_would_help(world: World, what: str) -> None:
    name, data = HTTP_403[what]
    assert (b"allow it with" in talk(world.lab.to(name, 80), data)) is HINTS[what]


def test_nobody_is_led_to_allow_the_metadata_address(world: World) -> None:
    ask = b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n"
    hinted = [
        b"allow it with" in talk(world.lab.inside.connect(address, 80), ask % address.encode())
        for address in ("169.254.169.254", "168.63.129.16", "1.2.3.4")
    ]
    assert hinted == [False, False, True]


@pytest.mark.parametrize(
    "address",
    ["1.2.3.4", "127.0.0.1", "127.1.2.3", "169.254.169.254", "10.0.0.5", "198.18.0.7",
     "2606:4700::1", "::1", "fd00::1", "fe80::1", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:2::7"],
)  # fmt: skip
def test_cannot_reach_an_address_that_no_rule_names(world: World, address: str) -> None:
    before = world.reached()
    host = f"[{address}]" if ":" in address else address
    data = b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n"
    if address != "fe80::1":
        answer = talk(world.lab.inside.connect(address, 80), data)
        assert answer.startswith(b"HTTP/1.1 403"), answer
    tunnel = b"CONNECT " + host.encode() + b":443 HTTP/1.1\r\nHost: x\r\n\r\n"
    assert talk(world.lab.proxy(), tunnel).startswith(b"HTTP/1.1 403")
    packed = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
    kind = b"\4" if ":" in address else b"\1"
    sock, answer = socks(world, socks5(kind + packed, 443))
    with sock:
        assert answer[1] == 2
    assert world.reached() == before


@pytest.mark.parametrize(
    ("port", "data", "said"),
    [
        (443, hello("evil.test"), b"\x15\3\3\0\2\2\x31"),
        (443, hello("also.test"), b"\x15\3\3\0\2\2\x31"),
        (443, hello(None), b"\x15\3\3\0\2\2\x31"),
        (443, hello("good.test").replace(b"good.test", b"good.tes\0"), b"\x15\3\3\0\2\2\x32"),
        (443, b"\x16\3\1\0\1\2", b"\x15\3\3\0\2\2\x32"),
        (443, GET, b"HTTP/1.1 400"),
        (443, b"\0\1\2\3", b""),
        (80, hello("good.test"), b"\x15\3\3\0\2\2\x31"),
        (80, b"SSH-2.0-x\r\n", b"SSH-2.0-agent-sandbox"),
        (80, b"\0\1\2\3", b""),
        (80, b"\r\n" + GET, b"HTTP/1.1 400"),
    ],
)
def test_cannot_pass_another_protocol_or_name(
    world: World, port: int, data: bytes, said: bytes
) -> None:
    before = world.reached()
    answer = talk(world.lab.to("good.test", port), data)
    assert answer.startswith(said), answer
    assert bool(answer) == bool(said)
    assert world.reached() == before
    # The same through a tunnel: it is dialled first, but nothing of the stream goes out.
    server = world.web if port == 80 else world.tls
    heard = len(server.heard)
    with world.lab.proxy() as sock:
        sock.sendall(b"CONNECT good.test:%d HTTP/1.1\r\n\r\n" % port)
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        assert talk(sock, data).startswith(said)
    assert server.wait(heard + 1)[-1] == b""


@pytest.mark.parametrize(
    "data",
    [GET.replace(b"good", b"evil"), b"\r\n" + GET.replace(b"good", b"evil"), hello("evil.test"),
     b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)  # fmt: skip
def test_cannot_name_another_host_on_another_port(world: World, data: bytes) -> None:
    before = len(world.dev.heard)
    answer = talk(world.lab.to("dev.test", 7000), data)
    assert answer.startswith((b"HTTP/1.1 403", b"HTTP/1.1 400", b"HTTP/1.1 505", b"\x15\3\3\0\2"))
    assert world.dev.wait(before + 1)[-1] == b""


@pytest.mark.parametrize(
    "target",
    [b"good.test:25", b"good.test:8080", b"evil.test:443", b"bad.wild.test:443", b"wild.test:443",
     b"localhost:80", b"localhost:5001", b"127.1:443", b"0x7f.1:443", b"2130706433:443",
     b"good.test%00.evil.test:443", b"xgood.test:443", b"[::ffff:127.0.0.1]:443"],
)  # fmt: skip
def test_cannot_connect_to(world: World, target: bytes) -> None:
    before = world.reached()
    answer = talk(world.lab.proxy(), b"CONNECT " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 403"), answer
    assert world.reached() == before


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (socks5(named(b"evil.test"), 443), 2),
        (socks5(named(b"good.test\0.evil.test"), 443), 2),
        (socks5(named(b"evil.test\0good.test"), 443), 2),
        (socks5(named(b"good.test"), 25), 2),
        (socks5(named(b"127.1"), 80), 2),
        (socks5(b"\1" + bytes(4), 80), 2),
        (socks5(named(b"good.test"), 0), 2),
        (socks5(named(b"good.test"), 443, command=2), 7),
        (socks5(named(b"good.test"), 443, command=3), 7),
        (socks5(named(b"nowhere.test"), 443), 4),
        (socks5(named(b"gone.test"), 443), 4),
    ],
)
def test_cannot_have_from_socks(world: World, request_: bytes, code: int) -> None:
    before = world.reached()
    sock, answer = socks(world, request_)
    with sock:
        assert answer[1] == code
        assert everything(sock) == b""
    assert world.reached() == before


SMUGGLED = {
    "both lengths": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths": b"Content-Length: 4\r\nContent-Length: 40\r\n\r\nabcd",
    "a folded line": b"X: y\r\n Transfer-Encoding: chunked\r\n\r\n",
    "a bare LF": b"X: y\nTransfer-Encoding: chunked\r\n\r\n",
    "gzip, chunked": b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a second Host": b"Host: evil.test\r\n\r\n",
    "NUL": b"X: \0\r\n\r\n",
}


@pytest.mark.parametrize("what", SMUGGLED)
def test_cannot_smuggle(world: World, what: str) -> None:
    before = world.reached()
    data = b"POST / HTTP/1.1\r\nHost: good.test\r\n" + SMUGGLED[what]
    assert talk(world.lab.to("good.test", 80), data).startswith(b"HTTP/1.1 400")
    assert world.reached() == before


def test_cannot_pipeline(world: World) -> None:
    """Only the first request goes out, wherever the second one is hidden."""
    evil = b"GET /evil HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    body = b"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 9\r\n\r\nhello\r\n\r\n"
    for data in (GET + evil, body + evil):
        before = len(world.web.heard)
        with world.lab.to("good.test", 80) as sock:
            sock.sendall(data)
            assert everything(sock).endswith(b"hi")
            world.web.wait(before + 1)
    assert not any(b"evil" in heard for heard in world.web.heard)


def test_cannot_send_a_head_without_end(world: World) -> None:
    before = world.reached()
    data = b"GET / HTTP/1.1\r\nHost: good.test\r\n" + b"X: y\r\n" * 20_000
    answer = talk(world.lab.to("good.test", 80), data)
    assert answer.startswith(b"HTTP/1.1 431")
    assert world.reached() == before


def test_ssh_is_told_at_once(world: World) -> None:
    with world.lab.to("evil.test", 22) as sock:
        said = everything(sock)
    assert said.startswith(b"SSH-2.0-agent-sandbox\r\n")
    assert b"--allow 'evil.test'" in said


@pytest.mark.parametrize("data", [b"", b"\0", bytes(600), b"\xff" * 40, b"\0\1\1\0\0\1" + bytes(6)])
def test_cannot_break_the_stub(world: World, data: bytes) -> None:
    with world.lab.inside.udp("127.0.0.1", 53) as sock:
        for _ in range(50):
            sock.send(data)
    with world.lab.inside.connect("127.0.0.1", 53) as sock:
        sock.sendall(len(data).to_bytes(2, "big") + data)
    assert world.lab.resolve("good.test").startswith("198.1")
