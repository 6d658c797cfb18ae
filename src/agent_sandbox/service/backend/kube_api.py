"""The calls that we make to the API server, and the stream of what changes there."""

from __future__ import annotations

import asyncio
import json
import random
import time

from ...record import Record
from .kube_http import Refusal, unavailable
from .kube_objects import at, items, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from .kube_http import Http

JSON_PATCH, MERGE_PATCH = "application/json-patch+json", "application/merge-patch+json"
# Objects per answer to a list.
PAGE = 500
# The API server ends a watch after this time; then we ask for the rest. So a stream without a word
# for longer than this has no other end any more: a load balancer that has moved says nothing.
WATCH_SECONDS, WATCH_QUIET = 60, 75.0
# Longer than any pod: a line of a watch is one object.
MOST_LINE = 8 << 20
# Between tries to list or watch again.
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
SHORT_WATCH = 5.0
ADDED, MODIFIED, DELETED, BOOKMARK, ERROR = "ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"
GONE = 410


class Event(Record):
    """A line of a watch."""

    kind: str
    object: object


class Expired(Exception):
    """The version that a watch began at is too old: list again."""


class Api:
    """Typed calls. Paths are ours; names in them are checked by the API server."""

    def __init__(self, http: Http, namespace: str) -> None:
        self.http = http
        self.namespace = namespace

    def path(self, plural: str, name: str = "", *, group: str = "/api/v1") -> str:
        """A resource of our namespace."""
        return f"{group}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    async def get(self, path: str) -> object:
        """One object; Refusal 404."""
        return await self.http.call("GET", path)

    async def create(self, path: str, document: object) -> object:
        """Make an object; Refusal 409 when the name is taken."""
        return await self.http.call("POST", path, document=document)

    async def patch(self, path: str, document: object, *, kind: str = JSON_PATCH) -> object:
        """Change an object."""
        return await self.http.call("PATCH", path, document=document, kind=kind)

    async def delete(self, path: str, *, uid: str = "", grace: int | None = None) -> bool:
        """Remove an object; False: it is gone already, or is another one of that name."""
        options: dict[str, object] = {"kind": "DeleteOptions", "apiVersion": "v1"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace is not None:
            options["gracePeriodSeconds"] = grace
        try:
            await self.http.call("DELETE", path, document=options)
        except Refusal as error:
            # 409: the uid is not this one.
            if error.status in (404, 409):
                return False
            raise
        return True

    async def list(
        self, path: str, query: Sequence[tuple[str, str]] = ()
    ) -> tuple[list[object], str]:
        """All objects, page by page, and the version that they were read at."""
        found: list[object] = []
        more = ""
        while True:
            page = [*query, ("limit", str(PAGE)), *([("continue", more)] if more else [])]
            document = await self.http.call("GET", path, query=page)
            found += items(document, "items")
            more = text(document, "metadata", "continue")
            if not more:
                return found, text(document, "metadata", "resourceVersion")

    async def log(self, pod: str, container: str, most: int) -> str:
        """The beginning of a container's output."""
        query = (("container", container), ("limitBytes", str(most)))
        said = await self.http.fetch(f"{self.path('pods', pod)}/log", query=query)
        return said[:most].decode("utf-8", "replace")

    async def watch(
        self, path: str, version: str, query: Sequence[tuple[str, str]] = ()
    ) -> AsyncGenerator[Event]:
        """What changes from a version on, until the API server ends it; Expired: list again."""
        asked = [
            *query, ("watch", "1"), ("resourceVersion", version), ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(WATCH_SECONDS)),
        ]  # fmt: skip
        stream = self.http.stream(path, query=asked, quiet=WATCH_QUIET)
        held = b""
        try:
            async for piece in stream:
                *lines, held = (held + piece).split(b"\n")
                if len(held) > MOST_LINE:
                    raise unavailable("a line of a watch is too long")
                for line in lines:
                    if line.strip():
                        yield read_event(line)
        except Refusal as error:
            if error.status == GONE:
                raise Expired from error
            raise
        finally:
            await stream.aclose()


def read_event(line: bytes) -> Event:
    """One line of a watch."""
    try:
        document: object = json.loads(line)
    except ValueError as error:
        raise unavailable("a line of a watch is not JSON") from error
    kind, found = text(document, "type"), at(document, "object")
    if kind == ERROR:
        code = at(found, "code")
        if code == GONE or text(found, "reason") in ("Expired", "Gone"):
            raise Expired
        raise Refusal(code if isinstance(code, int) else 500, text(found, "reason"),
                      text(found, "message"))  # fmt: skip
    if kind not in (ADDED, MODIFIED, DELETED, BOOKMARK) or not isinstance(found, dict):
        raise unavailable("a line of a watch is not an event")
    return Event(kind=kind, object=found)


class Follower:
    """Keeps a view of a kind of objects: listed once, then followed, listed again when needed.

    `replace` gets every object after a list, `change` each event. Both are called on the loop and
    must not wait.
    """

    def __init__(
        self, api: Api, path: str, query: Sequence[tuple[str, str]], *,
        replace: Callable[[list[object]], None], change: Callable[[Event], None],
        failed: Callable[[Exception], None] | None = None,
    ) -> None:  # fmt: skip
        self._api = api
        self._path = path
        self._query = query
        self._replace = replace
        self._change = change
        self._failed = failed or (lambda _error: None)
        self._version = ""
        self._task: asyncio.Task[None] | None = None
        # Set while the view follows the API server.
        self.current = asyncio.Event()

    async def start(self) -> None:
        """List, and follow from there on; what the list refuses, this does."""
        if self._task is None:
            await self._list()
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        self.current.clear()

    async def _list(self) -> None:
        found, self._version = await self._api.list(self._path, self._query)
        self._replace(found)
        self.current.set()

    async def _run(self) -> None:
        pause = FIRST_PAUSE
        while True:
            begun = time.monotonic()
            try:
                if not self._version:
                    await self._list()
                await self._follow()
            except Expired:
                # What happened meanwhile is in the list, or has come and gone.
                self._version = ""
            except Exception as error:  # noqa: BLE001 - the view must go on whatever comes
                self.current.clear()
                self._version = ""
                self._failed(error)
            if time.monotonic() - begun >= SHORT_WATCH:
                pause = FIRST_PAUSE
                continue
            # Whatever ends a watch at once will do so again. Not all replicas at the same time.
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))  # noqa: S311
            pause = min(pause * 2, LONGEST_PAUSE)

    async def _follow(self) -> None:
        events = self._api.watch(self._path, self._version, self._query)
        try:
            async for event in events:
                self._version = text(event.object, "metadata", "resourceVersion")
                if event.kind != BOOKMARK:
                    self._change(event)
        finally:
            await events.aclose()
