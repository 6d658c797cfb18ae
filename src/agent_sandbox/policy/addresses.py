"""Address classes: what an IP address is, before anything is sent to it.

Pure. The tables follow the IANA special-purpose registries. They are our own, because the answers
of `ipaddress.is_global` differ between Python versions. In IPv6 only 2000::/3 can be public.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Address: TypeAlias = IPv4Address | IPv6Address
    Network: TypeAlias = IPv4Network | IPv6Network

PUBLIC = ""
LOOPBACK = "loopback"
LINK_LOCAL = "link-local"
PRIVATE = "private"
METADATA = "cloud metadata"
RESERVED = "reserved"
# Nobody can be reached there by TCP, so no rule can open it. (Linux takes 0.0.0.0 for 127.0.0.1.)
UNSPECIFIED = "unspecified"
MULTICAST = "multicast"
BROADCAST = "broadcast"
# What the sandbox's own DNS answers with: such an address stands for a name, never for a machine.
STAND_IN = "stand-in"
NEVER = (UNSPECIFIED, MULTICAST, BROADCAST, STAND_IN)

STAND_IN_V4 = "198.18.0.0/15"
STAND_IN_V6 = "2001:2::/48"

# Services that hand out credentials to whoever asks. Azure's and Oracle's are in ranges that look
# public or merely reserved, so an address list is the only way to know them.
METADATA_ADDRESSES = frozenset({
    "169.254.169.254",  # AWS, Google, Azure, OpenStack, Oracle, DigitalOcean …
    "169.254.170.2", "169.254.170.23",  # AWS: containers, EKS pods
    "169.254.169.253", "169.254.169.123",  # AWS: resolver and clock beside it
    "169.254.0.23",  # Tencent
    "169.254.42.42",  # Scaleway
    "100.100.100.200",  # Alibaba
    "168.63.129.16",  # Azure's wire server
    "192.0.0.192",  # Oracle, classic
    "fd00:ec2::254", "fd00:ec2::253", "fd00:ec2::23",  # AWS
    "fd20:ce::254",  # Google
    "fd00:42::42",  # Scaleway
    "fd00:c1::a9fe:a9fe",  # Oracle
})  # fmt: skip

REST = "::/0"

# The first row that holds the address decides, so narrow rows stand above wide ones.
V4_ROWS = (
    ("0.0.0.0/8", UNSPECIFIED),
    ("127.0.0.0/8", LOOPBACK),
    ("10.0.0.0/8", PRIVATE),
    ("172.16.0.0/12", PRIVATE),
    ("192.168.0.0/16", PRIVATE),
    ("100.64.0.0/10", PRIVATE),  # shared address space of carriers, and of overlay networks
    ("169.254.0.0/16", LINK_LOCAL),
    (STAND_IN_V4, STAND_IN),
    ("192.0.0.0/24", RESERVED),  # protocol assignments, DS-Lite, NAT64 discovery
    ("192.0.2.0/24", RESERVED),  # documentation
    ("198.51.100.0/24", RESERVED),
    ("203.0.113.0/24", RESERVED),
    ("192.88.99.0/24", RESERVED),  # 6to4 relays
    ("224.0.0.0/4", MULTICAST),
    ("255.255.255.255/32", BROADCAST),
    ("240.0.0.0/4", RESERVED),
)
V6_ROWS = (
    ("::/128", UNSPECIFIED),
    ("::1/128", LOOPBACK),
    ("fe80::/10", LINK_LOCAL),
    ("fc00::/7", PRIVATE),
    ("fec0::/10", PRIVATE),  # site-local, deprecated, still routed in places
    ("ff00::/8", MULTICAST),
    (STAND_IN_V6, STAND_IN),
    ("64:ff9b:1::/48", PRIVATE),  # NAT64 of the local network: where v4 lies in it is its choice
    ("64:ff9b::/96", PUBLIC),  # NAT64: as the v4 address in it
    ("2001::/32", PUBLIC),  # Teredo: as the v4 addresses in it
    ("2001::/23", RESERVED),  # protocol assignments
    ("2001:db8::/32", RESERVED),  # documentation
    ("3fff::/20", RESERVED),
    ("2000::/3", PUBLIC),
    (REST, RESERVED),  # everything else: v4-compatible, discard-only, SRv6, unassigned
)


@lru_cache(maxsize=4096)
def network(text: str) -> Network:
    """A network from its canonical text."""
    return IPv6Network(text) if ":" in text else IPv4Network(text)


def address(text: str) -> Address:
    """An address; a v4-mapped one is the v4 address, since that is what is dialled. ValueError."""
    if ":" not in text:
        return IPv4Address(text)
    if "%" in text:
        # A zone picks an interface of the host: fe80::1%eth0.
        raise ValueError("a zone id is not part of an address")
    found = IPv6Address(text)
    return found.ipv4_mapped or found


def contains(text: str, found: Address) -> bool:
    """Whether the network `text` holds the address."""
    held = network(text)
    # Addresses of the other family are never members.
    return found in held


def classify(found: Address) -> str:
    """What the address is: PUBLIC, or the class because of which it is closed by default."""
    if str(found) in METADATA_ADDRESSES:
        return METADATA
    own = row_of(found)[1]
    if own != PUBLIC:
        return own
    for inner in embedded(found):
        held = classify(inner)
        if held != PUBLIC:
            return held
    return PUBLIC


def row_of(found: Address) -> tuple[str, str]:
    """The row of the tables that decides: the range and its class."""
    rows = V4_ROWS if isinstance(found, IPv4Address) else V6_ROWS
    return next((row for row in rows if contains(row[0], found)), ("", PUBLIC))


def embedded(found: Address) -> tuple[IPv4Address, ...]:
    """IPv4 addresses that a gateway or tunnel on the way would send the packet to."""
    if isinstance(found, IPv4Address):
        return ()
    value = int(found)
    low = value & 0xFFFFFFFF
    held = []
    if contains("64:ff9b::/96", found):
        held.append(low)
    if contains("2002::/16", found):  # 6to4
        held.append(value >> 80 & 0xFFFFFFFF)
    if contains("2001::/32", found):  # Teredo: the server, and the client with its bits inverted
        held += [value >> 64 & 0xFFFFFFFF, low ^ 0xFFFFFFFF]
    if value >> 32 & 0xFDFFFFFF == 0x5EFE:  # ISATAP: ::0:5efe:v4 and ::200:5efe:v4 of any prefix
        held.append(low)
    return tuple(IPv4Address(one) for one in held)


def names(rule: str, found: Address) -> bool:
    """Whether a rule's network names this address in particular, so that it opens a closed one.

    A network that also covers public addresses does not: who writes 0.0.0.0/0 means the internet,
    not the services on the host's loopback.
    """
    held = network(rule)
    if found not in held:
        return False
    kind = classify(found)
    if kind in NEVER:
        return False
    if kind == METADATA:
        return held.num_addresses == 1
    row = row_of(found)
    if row[1] == PUBLIC or row[0] == REST:  # closed for the v4 address in it, or of no known use
        return held.num_addresses == 1
    return within(held, network(row[0]))


def within(inner: Network, outer: Network) -> bool:
    """Whether all of `inner` lies in `outer`."""
    return (
        inner.version == outer.version
        and inner.prefixlen >= outer.prefixlen
        and inner.network_address in outer
    )
