"""DNS messages: what is well-formed, what is answered, and what cannot be said."""

from __future__ import annotations

import asyncio
import socket

import pytest

from agent_sandbox.proxy import dns, names
from agent_sandbox.proxy.stub import Stub, answer_from

IDENT = b"\xab\xcd"
QUERY = b"\x01\x00"


def head(questions: int = 1, answers: int = 0, authority: int = 0, extra: int = 0) -> bytes:
    counts = (questions, answers, authority, extra)
    return IDENT + QUERY + b"".join(n.to_bytes(2, "big") for n in counts)


def question(name: bytes, kind: int = dns.A, klass: int = 1) -> bytes:
    return name + kind.to_bytes(2, "big") + klass.to_bytes(2, "big")


GOOD = head() + question(dns.wire("example.com"))
OPT = b"\0" + (41).to_bytes(2, "big") + b"\x04\xd0" + bytes(6)


def ask(message: bytes, stub: Stub | None = None, room: int = 512) -> bytes:
    return asyncio.run((stub or Stub()).answer(message, room))


def code(answer: bytes) -> int:
    return answer[3] & 15


def test_a_question_is_read() -> None:
    found = dns.parse(GOOD)
    assert (found.name, found.kind, found.klass) == ("example.com", dns.A, 1)
    assert not found.edns


def test_a_question_with_edns_is_read() -> None:
    assert dns.parse(head(extra=1) + question(dns.wire("a.b")) + OPT).edns


@pytest.mark.parametrize(
    "message",
    [
        head(questions=0),
        head(questions=2) + question(dns.wire("a")) * 2,
        head(answers=1) + question(dns.wire("a")),
        head(authority=1) + question(dns.wire("a")),
        head(extra=2) + question(dns.wire("a")) + OPT * 2,
        head(extra=1) + question(dns.wire("a")) + b"\0\0\1\0\1" + bytes(6),
        head(extra=1) + question(dns.wire("a")) + OPT[:-1],
        head(extra=1) + question(dns.wire("a")) + OPT[:-1] + b"\5",
        head() + question(b"\xc0\x0c"),
        head() + question(b"\x01a\xc0\x0c"),
        head() + question(b"\x40" + b"a" * 64 + b"\0"),
        head() + question((b"\x3f" + b"a" * 63) * 4 + b"\0"),
        head() + b"\x05ab",
        head() + b"\x01a\0\0",
        head() + b"\x01a\0\0\1\0",
        GOOD + b"x",
        head() + question(dns.wire("a")) + bytes(2000),
    ],
)
def test_a_malformed_message_is_a_format_error(message: bytes) -> None:
    answer = ask(message)
    assert code(answer) == dns.FORMERR
    assert answer[:2] == IDENT


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (b"", b""),
        (GOOD[:11], b""),
        # An answer is not answered: two stubs would talk for ever.
        (IDENT + b"\x81\x00" + GOOD[4:], b""),
    ],
)
def test_some_messages_deserve_no_answer(message: bytes, expected: bytes) -> None:
    assert ask(message) == expected


def test_other_operations_are_not_implemented() -> None:
    assert code(ask(IDENT + b"\x28\x00" + GOOD[4:])) == dns.NOTIMP


@pytest.mark.parametrize(
    "name",
    [
        b"\x03a.b\0", b"\x03a\0b\x03com\0", b"\x01\x80\0", b"\x02-a\0", b"\x01*\0", b"\x03a b\0",
        b"\x01\xc3\0", dns.wire("1.2.3.4"), dns.wire("127.1"), dns.wire("0x7f.1"), b"\0",
    ],
)  # fmt: skip
def test_cannot_ask_for_what_is_no_name(name: bytes) -> None:
    assert code(ask(head() + question(name))) == dns.NXDOMAIN


@pytest.mark.parametrize("kind", [2, 5, 6, 15, 16, 33, 64, 65, 255, 257])
def test_other_types_have_no_records(kind: int) -> None:
    """HTTPS records would bring keys for encrypted names; none of the others helps either."""
    answer = ask(head() + question(dns.wire("example.com"), kind))
    assert code(answer) == dns.NOERROR
    assert answer[6:8] == b"\0\0"


def test_each_name_has_one_address_for_ever() -> None:
    stub = Stub()
    stub.ipv6 = True
    found: dict[tuple[str, int], bytes] = {}
    for _ in range(2):
        for name in ("a.test", "b.test", "A.TEST", "a.test"):
            for kind, size in ((dns.A, 4), (dns.AAAA, 16)):
                answer = ask(head() + question(dns.wire(name), kind), stub)
                address = answer[-size:]
                assert found.setdefault((name.lower(), kind), address) == address
                assert names.is_stand_in(address)
                assert stub.names.name(address) == name.lower()
    assert len(set(found.values())) == 4


def test_the_question_comes_back_in_its_own_spelling() -> None:
    """Clients that mix cases compare them."""
    message = head() + question(dns.wire("ExAmPle.COM"))
    assert b"\x07ExAmPle\x03COM\0" in ask(message)


def test_there_is_no_ipv6_address_where_there_is_no_ipv6() -> None:
    answer = ask(head() + question(dns.wire("a.test"), dns.AAAA))
    assert (code(answer), answer[6:8]) == (dns.NOERROR, b"\0\0")


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "x.localhost"])
def test_localhost_is_the_loopback(name: str) -> None:
    assert ask(head() + question(dns.wire(name)))[-4:] == bytes((127, 0, 0, 1))
    assert ask(head() + question(dns.wire(name), dns.AAAA))[-16:] == bytes(15) + b"\1"


def test_a_stand_in_has_a_name_again() -> None:
    stub = Stub()
    address = ask(head() + question(dns.wire("a.test")), stub)[-4:]
    back = ".".join(str(byte) for byte in reversed(address)) + ".in-addr.arpa"
    assert ask(head() + question(dns.wire(back), dns.PTR), stub).endswith(dns.wire("a.test"))
    other = dns.wire("1.0.0.127.in-addr.arpa")
    assert code(ask(head() + question(other, dns.PTR), stub)) == dns.NXDOMAIN


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("4.3.2.1.in-addr.arpa", b"\1\2\3\4"),
        ("256.3.2.1.in-addr.arpa", None),
        ("3.2.1.in-addr.arpa", None),
        ("x.3.2.1.in-addr.arpa", None),
        (".".join("0" * 31 + "2") + ".ip6.arpa", b"\x20" + bytes(15)),
        (".".join("0" * 31) + ".ip6.arpa", None),
        ("example.com", None),
    ],
)
def test_reverse_names(name: str, expected: bytes | None) -> None:
    assert dns.reverse(name) == expected


def test_edns_is_answered_and_later_versions_are_not() -> None:
    asked = head(extra=1) + question(dns.wire("a.test"))
    assert ask(asked + OPT).endswith(b"\0\0\x29\x04\xd0" + bytes(6))
    later = ask(asked + OPT[:6] + b"\1" + OPT[7:])
    assert (later[3] & 15) | (later[-6] << 4) == dns.BADVERS


def test_an_answer_without_room_is_cut_and_says_so() -> None:
    asked = dns.parse(GOOD)
    cut = dns.answer(asked, bytes(4), room=30)
    assert cut[2] & 2
    assert cut[6:8] == b"\0\0"


def test_when_all_addresses_are_taken_the_stub_fails() -> None:
    taken = names.Names(start=7)
    slots = {taken.slot(f"n{n}.test") for n in range(names.SLOTS)}
    assert slots == set(range(names.SLOTS))
    assert taken.slot("one.more") is None
    assert taken.slot("n0.test") == 7


def test_no_address_stands_for_two_names() -> None:
    assert names.v4(0) == bytes((198, 18, 1, 0))
    assert names.v4(names.SLOTS - 1) == bytes((198, 19, 0, 255))
    assert socket.inet_ntop(socket.AF_INET6, names.v6(1)) == "2001:2::1:1"
    mapped = bytes(10) + b"\xff\xff" + names.v4(5)
    assert names.is_stand_in(mapped)
    assert not names.is_stand_in(bytes((198, 20, 0, 1)))
    assert not names.is_stand_in(bytes(16))
    held = names.Names()
    held.slot("a.test")
    assert held.name(names.v4(0)) == held.name(names.v6(0)) == "a.test"
    assert held.name(mapped) is None


def test_answers_come_from_the_address_that_was_asked() -> None:
    four = (socket.IPPROTO_IP, 8, b"\1\0\0\0" + b"\1\1\1\1" + b"\2\2\2\2")
    assert answer_from([four])[0][2] == bytes(4) + b"\2\2\2\2" + bytes(4)
    six = (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO, b"\x20" * 16 + b"\1\0\0\0")
    assert answer_from([four, six])[0][2] == b"\x20" * 16 + bytes(4)
    assert answer_from([]) == []
