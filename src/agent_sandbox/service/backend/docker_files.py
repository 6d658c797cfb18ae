"""The files of a sandbox in a container.

Reading and archives go through the engine's archive API, which resolves names below the
container's root, never on the host. The engine does it as root, so a link is followed only where it
leads to WORK or HOME: no file of the image that the sandbox's user may not read is given out.
What changes single files is done inside, as that user: the kernel decides.
"""

from __future__ import annotations

import base64
import binascii
import json
import posixpath
import secrets
import stat

from ..problems import Problem
from . import docker_scripts as scripts
from . import docker_tar as tars
from .docker_engine import Refusal, unavailable
from .docker_exec import run
from .docker_requests import UID
from .interface import HOME, WORK, Entry
from .tree_open import check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from .docker_engine import Engine
    from .docker_exec import Result

STAT_FIELD = "x-docker-container-path-stat"
# In Go's os.FileMode.
GO_SYMLINK, GO_DIRECTORY = 1 << 27, 1 << 31
MAX_LINKS = 8
ROOTS = (WORK, HOME)
MISSING = 127


def not_found(path: str) -> Problem:
    """There is nothing of that name."""
    return Problem("NOT_FOUND", f"no such file: {path}", field="path")


def inside(path: str) -> bool:
    """Whether a normalised path is below one of the two places."""
    return any(path == root or path.startswith(f"{root}/") for root in ROOTS)


def checked(path: str) -> str:
    """A path that the service was asked for. `/tmp` is memory here: the engine cannot see it."""
    if not inside(check(path)):
        raise Problem("FORBIDDEN", f"'{path}' is not below '{WORK}' or '{HOME}'", field="path")
    return path


def parse_entry(line: str) -> Entry | None:
    """`MODE SIZE TIME NAME` of `stat`; None: not such a line."""
    mode, _, rest = line.partition(" ")
    size, _, rest = rest.partition(" ")
    when, _, path = rest.partition(" ")
    try:
        number, length, modified = int(mode, 16), int(size), float(int(when))
    except ValueError:
        return None
    if not path.startswith("/"):
        return None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}
    return Entry(
        path=path, kind=kinds.get(stat.S_IFMT(number), "other"), size=length,
        mode=stat.S_IMODE(number), modified=modified,
    )  # fmt: skip


def parse_list(output: str, most: int) -> tuple[list[Entry], bool]:
    """The answer of the script that lists; a name with a newline in it is put together again."""
    entries_text, _, links_text = output.partition("\n\n")
    found: list[Entry] = []
    for line in entries_text.splitlines():
        entry = parse_entry(line)
        if entry is not None:
            found.append(entry)
        elif found:
            found[-1] = found[-1].replace(path=f"{found[-1].path}\n{line}")
    links = links_text.splitlines()
    targets = dict(zip(links[::2], links[1::2], strict=False))
    found = [
        one.replace(target=targets.get(one.path, "")) if one.kind == "symlink" else one
        for one in found
    ]
    found.sort(key=lambda one: one.path)
    return found[:most], len(found) > most


class DockerFiles:
    """See `interface.Files`."""

    def __init__(self, engine: Engine, alive: Callable[[], Awaitable[str]]) -> None:
        self._engine = engine
        # Gives the name of the container, after seeing to it that it runs.
        self._alive = alive

    # --- where a name leads

    async def _real(self, path: str) -> str:
        """A path without links, all of it inside; what is missing at its end stays as it is."""
        path = checked(path)
        container = await self._alive()
        for _ in range(MAX_LINKS):
            follow = await self._first_link(container, path)
            if not follow:
                return path
            if not inside(follow):
                break
            path = follow
        raise Problem("FORBIDDEN", "a link on the way leads out", field="path", rule="files.link")

    async def _first_link(self, container: str, path: str) -> str:
        """The path with its first link replaced by what that leads to; "" if it has none."""
        root = next(r for r in ROOTS if path == r or path.startswith(f"{r}/"))
        parts = path[len(root) + 1 :].split("/") if path != root else []
        for count in range(1, len(parts) + 1):
            here, rest = posixpath.join(root, *parts[:count]), parts[count:]
            found = await self._look(container, here)
            if found is None:
                return ""
            mode, target = found
            if mode & GO_SYMLINK:
                # A link whose target cannot be told is one that leads out.
                end = posixpath.normpath(target) if target.startswith("/") else "/"
                return posixpath.join(end, *rest)
            if rest and not mode & GO_DIRECTORY:
                raise Problem("CONFLICT", f"'{here}' is no directory", field="path")
        return ""

    async def _look(self, container: str, path: str) -> tuple[int, str] | None:
        """What kind of file there is, and where it leads in the end if it is a link.

        Older engines look again after they have resolved the name, and a command that swaps links
        meanwhile can make them look at the host. So no more than this is taken from the answer, and
        none of it is given out.
        """
        try:
            fields = await self._engine.head(f"/containers/{container}/archive", {"path": path})
        except Refusal as error:
            if error.status == 404:
                return None
            raise _problem(error, path) from error
        try:
            about = json.loads(base64.b64decode(fields.get(STAT_FIELD, ""), validate=True))
            return int(about["mode"]), str(about["linkTarget"])
        except (binascii.Error, ValueError, KeyError, TypeError) as error:
            raise unavailable("it does not describe a file") from error

    async def _parent(self, path: str) -> str:
        """A path whose directory is real; the last name is taken as it is."""
        if checked(path) in ROOTS:
            return path
        directory, name = posixpath.split(path)
        return posixpath.join(await self._real(directory), name)

    async def _do(self, text: str, *words: str, data: bytes | None = None) -> Result:
        container = await self._alive()
        try:
            done = await run(self._engine, container, scripts.script(text, *words), data=data)
        except Refusal as error:
            raise Problem("WRONG_STATE", f"the sandbox cannot be asked: {error.message}") from error
        if done.code == MISSING:
            raise Problem(
                "UNSUPPORTED", f"the image lacks a program for this: {done.complaint}",
                hint="images need cat, chmod, find, head, mkdir, mv, readlink, rm, rmdir, stat, wc",
            )  # fmt: skip
        if done.code == 137:
            raise Problem("CONFLICT", "it was killed, with a command or for memory")
        return done

    # --- interface.Files

    async def entry(self, path: str) -> Entry:
        """One entry."""
        asked, path = path, await self._parent(path)
        done = await self._do(scripts.ENTRY, path)
        return _entry(done, path, asked)

    async def read(self, path: str, offset: int = 0) -> tuple[Entry, AsyncIterator[bytes]]:
        """A regular file."""
        asked, path = path, await self._real(path)
        events = self._archive(path)
        member = await anext(events, None)
        if not isinstance(member, tars.Member) or member.kind != tars.FILE:
            await events.aclose()
            raise Problem("CONFLICT", f"'{asked}' is no regular file", field="path")
        entry = Entry(
            path=asked, kind="file", size=member.size, mode=member.mode, modified=member.modified
        )
        return entry, _content(events, member.size, offset)

    async def _archive(self, path: str) -> AsyncGenerator[tars.Member | bytes]:
        """The engine's archive of a path, taken apart."""
        container = await self._alive()
        try:
            pieces = await self._engine.download(f"/containers/{container}/archive", {"path": path})
        except Refusal as error:
            raise _problem(error, path) from error
        reader = tars.Reader()
        try:
            async for piece in pieces:
                for event in reader.feed(piece):
                    yield event
            if not reader.done:
                raise Problem("CONFLICT", "the files changed while they were read")
        except OSError as error:
            raise Problem("CONFLICT", "the files changed while they were read") from error
        finally:
            await pieces.aclose()

    async def write(
        self, path: str, data: AsyncIterator[bytes], *, limit: int, mode: int = 0o644
    ) -> Entry:
        """Replace a file."""
        asked, path = path, await self._parent(path)
        if path in ROOTS:
            raise Problem("CONFLICT", f"'{asked}' is a directory", field="path")
        # In memory: the service may have no directory for temporary files (a read-only container).
        held = bytearray()
        async for piece in data:
            held += piece
            if len(held) > limit:
                raise Problem("TOO_LARGE", f"the file is larger than {limit} bytes")
        directory, name = posixpath.split(path)
        part = f".sandbox-{secrets.token_hex(8)}"
        words = (directory, part, name, f"{mode & 0o777:o}", str(len(held)))
        done = await self._do(scripts.WRITE, *words, data=bytes(held))
        if done.code == 4:
            raise Problem("CONFLICT", f"'{asked}' is a directory", field="path")
        return _entry(done, path, asked)

    async def delete(self, path: str, *, recursive: bool) -> None:
        """Remove an entry."""
        path = await self._parent(path)
        if path in ROOTS:
            raise Problem("FORBIDDEN", f"'{path}' itself cannot be removed", field="path")
        done = await self._do(scripts.DELETE, path, "all" if recursive else "one")
        if done.code == 3:
            raise not_found(path)
        if done.code == 4:
            raise Problem(
                "CONFLICT", f"{path} is not empty", hint="ask for recursive", field="path"
            )
        if done.code:
            raise _complaint(done, path)

    async def make(self, path: str) -> Entry:
        """A directory."""
        asked, path = path, await self._real(path)
        return _entry(await self._do(scripts.MAKE, path), path, asked)

    async def list(self, path: str, *, depth: int, most: int) -> tuple[list[Entry], bool]:
        """What is below."""
        asked, path = path, await self._real(path)
        done = await self._do(scripts.LIST, path, str(int(depth)), str(int(most) + 1))
        if done.code == 3:
            raise not_found(path)
        if done.code:
            raise _complaint(done, path)
        found, more = parse_list(done.output.decode("utf-8", "surrogateescape"), most)
        return [one.replace(path=asked + one.path[len(path) :]) for one in found], more

    async def pack(self, path: str) -> AsyncIterator[bytes]:
        """A tree as a tar."""
        path = await self._real(path)
        events = self._archive(path)
        first = await anext(events, None)
        if not isinstance(first, tars.Member):
            await events.aclose()
            raise not_found(path)
        return _repacked(first, events)

    async def unpack(self, path: str, data: AsyncIterator[bytes], *, limit: int) -> int:
        """A tar below a directory."""
        path = await self._real(path)
        await self.make(path)
        container = await self._alive()
        judge = tars.Judge()
        try:
            await self._engine.upload(
                "PUT", f"/containers/{container}/archive",
                {"path": path, "noOverwriteDirNonDir": "1"},
                _judged(data, judge, limit),
            )  # fmt: skip
        except Refusal as error:
            raise _problem(error, path) from error
        return judge.count


# --- streams


async def _content(
    events: AsyncGenerator[tars.Member | bytes], size: int, offset: int
) -> AsyncIterator[bytes]:
    skip, left = offset, size
    try:
        while left:
            piece = await anext(events)
            if isinstance(piece, tars.Member):
                raise Problem("CONFLICT", "the file changed while it was read")
            left -= len(piece)
            rest = piece[skip:]
            skip = max(0, skip - len(piece))
            if rest:
                yield rest
    finally:
        await events.aclose()


async def _repacked(
    first: tars.Member, events: AsyncGenerator[tars.Member | bytes]
) -> AsyncIterator[bytes]:
    """The engine's archive with names from the tree, and without what is no file or link."""
    single = first.kind != tars.DIRECTORY
    current: tars.Member | None = None
    try:
        if single:
            current = first.replace(name=posixpath.basename(first.name), mode=first.mode & 0o777)
            if current.kind in tars.TYPES:
                yield tars.header(current, UID)
        left = first.size
        async for event in events:
            if isinstance(event, tars.Member):
                current = tars.relative(event)
                left = event.size
                if current is not None:
                    yield tars.header(current, UID)
            elif current is not None:
                left -= len(event)
                yield event if left else event + tars.padding(current.size)
        yield tars.END
    finally:
        await events.aclose()


async def _judged(
    data: AsyncIterator[bytes], judge: tars.Judge, limit: int
) -> AsyncIterator[bytes]:
    """A client's archive, entry by entry judged and written anew."""
    gunzip, reader = tars.Gunzip(), tars.Reader()
    total = left = size = 0
    async for sent in data:
        for piece in gunzip.feed(sent):
            total += len(piece)
            if total > limit:
                raise Problem("TOO_LARGE", f"the archive holds more than {limit} bytes")
            for event in reader.feed(piece):
                if isinstance(event, bytes):
                    left -= len(event)
                    yield event if left else event + tars.padding(size)
                    continue
                left = size = event.size
                for member in judge.admit(event):
                    yield tars.header(member, UID)
    if gunzip.finish():
        raise tars.bad("not a tar")
    reader.finish()
    yield tars.END


# --- refusals


def _entry(done: Result, path: str, asked: str) -> Entry:
    if done.code:
        raise _complaint(done, path)
    text = done.output.decode("utf-8", "surrogateescape")
    # The name is known; a newline in it would end the line.
    line, _, target = text.partition(f" {path}\n")
    entry = parse_entry(f"{line} {path}")
    if entry is None:
        raise unavailable("it does not describe a file")
    return entry.replace(path=asked, target=target if entry.kind == "symlink" else "")


# What programs say, in any image, when the kernel refuses; and what the engine says.
COMPLAINTS = (
    ("No space left", "DISK_FULL"), ("quota exceeded", "DISK_FULL"),
    ("File too large", "DISK_FULL"),
    ("No such file", "NOT_FOUND"), ("Permission denied", "FORBIDDEN"),
    ("Read-only file system", "FORBIDDEN"), ("Not a directory", "CONFLICT"),
    ("Is a directory", "CONFLICT"), ("File exists", "CONFLICT"),
    ("cannot overwrite", "CONFLICT"), ("invalid symlink", "INVALID"), ("name too long", "INVALID"),
)  # fmt: skip


def _known(said: str, path: str) -> Problem | None:
    for text, code in COMPLAINTS:
        if text.lower() in said.lower():
            return Problem(code, f"'{path}': {text.lower()}", field="path")
    return None


def _complaint(done: Result, path: str) -> Problem:
    known = _known(done.complaint, path)
    if known is not None:
        return known
    return Problem(
        "CONFLICT", f"{path}: {done.complaint or f'exit code {done.code}'}", field="path"
    )


def _problem(error: Refusal, path: str) -> Problem:
    if error.status == 404:
        return not_found(path)
    known = _known(error.message, path)
    if known is not None:
        return known
    if error.status in (400, 403, 409):
        return Problem(
            "FORBIDDEN", f"the engine refuses {path}: {error.message[:200]}", field="path"
        )
    return unavailable(error.message)
