"""Which questions leave, counted at a real name server: those for allowed hosts, once each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agent_sandbox.proxy import dns

from .conftest import ANSWER, WEB
from .lab import RESOLVER, Lab, Resolver, Server, everything, hello

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab({}, ["*.wild.test", "moving.test", WEB]) as found:
        yield found


def get(lab: Lab, name: str) -> bytes:
    with lab.to(name, 80) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
        return everything(sock)


def test_cannot_send_a_question_out(lab: Lab) -> None:
    """A name is judged before it is looked up: what is in a refused name stays inside."""
    resolver = Resolver(lab.outside.udp_listen(RESOLVER, 53))
    for number in range(200):
        lab.resolve(f"secret-{number}.evil.test")
        lab.resolve(f"secret-{number}.wild.test")
    lab.resolve("secret.evil.test", dns.AAAA)
    assert get(lab, "secret.evil.test").startswith(b"HTTP/1.1 403")
    with lab.to("secret.evil.test", 443) as sock:
        sock.sendall(hello("secret.evil.test"))
        everything(sock)
    for said in (
        b"CONNECT secret.evil.test:443 HTTP/1.1\r\n\r\n",
        b"GET http://secret.evil.test/ HTTP/1.1\r\nHost: secret.evil.test\r\n\r\n",
        b"\4\1\0\x50\0\0\0\1\0secret.evil.test\0",
    ):
        with lab.proxy() as sock:
            sock.sendall(said)
            everything(sock)
    assert resolver.asked == []
    # The control: an allowed name is looked up, so a question would have been seen.
    assert get(lab, "asked.wild.test").startswith(b"HTTP/1.1 502")
    assert set(resolver.asked) == {"asked.wild.test"}
    resolver.close()


def test_cannot_rebind(lab: Lab) -> None:
    """A name server that changes its mind is not asked again for the same connection."""
    good = Server(lab.outside.listen(WEB, 80), ANSWER, until=b"\r\n\r\n")
    inner = Server(lab.outside.listen("127.0.0.1", 80), ANSWER, until=b"\r\n\r\n")
    resolver = Resolver(lab.outside.udp_listen(RESOLVER, 53), WEB, "127.0.0.1")
    stand_in = lab.resolve("moving.test")
    assert get(lab, "moving.test").endswith(b"hi")
    assert len(resolver.asked) == 2  # A and AAAA
    # The next connection asks anew, and the new address is judged anew.
    assert get(lab, "moving.test").startswith(b"HTTP/1.1 403")
    assert (good.count, inner.count) == (1, 0)
    assert lab.resolve("moving.test") == stand_in
    for one in (good, inner, resolver):
        one.close()


def test_a_datagram_goes_nowhere(lab: Lab) -> None:
    """QUIC and the like: only the stub takes datagrams."""
    lab.resolve("moving.test")
    with lab.outside.udp_listen("127.0.0.1", 443) as outer:
        for address in ("9.9.9.9", "127.0.0.1", lab.resolve("moving.test")):
            with lab.inside.udp(address, 443) as sock:
                sock.send(b"x")
                # lo has brought the answer already: nobody listens there.
                with pytest.raises(ConnectionRefusedError):
                    sock.recv(1)
        outer.settimeout(0.1)
        with pytest.raises(TimeoutError):
            outer.recv(1)
        # The control: a datagram from outside arrives.
        with lab.outside.udp("127.0.0.1", 443) as sock:
            sock.send(b"x")
            assert outer.recv(1) == b"x"
