"""Network rules: which host and port a command may reach, decided before anything is looked up.

Pure. `decide` judges what was asked for, `admit` the address that a lookup gave. Only the modes
allow, public and learn come here: nothing of this is imported for on and off.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from . import addresses
from .endpoints import (
    ANY,
    DEFAULT_PORTS,
    EVERY_PORT,
    LOCAL,
    LOCAL_ADDRESSES,
    LOCALHOST,
    MAX_PORT,
    NAME,
    NET,
    SUFFIX,
    Publish,
    Rule,
    as_rule,
    parse,
    parse_publish,
)  # fmt: skip
from .hostnames import BadName, canonical, is_address
from .model import FLAGS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from .model import Policy

__all__ = [
    "ANY", "DEFAULT_PORTS", "DNS_PORT", "EVERY_PORT", "LOCAL", "LOCALHOST", "LOCAL_ADDRESSES",
    "NAME", "NET", "PROXY_PORT", "SUFFIX", "BadName", "Egress", "Publish", "Rule", "Verdict",
    "admit", "as_rule", "canonical", "capture", "decide", "is_address", "opens_closed", "outward",
    "parse", "parse_publish", "ports_of",
]  # fmt: skip

DNS_PORT = 53
PROXY_PORT = 3128
# Below, listeners take every address; above, a server of the command may want the port.
FIRST_OPEN_PORT = 1024
MAX_LISTENERS = 4096
MAX_NETWORK = 256

# Modes in which a proxy decides.
ALLOW = "allow"
PUBLIC = "public"
LEARN = "learn"
MODES = (ALLOW, PUBLIC, LEARN)
OPEN_MODES = (PUBLIC, LEARN)

LOCAL_HOSTS = (LOCALHOST, *LOCAL_ADDRESSES)


class Egress(Record):
    """What may leave the sandbox."""

    mode: str
    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()


class Verdict(Record):
    """Whether, and because of what."""

    allowed: bool
    # The text of the rule that decided and where it stands; both empty if none did.
    rule: str
    source: str
    reason: str


# --- from the settings


def outward(policy: Policy, notices: list[str]) -> tuple[Egress | None, tuple[Publish, ...]]:
    """What a plan says about the network: what may leave, and which ports lead inside."""
    mode = str(policy.network.value)
    publish = tuple(parse_publish(str(s.value), str(s.source)) for s in policy.publish)
    if mode == "on":
        _check_shared(policy, publish, notices)
        return None, ()
    notices += [
        f"publish '{p.text}' ({p.source}): whoever reaches {p.address} reaches the server inside"
        for p in publish
        if not p.is_loopback()
    ]
    if mode not in MODES:
        return None, publish
    allow = tuple(parse(str(s.value), str(s.source)) for s in policy.allow)
    deny = tuple(parse(str(s.value), str(s.source), deny=True) for s in policy.deny)
    return Egress(mode=mode, allow=allow, deny=deny), publish


def _check_shared(policy: Policy, publish: tuple[Publish, ...], notices: list[str]) -> None:
    """With the host's network nothing can be refused, and nothing needs to be published."""
    network = policy.network.source
    # Only the user's flag lifts what a file denies: a project's file may not.
    held = [s for s in policy.deny if network.layer < FLAGS or s.source.layer >= FLAGS]
    if held:
        raise PolicyError(
            f"cannot deny '{held[0].value}' ({held[0].source}): "
            f"with network = on ({network}) the command has the host's network",
            hint="use --network=public, which reaches every public host that is not denied",
            code="deny-without-proxy",
        )
    capped = [s for s in policy.budgets if network.layer < FLAGS or s.source.layer >= FLAGS]
    if capped:
        raise PolicyError(
            f"cannot keep a budget ({capped[0].source}): "
            f"with network = on ({network}) nobody counts",
            hint="use --network=public, which reaches every public host",
            code="budget-without-proxy",
        )
    if policy.deny:
        notices.append(f"network = on ({network}): the deny-list does not hold")
    if policy.budgets:
        notices.append(f"network = on ({network}): budgets do not hold")
    notices += [
        f"publish '{p.text}' ({p.source}) does nothing: with network = on a server inside listens "
        "on this machine itself"
        for p in publish
    ]


def opens_closed(rule: Rule) -> bool:
    """Whether an allow rule could open what is closed unless somebody names its address.

    That is loopback, private networks, metadata, and this machine itself: a single public address
    could be its own.
    """
    if rule.kind != NET:
        return rule.kind == LOCAL
    held = addresses.network(rule.host)
    row, kind = addresses.row_of(held.network_address)
    return held.num_addresses == 1 or (
        kind != addresses.PUBLIC and addresses.within(held, addresses.network(row))
    )


# --- deciding


def decide(egress: Egress, host: str, port: int) -> Verdict:
    """Judge a host as it was asked for, in canonical spelling, before any lookup."""
    bad = _malformed(egress, host, port)
    if bad:
        return _refused(bad)
    for rule in egress.deny:
        if _has_port(rule, port, deny=True) and _denies(rule, host):
            return _denied(rule)
    for rule in egress.allow:
        if _has_port(rule, port) and _allows(rule, host):
            return _allowed(rule)
    if egress.mode in OPEN_MODES:
        return _open(egress, host)
    return _refused(_no_rule(egress, host, port))


def admit(egress: Egress, host: str, port: int, address: str, own: Collection[str]) -> Verdict:
    """Judge one address that the lookup of `host` gave; `own` are the host's own addresses."""
    verdict = decide(egress, host, port)
    if not verdict.allowed:
        return verdict
    try:
        found = addresses.address(address)
    except ValueError:
        return _refused(f"{address!r} is not an address")
    for rule in egress.deny:
        if _has_port(rule, port, deny=True) and _denies_address(rule, found):
            return _denied(rule)
    if host in LOCAL_HOSTS and str(found) in LOCAL_ADDRESSES:
        for rule in egress.allow:
            if rule.kind == LOCAL and _has_port(rule, port):
                return _allowed(rule)
    if host == LOCALHOST or (is_address(host) and host != str(found)):
        return _refused(f"{found} is not the address that was asked for")
    return _judge_class(egress, port, found, own) or verdict


def _judge_class(
    egress: Egress, port: int, found: addresses.Address, own: Collection[str]
) -> Verdict | None:
    """The verdict on an address that only a rule with this address opens; None if it is public."""
    kind = addresses.classify(found)
    mine = kind != addresses.LOOPBACK and _is_own(found, own)
    if kind == addresses.PUBLIC and not mine:
        return None
    for rule in egress.allow:
        if rule.kind != NET or not _has_port(rule, port):
            continue
        # Who names the network around this machine does not mean the services on it.
        single = addresses.network(rule.host).num_addresses == 1
        if addresses.names(rule.host, found) and (single or not mine):
            return _allowed(rule)
    what = "one of this machine's own addresses" if mine else f"a {kind} address"
    return _refused(f"{found} is {what}: {_way(kind, found, port)}")


def _is_own(found: addresses.Address, own: Collection[str]) -> bool:
    held = (found, *addresses.embedded(found))
    return any(_same(text, one) for text in own for one in held)


def _same(text: str, found: addresses.Address) -> bool:
    try:
        return addresses.address(text.partition("%")[0]) == found
    except ValueError:
        return False


def _way(kind: str, found: addresses.Address, port: int) -> str:
    if kind in addresses.NEVER:
        return "no rule opens it"
    return f"only a rule with the address itself opens it ({as_rule(str(found), port)})"


def _malformed(egress: Egress, host: str, port: int) -> str:
    if egress.mode not in MODES:
        return f"network={egress.mode}"
    if not 0 < port <= MAX_PORT:
        return f"{port} is not a port"
    try:
        same = canonical(host) == host
    except BadName as error:
        return f"{host!r} is not a host: {error}"
    # A caller that forgot to canonicalise must not get past a deny rule.
    return "" if same else f"{host!r} is not in canonical spelling"


def _has_port(rule: Rule, port: int, *, deny: bool = False) -> bool:
    ports = rule.ports or (EVERY_PORT if deny else DEFAULT_PORTS)
    return port in ports or ports == EVERY_PORT


def _allows(rule: Rule, host: str) -> bool:
    if rule.kind == LOCAL:
        return host in LOCAL_HOSTS
    if is_address(host):
        return rule.kind == NET and _opens(rule, host)
    if rule.kind == ANY:
        return not _is_local_name(host)
    return _covers_name(rule, host)


def _opens(rule: Rule, host: str) -> bool:
    found = addresses.address(host)
    if addresses.classify(found) == addresses.PUBLIC:
        return addresses.contains(rule.host, found)
    return addresses.names(rule.host, found)


def _denies(rule: Rule, host: str) -> bool:
    if rule.kind == ANY:
        return True
    if is_address(host):
        return _denies_address(rule, addresses.address(host))
    return _covers_name(rule, host) or (rule.kind == LOCAL and _is_local_name(host))


def _denies_address(rule: Rule, found: addresses.Address) -> bool:
    """Deny rules also hold for what a gateway would make of the address."""
    held = (found, *addresses.embedded(found))
    if rule.kind == LOCAL:
        return any(addresses.classify(one) == addresses.LOOPBACK for one in held)
    return rule.kind == NET and any(addresses.contains(rule.host, one) for one in held)


def _covers_name(rule: Rule, host: str) -> bool:
    if rule.kind == NAME:
        return host == rule.host
    return rule.kind == SUFFIX and host.endswith("." + rule.host)


def _is_local_name(host: str) -> bool:
    return host == LOCALHOST or host.endswith("." + LOCALHOST)


def _open(egress: Egress, host: str) -> Verdict:
    """What public and learn say when no rule does."""
    if _is_local_name(host):
        return _refused(f"{host} is this machine: only localhost:PORT opens a service on it")
    if is_address(host):
        found = addresses.address(host)
        kind = addresses.classify(found)
        if kind != addresses.PUBLIC:
            return _refused(
                f"{host} is a {kind} address: network={egress.mode} has public ones only"
            )
    return Verdict(allowed=True, rule="", source="", reason=f"network={egress.mode}")


def _no_rule(egress: Egress, host: str, port: int) -> str:
    """Why nothing matched; names the rule that would have, but for the port."""
    for rule in egress.allow:
        if _allows(rule, host):
            ports = ", ".join(str(one) for one in rule.ports or DEFAULT_PORTS)
            return f"'{rule.text}' ({rule.source}) allows {host} on port {ports} only"
    return f"no rule allows {as_rule(host, port)}"


def _allowed(rule: Rule) -> Verdict:
    why = f"allowed by '{rule.text}' ({rule.source})"
    return Verdict(allowed=True, rule=rule.text, source=rule.source, reason=why)


def _denied(rule: Rule) -> Verdict:
    why = f"denied by '{rule.text}' ({rule.source})"
    return Verdict(allowed=False, rule=rule.text, source=rule.source, reason=why)


def _refused(reason: str) -> Verdict:
    return Verdict(allowed=False, rule="", source="", reason=reason)


# --- listening


def ports_of(egress: Egress, host: str) -> tuple[int, ...]:
    """Ports from 1024 on that rules name for a name: to be taken on its stand-in address."""
    if is_address(host) or _is_local_name(host):
        return ()
    found = {
        port
        for rule in egress.allow
        if _allows(rule, host)
        for port in rule.ports
        if port >= FIRST_OPEN_PORT
    }
    return tuple(sorted(found))


def capture(egress: Egress) -> tuple[tuple[str, int], ...]:
    """Listeners to bind at the start, "" for every address. Without DNS and the proxy port."""
    low = {port for rule in egress.allow for port in rule.ports if 0 < port < FIRST_OPEN_PORT}
    ports = [*DEFAULT_PORTS, *sorted(low - {*DEFAULT_PORTS, DNS_PORT})]
    found = dict.fromkeys(("", port) for port in ports)
    for rule in egress.allow:
        for port in rule.ports:
            if port < FIRST_OPEN_PORT:
                continue
            for one in _addresses(rule):
                if len(found) >= MAX_LISTENERS:
                    return tuple(found)
                if (one, port) != (LOCAL_ADDRESSES[0], PROXY_PORT):
                    found[one, port] = None
    return tuple(found)


def _addresses(rule: Rule) -> Iterator[str]:
    if rule.kind == LOCAL:
        yield from LOCAL_ADDRESSES
    if rule.kind != NET or addresses.network(rule.host).num_addresses > MAX_NETWORK:
        return
    for one in addresses.network(rule.host):
        # Binding 0.0.0.0 would take the port everywhere.
        if addresses.classify(one) not in addresses.NEVER:
            yield str(one)
