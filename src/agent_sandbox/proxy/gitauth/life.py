"""The life of the process: orders, connections, the end of the run, the report."""

from __future__ import annotations

import asyncio
import json
import socket

from ...launch.egress import READY
from ...policy.knownhosts import spelled
from ...record import Record
from . import agent, lines, messages
from .filling import Filler
from .journal import HANDED_IN, REFUSED, Journal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

SSH_PORT = 22
MAX_CONNECTIONS = 64
# How long the rest of a message may take, and an answer to be taken.
REST_SECONDS = 30.0


class Orders(Record):
    """What the supervisor wants."""

    ssh: bool
    https: bool
    # The user's own agent.
    upstream: str
    rules: agent.Rules
    hosts: frozenset[tuple[str, int]]
    env: Mapping[str, str]
    log: str
    run: str


def load(data: bytes) -> Orders:
    """Orders from the supervisor's JSON. Pure."""
    told = json.loads(data)
    hosts = tuple((str(host), int(port)) for host, port in told["hosts"])
    rules = agent.Rules(
        names=frozenset((str(kind), str(text)) for kind, text in told["names"]),
        hosts=tuple(spelled(host, port or SSH_PORT) for host, port in hosts),
        any_host=bool(told["any_host"]), known_hosts=tuple(told["known_hosts"]),
    )  # fmt: skip
    return Orders(
        ssh=bool(told["ssh"]), https=bool(told["https"]), upstream=told["agent"], rules=rules,
        hosts=frozenset(hosts), env=told["env"], log=told["log"], run=told["run"],
    )  # fmt: skip


def run(told: int, listener: int, supervisor: int) -> None:
    """Serve until the supervisor says that the run is over, or is gone."""
    with open(told, "rb") as file:
        orders = load(file.read())
    asyncio.run(_run(orders, socket.socket(fileno=listener), socket.socket(fileno=supervisor)))


async def _run(orders: Orders, listener: socket.socket, supervisor: socket.socket) -> None:
    desk = Desk(orders)
    server = await asyncio.start_unix_server(desk.serve, sock=listener, limit=messages.MAX_MESSAGE)
    supervisor.settimeout(0)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(supervisor, READY)
    try:
        while await loop.sock_recv(supervisor, 64):
            pass
    except OSError:
        pass
    server.close()
    await desk.close()
    try:
        await loop.sock_sendall(supervisor, json.dumps(desk.journal.report()).encode() + b"\n")
    except OSError:
        # Nobody listens any more.
        return


class Desk:
    """Takes connections and tells their languages apart."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self.journal = Journal(orders.log, orders.run)
        self._filler = Filler(orders.env, orders.hosts)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._tasks.add(task)
        try:
            first = await reader.readexactly(1)
            if first == b"\0" and self._orders.ssh:
                await self._agent(first, reader, writer)
            elif first == b"a" and self._orders.https:
                await self._helper(first, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            # Whoever asked has gone, or does not finish.
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def close(self) -> None:
        """End every connection."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _agent(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        upstream = agent.Upstream(self._orders.upstream)
        session = agent.Session(self._orders.rules, upstream, self.journal)
        try:
            while not session.over:
                async with asyncio.timeout(REST_SECONDS):
                    size = int.from_bytes(first + await reader.readexactly(3))
                    if not 0 < size <= messages.MAX_MESSAGE:
                        self.journal.note(REFUSED, why="a message of a size that no agent takes")
                        return
                    message = await reader.readexactly(size)
                await _send(writer, messages.string(await session.answer(message)))
                first = await reader.readexactly(1)
        finally:
            upstream.close()

    async def _helper(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(REST_SECONDS):
            data = first
            # Git closes its side when it has said everything.
            while len(data) <= lines.MAX_QUESTION and (more := await reader.read(1 << 12)):
                data += more
        host = ""
        try:
            asked = lines.question(data)
            if asked.action != "get":
                # Git says what was good and what was bad. Neither is kept: it comes from inside.
                return
            host = asked.authority
            told = await self._fill(asked)
        except lines.Refused as error:
            about = f" for {host}" if host else ""
            self.journal.note(REFUSED, why=f"a credential{about}: {error}")
            return
        await _send(writer, told)

    async def _fill(self, asked: lines.Question) -> bytes:
        """The answer, written down before it leaves."""
        if not self.journal.has_room():
            raise lines.Refused("it could not be logged any more")
        told = await self._filler.fill(asked)
        self.journal.note(HANDED_IN, purpose=f"a credential for https://{asked.authority}")
        if not self.journal.is_whole:
            raise lines.Refused("it could not be logged")
        return told


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    async with asyncio.timeout(REST_SECONDS):
        await writer.drain()
