"""For the schemathesis command: what it cannot know by itself."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import schemathesis


@schemathesis.serializer("application/x-tar")
def tar(ctx: Any, value: Any) -> bytes:
    """Bytes as they are; anything else as the content of a file in a tar."""
    if isinstance(value, bytes):
        return value
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        data = repr(value).encode("utf-8", "replace")
        info = tarfile.TarInfo("file")
        info.size = len(data)
        archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
