"""The name server inside: answers every question itself, with stand-in addresses.

No question ever leaves, so none can carry anything out. A name that rules refuse gets an address,
too: the refusal is explained on the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct

from ..policy import network
from . import dns, names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    # Called before the first answer with a name's address: takes the ports that rules name there.
    Prepare = Callable[[str, int], Awaitable[None]]

# linux/in.h, and struct in_pktinfo: interface, address to answer from, address that was asked.
IP_PKTINFO = 8
IN_PKTINFO = struct.Struct("=i4s4s")
IN6_PKTINFO = struct.Struct("=16si")
ANCILLARY = 256
BATCH = 64
MAX_PENDING = 512
TCP_SECONDS = 10.0
MAX_TCP_QUESTIONS = 256
LOOPBACK = {dns.A: bytes((127, 0, 0, 1)), dns.AAAA: bytes(15) + b"\1"}


class Stub:
    """Questions in, answers out."""

    def __init__(self, prepare: Prepare | None = None) -> None:
        self.names = names.Names(int.from_bytes(os.urandom(2), "big"))
        # Without IPv6 inside, an IPv6 address would only make clients wait.
        self.ipv6 = False
        self._prepare = prepare
        self._pending: set[asyncio.Task[None]] = set()

    async def answer(self, data: bytes, room: int = 65_535) -> bytes:
        """The answer to a message; empty if it deserves none."""
        try:
            question = dns.parse(data)
        except dns.Malformed as error:
            return error.answer
        if question.edns and room == dns.UDP_PLAIN:
            room = dns.UDP_EDNS
        code, found = await self._find(question)
        return dns.answer(question, found, code=code, room=room)

    async def _find(self, question: dns.Question) -> tuple[int, bytes]:
        if question.edns_version or question.klass != dns.INTERNET:
            return dns.BADVERS if question.edns_version else dns.REFUSED, b""
        if question.kind == dns.PTR:
            return self._name_of(question.name)
        name = _host(question.name)
        if not name:
            return dns.NXDOMAIN, b""
        if name == "localhost" or name.endswith(".localhost"):
            return dns.NOERROR, LOOPBACK.get(question.kind, b"")
        if question.kind not in LOOPBACK or (question.kind == dns.AAAA and not self.ipv6):
            return dns.NOERROR, b""
        return await self._address_of(name, question.kind)

    async def _address_of(self, name: str, kind: int) -> tuple[int, bytes]:
        slot = self.names.slot(name)
        if slot is None:
            return dns.SERVFAIL, b""
        if self._prepare is not None:
            await self._prepare(name, slot)
        return dns.NOERROR, names.v4(slot) if kind == dns.A else names.v6(slot)

    def _name_of(self, asked: str) -> tuple[int, bytes]:
        address = dns.reverse(asked)
        name = self.names.name(address) if address else None
        return (dns.NOERROR, dns.wire(name)) if name else (dns.NXDOMAIN, b"")

    # --- UDP

    def serve_udp(self, sock: socket.socket) -> None:
        """Answer datagrams, each from the address that it was sent to."""
        sock.setblocking(False)  # noqa: FBT003 - positional only
        sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._datagrams, sock)

    def _datagrams(self, sock: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                data, ancillary, _, client = sock.recvmsg(dns.MAX_QUESTION + 1, ANCILLARY)
            except OSError:
                return
            if len(self._pending) >= MAX_PENDING:
                # They ask again.
                continue
            work = self._reply(sock, data, answer_from(ancillary), client)
            task = asyncio.get_running_loop().create_task(work)
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def _reply(
        self, sock: socket.socket, data: bytes, ancillary: list[tuple[int, int, bytes]],
        client: tuple[str, int],
    ) -> None:  # fmt: skip
        answer = await self.answer(data, dns.UDP_PLAIN)
        try:
            if answer:
                sock.sendmsg([answer], ancillary, 0, client)
        except OSError:
            # The buffer is full, or the client has gone. They ask again.
            return

    # --- TCP

    async def serve_tcp(self, client: socket.socket) -> None:
        """Answer questions with their length in front, one after the other."""
        loop = asyncio.get_running_loop()
        buffer = b""
        try:
            for _ in range(MAX_TCP_QUESTIONS):
                async with asyncio.timeout(TCP_SECONDS):
                    while len(buffer) < 2 or len(buffer) < 2 + int.from_bytes(buffer[:2], "big"):
                        chunk = await loop.sock_recv(client, dns.MAX_QUESTION)
                        if not chunk or int.from_bytes(buffer[:2], "big") > dns.MAX_QUESTION:
                            return
                        buffer += chunk
                    end = 2 + int.from_bytes(buffer[:2], "big")
                    answer = await self.answer(buffer[2:end])
                    buffer = buffer[end:]
                    if not answer:
                        return
                    await loop.sock_sendall(client, len(answer).to_bytes(2, "big") + answer)
        except (OSError, TimeoutError):
            return


def _host(asked: str) -> str:
    """The canonical name; "" for what is none, such as an address. Pure."""
    try:
        name = network.canonical(asked)
    except network.BadName:
        return ""
    return "" if network.is_address(name) else name


def answer_from(ancillary: list[tuple[int, int, bytes]]) -> list[tuple[int, int, bytes]]:
    """What makes an answer come from where the question went. Pure."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
            address, _ = IN6_PKTINFO.unpack(data[: IN6_PKTINFO.size])
            return [(level, kind, IN6_PKTINFO.pack(address, 0))]
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, IP_PKTINFO):
            _, _, address = IN_PKTINFO.unpack(data[: IN_PKTINFO.size])
            return [(level, kind, IN_PKTINFO.pack(0, address, bytes(4)))]
    return []
