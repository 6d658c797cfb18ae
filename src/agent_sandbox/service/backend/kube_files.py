"""The files of a sandbox, through its agent: the line to it is found when it is needed."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from .interface import Entry, Files
    from .pod_link import PodLink


class KubeFiles:
    """See `interface.Files`. After a restart of the service there is no line yet."""

    def __init__(self, link: Callable[[], Awaitable[PodLink]]) -> None:
        self._link = link

    async def _files(self) -> Files:
        return (await self._link()).files()

    async def entry(self, path: str) -> Entry:
        """One entry."""
        return await (await self._files()).entry(path)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file."""
        return await (await self._files()).read(path, offset)

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file."""
        return await (await self._files()).write(path, data, limit=limit, mode=mode)

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove a file, a link or a directory."""
        await (await self._files()).delete(path, recursive=recursive)

    async def make(self, path: str) -> Entry:
        """A directory."""
        return await (await self._files()).make(path)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        return await (await self._files()).list(path, depth=depth, most=most)

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar."""
        return await (await self._files()).pack(path)

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar below a directory."""
        return await (await self._files()).unpack(path, data, limit=limit)
