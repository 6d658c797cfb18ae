"""The log of the service: lines that a reader can trust, and that nobody has to wait for."""

from __future__ import annotations

import fcntl
import json
import os

from agent_sandbox.service.logs import Log


def test_cannot_hold_up_the_service_by_not_reading_its_log() -> None:
    """A pipe that is full takes no line; what was dropped is counted when there is room again."""
    reader, writer = os.pipe()
    # The control: one more byte would block, and here be an error.
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writer, "w") as stream, os.fdopen(reader, "rb") as lines:
        log = Log("json", stream)
        for number in range(1000):
            log.write("info", "something", number=number, more="x" * 100)
        os.set_blocking(writer, False)
        try:
            assert os.write(writer, b"x" * 4096) < 4096
        except BlockingIOError:
            pass
        os.set_blocking(writer, True)
        os.set_blocking(reader, False)
        first = lines.read()
        log.write("info", "again")
        last = json.loads(lines.read())
    written = first.count(b"something")
    assert 0 < written < 1000
    assert last["event"] == "again"
    assert last["dropped"] == 1000 - written
