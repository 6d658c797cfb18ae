"""Handlers: files of a sandbox, one by one or as a tree."""

from __future__ import annotations

import re

from ..http.messages import Response, empty
from ..problems import Problem
from . import reading, views
from .call import BYTES, TAR, Call, reply
from .views import clean

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ..core.files import AuditedFiles

MOST_LISTED = 10_000
# What a client sees of a type is always "bytes": a page of HTML from a sandbox must not become
# a page of ours.
DOWNLOAD = (("content-type", BYTES), ("content-disposition", "attachment"))
FROM = re.compile(r"bytes=([0-9]{1,15})-")


def _files(call: Call) -> AuditedFiles:
    return call.service.files(call.agent, call.ids["sandboxId"], request_id=call.request.id)


def _body(call: Call) -> AsyncIterator[bytes]:
    from .. import limits

    own = limits.for_agent(call.parts.limits, call.agent)
    return call.request.stream(own.max_upload_bytes)


async def get(call: Call) -> Response:
    """GET …/files: the bytes of a file, from `Range: bytes=N-` on."""
    offset = _offset(call.request.headers.get("range"))
    entry, data = await _files(call).read(call.query["path"], offset or 0)
    size = entry.size
    headers = (
        *DOWNLOAD, ("accept-ranges", "bytes"), ("x-file-size", str(size)),
        ("x-file-mode", f"{entry.mode & 0o7777:04o}"),
    )  # fmt: skip
    if offset is None:
        return Response(status=200, headers=headers, body=data)
    # The end is not promised: the file may grow or shrink while it is sent.
    return Response(
        status=206, body=data,
        headers=(*headers, ("content-range", f"bytes {offset}-{max(size - 1, offset)}/{size}")),
    )  # fmt: skip


def _offset(header: str | None) -> int | None:
    if header is None:
        return None
    found = FROM.fullmatch(header.replace(" ", ""))
    if found is None:
        # RFC 9110: a server may take a Range that it does not do for none.
        return None
    return int(found[1])


async def put(call: Call) -> Response:
    """PUT …/files: the body becomes the file, as one step."""
    mode = reading.mode_of(call.query.get("mode", "644"))
    entry = await _files(call).write(call.query["path"], _body(call), mode=mode)
    return reply(200, views.entry(entry))


async def delete(call: Call) -> Response:
    """DELETE …/files."""
    await _files(call).delete(call.query["path"], recursive=call.query.get("recursive", False))
    return empty(204)


async def make(call: Call) -> Response:
    """POST …/files/directory."""
    return reply(200, views.entry(await _files(call).make(call.query["path"])))


async def listed(call: Call) -> Response:
    """GET …/files/list."""
    most = call.query.get("limit", 1000)
    found, more = await _files(call).list(
        call.query.get("path", "/workspace"), depth=call.query.get("depth", 1), most=most
    )
    shown = [views.entry(entry) for entry in found]
    return reply(200, {"items": shown, "truncated": more})


async def stat(call: Call) -> Response:
    """GET …/files/stat."""
    return reply(200, views.entry(await _files(call).entry(call.query["path"])))


async def pack(call: Call) -> Response:
    """GET …/archive: a tree as tar."""
    path = call.query.get("path", "/workspace")
    data = await _files(call).pack(path)
    name = clean(path).rstrip("/").rpartition("/")[2]
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)
    disposition = f'attachment; filename="{plain[:100] or "files"}.tar"'
    return Response(
        status=200, body=data,
        headers=(("content-type", TAR), ("content-disposition", disposition)),
    )  # fmt: skip


async def unpack(call: Call) -> Response:
    """PUT …/archive: a tar, maybe gzip, below a directory."""
    if call.request.headers.get("content-encoding", "identity") not in ("identity", "gzip"):
        raise Problem("UNSUPPORTED_MEDIA_TYPE", "only gzip is known as an encoding of a tar")
    entries = await _files(call).unpack(call.query.get("path", "/workspace"), _body(call))
    return reply(200, {"entries": entries})
