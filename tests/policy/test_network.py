"""Decisions about hosts, ports and addresses, as tables."""

from __future__ import annotations

import pytest

from agent_sandbox.policy.network import (
    DEFAULT_PORTS,
    MAX_LISTENERS,
    Egress,
    admit,
    capture,
    decide,
    ports_of,
)

from .egress import egress

A = "allow"
P = "public"
L = "learn"
OK = True
NO = False

# mode, rules ("-" in front: deny), host, port, allowed, the rule that decided
DECISIONS: list[tuple[str, str, str, int, bool, str]] = [
    # exact names
    (A, "example.com", "example.com", 443, OK, "example.com"),
    (A, "example.com", "example.com", 80, OK, "example.com"),
    (A, "example.com", "example.com", 22, OK, "example.com"),
    (A, "example.com", "example.com", 8443, NO, ""),
    (A, "example.com", "example.com", 21, NO, ""),
    (A, "example.com", "www.example.com", 443, NO, ""),
    (A, "example.com", "example.com.evil.test", 443, NO, ""),
    (A, "example.com", "notexample.com", 443, NO, ""),
    (A, "example.com", "com", 443, NO, ""),
    (A, "EXAMPLE.com.", "example.com", 443, OK, "EXAMPLE.com."),
    (A, "example.com:8443", "example.com", 8443, OK, "example.com:8443"),
    (A, "example.com:8443", "example.com", 443, NO, ""),
    (A, "example.com:*", "example.com", 1, OK, "example.com:*"),
    (A, "example.com:*", "example.com", 65535, OK, "example.com:*"),
    (A, "a.example b.example:81", "b.example", 81, OK, "b.example:81"),
    (A, "", "example.com", 443, NO, ""),
    (A, "bücher.example", "xn--bcher-kva.example", 443, OK, "bücher.example"),
    # suffixes
    (A, "*.example.com", "www.example.com", 443, OK, "*.example.com"),
    (A, "*.example.com", "a.b.c.example.com", 443, OK, "*.example.com"),
    (A, "*.example.com", "example.com", 443, NO, ""),
    (A, "*.example.com", "notexample.com", 443, NO, ""),
    (A, "*.example.com", "example.com.evil.test", 443, NO, ""),
    (A, "*.example.com:8080", "x.example.com", 8080, OK, "*.example.com:8080"),
    (A, "*.example.com:8080", "x.example.com", 443, NO, ""),
    # any name
    (A, "*", "example.com", 443, OK, "*"),
    (A, "*", "example.com", 8443, NO, ""),
    (A, "*:8443", "example.com", 8443, OK, "*:8443"),
    (A, "*:*", "example.com", 9, OK, "*:*"),
    (A, "*:*", "8.8.8.8", 443, NO, ""),
    (A, "*:*", "localhost", 443, NO, ""),
    (A, "*:*", "a.localhost", 443, NO, ""),
    (A, "*:*", "127.0.0.1", 443, NO, ""),
    (A, "*:*", "::1", 443, NO, ""),
    # addresses
    (A, "8.8.8.8", "8.8.8.8", 443, OK, "8.8.8.8"),
    (A, "8.8.8.8", "8.8.8.8", 53, NO, ""),
    (A, "8.8.8.8:53", "8.8.8.8", 53, OK, "8.8.8.8:53"),
    (A, "8.8.8.8", "8.8.4.4", 443, NO, ""),
    (A, "8.8.8.8", "dns.google", 443, NO, ""),
    (A, "8.8.0.0/16", "8.8.4.4", 443, OK, "8.8.0.0/16"),
    (A, "8.8.0.0/16", "8.9.0.0", 443, NO, ""),
    (A, "0.0.0.0/0", "8.8.4.4", 443, OK, "0.0.0.0/0"),
    (A, "0.0.0.0/0", "10.0.0.1", 443, NO, ""),
    (A, "0.0.0.0/0", "127.0.0.1", 443, NO, ""),
    (A, "0.0.0.0/0", "2a00::1", 443, NO, ""),
    (A, "::/0", "2a00::1", 443, OK, "::/0"),
    (A, "::/0", "8.8.8.8", 443, NO, ""),
    (A, "::/0:*", "::1", 443, NO, ""),
    (A, "10.0.0.0/8", "10.1.2.3", 443, OK, "10.0.0.0/8"),
    (A, "10.0.0.0/8:5432", "10.1.2.3", 5432, OK, "10.0.0.0/8:5432"),
    (A, "fd00::/8", "fd00::7", 443, OK, "fd00::/8"),
    (A, "169.254.169.254", "169.254.169.254", 80, OK, "169.254.169.254"),
    (A, "169.254.0.0/16", "169.254.169.254", 80, NO, ""),
    (A, "127.0.0.1:5432", "127.0.0.1", 5432, OK, "127.0.0.1:5432"),
    (A, "127.0.0.1:5432", "localhost", 5432, NO, ""),
    # one service of this machine
    (A, "localhost:5432", "localhost", 5432, OK, "localhost:5432"),
    (A, "localhost:5432", "127.0.0.1", 5432, OK, "localhost:5432"),
    (A, "localhost:5432", "::1", 5432, OK, "localhost:5432"),
    (A, "localhost:5432", "127.0.0.2", 5432, NO, ""),
    (A, "localhost:5432", "localhost", 5433, NO, ""),
    (A, "localhost:5432", "localhost", 443, NO, ""),
    (A, "localhost:5432", "a.localhost", 5432, NO, ""),
    (A, "localhost:5432", "example.com", 5432, NO, ""),
    # deny beats allow, whatever the order
    (A, "example.com -example.com", "example.com", 443, NO, "example.com"),
    (A, "-example.com example.com:*", "example.com", 9, NO, "example.com"),
    (A, "*.example.com -evil.example.com", "evil.example.com", 443, NO, "evil.example.com"),
    (A, "*.example.com -evil.example.com", "good.example.com", 443, OK, "*.example.com"),
    (A, "a.example.com -*.example.com", "a.example.com", 443, NO, "*.example.com"),
    (A, "example.com -example.com:22", "example.com", 22, NO, "example.com:22"),
    (A, "example.com -example.com:22", "example.com", 443, OK, "example.com"),
    (A, "example.com -example.com:*", "example.com", 443, NO, "example.com:*"),
    (A, "example.com -*", "example.com", 443, NO, "*"),
    (A, "8.8.8.8 -8.0.0.0/8", "8.8.8.8", 443, NO, "8.0.0.0/8"),
    (A, "8.8.8.8 -*:443", "8.8.8.8", 443, NO, "*:443"),
    (A, "localhost:80 -localhost", "localhost", 80, NO, "localhost"),
    (A, "localhost:80 -localhost", "127.0.0.1", 80, NO, "localhost"),
    (A, "127.0.0.2:80 -localhost", "127.0.0.2", 80, NO, "localhost"),
    (A, "localhost:80 -localhost:81", "localhost", 80, OK, "localhost:80"),
    (A, "localhost:80 -127.0.0.1", "127.0.0.1", 80, NO, "127.0.0.1"),
    # a gateway's address of a denied one
    (P, "-8.8.8.8", "64:ff9b::808:808", 443, NO, "8.8.8.8"),
    (P, "-8.8.8.8", "2002:808:808::1", 443, NO, "8.8.8.8"),
    (P, "-8.8.8.8", "64:ff9b::808:809", 443, OK, ""),
    # public and learn
    *[row for mode in (P, L) for row in (
        (mode, "", "example.com", 443, OK, ""),
        (mode, "", "example.com", 12345, OK, ""),
        (mode, "", "8.8.8.8", 443, OK, ""),
        (mode, "", "2a00::1", 443, OK, ""),
        (mode, "", "localhost", 443, NO, ""),
        (mode, "", "a.localhost", 443, NO, ""),
        (mode, "", "127.0.0.1", 443, NO, ""),
        (mode, "", "10.0.0.1", 443, NO, ""),
        (mode, "", "169.254.169.254", 80, NO, ""),
        (mode, "", "168.63.129.16", 80, NO, ""),
        (mode, "", "198.18.0.9", 80, NO, ""),
        (mode, "", "fd00::1", 443, NO, ""),
        (mode, "-example.com", "example.com", 443, NO, "example.com"),
        (mode, "-*.example.com", "a.example.com", 9, NO, "*.example.com"),
        (mode, "-*:25", "example.com", 25, NO, "*:25"),
        (mode, "10.0.0.1", "10.0.0.1", 443, OK, "10.0.0.1"),
        (mode, "10.0.0.1", "10.0.0.1", 81, NO, ""),
        (mode, "localhost:80", "localhost", 80, OK, "localhost:80"),
        (mode, "example.com:81", "example.com", 81, OK, "example.com:81"),
    )],
    # other modes never come here, and would be closed
    ("off", "example.com", "example.com", 443, NO, ""),
    ("on", "example.com", "example.com", 443, NO, ""),
    ("", "example.com", "example.com", 443, NO, ""),
    # not canonical, not a host, not a port
    *[(mode, "example.com *:*", host, port, NO, "") for mode in (A, P) for host, port in (
        ("Example.com", 443), ("example.com.", 443), ("example.com\0", 443), ("", 443),
        ("[::1]", 443), ("127.1", 443), ("::ffff:8.8.8.8", 443), ("2A00::1", 443),
        ("example.com", 0), ("example.com", -1), ("example.com", 65536),
    )],
]  # fmt: skip


@pytest.mark.parametrize(("mode", "rules", "host", "port", "allowed", "rule"), DECISIONS)
def test_decisions(  # noqa: PLR0917 - a row of the table
    mode: str, rules: str, host: str, port: int, allowed: bool, rule: str
) -> None:
    """Before any lookup; and each verdict says why."""
    verdict = decide(egress(mode, *rules.split()), host, port)
    assert (verdict.allowed, verdict.rule) == (allowed, rule)
    assert verdict.source == ("" if not rule else "allow" if allowed else "deny")
    assert verdict.reason


OWN = ("192.168.1.5", "203.0.114.9", "2a00::5", "fe80::5%eth0", "not an address")

# mode, rules, host, port, address, allowed, the rule that decided
ADMISSIONS: list[tuple[str, str, str, int, str, bool, str]] = [
    (A, "example.com", "example.com", 443, "8.8.8.8", OK, "example.com"),
    (A, "example.com", "example.com", 443, "2a00::1", OK, "example.com"),
    (A, "example.com", "example.com", 443, "::ffff:8.8.8.8", OK, "example.com"),
    # what is refused before the lookup stays so
    (A, "example.com", "other.example", 443, "8.8.8.8", NO, ""),
    (A, "example.com", "example.com", 81, "8.8.8.8", NO, ""),
    (A, "8.8.8.8", "example.com", 443, "8.8.8.8", NO, ""),
    # a name never opens a closed address
    *[(mode, "example.com *:*", "example.com", 443, address, NO, "")
      for mode in (A, P, L) for address in (
        "127.0.0.1", "127.9.9.9", "::1", "10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1",
        "169.254.1.1", "169.254.169.254", "fe80::1", "fd00::1", "fd00:ec2::254", "168.63.129.16",
        "0.0.0.0", "::", "224.0.0.1", "ff02::1", "240.0.0.1", "255.255.255.255", "198.18.0.1",
        "2001:2::1", "192.0.2.1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
        "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:a00:1::1", "2001:0:808:808::f5ff:fffe",
        "2a00::5efe:a00:1", "::127.0.0.1", "100::1", "4000::1",
        "192.168.1.5", "203.0.114.9", "2a00::5", "64:ff9b::cb00:7209", "fe80::5",
        "::ffff:203.0.114.9",
        "fe80::1%eth0", "8.8.8", "", "x", "8.8.8.8:80", "[2a00::1]", "8.8.8.8\0", "010.8.8.8",
      )],
    # a rule with the address does, together with one for the name
    (A, "db.example 10.0.0.1", "db.example", 443, "10.0.0.1", OK, "10.0.0.1"),
    (A, "db.example 10.0.0.0/8", "db.example", 443, "10.0.0.1", OK, "10.0.0.0/8"),
    (A, "db.example 10.0.0.0/8:80", "db.example", 443, "10.0.0.1", NO, ""),
    (A, "db.example 0.0.0.0/0:*", "db.example", 443, "10.0.0.1", NO, ""),
    (A, "10.0.0.0/8", "db.example", 443, "10.0.0.1", NO, ""),
    (P, "10.0.0.0/8", "db.example", 443, "10.0.0.1", OK, "10.0.0.0/8"),
    (P, "10.0.0.0/8", "db.example", 443, "10.0.0.2", OK, "10.0.0.0/8"),
    (P, "10.0.0.0/8", "db.example", 444, "10.0.0.2", NO, ""),
    (P, "127.0.0.1", "db.example", 443, "127.0.0.1", OK, "127.0.0.1"),
    (P, "localhost:443", "db.example", 443, "127.0.0.1", NO, ""),
    # asked for by address
    (A, "10.0.0.0/8", "10.0.0.1", 443, "10.0.0.1", OK, "10.0.0.0/8"),
    (A, "10.0.0.0/8", "10.0.0.1", 443, "10.0.0.2", NO, ""),
    (A, "8.8.8.8", "8.8.8.8", 443, "8.8.8.8", OK, "8.8.8.8"),
    (A, "8.8.8.8", "8.8.8.8", 443, "8.8.4.4", NO, ""),
    (P, "", "8.8.8.8", 443, "8.8.8.8", OK, ""),
    (P, "", "8.8.8.8", 443, "8.8.4.4", NO, ""),
    (A, "169.254.169.254", "169.254.169.254", 80, "169.254.169.254", OK, "169.254.169.254"),
    # services of this machine
    (A, "localhost:5432", "localhost", 5432, "127.0.0.1", OK, "localhost:5432"),
    (A, "localhost:5432", "localhost", 5432, "::1", OK, "localhost:5432"),
    (A, "localhost:5432", "127.0.0.1", 5432, "127.0.0.1", OK, "localhost:5432"),
    (A, "localhost:5432", "127.0.0.1", 5432, "::1", OK, "localhost:5432"),
    (A, "localhost:5432", "localhost", 5432, "127.0.0.2", NO, ""),
    (A, "localhost:5432", "localhost", 5432, "10.0.0.1", NO, ""),
    (A, "localhost:5432", "localhost", 5432, "192.168.1.5", NO, ""),
    (A, "localhost:5432", "localhost", 5433, "127.0.0.1", NO, ""),
    (A, "localhost:5432 10.0.0.1:5432", "localhost", 5432, "10.0.0.1", NO, ""),
    # this machine's other addresses: the network around it is not enough
    (A, "192.168.1.0/24", "192.168.1.4", 443, "192.168.1.4", OK, "192.168.1.0/24"),
    (A, "192.168.1.0/24", "192.168.1.5", 443, "192.168.1.5", NO, ""),
    (A, "192.168.1.5", "192.168.1.5", 443, "192.168.1.5", OK, "192.168.1.5"),
    (A, "203.0.114.0/24", "203.0.114.9", 443, "203.0.114.9", NO, ""),
    (A, "203.0.114.9", "203.0.114.9", 443, "203.0.114.9", OK, "203.0.114.9"),
    (P, "", "203.0.114.8", 443, "203.0.114.8", OK, ""),
    (P, "", "203.0.114.9", 443, "203.0.114.9", NO, ""),
    # deny rules see the address
    (P, "-8.8.0.0/16", "example.com", 443, "8.8.8.8", NO, "8.8.0.0/16"),
    (P, "-8.8.0.0/16", "example.com", 443, "::ffff:8.8.8.8", NO, "8.8.0.0/16"),
    (P, "-8.8.0.0/16", "example.com", 443, "64:ff9b::808:808", NO, "8.8.0.0/16"),
    (P, "-8.8.0.0/16", "example.com", 443, "2a00::5efe:808:808", NO, "8.8.0.0/16"),
    (P, "-8.8.0.0/16:80", "example.com", 443, "8.8.8.8", OK, ""),
    (A, "example.com -8.8.8.8", "example.com", 443, "8.8.8.8", NO, "8.8.8.8"),
    (A, "db.example 127.0.0.1 -localhost", "db.example", 443, "127.0.0.1", NO, "localhost"),
    (A, "localhost:80 -127.0.0.0/8", "localhost", 80, "127.0.0.1", NO, "127.0.0.0/8"),
    (A, "localhost:80 -127.0.0.0/8", "localhost", 80, "::1", OK, "localhost:80"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "rules", "host", "port", "address", "allowed", "rule"), ADMISSIONS
)
def test_admissions(  # noqa: PLR0917 - a row of the table
    mode: str, rules: str, host: str, port: int, address: str, allowed: bool, rule: str
) -> None:
    """One address that a lookup gave."""
    verdict = admit(egress(mode, *rules.split()), host, port, address, OWN)
    assert (verdict.allowed, verdict.rule) == (allowed, rule)
    assert verdict.reason


@pytest.mark.parametrize(
    ("rules", "host", "port", "words"),
    [
        ("", "example.com", 443, "no rule allows example.com"),
        ("", "example.com", 8443, "no rule allows example.com:8443"),
        ("", "fd00::1", 8443, "no rule allows [fd00::1]:8443"),
        ("example.com", "example.com", 8443, "'example.com' (allow) allows example.com on port 80"),
        ("example.com", "example.com", 443, "allowed by 'example.com' (allow)"),
        ("-example.com", "example.com", 443, "denied by 'example.com' (deny)"),
    ],
)
def test_a_verdict_says_what_decided(rules: str, host: str, port: int, words: str) -> None:
    """Rule and source, or what is missing."""
    assert words in decide(egress(A, *rules.split()), host, port).reason


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.1", "10.0.0.1 is a private address: only a rule with the address itself"),
        ("127.0.0.1", "is a loopback address"),
        ("169.254.169.254", "is a cloud metadata address"),
        ("192.168.1.5", "one of this machine's own addresses"),
        ("224.0.0.1", "is a multicast address: no rule opens it"),
    ],
)
def test_a_closed_address_is_explained(address: str, words: str) -> None:
    """With the rule that would open it."""
    assert words in admit(egress(P), "example.com", 443, address, OWN).reason


@pytest.mark.parametrize(
    ("rules", "host", "expected"),
    [
        ("", "example.com", ()),
        ("example.com", "example.com", ()),
        ("example.com:443 example.com:1023", "example.com", ()),
        ("example.com:8443 example.com:1024", "example.com", (1024, 8443)),
        ("example.com:8443", "other.example", ()),
        ("*.example.com:8443 *:9000 a.example.com:7000", "a.example.com", (7000, 8443, 9000)),
        ("*.example.com:8443 *:9000", "example.com", (9000,)),
        # Every port cannot be bound: the proxy port is the way.
        ("example.com:*", "example.com", ()),
        ("localhost:5432 *:9000", "localhost", ()),
        ("10.0.0.1:5432 *:9000", "10.0.0.1", ()),
        ("10.0.0.1:5432", "example.com", ()),
    ],
)
def test_high_ports_of_a_name(rules: str, host: str, expected: tuple[int, ...]) -> None:
    """Those that rules name for it, to be bound on its stand-in address."""
    for mode in (A, P, L):
        assert ports_of(egress(mode, *rules.split()), host) == expected


WELL_KNOWN = tuple(("", port) for port in DEFAULT_PORTS)


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("", ()),
        ("example.com", ()),
        ("example.com:443", ()),
        ("example.com:25 *:587 10.0.0.1:25", (("", 25), ("", 587))),
        ("example.com:8443 *:9000", ()),
        ("localhost:5432", (("127.0.0.1", 5432), ("::1", 5432))),
        ("localhost:25", (("", 25),)),
        ("10.0.0.1:5432", (("10.0.0.1", 5432),)),
        ("10.0.0.0/31:5432", (("10.0.0.0", 5432), ("10.0.0.1", 5432))),
        ("[fd00::1]:5432", (("fd00::1", 5432),)),
        ("10.0.0.0/23:5432", ()),
        ("fd00::/64:5432", ()),
        ("10.0.0.1:*", ()),
        ("10.0.0.1", ()),
        ("-10.0.0.1:5432 -a.example:25", ()),
        # The DNS stub and the proxy have these.
        ("8.8.8.8:53 a.example:53", ()),
        ("localhost:3128", (("::1", 3128),)),
        ("10.0.0.1:3128", (("10.0.0.1", 3128),)),
    ],
)
def test_listeners_at_the_start(rules: str, expected: tuple[tuple[str, int], ...]) -> None:
    """Low ports everywhere, high ports only where a rule names the address."""
    assert capture(egress(A, *rules.split())) == (*WELL_KNOWN, *expected)


def test_a_network_of_256_addresses_is_captured_whole() -> None:
    """And one of 512 is left to the proxy port."""
    assert len(capture(egress(A, "10.0.0.0/24:5432"))) == 3 + 256


def test_listeners_are_limited_and_each_once() -> None:
    """However many rules there are."""
    rules = [f"10.0.{n}.0/24:5432" for n in range(40)]
    found = capture(egress(A, *rules, *rules))
    assert len(found) == len(set(found)) == MAX_LISTENERS


def test_no_listener_takes_every_address_of_a_high_port() -> None:
    """The command's own server needs it."""
    made = egress(
        A, "localhost:8080", "10.0.0.0/30:8080", "*:8080", "a.example:8080", "0.0.0.0/0:8080"
    )
    assert not [
        port for where, port in capture(made) if where in ("", "0.0.0.0", "::") and port >= 1024
    ]


def test_an_empty_allow_list_allows_nothing() -> None:
    """The mode alone opens nothing."""
    nothing = Egress(mode=A)
    assert not decide(nothing, "example.com", 443).allowed
    assert not admit(nothing, "example.com", 443, "8.8.8.8", ()).allowed
