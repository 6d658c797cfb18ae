"""One lookup, every address checked, the checked one dialled."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import pytest

from agent_sandbox.policy import network
from agent_sandbox.proxy import dial, routes
from agent_sandbox.proxy.dial import Dialler
from agent_sandbox.proxy.refusals import FORBIDDEN, UNREACHABLE, Problem


def policy(*allow: str, mode: str = "allow") -> network.Egress:
    return network.Egress(mode=mode, allow=tuple(network.parse(text, "test") for text in allow))


class Lookup:
    """A name server that says something else each time."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


class Dialled(Exception):
    """What would have been connected to."""


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Records instead of connecting; addresses that end in .1 do not answer."""
    made: list[tuple[str, int]] = []

    async def connect(address: str, port: int) -> socket.socket:
        made.append((address, port))
        if address.endswith(".1"):
            raise ConnectionRefusedError(111, "Connection refused")
        return socket.socket()

    monkeypatch.setattr(dial, "connect", connect)
    return made


def dialled(egress: network.Egress, host: str, lookup: Lookup, own: str = "") -> None:
    async def run() -> None:
        dialler = Dialler(lookup, lambda address: address == own)
        (await dialler.dial(egress, host, 443)).close()

    asyncio.run(run())


def test_cannot_rebind(connections: list[tuple[str, int]]) -> None:
    """The second answer of a name server is never asked for."""
    lookup = Lookup(["93.184.216.34"], ["127.0.0.1"])
    dialled(policy("a.test"), "a.test", lookup)
    assert lookup.asked == ["a.test"]
    assert connections == [("93.184.216.34", 443)]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "169.254.169.254", "192.168.1.1", "100.64.0.1", "0.0.0.0",
     "224.0.0.1", "::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1",
     "64:ff9b::a00:1", "2002:7f00:1::1", "::",
     "198.18.1.5", "255.255.255.255"],
)  # fmt: skip
@pytest.mark.parametrize("mode", ["allow", "public", "learn"])
def test_cannot_reach_an_inner_address_by_a_name(
    connections: list[tuple[str, int]], address: str, mode: str
) -> None:
    with pytest.raises(Problem) as caught:
        dialled(policy("a.test", mode=mode), "a.test", Lookup([address]))
    assert caught.value.kind == FORBIDDEN
    assert connections == []


def test_cannot_reach_this_machine_by_its_public_address(
    connections: list[tuple[str, int]],
) -> None:
    with pytest.raises(Problem):
        dialled(policy("a.test"), "a.test", Lookup(["93.184.216.34"]), own="93.184.216.34")
    assert connections == []
    dialled(policy("a.test"), "a.test", Lookup(["93.184.216.34"]), own="93.184.216.35")
    assert len(connections) == 1


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "::ffff:93.184.216.34", "64:ff9b::5db8:d822", "2002:5db8:d822::1",
     "2001:0:5db8:d822::a247:27dd", "2606:4700::5efe:5db8:d822"],
)  # fmt: skip
def test_cannot_reach_this_machine_by_an_address_that_wraps_its_own(
    connections: list[tuple[str, int]], address: str
) -> None:
    """NAT64, 6to4, Teredo, ISATAP. The control: the same address, and another machine's in it."""
    for own, made in (("93.184.216.34", 0), ("93.184.216.35", 1)):
        if made:
            dialled(policy("a.test"), "a.test", Lookup([address]), own=own)
        else:
            with pytest.raises(Problem) as caught:
                dialled(policy("a.test"), "a.test", Lookup([address]), own=own)
            assert "this machine's own" in caught.value.why
        assert len(connections) == made


@pytest.mark.parametrize(
    ("text", "known"),
    [("1.2.3.4 a.test", True), ("1.2.3.4 b.test A.Test # x", True), ("::1\ta.test\n", True),
     ("#1.2.3.4 a.test", False), ("1.2.3.4 x#a.test", False), ("a.test 1.2.3.4", False),
     ("1.2.3.4 a.test.corp", False), ("", False)],
)  # fmt: skip
def test_names_of_the_hosts_file_are_found(text: str, *, known: bool) -> None:
    """All others are looked up with a last dot, so that no search domain is added."""
    assert dial.is_listed("a.test", text) is known


def test_good_addresses_among_bad_ones_are_used_in_order(
    connections: list[tuple[str, int]],
) -> None:
    lookup = Lookup(["10.0.0.7", "93.184.216.1", "93.184.216.34", "93.184.216.35"])
    dialled(policy("a.test"), "a.test", lookup)
    assert connections == [("93.184.216.1", 443), ("93.184.216.34", 443)]


def test_an_address_is_not_looked_up(connections: list[tuple[str, int]]) -> None:
    lookup = Lookup(["127.0.0.1"])
    dialled(policy("93.184.216.34"), "93.184.216.34", lookup)
    assert lookup.asked == []


@pytest.mark.parametrize("found", [[], ["93.184.216.1"]])
def test_a_host_that_cannot_be_reached_is_a_problem(
    connections: list[tuple[str, int]], found: list[str]
) -> None:
    with pytest.raises(Problem) as caught:
        dialled(policy("a.test"), "a.test", Lookup(found))
    assert caught.value.kind == UNREACHABLE


def test_a_lookup_that_fails_is_a_problem() -> None:
    def fail(host: str) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    async def run() -> None:
        with pytest.raises(Problem) as caught:
            await Dialler(fail).dial(policy("a.test"), "a.test", 443)
        assert "Name or service not known" in caught.value.why.capitalize() or caught.value.why

    asyncio.run(run())


def test_lookups_at_the_same_time_are_limited() -> None:
    now, most = [0], [0]
    lock = threading.Lock()

    def slow(host: str) -> list[str]:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return []

    async def run() -> None:
        dialler = Dialler(slow)
        await asyncio.gather(*(dialler.resolve(f"n{n}.test", 1) for n in range(60)))

    asyncio.run(run())
    assert 1 < most[0] <= dial.MAX_LOOKUPS


def test_the_kernel_knows_its_own_addresses() -> None:
    assert routes.is_own("127.0.0.1")
    assert routes.is_own("127.99.1.2")
    assert routes.is_own("::1")
    assert routes.is_own("0.0.0.0")
    assert routes.is_own("not an address")
    assert routes.is_own("224.0.0.1") or not routes.is_own("93.184.216.34")


def test_an_answer_of_the_kernel_is_read() -> None:
    def answer(kind: int, message: int = 24) -> bytes:
        body = bytes((2, 32, 0, 0, 254, 0, 0, kind, 0, 0, 0, 0))
        return (28).to_bytes(4, "little") + message.to_bytes(2, "little") + bytes(10) + body

    assert routes.is_remote(answer(1))
    assert not routes.is_remote(answer(2))
    assert not routes.is_remote(answer(3))
    assert not routes.is_remote(b"")
    assert routes.is_remote(answer(2, routes.NLMSG_ERROR))
