"""Hosts, rules and verdicts: any text is a value or our own error, and deny always wins."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from hypothesis import strategies as st

from agent_sandbox.errors import PolicyError, SandboxError
from agent_sandbox.policy import addresses, network
from agent_sandbox.policy.merge import widenings
from agent_sandbox.policy.model import FLAGS, GLOBAL, PROJECT, Plan
from agent_sandbox.policy.network import BadName, Egress, Rule
from agent_sandbox.policy.resolve import resolve
from policy.facts import facts, layer, policy_of

from .bound import attempt, fuzz
from .mutation import mutated

TEXTS = (
    "example.com", "*.example.com:8443", "10.0.0.0/8:5432", "[fd00::7]:443", "localhost:5432",
    "*:*", "::ffff:10.0.0.0/104", "bücher.example", "fd00::/8:22", "127.0.0.1", "https://a.example/x",
    "0x7f.1", "xn--bcher-kva.example.", "127.0.0.1:8080:3000", "[::1]:80:90",
)  # fmt: skip
PIECES = (
    ".", ":", "*", "/", "[", "]", "::", "%", "\0", "xn--", "-", "_", "0x", "1", "65536", "。", "ß",
    "\u200d", "\ud800", "１", "@", " ", "ffff:", "2002:", "a" * 64, "İ", "ǅ", "٣",
)  # fmt: skip
HOSTS = st.one_of(mutated(TEXTS, PIECES), st.text(max_size=40))
V4 = st.one_of(
    st.integers(0, 2**32 - 1),
    st.sampled_from((0x7F000001, 0x0A000001, 0xA9FEA9FE, 0xA83F8110, 0xC0A80105, 0x08080808)),
)
PREFIXES = (0, 0xFFFF << 32, 0x64FF9B << 96, 0x64FF9B0001 << 80, 0x2A00 << 112 | 0x5EFE << 32)
V6 = st.one_of(
    st.integers(0, 2**128 - 1), st.builds(lambda p, v: p | v, st.sampled_from(PREFIXES), V4)
)
ADDRESSES = st.one_of(st.builds(IPv4Address, V4), st.builds(IPv6Address, V6))
PORTS = st.one_of(st.sampled_from((22, 80, 443, 5432)), st.integers(-1, 65537))
MODES = st.sampled_from(("allow", "public", "learn", "off"))


def rules_of(texts: list[str], *, deny: bool) -> tuple[Rule, ...]:
    """Those of the texts that are rules."""

    def made(text: str) -> Rule | SandboxError:
        return attempt(lambda: network.parse(text, "s", deny=deny), PolicyError)

    return tuple(rule for rule in map(made, texts) if isinstance(rule, Rule))


def canonical(text: str) -> str:
    """The canonical spelling, or nothing."""
    try:
        return network.canonical(text)
    except BadName:
        return ""


@fuzz(1500, text=HOSTS)
def test_a_host_is_canonical_or_refused(text: str) -> None:
    """The spelling is stable, plain ASCII, and of letters that need no quoting."""
    name = canonical(text)
    if name:
        assert canonical(name) == name
        assert name.isascii()
        assert name == name.lower()
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.:")
        if network.is_address(name):
            assert str(addresses.address(name)) == name
        else:
            assert ":" not in name
            assert len(name) <= 253


@fuzz(1500, text=HOSTS)
def test_a_text_is_a_rule_or_our_error(text: str) -> None:
    """A rule's own text is parsed to the same rule again; both lists read it alike."""
    made = attempt(lambda: network.parse(text, "s"), PolicyError)
    if not isinstance(made, SandboxError):
        assert made == network.parse(text, "s", deny=True)
        assert all(0 <= port <= 65535 for port in made.ports)
        if made.kind == "net":
            assert str(addresses.network(made.host)) == made.host
    attempt(lambda: network.parse_publish(text, "s"), PolicyError)


@fuzz(
    800, mode=MODES, allow=st.lists(HOSTS, max_size=4), deny=st.lists(HOSTS, max_size=3),
    host=HOSTS, port=PORTS, found=ADDRESSES, own=st.lists(st.builds(str, ADDRESSES), max_size=2),
)  # fmt: skip
def test_verdicts_hold_together(  # noqa: PLR0917 - drawn by name
    mode: str, allow: list[str], deny: list[str], host: str, port: int,
    found: IPv4Address | IPv6Address, own: list[str],
) -> None:  # fmt: skip
    """Denying more never opens anything, and an address is never wider than its name."""
    names = [*allow, host, str(found)]
    made = Egress(mode=mode, allow=rules_of(names, deny=False), deny=rules_of(deny, deny=True))
    for asked in (host, canonical(host), canonical(str(found))):
        before = network.decide(made, asked, port)
        after = network.admit(made, asked, port, str(found), own)
        assert before.reason
        assert after.reason
        assert before.allowed >= after.allowed
        closed = made.replace(deny=(*made.deny, network.parse("*", "s", deny=True)))
        assert not network.decide(closed, asked, port).allowed
        open_again = made.replace(deny=())
        assert network.decide(open_again, asked, port).allowed >= before.allowed
        network.ports_of(made, asked)
    assert len(network.capture(made)) <= network.MAX_LISTENERS


@fuzz(800, found=ADDRESSES, own=st.lists(st.builds(str, ADDRESSES), max_size=2), port=PORTS)
def test_names_never_open_a_closed_address(
    found: IPv4Address | IPv6Address, own: list[str], port: int
) -> None:
    """Whatever the lookup of an allowed name says."""
    text = str(found)
    for mode in ("allow", "public", "learn"):
        made = Egress(
            mode=mode, allow=(network.parse("*:*", "s"), network.parse("a.example:*", "s"))
        )
        verdict = network.admit(made, "a.example", port, text, own)
        plain = addresses.address(text)
        if verdict.allowed:
            assert addresses.classify(plain) == addresses.PUBLIC
            assert text not in own
            # What Python itself knows to be special is a part of what we know.
            assert not (plain.is_multicast)
            assert not (plain.is_unspecified)
            assert not (plain.is_link_local)
            assert addresses.embedded(plain) or not (plain.is_private or plain.is_reserved)


RULES = ("a.example", "*.example:81", "10.0.0.1", "10.0.0.0/8:*", "*", "localhost:80", "8.8.8.8")
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "network": st.sampled_from(("on", "off", "allow", "public", "learn")),
        "allow": st.lists(st.sampled_from(RULES), max_size=2),
        "deny": st.lists(st.sampled_from(RULES), max_size=1),
        "publish": st.lists(st.sampled_from(("8080", "0.0.0.0:80:81")), max_size=1),
    },
)
CONTACTS = tuple(
    (host, port, address)
    for host, address in (
        ("a.example", "8.8.8.8"), ("a.example", "10.0.0.1"), ("b.example", "8.8.8.8"),
        ("10.0.0.1", "10.0.0.1"), ("localhost", "127.0.0.1"), ("8.8.8.8", "8.8.8.8"),
    )
    for port in (80, 81, 443)
)  # fmt: skip


def reached(plan: Plan) -> set[tuple[str, int, str]]:
    """Whom a plan lets the command talk to, out of some."""
    if plan.network:
        return set(CONTACTS)
    egress = plan.egress
    return {c for c in CONTACTS if egress is not None and network.admit(egress, *c, ()).allowed}


def planned(
    user: dict[str, object], project: dict[str, object] | None, flags: dict[str, object]
) -> Plan | SandboxError:
    """The plan of some layers, or our error."""

    def made() -> Plan:
        policy = policy_of(user=user, project=project, flags=flags)
        return resolve(policy, facts(policy))

    return attempt(made, PolicyError)


@fuzz(600, user=SETTINGS, project=SETTINGS, flags=SETTINGS)
def test_a_project_cannot_open_its_own_network(
    user: dict[str, object], project: dict[str, object], flags: dict[str, object]
) -> None:
    """Where no trust is asked for, its file reaches and publishes nothing more (invariant 4)."""
    above = [layer(FLAGS, flags)]
    if widenings(layer(PROJECT, project), [layer(GLOBAL, user)], above):
        return
    whole, below = planned(user, project, flags), planned(user, None, flags)
    if isinstance(whole, SandboxError):
        return
    if isinstance(below, SandboxError):
        # A deny-list that could not hold; it does in a tighter mode.
        assert not whole.network
        return
    assert reached(whole) <= reached(below)
    assert below.network or set(whole.publish) <= set(below.publish)
