"""The body of a request on its way from the connection to the handler.

What comes is kept as it came and decoded when it is read: a body of a million tiny chunks costs
nothing before someone has decided to read it.
"""

from __future__ import annotations

import asyncio

from ...proxy import http1
from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Source(Protocol):
        """The connection, as far as a body needs it."""

        def body_wanted(self) -> None:
            """Somebody reads for the first time: `100 Continue` is due."""

        def body_waits(self, *, waiting: bool) -> None:
            """The reader waits for the client, or no longer."""

        def body_taken(self) -> None:
            """There is room again."""

        def body_rest(self, rest: bytes) -> None:
            """What came behind the body."""


class Body:
    """What follows a head. The connection feeds it, the handler reads it."""

    __slots__ = (
        "_chunks", "_error", "_left", "_pieces", "_source", "_waiter", "_wanted", "held", "length",
    )  # fmt: skip

    def __init__(self, length: int | None, source: Source | None = None) -> None:
        """`length` None: chunked."""
        self.length = length
        # Raw bytes that wait for a reader.
        self.held = 0
        self._left = length or 0
        self._chunks = http1.Chunks(framed=False) if length is None else None
        self._pieces: list[bytes] = []
        self._source = source
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = False
        self._error: Problem | None = None

    @classmethod
    def of(cls, data: bytes) -> Body:
        """A body that is all there."""
        body = cls(len(data))
        body.feed(data)
        return body

    # --- the connection's side

    @property
    def complete(self) -> bool:
        """Whether nothing more is to come, as far as that is known."""
        return self._chunks.done if self._chunks is not None else self._left == 0

    @property
    def missing(self) -> int | None:
        """How much is still to come; None: not known."""
        return self._left if self._chunks is None else None

    @property
    def failed(self) -> bool:
        """Whether it ended before its end."""
        return self._error is not None

    def feed(self, data: bytes) -> bytes:
        """Take what belongs to the body; give back the rest."""
        rest = b""
        if self._chunks is None:
            data, rest = data[: self._left], data[self._left :]
            self._left -= len(data)
        if data:
            self._pieces.append(data)
            self.held += len(data)
            self._wake()
        return rest

    def fail(self, problem: Problem) -> None:
        """No more will come. What is there may still be read; then the reader is told why."""
        if not self.complete and self._error is None:
            self._error = problem
            self._wake()

    def settle(self) -> bool:
        """The reader has gone: look once at what is there, drop it, and say whether that was all.

        May raise BadRequest.
        """
        data, self._pieces, self.held = b"".join(self._pieces), [], 0
        if self._chunks is not None and not self._chunks.done:
            self._decode(data)
        return self.complete

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the reader's side

    async def read(self) -> bytes:
        """The next piece; b"" at the end."""
        if not self._wanted:
            self._wanted = True
            if self._source is not None and not self.complete:
                self._source.body_wanted()
        while True:
            if self._pieces:
                data = self._take()
                if data:
                    return data
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            await self._wait()

    def _take(self) -> bytes:
        pieces, self._pieces, self.held = self._pieces, [], 0
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if self._chunks is not None:
            try:
                data = self._decode(data)
            except http1.BadRequest as error:
                self._error = Problem("BAD_REQUEST", f"bad request: {error}", rule="http.chunks")
                raise self._error from None
        if self._source is not None:
            self._source.body_taken()
        return data

    def _decode(self, data: bytes) -> bytes:
        if self._chunks is None or self.complete:
            return data
        content = self._chunks.feed(data)
        if self._source is not None and self._chunks.rest:
            self._source.body_rest(self._chunks.rest)
        return content

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two readers of one body")
        self._waiter = asyncio.get_running_loop().create_future()
        if self._source is not None:
            self._source.body_waits(waiting=True)
        try:
            await self._waiter
        finally:
            self._waiter = None
            if self._source is not None:
                self._source.body_waits(waiting=False)
