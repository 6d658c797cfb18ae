"""The control socket of a running proxy: one JSON object per line, in and out.

    {"do": "allow", "rules": ["example.com"]} → {"ok": true, "mode": …, "allow": […], "deny": […]}

The socket lies outside; no sandbox sees it. Only the same user may speak to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct

from ..errors import SandboxError
from ..policy import network

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

MAX_LINE = 64 * 1024
MAX_RULES = 4096
LINE_SECONDS = 30.0
SOURCE = "sandboxctl net"
# struct ucred: pid, uid, gid.
UCRED = struct.Struct("=iII")


def changed(egress: network.Egress, order: object) -> network.Egress:
    """The policy after an order; ValueError or PolicyError if it makes no sense. Pure."""
    if not isinstance(order, dict) or order.get("do") not in ("allow", "deny", "list"):
        raise ValueError("an order has do = allow, deny or list")
    texts = order.get("rules", [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("rules is a list of texts")
    deny = order["do"] == "deny"
    if order["do"] == "list" or not texts:
        return egress
    new = tuple(network.parse(text, SOURCE, deny=deny) for text in texts)
    held = egress.deny if deny else egress.allow
    if len(held) + len(new) > MAX_RULES:
        raise ValueError("too many rules")
    both = (*held, *(rule for rule in new if rule not in held))
    # The last word of this kind counts: what was denied here can be allowed here again.
    said = {rule.text for rule in new}
    other = egress.allow if deny else egress.deny
    rest = tuple(r for r in other if r.source != SOURCE or r.text not in said)
    allow, deny_list = (rest, both) if deny else (both, rest)
    return egress.replace(allow=allow, deny=deny_list)


def listed(egress: network.Egress) -> dict[str, object]:
    """The policy, to be shown."""
    return {
        "mode": egress.mode,
        "allow": [[rule.text, rule.source] for rule in egress.allow],
        "deny": [[rule.text, rule.source] for rule in egress.deny],
    }


class Control:
    """The listener, and the policy that it changes."""

    def __init__(
        self, path: str, read: Callable[[], network.Egress],
        write: Callable[[network.Egress], Awaitable[None]],
        seen: Callable[[], dict[str, object]] = dict,
    ) -> None:  # fmt: skip
        self._seen = seen
        self._path = path
        self._read = read
        self._write = write
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        # The mode is right from the first moment on: nobody else can connect before a chmod.
        before = os.umask(0o177)
        directory, _, name = path.rpartition("/")
        try:
            # An address has room for 107 bytes, and state directories may lie deep.
            os.chdir(directory)
            self.listener.bind(name)
        finally:
            os.umask(before)
            os.chdir("/")
        self.listener.listen(16)

    def remove(self) -> None:
        """Take the socket away."""
        try:
            os.unlink(self._path)
        except OSError:
            return

    async def serve(self, client: socket.socket) -> None:
        """Answer one client's lines."""
        loop = asyncio.get_running_loop()
        if peer(client) not in (os.getuid(), 0):
            return
        buffer = b""
        try:
            while True:
                async with asyncio.timeout(LINE_SECONDS):
                    while b"\n" not in buffer:
                        chunk = await loop.sock_recv(client, MAX_LINE)
                        if not chunk or len(buffer) > MAX_LINE:
                            return
                        buffer += chunk
                    line, _, buffer = buffer.partition(b"\n")
                    answer = await self._answer(line)
                    await loop.sock_sendall(client, answer)
        except (OSError, TimeoutError):
            return

    async def _answer(self, line: bytes) -> bytes:
        answer: dict[str, object]
        try:
            new = changed(self._read(), json.loads(line))
            if new is not self._read():
                # Only then: who reads the answer can rely on it.
                await self._write(new)
            answer = {"ok": True, **listed(new), **self._seen()}
        except SandboxError as error:
            answer = {"ok": False, "error": error.message, "hint": error.hint}
        except (ValueError, RecursionError) as error:
            answer = {"ok": False, "error": str(error)}
        return json.dumps(answer).encode() + b"\n"


def peer(client: socket.socket) -> int:
    """Whose process is at the other end."""
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size)
    uid: int = UCRED.unpack(raw)[1]
    return uid
