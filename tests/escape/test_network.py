"""The network: with --network=off nothing leaves; with it on, its settings stay the host's own."""

from __future__ import annotations

import fcntl
import socket
import struct
from typing import TYPE_CHECKING

import pytest

from escape.attack import ROOT, Attack, Scene, Trial, trials

if TYPE_CHECKING:
    from escape.attack import Step

pytestmark = pytest.mark.kernel

OFF = ("--network=off",)
SEND = """
import socket
def send(family, kind, address):
    try:
        peer = socket.socket(family, kind)
        peer.settimeout(3)
        peer.connect((address, int(port)))
        peer.send(b"x")
    except OSError as error:
        print(address, error)
"""
# A question for a name, as any resolver sends it, to a server of the attacker's choice.
QUESTION = """
import socket
packet = bytes.fromhex("123401000001000000000000") + b"\\6secret\\7example\\3org\\0\\0\\1\\0\\1"
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(packet, ("127.0.0.1", int(port)))
except OSError as error: print(error)
"""
CONNECTIONS = """
import glob
for name in ("tcp", "tcp6", "udp", "unix", "route", "arp"):
    print(open(f"/proc/net/{name}").read())
"""
# From linux/sockios.h.
SIOCSIFFLAGS, SIOCGIFADDR = 0x8914, 0x8915
ADD_ADDRESS = """
import fcntl, socket, struct
packed = struct.pack("16sHH4s8x", alias.encode(), socket.AF_INET, 0, socket.inet_aton(address))
try: fcntl.ioctl(socket.socket(), 0x8916, packed)
except OSError as error: print(error)
"""


def service(
    kind: int = socket.SOCK_STREAM, family: int = socket.AF_INET, address: str = "127.0.0.1"
) -> Step:
    """A host service on loopback."""

    def setup(scene: Scene) -> None:
        scene.facts["port"] = str(scene.listen((address, 0), kind, family).port)

    return setup


def alias(scene: Scene) -> None:
    """A name and an address that the host's loopback does not have."""
    number = int(scene.token[:4], 16)
    scene.facts["alias"] = f"lo:{scene.token[:8]}"
    scene.facts["address"] = f"127.99.{number >> 8}.{number & 255}"
    scene.cleanup.callback(remove_alias, scene.facts["alias"])


def alias_is_there(scene: Scene) -> bool:
    with socket.socket() as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("32s", scene.facts["alias"].encode()))
        except OSError:
            return False
    return True


def remove_alias(name: str) -> None:
    with socket.socket() as any_socket:
        try:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", name.encode(), 0))
        except OSError:
            return


def lists_the_service(scene: Scene) -> bool:
    """Whether the host's own table of sockets came out: ports are in hexadecimal there."""
    return f":{int(scene.facts['port']):04X} " in scene.output


ATTACKS = (
    Attack(
        name="tcp-to-loopback", invariant=10, what="databases, debuggers, other agents",
        setup=service(), flags=OFF, python=True,
        script=SEND + 'send(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1")',
        without="network namespace",
    ),
    Attack(
        name="tcp-to-any-address", invariant=10, what="0.0.0.0 and other spellings of loopback",
        setup=service(address="0.0.0.0"), flags=OFF, python=True,
        script=SEND + """
for address in ("0.0.0.0", "127.1.2.3", "localhost"):
    send(socket.AF_INET, socket.SOCK_STREAM, address)
send(socket.AF_INET6, socket.SOCK_STREAM, "::ffff:127.0.0.1")
""", without="network namespace",
    ),
    Attack(
        name="tcp-over-ipv6", invariant=10, what="::1",
        setup=service(family=socket.AF_INET6, address="::1"), flags=OFF, python=True,
        script=SEND + 'send(socket.AF_INET6, socket.SOCK_STREAM, "::1")',
        without="network namespace",
    ),
    Attack(
        name="udp", invariant=10, what="no connection needed",
        setup=service(socket.SOCK_DGRAM), flags=OFF, python=True,
        script=SEND + 'send(socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1")',
        without="network namespace",
    ),
    Attack(
        name="name-server", invariant=10, what="a secret in a question",
        setup=service(socket.SOCK_DGRAM), flags=OFF, python=True, script=QUESTION,
        without="network namespace",
    ),
    Attack(
        name="other-network-namespaces", invariant=10, what="setns to those that /proc names",
        setup=service(), flags=OFF, python=True,
        script="import ctypes, glob, os\n" + SEND + """
for name in glob.glob("/proc/[0-9]*/ns/net"):
    try: ctypes.CDLL(None).setns(os.open(name, os.O_RDONLY), 0x40000000)
    except OSError as error: print(error)
    send(socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1")
""", without="network namespace",
    ),
    Attack(
        name="list-of-connections", invariant=10, what="who listens on the host, who talks to whom",
        setup=service(), flags=OFF, python=True, script=CONNECTIONS, escaped=lists_the_service,
        without="network namespace",
    ),
    Attack(
        name="address-of-the-host", invariant=2, what="add one with the network shared",
        who=(ROOT,), setup=alias, python=True, script=ADD_ADDRESS, escaped=alias_is_there,
        without="user namespace",
    ),
)  # fmt: skip


@trials(ATTACKS)
def test_cannot_use_the_network(trial: Trial) -> None:
    trial.run()
