"""A command's events, across as many connections as it takes. Pure.

Every event of output has an id. After a broken connection the service is told the last one that
was seen, and goes on behind it: nothing is lost and nothing comes twice.
"""

from __future__ import annotations

import json

from ..service.http.events import Decoder, TooLarge
from . import calls, values
from .errors import ApiError, BadAnswer
from .values import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..service.http.events import Event as SentEvent
    from .calls import Call
    from .values import Result
    from .wire import Head

OUTPUT = ("stdout", "stderr")


class Following:
    """What has been seen of one command."""

    def __init__(self, exec_id: str = "", last: str = "") -> None:
        self.exec_id = exec_id
        self.last = last
        # Known after the end; without output.
        self.result: Result | None = None
        self._started = False
        self._decoder = Decoder()

    @property
    def ended(self) -> bool:
        """Whether the last event has come."""
        return self.result is not None

    def opened(self, head: Head) -> None:
        """An answer began: it names the command, before any event of it."""
        named = head.headers.get("location", "").rpartition("/v1/execs/")[2]
        if not self.exec_id and named.startswith("exc-"):
            self.exec_id = named

    def resume(self) -> Call:
        """The request for what has not been seen."""
        # Half of an event may be left of the connection that broke.
        self._decoder = Decoder()
        return calls.events(self.exec_id, self.last)

    def feed(self, data: bytes) -> list[Event]:
        """The events that are complete now."""
        found = []
        for raw in self._decode(data):
            event = self._event(raw.event, raw.data, raw.id)
            if event is not None:
                found.append(event)
            if self.ended:
                break
        return found

    def _decode(self, data: bytes) -> list[SentEvent]:
        try:
            return self._decoder.feed(data)
        except TooLarge as error:
            raise BadAnswer(f"the stream has {error}") from None

    def _event(self, kind: str, data: str, name: str) -> Event | None:
        members = self._members(data)
        if kind == "error":
            raise _refusal(members)
        if kind in OUTPUT:
            self.last = name or self.last
            return Event(kind=kind, data=values.output(members, "data"), id=name)
        if kind == "start":
            found = values.result(members)
            if not found.id or self.exec_id not in ("", found.id):
                raise BadAnswer("the stream is another command's")
            self.exec_id = found.id
            # A stream that goes on begins with it again.
            seen, self._started = self._started, True
            return None if seen else Event(kind=kind, id=name, result=found)
        if kind == "retry":
            # Not `last`: a stream that breaks here tells it again.
            return Event(kind=kind, id=name, result=values.result(members))
        if kind == "exit":
            self.last = name or self.last
            self.result = values.result(members)
            return Event(kind=kind, id=name, result=self.result)
        # Kinds of a later version.
        return None

    def _members(self, data: str) -> dict[str, object]:
        try:
            return values.members(json.loads(data), "event")
        except (ValueError, RecursionError):
            raise BadAnswer("an event of the stream is not JSON") from None


def _refusal(members: dict[str, object]) -> ApiError:
    def text(name: str) -> str:
        value = members.get(name)
        return value if isinstance(value, str) else ""

    return ApiError(
        500, text("code") or "INTERNAL", text("message") or "the stream ended with an error",
        hint=text("hint"), rule=text("rule"), request_id=text("requestId"),
    )  # fmt: skip


class Output:
    """What a command wrote, gathered."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[bytes]] = {name: [] for name in OUTPUT}

    def take(self, event: Event) -> None:
        """Keep the data of an event; of two starts, that of the last."""
        if event.kind == "retry":
            for pieces in self._pieces.values():
                pieces.clear()
        if event.kind in OUTPUT:
            self._pieces[event.kind].append(event.data)

    def complete(self, result: Result) -> Result:
        """How it ended, with what it wrote."""
        return result.replace(
            out=b"".join(self._pieces["stdout"]), err=b"".join(self._pieces["stderr"])
        )
