"""The files of a sandbox of the service."""

from __future__ import annotations

import os

from . import calls, trees

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .sync import Client
    from .trees import Unpacked
    from .values import Entry, Listing


class Files:
    """`sandbox.files`. Paths are inside: absolute, or below /workspace."""

    def __init__(self, client: Client, sandbox_id: str) -> None:
        self._client = client
        self._id = sandbox_id

    def read(self, path: str) -> bytes:
        """The content of a file."""
        return self._client.ask(calls.read(self._id, path)).body

    def read_text(self, path: str) -> str:
        """The content of a file in UTF-8."""
        return self.read(path).decode()

    def write(self, path: str, data: bytes | str, *, mode: int | None = None) -> None:
        """Replace a file as one step; missing directories are made."""
        content = data.encode() if isinstance(data, str) else data
        self._client.ask(calls.write(self._id, path, content, mode))

    def delete(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link or a directory; a full one only with `recursive`."""
        self._client.drive(calls.remove(self._id, path, recursive=recursive))

    def list(self, path: str = "/workspace", *, depth: int = 1) -> Listing:
        """What is below a directory."""
        return self._client.drive(calls.listing(self._id, path, depth))

    def stat(self, path: str) -> Entry:
        """What is known of a file."""
        return self._client.drive(calls.entry(self._id, path, make=False))

    def make(self, path: str) -> Entry:
        """A directory with its parents; it may be there already."""
        return self._client.drive(calls.entry(self._id, path, make=True))

    # --- with files of this machine

    def upload(self, local: str | os.PathLike[str], path: str) -> None:
        """A file of this machine, however large; its permissions go along."""
        with open(local, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            call = calls.write(self._id, path, b"", mode)
            self._client.ask(call, trees.pieces(file))

    def download(self, path: str, local: str | os.PathLike[str]) -> None:
        """A file, however large; what was there is replaced when all of it has come."""
        with (
            self._client.body(calls.read(self._id, path)) as exchange,
            trees.Replacement(os.fspath(local)) as file,
        ):
            for piece in exchange:
                file.write(piece)

    def upload_tree(self, local: str | os.PathLike[str], path: str = "/workspace") -> None:
        """What is in a directory of this machine, into a directory inside."""
        self._client.ask(calls.unpack(self._id, path), trees.pack(os.fspath(local)))

    def download_tree(
        self, path: str = "/workspace", local: str | os.PathLike[str] = "."
    ) -> Unpacked:
        """What is in a directory inside, into one of this machine. Nothing in it is followed."""
        with self._client.body(calls.archive(self._id, path)) as exchange:
            return trees.unpack(trees.Pieces(exchange.read), os.fspath(local))
