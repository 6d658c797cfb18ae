"""The parts of a proxy put together: orders in, a report out."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys

from ..policy import network
from ..record import Record
from . import names, refusals
from .control import Control
from .dial import Dialler
from .gateway import Gate
from .injecting import Value, Values
from .ledger import Budget, Ledger
from .listening import Listeners, connections_for, raise_descriptors
from .publish import Publisher
from .relay import Relay, close
from .streams import Streams
from .stub import Stub

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from .authority import Authority
    from .injected import Injected
    from .listening import Handler
    from .waiting import Found

REPORT_SECONDS = 5.0
# Two threads take turns: the relay must not wait 5 ms for each of its.
SWITCH_SECONDS = 0.0005
MAX_ORDERS = 16 << 20
# Connections to published ports, and to the control socket.
MAX_OUTER = 512
MAX_ORDERING = 16


class Orders(Record):
    """What a proxy is told."""

    egress: network.Egress
    publish: tuple[tuple[str, int, int], ...] = ()
    control: str = ""
    budgets: tuple[Budget, ...] = ()
    secrets: tuple[Value, ...] = ()
    # Certificates, in PEM, that are trusted besides the system's.
    ca: str = ""
    # Where the command reads certificates, and where the library is that makes ours.
    bundle: str = ""
    library: str = ""
    # What `sandboxctl net` shows.
    project: str = ""
    # What a refused client may read about its sandbox; "" where there is no such page.
    page: str = ""


def read_orders(data: bytes) -> Orders:
    """Orders from JSON. The texts of rules were checked before; they are checked again."""
    said = json.loads(data)
    allow = tuple(network.parse(text, source) for text, source in said.get("allow", ()))
    deny = tuple(network.parse(text, source, deny=True) for text, source in said.get("deny", ()))
    return Orders(
        egress=network.Egress(mode=said["mode"], allow=allow, deny=deny),
        publish=tuple((str(a), int(p), int(i)) for a, p, i in said.get("publish", ())),
        control=said.get("control", ""),
        budgets=tuple(_budget(row) for row in said.get("budgets", ())),
        secrets=tuple(Value(**row) for row in said.get("secrets", ())),
        **{key: str(said.get(key, "")) for key in ("ca", "bundle", "library", "project", "page")},
    )


def _budget(row: dict[str, str | int]) -> Budget:
    rule = network.parse(str(row["host"]), str(row.get("source", "")), deny=True)
    caps = {key: int(row.get(key, 0)) for key in ("requests", "upload", "total")}
    return Budget(rule=rule, **caps)


class Proxy:
    """All parts of a running proxy."""

    def __init__(
        self, orders: Orders, line: socket.socket, dialler: Dialler | None = None,
        authority: Authority | None = None,
    ) -> None:  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._orders = orders
        self.ledger = Ledger(orders.budgets)
        self.relay = Relay()
        self.listeners = Listeners(connections_for(raise_descriptors()))
        # What comes from outside must not wait because the command holds every connection.
        self.outer = Listeners(MAX_OUTER)
        # And nobody who holds connections to a published port may keep the user from a word.
        self.ordering = Listeners(MAX_ORDERING)
        self.stub = Stub(self._prepare)
        self.streams = Streams(
            orders.egress, ledger=self.ledger, stand_ins=self.stub.names,
            dialler=dialler or Dialler(), relay=self.relay, left=self.listeners.left,
            injected=_injected(orders, authority),
        )  # fmt: skip
        # (address, port) of every listener inside, or on its way.
        self._bound: set[tuple[str, int]] = set()
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._problems: list[str] = []
        self._control: Control | None = None
        self.relay.start()
        self._gate = Gate(line, self.take)

    def start(self) -> None:
        """Everything but the first listeners, which come from the gate."""
        publisher = Publisher(self._gate, self.relay, self.outer)
        for address, port, inner in self._orders.publish:
            problem = publisher.publish(address, port, inner)
            if problem:
                self._problems.append(problem)
        if self._orders.control:
            try:
                self._control = Control(
                    self._orders.control, lambda: self.streams.egress, self.change, self._seen
                )
            except OSError as error:
                self._problems.append(f"no control socket: {error}")
            else:
                handler = _plain(self.ordering, self._control.serve)
                self.ordering.add(self._control.listener, handler)

    async def change(self, egress: network.Egress) -> None:
        """Put another policy in force, for what is connected already, too."""
        self.streams.change(egress)
        self.relay.review(lambda a: network.decide(egress, a.host, a.port).allowed)
        await self._catch_up()

    def _seen(self) -> dict[str, object]:
        """What a list shows besides the rules."""
        return {"project": self._orders.project, "hosts": self.ledger.report()["hosts"]}

    async def finish(self, supervisor: socket.socket) -> None:
        """Write the report, unless nobody is there to read it."""
        if self._control is not None:
            self._control.remove()
        report = self.ledger.report()
        if self._problems:
            report["problems"] = self._problems
        try:
            async with asyncio.timeout(REPORT_SECONDS):
                await self._loop.sock_sendall(supervisor, json.dumps(report).encode())
        except (OSError, TimeoutError):
            return

    # --- listeners inside

    def take(self, protocol: str, address: str, port: int, fd: int) -> None:
        """Serve a listener that the gate has made at the start."""
        sock = socket.socket(fileno=fd)
        self.stub.ipv6 = self.stub.ipv6 or sock.family == socket.AF_INET6
        if protocol == "udp":
            self.stub.serve_udp(sock)
            return
        self._bound.add(("" if address == "*" else address, port))
        handler: Handler = self.streams.captured
        if port == network.DNS_PORT:
            handler = _plain(self.listeners, self.stub.serve_tcp)
        elif (address, port) == ("127.0.0.1", network.PROXY_PORT):
            handler = self.streams.mux
        elif address == "127.0.0.1" and port in self.streams.bases():
            handler = self.streams.based
        self.listeners.add(sock, handler)

    async def _prepare(self, name: str, slot: int) -> None:
        """Take the ports that rules name for a name, before its address is handed out."""
        ports = network.ports_of(self.streams.egress, name)
        texts = [socket.inet_ntop(socket.AF_INET, names.v4(slot))]
        if self.stub.ipv6:
            texts.append(socket.inet_ntop(socket.AF_INET6, names.v6(slot)))
        wanted = [(text, port) for port in ports for text in texts]
        if all(one in self._bound for one in wanted) and name not in self._preparing:
            return
        # A and AAAA are asked for at the same time: the second waits for the first.
        task = self._preparing.get(name)
        if task is None:
            task = self._loop.create_task(self._bind_all(wanted))
            self._preparing[name] = task
            task.add_done_callback(lambda _: self._preparing.pop(name, None))
        await asyncio.shield(task)

    async def _bind_all(self, wanted: list[tuple[str, int]]) -> None:
        await asyncio.gather(*(self._bind(*one) for one in wanted if one not in self._bound))

    async def _bind(self, address: str, port: int) -> None:
        self._bound.add((address, port))
        try:
            listener = await self._gate.bind(address or "*", port)
        except (OSError, TimeoutError):
            # Taken by the command, or too many. Through the proxy port it can still be reached.
            return
        self.listeners.add(listener, self.streams.captured)

    async def _catch_up(self) -> None:
        """After a change: ports that the new rules name."""
        egress = self.streams.egress
        await self._bind_all([one for one in network.capture(egress) if one not in self._bound])
        for name in self.stub.names.all():
            slot = self.stub.names.slot(name)
            if slot is not None and network.ports_of(egress, name):
                await self._prepare(name, slot)


def _plain(
    listeners: Listeners, serve: Callable[[socket.socket], Coroutine[None, None, None]]
) -> Handler:
    """A handler whose connections end when it returns."""

    async def handler(client: socket.socket) -> None:
        try:
            await serve(client)
        finally:
            close(client)
            listeners.left()

    return handler


def _injected(orders: Orders, authority: Authority | None) -> Injected | None:
    """The hosts that have a secret. Loaded only for them: it needs OpenSSL."""
    if not orders.secrets:
        return None
    from .authority import client_context
    from .injected import Injected

    return Injected(Values(orders.secrets), authority, lambda: client_context(orders.ca))


async def serve(
    orders: Orders, line: socket.socket, supervisor: socket.socket, found: Sequence[Found] = (),
    authority: Authority | None = None,
) -> None:  # fmt: skip
    """Be a proxy until the supervisor says so, or is gone. `found`: what the gate sent already."""
    loop = asyncio.get_running_loop()
    supervisor.setblocking(False)  # noqa: FBT003 - positional only
    proxy = Proxy(orders, line, authority=authority)
    for listener in found:
        proxy.take(*listener)
    proxy.start()
    try:
        while await loop.sock_recv(supervisor, 4096):
            pass
    except OSError:
        pass
    await proxy.finish(supervisor)


def told_orders(told: int) -> Orders:
    """The orders behind a descriptor, which stays open: it may be read twice."""
    return read_orders(os.pread(told, MAX_ORDERS, 0))


def prepare(told: int) -> Authority:
    """Make the certificates of this run and show them to the command, before it is let go."""
    from .authority import Authority, bundle, write

    orders = told_orders(told)
    made = Authority((host for host, _ in Values(orders.secrets).opened), orders.library)
    write(orders.bundle, bundle(made.certificate, orders.ca))
    return made


def run(
    told: int, line: int, supervisor: int, found: Sequence[Found] = (),
    authority: Authority | None = None,
) -> None:  # fmt: skip
    """Be the process, with its three descriptors; ends it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    orders = told_orders(told)
    refusals.Page.path = orders.page
    # The values are in our memory now, and nowhere else.
    os.close(told)
    ends = socket.socket(fileno=line), socket.socket(fileno=supervisor)
    asyncio.run(serve(orders, *ends, found, authority))
    # Threads may be in a lookup that nobody waits for any more.
    os._exit(0)
