"""What people write in allow, deny and publish: every form, and every mistake with its hint."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy.network import as_rule, decide, parse, parse_publish

from .egress import egress

EVERY = (0,)
FORMS = [
    ("example.com", "name", "example.com", ()),
    ("Example.COM.", "name", "example.com", ()),
    ("example.com:443", "name", "example.com", (443,)),
    ("example.com:65535", "name", "example.com", (65535,)),
    ("example.com:*", "name", "example.com", EVERY),
    ("intranet", "name", "intranet", ()),
    ("bücher.example:8443", "name", "xn--bcher-kva.example", (8443,)),
    ("_x.example", "name", "_x.example", ()),
    ("*.example.com", "suffix", "example.com", ()),
    ("*.Example.com:8080", "suffix", "example.com", (8080,)),
    ("*.com", "suffix", "com", ()),
    ("*.com:*", "suffix", "com", EVERY),
    ("*", "any", "*", ()),
    ("*:8443", "any", "*", (8443,)),
    ("*:*", "any", "*", EVERY),
    ("192.0.2.7", "net", "192.0.2.7/32", ()),
    ("192.0.2.7:5432", "net", "192.0.2.7/32", (5432,)),
    ("127.0.0.1:5432", "net", "127.0.0.1/32", (5432,)),
    ("10.0.0.0/8", "net", "10.0.0.0/8", ()),
    ("10.0.0.0/8:5432", "net", "10.0.0.0/8", (5432,)),
    ("10.0.0.0/8:*", "net", "10.0.0.0/8", EVERY),
    ("0.0.0.0/0", "net", "0.0.0.0/0", ()),
    ("192.0.2.7/32", "net", "192.0.2.7/32", ()),
    ("fd00::7", "net", "fd00::7/128", ()),
    ("FD00:0::7", "net", "fd00::7/128", ()),
    ("[fd00::7]", "net", "fd00::7/128", ()),
    ("[fd00::7]:443", "net", "fd00::7/128", (443,)),
    ("[fd00::7]:*", "net", "fd00::7/128", EVERY),
    ("fd00::/8", "net", "fd00::/8", ()),
    ("fd00::/8:443", "net", "fd00::/8", (443,)),
    ("[fd00::]/8:443", "net", "fd00::/8", (443,)),
    ("[fd00::/8]:443", "net", "fd00::/8", (443,)),
    ("[fd00::/8]", "net", "fd00::/8", ()),
    ("::/0", "net", "::/0", ()),
    ("[::1]:5432", "net", "::1/128", (5432,)),
    ("::ffff:10.0.0.1", "net", "10.0.0.1/32", ()),
    ("[::ffff:10.0.0.1]:80", "net", "10.0.0.1/32", (80,)),
    ("::ffff:10.0.0.0/104", "net", "10.0.0.0/8", ()),
    ("localhost:5432", "local", "localhost", (5432,)),
    ("LOCALHOST.:1", "local", "localhost", (1,)),
]

# The text, a part of the message, a part of the hint.
MISTAKES = [
    ("", "it is empty", "example.com"),
    (" ", "a blank", "of its own"),
    ("a b", "a blank", "of its own"),
    (" a", "a blank", "of its own"),
    ("a\n", "control", "of its own"),
    ("a\0b", "control", "of its own"),
    ("https://example.com", "it is a URL", "write 'example.com'"),
    ("https://example.com:8443/x?y", "it is a URL", "write 'example.com:8443'"),
    ("ssh://git@example.com/x", "it is a URL", "write 'example.com'"),
    ("http://", "it is a URL", "write 'example.com'"),
    ("git@github.com", "a user name", "write 'github.com'"),
    ("git@github.com:x/y.git", "a user name", "write 'github.com'"),
    ("a.example,b.example", "it is a list", "of its own"),
    ("a.example:80,443", "it is a list", "of its own"),
    ("!a.example", "'!'", "deny"),
    ("example.com/path", "a host, not a path", "write 'example.com'"),
    ("example.com/24", "a host, not a path", "write 'example.com'"),
    ("example.com:0", "'0' is not a port", "1 to 65535"),
    ("example.com:65536", "'65536' is not a port", "1 to 65535"),
    ("example.com:99999999", "is not a port", "1 to 65535"),
    ("example.com:080", "'080' is not a port", "1 to 65535"),
    ("example.com:+80", "'+80' is not a port", "1 to 65535"),
    ("example.com:-1", "'-1' is not a port", "1 to 65535"),
    ("example.com:https", "'https' is not a port", "1 to 65535"),
    ("example.com:80-90", "'80-90' is not a port", "1 to 65535"),
    ("example.com:٣", "is not a port", "1 to 65535"),
    ("example.com:²", "is not a port", "1 to 65535"),
    ("example.com:", "'' is not a port", "1 to 65535"),
    ("example.com:443:443", "two ports", "write 'example.com:443'"),
    ("intranet:443:443", "neither a name nor a complete IP address", "example.com:8443"),
    ("1.2.3.4:1:2", "two ports", "write '1.2.3.4:1'"),
    (":443", "the host is empty", "example.com:8443"),
    ("*foo.com", "whole parts", "write '*.foo.com'"),
    ("foo.*", "whole parts", "'*."),
    ("foo.*.com", "whole parts", "write '*.com'"),
    ("f*o.com", "whole parts", "'*.o.com'"),
    ("*.*.com", "whole parts", "*.example.com"),
    ("**.com", "whole parts", "write '*.com'"),
    ("**", "whole parts", "write '*.example.com'"),
    ("*.", "is empty", "*.example.com"),
    ("*..com", "is empty", "*.example.com"),
    ("*.1.2.3.4", "addresses have no parts", "10.0.0.0/8"),
    ("*.localhost", "this machine", "localhost:PORT"),
    ("localhost", "every service", "localhost:PORT"),
    ("localhost:*", "every service", "localhost:PORT"),
    ("127.1", "IP address", "192.168.1.7"),
    ("2130706433:80", "IP address", "192.168.1.7"),
    ("0x7f.1", "IP address", "192.168.1.7"),
    ("0177.0.0.1", "IP address", "192.168.1.7"),
    ("10.0.0.0/33", "'/33' is not the size", "10.0.0.0/32"),
    ("10.0.0.0/", "'/' is not the size", "10.0.0.0/32"),
    ("10.0.0.0/08", "'/08' is not the size", "10.0.0.0/32"),
    ("10.0.0.0/-1", "'/-1' is not the size", "10.0.0.0/32"),
    ("10.0.0.0/255.0.0.0", "is not the size", "10.0.0.0/32"),
    ("10.0.0.0/8/8", "is not the size", "10.0.0.0/32"),
    ("10.0.0.0/٣", "is not the size", "10.0.0.0/32"),
    ("10.1.2.3/8", "not the first address", "write 10.0.0.0/8, or 10.1.2.3"),
    ("fd00::1/8", "not the first address", "write fd00::/8, or fd00::1"),
    ("fd00::/129", "'/129' is not the size", "fd00::/128"),
    ("::ffff:10.0.0.0/95", "is not the size", "10.0.0.0/32"),
    ("10.0.0.0/8:0", "'0' is not a port", "1 to 65535"),
    ("fe80::1%eth0", "zone id", "example.com"),
    ("[fe80::1%eth0]:80", "zone id", "example.com"),
    ("[fd00::1", "brackets", "[fd00::7]:443"),
    ("[fd00::1]443", "brackets", "[fd00::7]:443"),
    ("[fd00::/8]/8", "brackets", "[fd00::7]:443"),
    ("[1.2.3.4]:80", "brackets", "[fd00::7]:443"),
    ("[example.com]:80", "brackets", "[fd00::7]:443"),
    ("[]:80", "brackets", "[fd00::7]:443"),
    ("0.0.0.0", "unspecified", "localhost:5432"),
    ("0.0.0.0:8080", "unspecified", "localhost:5432"),
    ("0.0.0.0/8", "unspecified", "localhost:5432"),
    ("[::]:80", "unspecified", "localhost:5432"),
    ("224.0.0.0/4", "multicast", "localhost:5432"),
    ("ff02::1", "multicast", "localhost:5432"),
    ("255.255.255.255", "broadcast", "localhost:5432"),
    ("198.18.0.0/15", "stand-in", "localhost:5432"),
    ("198.18.3.4:80", "stand-in", "localhost:5432"),
    ("2001:2::7", "stand-in", "localhost:5432"),
    ("-a.example", "begins or ends with '-'", "example.com"),
    ("a\\b", "does not belong", "example.com"),
    ("straße.de", "xn--", "example.com"),
    ("a" * 300, "longer than 63", "example.com"),
]


@pytest.mark.parametrize(("text", "kind", "host", "ports"), FORMS)
def test_each_form_has_one_meaning(text: str, kind: str, host: str, ports: tuple[int, ...]) -> None:
    """The rule keeps the text and where it stands, for the report."""
    rule = parse(text, "flag --allow")
    assert (rule.kind, rule.host, rule.ports) == (kind, host, ports)
    assert (rule.text, rule.source) == (text, "flag --allow")
    denied = parse(text, "flag --deny", deny=True)
    assert (denied.kind, denied.host, denied.ports) == (kind, host, ports)


@pytest.mark.parametrize(
    ("text", "message", "hint"), MISTAKES, ids=[ascii(text)[:40] for text, _, _ in MISTAKES]
)
def test_a_mistake_is_named_with_a_hint(text: str, message: str, hint: str) -> None:
    """Message, hint, source, and a code for programs."""
    with pytest.raises(PolicyError) as caught:
        parse(text, "flag --allow")
    assert message in caught.value.message
    assert "in flag --allow" in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.code == "bad-network-rule"


@pytest.mark.parametrize("text", ["localhost", "localhost:*"])
def test_all_of_this_machine_can_be_denied(text: str) -> None:
    """Though it cannot be allowed."""
    assert parse(text, "s", deny=True).kind == "local"


@pytest.mark.parametrize(
    ("host", "port", "expected"),
    [
        ("example.com", 443, "example.com"),
        ("example.com", 22, "example.com"),
        ("example.com", 8443, "example.com:8443"),
        ("10.0.0.1", 80, "10.0.0.1"),
        ("10.0.0.1", 5432, "10.0.0.1:5432"),
        ("fd00::1", 443, "fd00::1"),
        ("fd00::1", 8443, "[fd00::1]:8443"),
        ("localhost", 80, "localhost:80"),
        ("localhost", 5432, "localhost:5432"),
    ],
)
def test_a_suggested_rule_allows_what_it_was_made_for(host: str, port: int, expected: str) -> None:
    """Ready to paste."""
    assert as_rule(host, port) == expected
    assert decide(egress("allow", expected), host, port).allowed


PUBLISH = [
    ("8080", ("127.0.0.1", 8080, 8080), True),
    ("8080:3000", ("127.0.0.1", 8080, 3000), True),
    ("127.0.0.1:8080", ("127.0.0.1", 8080, 8080), True),
    ("127.0.0.2:8080:3000", ("127.0.0.2", 8080, 3000), True),
    ("[::1]:8080", ("::1", 8080, 8080), True),
    ("[::1]:8080:3000", ("::1", 8080, 3000), True),
    ("0.0.0.0:8080", ("0.0.0.0", 8080, 8080), False),
    ("192.168.1.5:80:8080", ("192.168.1.5", 80, 8080), False),
    ("[::]:80", ("::", 80, 80), False),
    ("[fd00::1]:1:65535", ("fd00::1", 1, 65535), False),
    ("[::ffff:127.0.0.1]:80", ("127.0.0.1", 80, 80), True),
]


@pytest.mark.parametrize(("text", "expected", "loopback"), PUBLISH)
def test_a_port_is_published(text: str, expected: tuple[str, int, int], loopback: bool) -> None:
    """On the loopback, unless another address is given."""
    made = parse_publish(text, "flag --publish")
    assert (made.address, made.port, made.inner_port) == expected
    assert made.is_loopback() is loopback
    assert (made.text, made.source) == (text, "flag --publish")


@pytest.mark.parametrize(
    "text",
    ["", "0", "65536", "a", "8080:", ":8080", "8080:0", "8080:3000:1", "1:2:3:4", "localhost:80",
     "localhost:80:80", "80/tcp", "8080-8090", "::1:80", "[::1]", "[::1]80", "[::1]:",
     "[127.0.0.1]:80",
     "127.1:80", "127.0.0.1", "127.0.0.1:", "1.2.3.4.5:80", "[::1%lo]:80", "224.0.0.1:80", "08",
     "+8",
     "8 ", "²", "٣", "[ff02::1]:80", "255.255.255.255:80", "]:80", "[]:80", "a.b:80", "\0"],
)  # fmt: skip
def test_what_is_no_port_is_not_published(text: str) -> None:
    """The error says what to write."""
    with pytest.raises(PolicyError) as caught:
        parse_publish(text, "flag --publish")
    assert caught.value.code == "bad-publish"
    assert "flag --publish" in caught.value.message
    assert "8080:3000" in caught.value.hint
