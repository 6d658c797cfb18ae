"""Asks the kernel whether an address is one of this machine's own.

Not a list of interfaces, which would be old when it is used: the answer to `ip route get`, which
also knows of addresses that exist only as routes.
"""

from __future__ import annotations

import socket
import sys

RTM_GETROUTE = 26
NLM_F_REQUEST = 1
NLMSG_ERROR = 2
RTA_DST = 1
RTN_UNICAST = 1
HEADER = 16
# In struct rtmsg, behind the netlink header.
TYPE_OFFSET = HEADER + 7


def request(packed: bytes) -> bytes:
    """`ip route get ADDRESS`. Pure."""
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    message = bytes((family, len(packed) * 8, 0, 0, 0, 0, 0, 0)) + _number(0, 4)
    message += _number(4 + len(packed), 2) + _number(RTA_DST, 2) + packed
    header = _number(HEADER + len(message), 4) + _number(RTM_GETROUTE, 2)
    return header + _number(NLM_F_REQUEST, 2) + _number(1, 4) + _number(0, 4) + message


def is_remote(answer: bytes) -> bool:
    """Whether packets would leave the machine, or go nowhere. Pure."""
    if int.from_bytes(answer[4:6], sys.byteorder) == NLMSG_ERROR:
        # No route. Connecting fails by itself.
        return True
    return len(answer) > TYPE_OFFSET and answer[TYPE_OFFSET] == RTN_UNICAST


def is_own(address: str) -> bool:
    """Whether an address leads to this machine itself. When in doubt, it does."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0) as line:
            line.send(request(socket.inet_pton(family, address)))
            return not is_remote(line.recv(4096))
    except OSError:
        return True


def _number(value: int, size: int) -> bytes:
    return value.to_bytes(size, sys.byteorder)
