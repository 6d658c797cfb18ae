"""Stand-in addresses: each name that was asked for gets one, for the whole run.

Append-only. An address that once stood for one name never stands for another: a client that has
cached it would send the first host's credentials to the second. Pure.
"""

from __future__ import annotations

# RFC 2544 and RFC 5180: for benchmarks, never routed. A stray packet goes nowhere.
V4_NETWORK = bytes((198, 18))
V6_NETWORK = bytes((0x20, 0x01, 0x00, 0x02, 0, 0))
# The first addresses of 198.18.0.0/15 stay free: for name servers and the like.
V4_FIRST = int.from_bytes(bytes((198, 18, 1, 0)), "big")
V6_FIRST = int.from_bytes(V6_NETWORK + bytes(10), "big") + 0x10000
SLOTS = 65_536
MAPPED = bytes(10) + b"\xff\xff"


class Names:
    """Name ↔ slot; a slot has an IPv4 and an IPv6 address."""

    def __init__(self, start: int = 0) -> None:
        # A random start keeps two runs from meaning different hosts by one address, mostly.
        self._start = start % SLOTS
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def all(self) -> tuple[str, ...]:
        """Every name so far, in the order of asking."""
        return tuple(self._slots)

    def slot(self, name: str) -> int | None:
        """The slot of a name, a new one if need be; None when all are taken."""
        found = self._slots.get(name)
        if found is not None:
            return found
        if len(self._slots) >= SLOTS:
            return None
        new = (self._start + len(self._slots)) % SLOTS
        self._slots[name] = new
        self._names[new] = name
        return new

    def name(self, address: bytes) -> str | None:
        """The name that an address stands for; None for any other address."""
        address = unmapped(address)
        first = V4_FIRST if len(address) == 4 else V6_FIRST
        return self._names.get(int.from_bytes(address, "big") - first)


def v4(slot: int) -> bytes:
    """The IPv4 address of a slot."""
    return (V4_FIRST + slot).to_bytes(4, "big")


def v6(slot: int) -> bytes:
    """The IPv6 address of a slot."""
    return (V6_FIRST + slot).to_bytes(16, "big")


def unmapped(address: bytes) -> bytes:
    """An IPv4 address that a dual-stack socket shows as IPv6, as IPv4 again."""
    return address[12:] if len(address) == 16 and address.startswith(MAPPED) else address


def is_stand_in(address: bytes) -> bool:
    """Whether an address lies where stand-ins are taken from: it is never a real destination."""
    address = unmapped(address)
    if len(address) == 4:
        return address[:1] == V4_NETWORK[:1] and address[1] & 0xFE == V4_NETWORK[1]
    return address.startswith(V6_NETWORK)
