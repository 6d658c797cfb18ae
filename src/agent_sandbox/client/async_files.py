"""The files of a sandbox of the service, for asyncio. The twin of `sync_files`."""

from __future__ import annotations

import asyncio
import os
import tempfile

from . import calls, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from .asynchronous import AsyncClient
    from .trees import Unpacked
    from .values import Entry, Listing


class AsyncFiles:
    """`sandbox.files`. Paths are inside: absolute, or below /workspace."""

    def __init__(self, client: AsyncClient, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id

    async def read(self, path: str) -> bytes:
        """The content of a file."""
        answer = await self._client.ask(calls.read(self._id, path))
        return answer.body

    async def read_text(self, path: str) -> str:
        """The content of a file in UTF-8."""
        return (await self.read(path)).decode()

    async def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Replace a file as one step; missing directories are made."""
        content = data.encode() if isinstance(data, str) else data
        await self._client.ask(calls.write(self._id, path, content, mode))

    async def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or a directory; a full one only with `recursive`."""
        await self._client.drive(calls.remove(self._id, path, recursive=recursive))

    async def list(self, path: str = "/workspace", *, depth: int = 1) -> Listing:
        """What is below a directory."""
        return await self._client.drive(calls.listing(self._id, path, depth))

    async def stat(self, path: str) -> Entry:
        """What is known of a file."""
        return await self._client.drive(calls.entry(self._id, path, make=False))

    async def make(self, path: str) -> Entry:
        """A directory with its parents; it may be there already."""
        return await self._client.drive(calls.entry(self._id, path, make=True))

    # --- with files of this machine. Disks are slow: threads read and write them.

    async def upload(self, local: str | os.PathLike[str], path: str) -> None:
        """A file of this machine, however large; its permissions go along."""
        with await asyncio.to_thread(open, local, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            call = calls.write(self._id, path, b"", mode)
            await self._client.ask(call, _threaded(trees.pieces(file)))

    async def download(self, path: str, local: str | os.PathLike[str]) -> None:
        """A file, however large; what was there is replaced when all of it has come."""
        async with self._client.body(calls.read(self._id, path)) as exchange:
            with trees.Replacement(os.fspath(local)) as file:
                async for piece in exchange:
                    await asyncio.to_thread(file.write, piece)

    async def upload_tree(self, local: str | os.PathLike[str], path: str = "/workspace") -> None:
        """What is in a directory of this machine, into a directory inside."""
        parts = _threaded(trees.pack(os.fspath(local)))
        await self._client.ask(calls.unpack(self._id, path), parts)

    async def download_tree(
        self, path: str = "/workspace", local: str | os.PathLike[str] = "."
    ) -> Unpacked:
        """What is in a directory inside, into one of this machine. Nothing in it is followed."""
        with tempfile.TemporaryFile() as held:
            async with self._client.body(calls.archive(self._id, path)) as exchange:
                async for piece in exchange:
                    await asyncio.to_thread(held.write, piece)
            held.seek(0)
            return await asyncio.to_thread(trees.unpack, held, os.fspath(local))


async def _threaded(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    # StopIteration cannot leave a thread as itself.
    while (piece := await asyncio.to_thread(next, parts, None)) is not None:
        yield piece
