"""Address classes: every special range by its first, last and neighbouring addresses."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest

from agent_sandbox.policy import addresses
from agent_sandbox.policy.addresses import (
    BROADCAST,
    LINK_LOCAL,
    LOOPBACK,
    METADATA,
    MULTICAST,
    PRIVATE,
    PUBLIC,
    RESERVED,
    STAND_IN,
    UNSPECIFIED,
    address,
    classify,
)

# From the IANA special-purpose registries, written down apart from the tables under test.
RANGES = [
    ("0.0.0.0/8", UNSPECIFIED),
    ("10.0.0.0/8", PRIVATE),
    ("100.64.0.0/10", PRIVATE),
    ("127.0.0.0/8", LOOPBACK),
    ("169.254.0.0/16", LINK_LOCAL),
    ("172.16.0.0/12", PRIVATE),
    ("192.0.0.0/24", RESERVED),
    ("192.0.2.0/24", RESERVED),
    ("192.88.99.0/24", RESERVED),
    ("192.168.0.0/16", PRIVATE),
    ("198.18.0.0/15", STAND_IN),
    ("198.51.100.0/24", RESERVED),
    ("203.0.113.0/24", RESERVED),
    ("224.0.0.0/4", MULTICAST),
    ("240.0.0.0/5", RESERVED),
    ("255.255.255.255/32", BROADCAST),
    ("::/128", UNSPECIFIED),
    ("::1/128", LOOPBACK),
    ("::2/127", RESERVED),
    ("::7f00:0/104", RESERVED),
    ("::ffff:0:0:0/96", RESERVED),
    ("64:ff9b:1::/48", PRIVATE),
    ("100::/64", RESERVED),
    ("100:0:0:1::/64", RESERVED),
    ("2001:1::/32", RESERVED),
    ("2001:2::/48", STAND_IN),
    ("2001:10::/28", RESERVED),
    ("2001:20::/28", RESERVED),
    ("2001:db8::/32", RESERVED),
    ("3fff::/20", RESERVED),
    ("4000::/3", RESERVED),
    ("5f00::/16", RESERVED),
    ("fc00::/7", PRIVATE),
    ("fe80::/10", LINK_LOCAL),
    ("fec0::/10", PRIVATE),
    ("ff00::/8", MULTICAST),
]
PUBLIC_ONES = [
    "1.0.0.0", "1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0",
    "126.255.255.255", "128.0.0.0", "169.253.255.255", "169.255.0.0", "172.15.255.255",
    "172.32.0.0", "191.255.255.255", "192.0.1.0", "192.167.255.255", "192.169.0.0",
    "198.17.255.255", "198.20.0.0", "223.255.255.255", "168.63.129.15", "192.31.196.1",
    "2000::", "2001:200::1", "2001:4860:4860::8888", "2606:4700::1111", "2a00::1",
    "2620:4f:8000::1",
    "3ffe:ffff::1",
]  # fmt: skip
METADATA_ONES = [
    "169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16",
    "192.0.0.192", "fd00:ec2::254", "fd20:ce::254", "fd00:42::42", "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe", "64:ff9b::a83f:8110", "2002:a9fe:a9fe::1", "2a00::5efe:a83f:8110",
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), RANGES)
def test_a_special_range_is_closed_from_end_to_end(text: str, expected: str) -> None:
    """Its first and its last address are of its class."""
    held = ip_network(text)
    assert classify(held[0]) == expected
    assert classify(held[-1]) == expected


@pytest.mark.parametrize("text", PUBLIC_ONES)
def test_what_lies_beside_a_special_range_is_public(text: str) -> None:
    """No range is taken too wide."""
    assert classify(address(text)) == PUBLIC


@pytest.mark.parametrize("text", METADATA_ONES)
def test_metadata_services_are_known(text: str) -> None:
    """Wherever their addresses lie, and however they are wrapped."""
    assert classify(address(text)) == METADATA


def wrapped(inner: str) -> list[str]:
    """The forms in which IPv6 carries an IPv4 address."""
    value = int(IPv4Address(inner))
    high, low = value >> 16, value & 0xFFFF
    other = value ^ 0xFFFFFFFF
    return [
        f"::ffff:{inner}",
        f"64:ff9b::{inner}",
        f"2002:{high:x}:{low:x}::1",
        f"2001:0:808:808:0:ffff:{other >> 16:x}:{other & 0xFFFF:x}",
        f"2001:0:{high:x}:{low:x}:0:ffff:f7f7:f7f7",
        f"2a00:1:2:3:0:5efe:{inner}",
        f"2a00:1:2:3:200:5efe:{inner}",
    ]


CLOSED = [
    ("127.0.0.1", LOOPBACK), ("10.1.2.3", PRIVATE), ("192.168.0.1", PRIVATE),
    ("100.64.0.1", PRIVATE), ("169.254.1.1", LINK_LOCAL), ("0.0.0.0", UNSPECIFIED),
    ("224.0.0.1", MULTICAST), ("240.0.0.1", RESERVED), ("169.254.169.254", METADATA),
    ("168.63.129.16", METADATA), ("198.18.0.1", STAND_IN),
]  # fmt: skip


@pytest.mark.parametrize(("inner", "kind"), CLOSED)
def test_an_embedded_address_closes_what_carries_it(inner: str, kind: str) -> None:
    """A gateway on the way would send the packet there."""
    assert [classify(address(form)) for form in wrapped(inner)] == [kind] * 7


def test_an_embedded_public_address_changes_nothing() -> None:
    """The control of the test above."""
    assert {classify(address(form)) for form in wrapped("8.8.4.4")} == {PUBLIC}


@pytest.mark.parametrize(
    "text", ["fe80::1%eth0", "1.2.3", "01.2.3.4", "", "a", "1.2.3.4/32", "::1/128", "[::1]", "1"]
)
def test_a_text_that_is_no_address_is_an_error(text: str) -> None:
    """The caller refuses then."""
    with pytest.raises(ValueError, match=r"."):
        address(text)


@pytest.mark.parametrize(
    ("rule", "found", "expected"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.1.0.0/16", "10.1.2.3", True),
        ("10.1.2.3/32", "10.1.2.3", True),
        ("10.1.2.4/32", "10.1.2.3", False),
        # A network with public addresses in it names the public ones.
        ("0.0.0.0/0", "10.1.2.3", False),
        ("8.0.0.0/6", "10.1.2.3", False),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("127.0.0.0/8", "127.0.0.1", True),
        ("127.0.0.1/32", "127.0.0.1", True),
        ("::/0", "::1", False),
        ("::/0", "::5", False),
        ("::/8", "::5", False),
        ("::5/128", "::5", True),
        ("::1/128", "::1", True),
        ("fc00::/7", "fd00::1", True),
        ("fd00::/64", "fd00::1", True),
        ("::/0", "fd00::1", False),
        # Metadata services need their own address.
        ("169.254.0.0/16", "169.254.1.1", True),
        ("169.254.0.0/16", "169.254.169.254", False),
        ("169.254.169.0/24", "169.254.169.254", False),
        ("169.254.169.254/32", "169.254.169.254", True),
        ("168.63.0.0/16", "168.63.129.16", False),
        ("168.63.129.16/32", "168.63.129.16", True),
        ("100.64.0.0/10", "100.100.100.200", False),
        ("fc00::/7", "fd00:ec2::254", False),
        # A network around a gateway's range does not name what the gateway leads to.
        ("64:ff9b::/96", "64:ff9b::a00:1", False),
        ("10.0.0.0/8", "64:ff9b::a00:1", False),
        ("64:ff9b::a00:1/128", "64:ff9b::a00:1", True),
        ("2002::/16", "2002:a00:1::1", False),
        ("2000::/3", "2a00::5efe:a00:1", False),
        # Nobody can be dialled there.
        ("0.0.0.0/8", "0.0.0.0", False),
        ("0.0.0.0/32", "0.0.0.0", False),
        ("224.0.0.1/32", "224.0.0.1", False),
        ("198.18.0.5/32", "198.18.0.5", False),
        ("2001:2::5/128", "2001:2::5", False),
    ],
)
def test_only_a_rule_for_the_address_names_it(rule: str, found: str, expected: bool) -> None:
    """What opens a closed address is narrow."""
    assert addresses.names(rule, address(found)) is expected


def test_the_tables_are_networks_and_narrow_rows_come_first() -> None:
    """A row that could never be reached would be a mistake in the order."""
    for rows in (addresses.V4_ROWS, addresses.V6_ROWS):
        seen: list[addresses.Network] = []
        for text, _ in rows:
            held = addresses.network(text)
            assert str(held) == text
            assert not any(addresses.within(held, earlier) for earlier in seen)
            seen.append(held)
    for text in addresses.METADATA_ADDRESSES:
        assert str(address(text)) == text


def test_families_are_not_mixed_up() -> None:
    """An IPv4 network holds no IPv6 address of the same number."""
    assert not addresses.contains("0.0.0.0/0", IPv6Address(5))
    assert not addresses.contains("::/0", IPv4Address(5))
