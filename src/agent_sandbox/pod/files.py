"""Files of the sandbox for the service: the same steps as on a machine of its own.

Each operation is a process of its own, so it may wait and take its time. It works as the sandbox's
user on the sandbox's files: what the kernel refuses the command, it refuses here, and a link leads
out of nothing (`tree_open`).
"""

from __future__ import annotations

import os
from functools import partial

from ..service.backend import tree_steps as steps
from ..service.backend import tree_tar
from ..service.backend.tree_open import Root, check, problem
from ..service.problems import Problem
from . import frames, held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import TypeVar

    from ..service.backend.interface import Entry
    from .frames import Fields
    from .line import Line

    T = TypeVar("T")

# How long the service may take for a piece, in seconds.
SECONDS = 120.0
DEEPEST = 1000
# A file of the node that everybody in the pod can write, and that no volume's bound counts.
LAST_WORDS, BLOCK = "/dev/termination-log", 512


def serve(operation: str, fields: Fields, line: Line, place: str) -> None:
    """One operation, to its answer."""
    act = OPERATIONS[operation]
    try:
        answer = act(fields, line, place)
        line.send(frames.text(frames.ANSWER, answer), SECONDS)
    except Problem as refusal:
        document = {
            "code": refusal.code, "message": refusal.message, "hint": refusal.hint,
            "field": refusal.field,
        }  # fmt: skip
        line.send(frames.text(frames.REFUSAL, document), SECONDS)
    line.finish(SECONDS)


def _do(place: str, path: str, job: Callable[[Root, str], T]) -> T:
    with Root(place) as root:
        try:
            return job(root, check(path))
        except OSError as error:
            raise problem(error, path) from error


def _described(entry: Entry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in entry.__fields__}


def _pieces(line: Line) -> Iterator[bytes]:
    """What the service sends, to the end."""
    while True:
        kind, data = line.next(SECONDS)
        if kind == frames.DONE:
            return
        if kind != frames.DATA:
            raise Problem("BAD_REQUEST", "not a piece of a file")
        yield data


def _look(fields: Fields, _: Line, place: str) -> dict[str, object]:
    path = fields.word("path")
    fields.end()
    return _described(_do(place, path, steps.look))


def _read(fields: Fields, line: Line, place: str) -> dict[str, object]:
    path, offset = fields.word("path"), fields.whole("offset")
    fields.end()
    entry, fd = _do(place, path, partial(steps.open_at, offset=offset))
    try:
        line.send(frames.text(frames.ANSWER, _described(entry)), SECONDS)
        while data := os.read(fd, frames.CHUNK):
            line.send(frames.frame(frames.DATA, data), SECONDS)
        line.send(frames.frame(frames.DONE), SECONDS)
    except OSError as error:
        raise problem(error, path) from error
    finally:
        os.close(fd)
    return {}


def _write(fields: Fields, line: Line, place: str) -> dict[str, object]:
    path, mode = fields.word("path"), fields.whole("mode", most=0o777)
    limit = fields.whole("limit")
    fields.end()
    check(path)
    fresh = f"{place}/.new-{os.urandom(8).hex()}"
    try:
        fd = steps.create(fresh)
    except OSError as error:
        raise problem(error, path) from error
    try:
        _fill(fd, _pieces(line), limit, path)
        os.fchmod(fd, mode)
        return _described(_do(place, path, partial(steps.put, fresh)))
    except BaseException:
        steps.unlink(fresh)
        raise
    finally:
        os.close(fd)


def _fill(fd: int, pieces: Iterator[bytes], limit: int, path: str) -> None:
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > limit:
            raise Problem("TOO_LARGE", f"'{path}' would have more than {limit} bytes")
        try:
            steps.write_all(fd, piece)
        except OSError as error:
            raise problem(error, path) from error


def _delete(fields: Fields, _: Line, place: str) -> dict[str, object]:
    path, recursive = fields.word("path"), fields.switch("recursive")
    fields.end()
    _do(place, path, partial(steps.delete, recursive=recursive))
    return {}


def _make(fields: Fields, _: Line, place: str) -> dict[str, object]:
    path = fields.word("path")
    fields.end()
    return _described(_do(place, path, steps.make))


def _list(fields: Fields, line: Line, place: str) -> dict[str, object]:
    path, depth = fields.word("path"), fields.whole("depth", most=DEEPEST)
    most = fields.whole("most")
    fields.end()
    found, more = _do(place, path, partial(steps.list_below, depth=depth, most=most))
    for at in range(0, len(found), frames.PER_LIST):
        some = [_described(entry) for entry in found[at : at + frames.PER_LIST]]
        line.send(frames.text(frames.LISTED, {"entries": some}), SECONDS)
    return {"more": more}


def _pack(fields: Fields, line: Line, place: str) -> dict[str, object]:
    path = fields.word("path")
    fields.end()
    top = _do(place, path, Root.directory)
    line.send(frames.text(frames.ANSWER, {}), SECONDS)
    for piece in tree_tar.pack(top):
        for at in range(0, len(piece), frames.CHUNK):
            line.send(frames.frame(frames.DATA, piece[at : at + frames.CHUNK]), SECONDS)
    line.send(frames.frame(frames.DONE), SECONDS)
    return {}


def _unpack(fields: Fields, line: Line, place: str) -> dict[str, object]:
    path, limit = fields.word("path"), fields.whole("limit")
    fields.end()
    top = _do(place, path, steps.make_open)
    archive = tree_tar.Unpacking(top, place, limit)
    try:
        for piece in _pieces(line):
            archive.feed(piece)
        archive.finish()
    except OSError as error:
        raise problem(error, path) from error
    finally:
        archive.close()
    return {"count": archive.count}


def usage(place: str, most: int, commands: Iterable[int] = ()) -> int:
    """Bytes on the disk, with what the processes below `commands` hold there without a name.

    Without an inner layer a command can also fill what is the kubelet's.
    """
    total = steps.disk_usage(place, most) + _last_words()
    try:
        return total + held.weight(commands, os.stat(place).st_dev)
    except held.Closed:
        # Where nobody counts there is no limit: it is taken for full.
        return steps.TOO_DEEP


def _last_words() -> int:
    try:
        return os.stat(LAST_WORDS, follow_symlinks=False).st_blocks * BLOCK
    except OSError:
        return 0


OPERATIONS: dict[str, Callable[[Fields, Line, str], dict[str, object]]] = {
    "files.entry": _look, "files.read": _read, "files.write": _write, "files.delete": _delete,
    "files.make": _make, "files.list": _list, "files.pack": _pack, "files.unpack": _unpack,
}  # fmt: skip
