"""Hosts have one canonical spelling, or none."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.network import BadName, canonical, is_address

GOOD = [
    ("example.com", "example.com"),
    ("EXAMPLE.com", "example.com"),
    ("example.com.", "example.com"),
    ("a", "a"),
    ("localhost", "localhost"),
    ("LOCALHOST.", "localhost"),
    ("_dmarc.example.com", "_dmarc.example.com"),
    ("a_b.example", "a_b.example"),
    ("1.example", "1.example"),
    ("1a", "1a"),
    ("0xg", "0xg"),
    ("a--b.example", "a--b.example"),
    ("r3---sn.example", "r3---sn.example"),
    ("xn--bcher-kva.example", "xn--bcher-kva.example"),
    ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
    ("bücher.example", "xn--bcher-kva.example"),
    ("BÜCHER.Example.", "xn--bcher-kva.example"),
    ("例え.jp", "xn--r8jz45g.jp"),
    ("пример.рф", "xn--e1afmkfd.xn--p1ai"),
    ("a" * 63 + ".b", "a" * 63 + ".b"),
    (".".join(["a" * 49] * 5), ".".join(["a" * 49] * 5)),
    (".".join(["a" * 50] * 4 + ["b" * 49]), ".".join(["a" * 50] * 4 + ["b" * 49])),
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "0.0.0.0"),
    ("255.255.255.255", "255.255.255.255"),
    ("::1", "::1"),
    ("::", "::"),
    ("FD00:0:0::0001", "fd00::1"),
    ("2001:DB8:0:0:0:0:0:1", "2001:db8::1"),
    ("::ffff:127.0.0.1", "127.0.0.1"),
    ("::FFFF:7f00:1", "127.0.0.1"),
    ("0:0:0:0:0:ffff:10.0.0.1", "10.0.0.1"),
    ("64:ff9b::10.0.0.1", "64:ff9b::a00:1"),
]

BAD = [
    "", ".", "..", "a..b", ".a", "a..", "example.com..",
    # A NUL ends the name for C, and not for us.
    "example.com\0.evil.test", "a\0", "\0",
    " example.com", "example.com ", "a b", "a\tb", "a\n", "a\r\nb", "a\x7f", "a\x1b[m", "a\u00a0b",
    "a\u2028b", "a\u200bb", "\ufeffa",
    "a%00b", "%61", "fe80::1%eth0", "fe80::1%25eth0", "127.0.0.1%lo",
    "a/b", "a\\b", "a@b", "a?b", "a#b", "a*b", "*", "*.a", "a,b", "a;b", "a'b", 'a"b', "a$b",
    "a(b", "a+b", "a=b", "[::1]", "[127.0.0.1]", "a]", "{a}", "a|b", "a~b", "!a", "a&b", "<a>",
    "-a", "a-", "a.-b", "a-.b", "-", "-oProxyCommand=x",
    "a" * 64, "a" * 64 + ".b", ".".join(["a" * 50] * 4 + ["b" * 50]), "a." * 127 + "a", "a" * 5000,
    # What inet_aton takes for an address.
    "127.1", "127.0.1", "127", "0", "2130706433", "017700000001", "0177.0.0.1", "0x7f.1",
    "0x7f.0.0.1", "0x7f000001", "0X7F000001", "0x", "127.0.0.0x1", "127.0.0.01", "127.0.0.001",
    "00.0.0.0", "1.2.3.4.5", "256.0.0.1", "1.2.3.256", "1.2.3.4.", "127.0.0.1.", "a.1", "a.0x1",
    "example.123", "-1.2.3.4", "1e3.5", "1.2.3.999999999999999999999",
    # Digits and dots that are others.
    "１２７.0.0.1", "127。0。0。1", "127．0．0．1", "example。com", "a｡b", "①.example",
    "127.0.0.①", "1²7.0.0.1",
    # Letters that IDNA 2003 and 2008 send to different hosts, or that look like others.
    "straße.example", "faß.de", "βόλος.com", "a\u200db.example", "a\u00adb.example",
    "ｅxample.com", "ﬁ.example", "K\u212a.example", "℀.example", "\u202ea.example",
    "u\u0308.example",
    "\ud800.example", "a\udc80b",
    ":", ":::", "1:2:3", "::1::", "12345::", "::g", "1:2:3:4:5:6:7:8:9", "::1.2.3", "::256.0.0.1",
    "::ffff:127.1", "::ffff:0177.0.0.1", "::1]", "example.com:443", "127.0.0.1:80", "::1/128",
    "::1.",
]  # fmt: skip


@pytest.mark.parametrize(("host", "expected"), GOOD)
def test_a_host_has_one_spelling(host: str, expected: str) -> None:
    """And that spelling is its own."""
    assert canonical(host) == expected
    assert canonical(expected) == expected


@pytest.mark.parametrize("host", BAD, ids=[ascii(b)[:40] for b in BAD])
def test_cannot_be_a_host(host: str) -> None:
    """What two programs might read differently is refused, with a reason."""
    with pytest.raises(BadName) as caught:
        canonical(host)
    assert str(caught.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("example.com", False), ("1.example", False), ("127.0.0.1", True), ("::1", True), ("a", False),
     ("0xg", False), ("localhost", False)],
)  # fmt: skip
def test_addresses_are_told_from_names(host: str, expected: bool) -> None:
    """By their canonical spelling."""
    assert is_address(host) is expected
