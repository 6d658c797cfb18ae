"""The files of a sandbox, for an agent: each act is in the audit first, and bounded."""

from __future__ import annotations

from .. import limits as bounds
from ..backend.interface import HOME, WORK
from ..problems import Problem
from ..values import FILES, PAUSED, RUNNING
from .disk import left
from .sandboxes import wrong_state

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from ..backend.interface import Entry, Files
    from ..values import Agent
    from .context import Context, Live
    from .disk import Disks

_MOST_PATH = 4096


class AuditedFiles:
    """As `backend.interface.Files`; the bounds of uploads are the agent's."""

    def __init__(
        self, context: Context, disks: Disks, agent: Agent, sandbox_id: str, request_id: str
    ) -> None:
        self._context = context
        self._disks = disks
        self._agent = agent
        self._sandbox_id = sandbox_id
        self._request_id = request_id
        bounds.check_scope(agent, FILES)
        self._live()

    async def entry(self, path: str) -> Entry:
        """One entry."""
        _, files = self._begin("file.stat", path)
        return await files.entry(normal(path))

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file; close the iterator."""
        _, files = self._begin("file.get", path)
        return await files.read(normal(path), offset)

    async def write(self, path: str, data: AsyncIterator[bytes], *, mode: int = 0o644) -> Entry:
        """Replace a file."""
        live, files = self._begin("file.put", path)
        return await self._disks.upload(
            live,
            data,
            lambda parts: files.write(normal(path), parts, limit=self._most(), mode=mode),
        )

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove."""
        live, files = self._begin("file.delete", path)
        await files.delete(normal(path), recursive=recursive)
        # How much is left is not known before the next look.
        live.disk = None

    async def make(self, path: str) -> Entry:
        """A directory."""
        live, files = self._begin("file.mkdir", path)
        await self._disks.check(live)
        try:
            return await files.make(normal(path))
        finally:
            # Directories weigh something, too.
            self._disks.watch(live)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        _, files = self._begin("file.list", path)
        return await files.list(normal(path), depth=depth, most=most)

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar; close the iterator."""
        _, files = self._begin("file.pack", path)
        return await files.pack(normal(path))

    async def unpack(self, path: str, data: AsyncIterator[bytes]) -> int:
        """A tar below a directory."""
        live, files = self._begin("file.unpack", path)

        def work(parts: AsyncIterator[bytes]) -> Awaitable[int]:
            return files.unpack(normal(path), parts, limit=left(live, self._most()))

        # A small archive may be a large tree. One after the other, each has what is really left.
        async with live.unpacking:
            try:
                return await self._disks.upload(live, data, work)
            finally:
                live.disk = None

    def _live(self) -> Live:
        live = self._context.sandbox(self._agent, self._sandbox_id)
        if live.sandbox.state not in (RUNNING, PAUSED):
            raise wrong_state(live.sandbox)
        return live

    def _most(self) -> int:
        return self._context.limits_of(self._agent).max_upload_bytes

    def _begin(self, action: str, path: str) -> tuple[Live, Files]:
        context = self._context
        # Asked each time: the object may be older than the last look at the sandbox.
        live = self._live()
        backend = context.backend(live.sandbox.backend)
        clean = normal(path)
        context.note(self._agent, action, {"type": "sandbox", "id": live.sandbox.id},
                     request_id=self._request_id, request={"path": clean})  # fmt: skip
        live.touch(context.clock())
        return live, backend.files(live.sandbox)


def normal(path: str) -> str:
    """A path inside: absolute, normalised, below WORK or HOME. Relative ones are below WORK."""
    parts = (path if path.startswith("/") else f"{WORK}/{path}").split("/")
    clean = "/" + "/".join(part for part in parts if part not in ("", "."))
    if ".." in parts or "\0" in path or len(path) > _MOST_PATH:
        raise Problem("INVALID", "the path has '..' or NUL in it, or is too long",
                      rule="files.path", field="path")  # fmt: skip
    if not any(clean == top or clean.startswith(f"{top}/") for top in (WORK, HOME)):
        raise Problem("INVALID", f"the path must be below {WORK} or {HOME}", rule="files.path",
                      field="path")  # fmt: skip
    return clean
