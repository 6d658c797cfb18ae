"""What gate and proxy are told, and how a report is read: no process is started."""

from __future__ import annotations

import json
import struct

import pytest

from agent_sandbox.launch import egress, gate, netns
from agent_sandbox.policy.network import Egress, parse, parse_publish
from agent_sandbox.sandbox import traffic


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b": [["x", 1], ['"\\\n\0é\U0001f600\udce9', 65535]]},
        ["", "/", "</script>", True],
    ],
)
def test_orders_are_json(value: object) -> None:
    """As the module of that name reads it."""
    assert json.loads(egress.to_json(value)) == value


def test_orders_refuse_what_has_no_form() -> None:
    """Nothing is guessed."""
    with pytest.raises(TypeError):
        egress.to_json({"a": 1.5})


def test_a_gate_gets_its_orders_as_they_were_given() -> None:
    """Through bytes and back."""
    orders = gate.Orders(capture=True, listeners=(("udp", "*", 53), ("tcp", "::1", 8000)))
    assert gate.Orders.load(orders.dump()) == orders


def test_listeners_are_dns_the_proxy_port_and_what_rules_name() -> None:
    """Low ports everywhere, high ones only where an address is named."""
    rules = ("example.com:8443", "localhost:5000", "192.0.2.1:9000", "x.org:25")
    found = egress.listeners(Egress(mode="allow", allow=tuple(parse(r, "test") for r in rules)))
    assert found[:3] == (("udp", "*", 53), ("tcp", "*", 53), ("tcp", "127.0.0.1", 3128))
    assert set(found[3:]) == {
        ("tcp", "*", 80), ("tcp", "*", 443), ("tcp", "*", 22), ("tcp", "*", 25),
        ("tcp", "127.0.0.1", 5000), ("tcp", "::1", 5000), ("tcp", "192.0.2.1", 9000),
    }  # fmt: skip


def test_nothing_is_told_where_neither_is_needed() -> None:
    """Network on, or off without published ports."""
    assert egress.told(None, (), "/work") == (b"", b"")


def test_published_ports_need_no_listener_inside() -> None:
    """Off with --publish: no routes, no DNS, no captured port."""
    to_gate, to_proxy = egress.told(None, (parse_publish("8080:80", "test"),), "/work")
    assert gate.Orders.load(to_gate) == gate.Orders(capture=False, listeners=())
    orders = json.loads(to_proxy)
    assert (orders["mode"], orders["publish"]) == ("off", [["127.0.0.1", 8080, 80]])


def test_the_route_is_the_one_that_ip_makes() -> None:
    """`ip route add local default dev lo table local`, as struct packs it."""
    message = netns.route_message(2)
    length, kind, flags, _, _ = struct.unpack("=IHHII", message[:16])
    assert (length, kind, flags) == (len(message), 24, 0x605)
    assert struct.unpack("=8BI", message[16:28]) == (2, 0, 0, 0, 255, 4, 254, 2, 0)
    assert struct.unpack("=HHI", message[28:]) == (8, 4, 1)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"1 bind 198.18.0.1 8443", ("1", "bind", "198.18.0.1", 8443)),
        (b"22 connect ::1 1", ("22", "connect", "::1", 1)),
        (b"1 bind 198.18.0.1", None),
        (b"1 bind 198.18.0.1 0", None),
        (b"1 bind 198.18.0.1 65536", None),
        (b"-1 bind 198.18.0.1 80", None),
        (b"1 unlink /etc/passwd 80", None),
        ("1 bind 1.1.1.1 ٣".encode(), None),
        (b"", None),
        (b"\xff\xfe", None),
    ],
)
def test_requests_are_read_strictly(data: bytes, wanted: object) -> None:
    """One form, and nothing else."""
    assert netns.parse_request(data) == wanted


def contact(host: str, port: int = 443, **more: object) -> traffic.Contact:
    """A refused contact, unless told otherwise."""
    return traffic.Contact(**{"host": host, "port": port, "allowed": False, "count": 1, **more})  # type: ignore[arg-type]


def test_the_line_at_the_end_names_the_busiest_and_how_to_allow_them() -> None:
    """Five hosts and three flags at most; what a rule denies is not to be allowed by another."""
    found = traffic.Traffic(
        contacts=(contact("a.com"), contact("b.com", 22, count=9), contact("c.com", allowed=True))
    )
    assert traffic.refusals(found) == (
        "2 hosts refused: b.com:22, a.com:443 (allow with --allow b.com:22 --allow a.com:443)"
    )
    many = traffic.Traffic(contacts=tuple(contact(f"h{n}.com") for n in range(9)))
    assert traffic.refusals(many).startswith("9 hosts refused: h0.com:443, ")
    assert traffic.refusals(many).count("--allow") == 3
    assert ", … (allow" in traffic.refusals(many)
    denied = traffic.Traffic(contacts=(contact("a.com", rule="a.com", source="flag"),))
    assert traffic.refusals(denied) == "1 host refused: a.com:443"
    # Its address is what is refused, or its name in TLS.
    final = traffic.Traffic(contacts=(contact("a.com", final=True),))
    assert traffic.refusals(final) == "1 host refused: a.com:443"
    assert traffic.refusals(traffic.Traffic()) == ""


def test_cannot_make_the_user_paste_a_command() -> None:
    """Names come from inside: only harmless ones stand in flags; brackets are quoted."""
    found = traffic.Traffic(
        contacts=(contact("x;reboot"), contact("$(id)"), contact("a'b"), contact("2001:db8::1")),
        learned=("good.com", "`id`", "*.npmjs.org"),
    )
    assert traffic.refusals(found).endswith("(allow with --allow '[2001:db8::1]:443')")
    assert traffic.learned(found) == "--network=allow --allow good.com --allow '*.npmjs.org'"


def test_a_report_is_whole_or_nothing() -> None:
    """A proxy that was killed while it wrote."""
    one = {name: getattr(contact("a.com"), name) for name in traffic.Contact.__fields__}
    data = json.dumps({"hosts": [one], "learned": ["a.com"]}).encode()
    assert traffic.parse(data).contacts == (contact("a.com"),)
    assert traffic.parse(data[:-5]) == traffic.parse(b"") == traffic.Traffic()
    assert traffic.parse(b"[]") == traffic.Traffic()
