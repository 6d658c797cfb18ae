"""What people write about hosts and ports: entries of allow, deny and publish become values.

Pure, and strict: a text that could mean two things is an error with a hint, since the wrong guess
opens something that nobody named.
"""

from __future__ import annotations

from ipaddress import ip_network

from ..errors import PolicyError
from ..record import Record
from . import addresses
from .hostnames import BadName, canonical, is_address

DEFAULT_PORTS = (80, 443, 22)
EVERY_PORT = (0,)
MAX_PORT = 65535

# Kinds of rules.
NAME = "name"
SUFFIX = "suffix"
ANY = "any"
NET = "net"
LOCAL = "local"

LOCALHOST = "localhost"
LOCAL_ADDRESSES = ("127.0.0.1", "::1")

FORMS = (
    "write example.com, *.example.com, example.com:8443, 192.168.1.7, 10.0.0.0/8:5432, "
    "[fd00::7]:443 or localhost:5432"
)
PUBLISH_FORMS = "write 8080, 8080:3000 (port outside, port inside) or 127.0.0.1:8080:3000"


class Rule(Record):
    """One entry of an allow or deny list."""

    text: str
    source: str
    kind: str
    # The canonical name, the suffix without "*.", or the network in CIDR text.
    host: str
    # () = DEFAULT_PORTS for allow, every port for deny; (0,) = every port.
    ports: tuple[int, ...] = ()


class Publish(Record):
    """A port of the host that leads to a server inside."""

    address: str
    port: int
    inner_port: int
    text: str = ""
    source: str = ""

    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return addresses.classify(addresses.address(self.address)) == addresses.LOOPBACK


def parse(text: str, source: str, *, deny: bool = False) -> Rule:
    """One rule. PolicyError, with a hint, for what is not exactly one of the forms."""
    _check_text(text, source)
    host, port = _split(text, source)
    ports = () if port is None else _ports(port, text, source)
    kind, found = _host(host, text, source)
    if kind == LOCAL and not deny and ports in ((), EVERY_PORT):
        raise _bad(text, source, "it opens every service of this machine", "write localhost:PORT")
    return Rule(text=text, source=source, kind=kind, host=found, ports=ports)


def parse_publish(text: str, source: str) -> Publish:
    """[ADDR:]PORT[:PORT]. The address is the loopback if none is given."""
    head, bracket, rest = text.rpartition("]")
    if bracket:
        where, parts = head.removeprefix("["), rest.removeprefix(":").split(":")
        good = head.startswith("[") and rest.startswith(":") and ":" in where
    else:
        parts = text.split(":")
        # A port is never dotted, an IPv4 address always is.
        where = parts.pop(0) if "." in parts[0] else ""
        good = True
    numbers = [_port_number(part) for part in parts]
    if not good or not 1 <= len(numbers) <= 2 or 0 in numbers:
        raise _bad_publish(text, source, "it is not [ADDR:]PORT[:PORT]", PUBLISH_FORMS)
    outer, inner = numbers[0], numbers[-1]
    found = _publish_address(where, text, source)
    return Publish(address=found, port=outer, inner_port=inner, text=text, source=source)


def as_rule(host: str, port: int) -> str:
    """The shortest text of a rule that allows this canonical host and port."""
    if port in DEFAULT_PORTS and host != LOCALHOST:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _publish_address(where: str, text: str, source: str) -> str:
    if not where:
        return LOCAL_ADDRESSES[0]
    try:
        found = addresses.address(where)
    except ValueError:
        problem = f"'{where}' is not an IP address"
        raise _bad_publish(text, source, problem, PUBLISH_FORMS) from None
    if addresses.classify(found) in (addresses.MULTICAST, addresses.BROADCAST):
        raise _bad_publish(text, source, f"nobody can listen at {found}", PUBLISH_FORMS)
    return str(found)


def _check_text(text: str, source: str) -> None:
    """What people paste or mistype, each with its own hint."""
    if not text:
        raise _bad(text, source, "it is empty", FORMS)
    if not text.isprintable() or " " in text:
        problem = "it holds a blank or a control character"
        raise _bad(text, source, problem, "give each host as an entry of its own")
    if "://" in text:
        host = text.partition("://")[2].partition("/")[0].rpartition("@")[2]
        raise _bad(text, source, "it is a URL, not a host", f"write '{host or 'example.com'}'")
    if "@" in text:
        host = text.rpartition("@")[2].partition(":")[0]
        raise _bad(text, source, "it holds a user name", f"write '{host}'")
    if "," in text:
        raise _bad(text, source, "it is a list", "give each host and port as an entry of its own")
    if text.startswith("!"):
        raise _bad(text, source, "'!' is not part of a host", "use deny for what is to be refused")


def _split(text: str, source: str) -> tuple[str, str | None]:
    """The host and, if there is one, the text of the port."""
    if text.startswith("["):
        return _split_brackets(text, source)
    host, slash, tail = text.partition("/")
    if slash:
        prefix, colon, port = tail.partition(":")
        return f"{host}/{prefix}", port if colon else None
    if text.count(":") > 1:
        if "." in text.partition(":")[0]:
            near = ":".join(text.split(":")[:2])
            raise _bad(text, source, "it has two ports", f"write '{near}'")
        # An IPv6 address without brackets has no port.
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _split_brackets(text: str, source: str) -> tuple[str, str | None]:
    """[v6], [v6]:port, [v6/prefix]:port and [v6]/prefix:port."""
    inner, closed, rest = text[1:].partition("]")
    prefix, colon, port = rest.partition(":")
    good = prefix == "" or (prefix.startswith("/") and "/" not in inner)
    if not closed or not good or ":" not in inner:
        problem = "brackets go around an IPv6 address, a port after them"
        raise _bad(text, source, problem, "write [fd00::7] or [fd00::7]:443")
    return inner + prefix, port if colon else None


def _ports(port: str, text: str, source: str) -> tuple[int, ...]:
    if port == "*":
        return EVERY_PORT
    number = _port_number(port)
    if not number:
        problem = f"'{port}' is not a port"
        raise _bad(text, source, problem, f"a port is a number from 1 to {MAX_PORT}, or *")
    return (number,)


def _port_number(text: str) -> int:
    """A port as people write it, or 0."""
    plain = text.isascii() and text.isdecimal() and len(text) <= 5 and not text.startswith("0")
    number = int(text) if plain else 0
    return number if number <= MAX_PORT else 0


def _host(host: str, text: str, source: str) -> tuple[str, str]:
    """The kind of a rule and what it compares with."""
    if host == "*":
        return ANY, "*"
    if "/" in host:
        return NET, _network(host, text, source)
    if host.startswith("*."):
        return SUFFIX, _suffix(host[2:], text, source)
    if "*" in host:
        # example*.com or *example.com would also match what somebody else has registered.
        near = host.rpartition("*")[2].lstrip(".") or "example.com"
        raise _bad(text, source, "'*' stands for whole parts at the beginning", f"write '*.{near}'")
    found = _canonical(host, text, source)
    if found == LOCALHOST:
        return LOCAL, found
    if not is_address(found):
        return NAME, found
    return NET, _openable(f"{found}/{128 if ':' in found else 32}", text, source)


def _suffix(suffix: str, text: str, source: str) -> str:
    if "*" in suffix:
        raise _bad(text, source, "'*' stands for whole parts at the beginning", FORMS)
    found = _canonical(suffix, text, source)
    if is_address(found):
        raise _bad(text, source, "addresses have no parts below them", "write 10.0.0.0/8")
    if found == LOCALHOST:
        raise _bad(text, source, "it is this machine", "write localhost:PORT")
    return found


def _canonical(host: str, text: str, source: str) -> str:
    try:
        return canonical(host)
    except BadName as error:
        raise _bad(text, source, str(error), FORMS) from None


def _network(written: str, text: str, source: str) -> str:
    base, _, prefix = written.partition("/")
    found = _canonical(base, text, source)
    if not is_address(found):
        raise _bad(text, source, "a rule holds a host, not a path", f"write '{found}'")
    size = 128 if ":" in found else 32
    bits = int(prefix) if prefix.isascii() and prefix.isdecimal() and len(prefix) <= 3 else -1
    if ":" in base and size == 32:
        bits -= 96  # v4-mapped: ::ffff:10.0.0.0/104 is 10.0.0.0/8
    if not 0 <= bits <= size or (prefix != "0" and prefix.startswith("0")):
        problem = f"'/{prefix}' is not the size of a network"
        raise _bad(text, source, problem, f"write {found}/{size} for one address")
    network = ip_network(f"{found}/{bits}", strict=False)
    if str(network.network_address) != found:
        problem = f"{found} is not the first address of a /{bits} network"
        raise _bad(text, source, problem, f"write {network}, or {found} for the one address")
    return _openable(str(network), text, source)


def _openable(network: str, text: str, source: str) -> str:
    """Refuse a rule that could never do anything: the addresses in it cannot be dialled."""
    held = addresses.network(network)
    row, kind = addresses.row_of(held.network_address)
    if kind in addresses.NEVER and addresses.within(held, addresses.network(row)):
        raise _bad(text, source, f"no connection can go to a {kind} address", FORMS)
    return network


def _bad(text: str, source: str, problem: str, hint: str) -> PolicyError:
    shown = text if len(text) <= 80 else text[:77] + "…"
    message = f"cannot use network rule {shown!r} in {source}: {problem}"
    return PolicyError(message, hint=hint, code="bad-network-rule")


def _bad_publish(text: str, source: str, problem: str, hint: str) -> PolicyError:
    shown = text if len(text) <= 80 else text[:77] + "…"
    message = f"cannot publish {shown!r} ({source}): {problem}"
    return PolicyError(message, hint=hint, code="bad-publish")
