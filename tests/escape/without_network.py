"""Takes protections of the network away: the namespace, and what the proxy outside checks."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING, Any

from escape.patching import CONDITIONS, PROTECTIONS, Table, around, module, of_plan, protection, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from escape.patching import Patch

# Patches that are made in the proxy's own process.
PROXY = Table()
_wanted: list[str] = []


def in_proxy(name: str, table: Table = PROTECTIONS) -> Callable[[Patch], Patch]:
    """Put the decorated patch into the table; it has the proxy started with the patch in it."""

    def put_in(patch: Patch) -> Patch:
        PROXY[name] = patch
        table[name] = lambda: _weaken(name)
        return patch

    return put_in


def _weaken(name: str) -> None:
    _wanted.append(name)
    if len(_wanted) > 1:
        return
    egress = module("launch.egress")
    start = egress.Proxy.__init__
    source = os.path.dirname(os.path.dirname(os.path.dirname(egress.PROGRAM)))
    weak = f"{os.path.dirname(os.path.abspath(__file__))}/weak_proxy.py"

    def start_weak(self: Any, told: bytes, line: int, arguments: Any = ()) -> None:
        start(self, told, line, weak, (*arguments, source, ",".join(_wanted)))

    egress.Proxy.__init__ = start_weak


# --- the namespace --------------------------------------------------------------------------------


@protection("network of its own")
def _() -> None:
    of_plan(lambda plan: plan.replace(network=True, egress=None, publish=()))


# --- rules ----------------------------------------------------------------------------------------


@in_proxy("rules for hosts")
def _() -> None:
    verdict = module("policy.network").Verdict(allowed=True, rule="", source="", reason="")
    put("policy.network", "decide", lambda *_: verdict)


@in_proxy("rules for addresses")
def _() -> None:
    network = module("policy.network")
    put("policy.network", "admit", lambda e, host, port, *_: network.decide(e, host, port))


@in_proxy("ports of rules")
def _() -> None:
    put("policy.network", "_has_port", lambda *_, **__: True)


@in_proxy("one spelling of a name")
def _() -> None:
    put("policy.hostnames", "canonical", lambda host: host)


@in_proxy("own addresses known")
def _() -> None:
    module("proxy.dial").Dialler.own = lambda *_: ()


# --- lookups --------------------------------------------------------------------------------------


@in_proxy("one lookup")
def _() -> None:
    dialler = module("proxy.dial").Dialler
    first = dialler._first

    async def again(self: Any, _: Any, host: str, port: int) -> Any:
        return await first(self, await self.resolve(host, port), host, port)

    dialler._first = again


@in_proxy("names without search domains")
def _() -> None:
    put("proxy.dial", "is_listed", lambda *_: True)


@in_proxy("questions stay inside")
def _() -> None:
    stub = module("proxy.stub").Stub
    answer = stub.answer

    with open("/etc/resolv.conf", encoding="ascii") as file:
        server = file.read().split()[1]

    async def forward(self: Any, data: bytes, *room: int) -> Any:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.sendto(data, (server, 53))
        return await answer(self, data, *room)

    stub.answer = forward


# --- streams --------------------------------------------------------------------------------------


@in_proxy("names in TLS")
def _() -> None:
    async def unread(*_: object) -> None:
        pass

    module("proxy.streams").Streams._hello = unread


@in_proxy("names in HTTP")
def _() -> None:
    module("proxy.streams").Streams._check_host = lambda *_: None


@in_proxy("requests built anew")
def _() -> None:
    def as_it_came(request: Any, _: str, path: str) -> bytes:
        lines = [f"{request.method} {path} {request.version}"]
        lines += [f"{name}: {value}" for name, value in request.fields]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    put("proxy.http1", "rebuild", as_it_came)


@in_proxy("strict framing")
def _() -> None:
    def first_length(values: Any, _: str) -> tuple[bool, int, bool]:
        lengths = [text for text in values.get("content-length", []) if text.isdigit()]
        return bool(lengths), int(lengths[0]) if lengths else 0, False

    put("proxy.http1", "_framing", first_length)


@in_proxy("one request")
def _() -> None:
    def endless(old: Callable[[bytes], Any], head: bytes) -> Any:
        request = old(head)
        return request if request.method == "CONNECT" else request.replace(length=1 << 40)

    around("proxy.http1", "parse", endless)


@in_proxy("the server agrees to an upgrade")
def _() -> None:
    around(
        "proxy.http1",
        "answer",
        lambda old, data: found.replace(status=101) if (found := old(data)) else None,
    )


# --- limits ---------------------------------------------------------------------------------------


@in_proxy("size of a head")
def _() -> None:
    put("proxy.http1", "MAX_HEAD", 1 << 40)
    put("proxy.inlet", "MAX_WAITING", 1 << 40)


@in_proxy("blanks before a request")
def _() -> None:
    put("proxy.sniff", "MAX_FIRST_LINE", 1 << 40)
    put("proxy.inlet", "MAX_WAITING", 1 << 40)


@in_proxy("time for a handshake")
def _() -> None:
    put("proxy.inlet", "HANDSHAKE_SECONDS", 1e6)


@in_proxy("number of connections")
def _() -> None:
    put("proxy.serving", "connections_for", lambda _: 1 << 30)


@in_proxy("short handshakes", CONDITIONS)
def _() -> None:
    # Ten seconds, and two more to read a refusal, are for people.
    put("proxy.inlet", "HANDSHAKE_SECONDS", 0.5)
    put("proxy.inlet", "FAREWELL_SECONDS", 0.2)
