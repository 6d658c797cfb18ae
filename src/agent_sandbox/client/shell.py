"""A terminal over a WebSocket, without a socket: what is sent, and what came. Pure."""

from __future__ import annotations

import base64
import json
import os

from ..service.http import frames
from . import calls, values
from .errors import BadAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .calls import Call
    from .values import Result
    from .wire import Head

MAX_MESSAGE = 16 * 1024 * 1024


class Talk:
    """The client's side of one terminal."""

    def __init__(self, exec_id: str) -> None:
        self._key = base64.b64encode(os.urandom(16)).decode("ascii")
        self._exec_id = exec_id
        self._reader = frames.Reader(masked=False, limit=MAX_MESSAGE)
        self.ended = False
        # How the command ended, if that was told; and what the service did not do for us.
        self.result: Result | None = None
        self.problems: list[str] = []
        self._answers = bytearray()

    def call(self) -> Call:
        """The request that becomes a WebSocket."""
        found = calls.get("execs", self._exec_id, "ws")
        return found.replace(
            accept="*/*",
            headers=(
                ("Connection", "Upgrade"), ("Upgrade", "websocket"),
                ("Sec-WebSocket-Version", "13"), ("Sec-WebSocket-Key", self._key),
            ),
        )  # fmt: skip

    def check(self, head: Head) -> None:
        """Whether the other end has understood."""
        accepted = head.headers.get("sec-websocket-accept", "")
        if head.status != 101 or accepted != frames.accept_key(self._key):
            raise BadAnswer(
                "the service does not open a terminal",
                hint="a proxy in between that does not pass WebSockets?",
            )

    def feed(self, data: bytes) -> bytes:
        """Output of the terminal in what came; b"" as input means that the connection ended."""
        if not data:
            self.ended = True
        out = bytearray()
        try:
            for kind, payload in self._reader.feed(data):
                self._take(kind, payload, out)
        except frames.FrameError as error:
            raise BadAnswer(f"the terminal's connection cannot be read: {error}") from None
        return bytes(out)

    def _take(self, kind: int, payload: bytes | str, out: bytearray) -> None:
        if isinstance(payload, str):
            self._note(payload)
        elif kind == frames.BINARY:
            out += payload
        elif kind == frames.PING:
            self._answers += self._frame(frames.PONG, payload)
        elif kind == frames.CLOSE and not self.ended:
            self.ended = True
            self._answers += self._frame(frames.CLOSE, payload[:2])

    def _note(self, text: str) -> None:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return
        if isinstance(found, dict) and found.get("type") == "exit":
            self.result = values.result(found)
        elif isinstance(found, dict) and found.get("type") == "error":
            # Kept as a few: each refused key press makes one.
            self.problems = [*self.problems[-9:], str(found.get("message", ""))]

    def answers(self) -> bytes:
        """What the protocol wants to be sent now."""
        found, self._answers = bytes(self._answers), bytearray()
        return found

    def _frame(self, kind: int, payload: bytes) -> bytes:
        return frames.encode(kind, payload, mask=os.urandom(4))

    def keys(self, data: bytes) -> bytes:
        """What was typed."""
        return self._frame(frames.BINARY, data)

    def order(self, **members: object) -> bytes:
        """`type="resize"` with rows and cols, `type="signal"`, `type="eof"`."""
        return self._frame(frames.TEXT, json.dumps(members).encode())

    def close(self) -> bytes:
        """The end, from our side."""
        return self._frame(frames.CLOSE, frames.close_payload(frames.NORMAL))
