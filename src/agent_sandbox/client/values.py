"""What the service answers, as values. Fields that this version does not know are in `raw`."""

from __future__ import annotations

import base64
import binascii
from datetime import datetime

from ..errors import EXIT_CANNOT_BUILD
from ..record import Record
from .errors import BadAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, TypedDict

    # What a sandbox may be given. Sizes are bytes or "512M"; times are seconds.
    class SandboxOptions(TypedDict, total=False):
        """For `create` and `run`."""

        template: str
        backend: str
        image: str
        runtime: str
        env: Mapping[str, str]
        metadata: Mapping[str, str]
        # Seconds until it expires.
        lifetime: float
        memory: int | str
        cpus: float
        pids: int
        disk: int | str
        # "off", "public", a list of hosts that may be reached, or {"mode", "allowOut", "denyOut"}.
        network: str | Sequence[str] | Mapping[str, object]
        # Path inside → content.
        files: Mapping[str, bytes | str]

    class ExecOptions(TypedDict, total=False):
        """For `exec`, `stream` and `run`."""

        cwd: str
        env: Mapping[str, str]
        # All of the input. Without it the command reads the end at once.
        input: bytes | str
        # More input comes later, by `write`.
        keep_input: bool
        # Seconds from its start; then all of it is killed.
        timeout: float
        # A terminal with so many rows and columns.
        tty: tuple[int, int]

    class RunOptions(ExecOptions, SandboxOptions, total=False):
        """For `Client.run`: `env` is the command's."""

        # Run it once more, in a new sandbox, should its machine be lost under it.
        retry: bool

    class AuditFilter(TypedDict, total=False):
        """For `Client.audit`."""

        agent: str
        action: str
        decision: str
        since: str
        until: str
        limit: int


class SandboxInfo(Record):
    """A sandbox, as the service has it."""

    id: str
    state: str
    owner: str = ""
    backend: str = ""
    template: str = ""
    image: str = ""
    digest: str = ""
    created_at: datetime | None = None
    expires_at: datetime | None = None
    last_used_at: datetime | None = None
    metadata: Mapping[str, str] = {}
    # As asked for, and as kept: each bound with what enforces it.
    resources: Mapping[str, Any] = {}
    effective: Mapping[str, Any] = {}
    network: Mapping[str, Any] = {}
    # What keeps what in this very sandbox, by name: {"filesystem": "bwrap"}; "": nothing does.
    guarantees: Mapping[str, Any] = {}
    # Why it has failed, or was lost.
    reason: str = ""
    raw: Mapping[str, Any] = {}


class Result(Record):
    """How a command ended, or how far it is. The names are those of `agent_sandbox.Result`."""

    id: str
    sandbox_id: str = ""
    # "Running", "Exited", "Failed" (it never started) or "Lost" (nobody has seen its end).
    state: str = ""
    # 128 plus the number after a signal; 125 when it never ran or was lost.
    code: int = EXIT_CANNOT_BUILD
    out: bytes = b""
    err: bytes = b""
    signal: str = ""
    timed_out: bool = False
    oom_killed: bool = False
    # The limit that ended it, or "".
    exceeded: str = ""
    # There was more output than is kept.
    truncated: bool = False
    # Seconds.
    duration: float = 0.0
    cpu_time: float = 0.0
    max_rss_kb: int = 0
    started_at: datetime | None = None
    ended_at: datetime | None = None
    error: str = ""
    # 2: it was lost, and run again because `retry` asked for that.
    attempts: int = 1
    raw: Mapping[str, Any] = {}

    @property
    def ok(self) -> bool:
        """Whether it ran and succeeded."""
        return self.state == "Exited" and self.code == 0

    @property
    def lost(self) -> bool:
        """Whether nobody has seen its end; `error` says why. It may have done all, or nothing."""
        return self.state == "Lost"

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("Running", "Pending")

    @property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.out.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.err.decode("utf-8", "replace")


class Event(Record):
    """A piece of a stream: "start", "stdout", "stderr", "retry", "exit" or "error".

    After "retry", output is that of the second start: forget what came before.
    """

    kind: str
    data: bytes = b""
    # Names the event: a stream goes on behind it.
    id: str = ""
    # With "start", "retry" and "exit".
    result: Result | None = None

    @property
    def text(self) -> str:
        """The data as text. A character may be split between two events."""
        return self.data.decode("utf-8", "replace")


class Entry(Record):
    """A file in a sandbox; `kind` is "file", "directory", "symlink" or "other"."""

    path: str
    kind: str
    size: int = 0
    mode: int = 0
    modified_at: datetime | None = None
    target: str = ""


class Listing(Record):
    """The files below a directory; `truncated` when there are more."""

    entries: tuple[Entry, ...]
    truncated: bool = False


class Page(Record):
    """A part of a list, and the cursor of the next part."""

    items: tuple[Any, ...]
    next: str = ""


# --- from JSON


def members(value: object, what: str) -> dict[str, Any]:
    """An object; anything else is not our service."""
    if not isinstance(value, dict):
        raise BadAnswer(f"the answer has no {what}", hint="is SANDBOX_API another service?")
    return value


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    return value if isinstance(value, str) else ""


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


def _map(found: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def _time(found: Mapping[str, Any], name: str) -> datetime | None:
    text = _text(found, name)
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def sandbox(value: object) -> SandboxInfo:
    """A sandbox from its JSON."""
    found = members(value, "sandbox")
    if not _text(found, "id"):
        raise BadAnswer("the answer is not a sandbox", hint="is SANDBOX_API another service?")
    return SandboxInfo(
        id=_text(found, "id"), state=_text(found, "state"), owner=_text(found, "owner"),
        backend=_text(found, "backend"), template=_text(found, "template"),
        image=_text(found, "image"), digest=_text(found, "digest"), reason=_text(found, "reason"),
        metadata=_map(found, "metadata"), resources=_map(found, "resources"),
        effective=_map(found, "effective"), network=_map(found, "network"),
        guarantees=_map(found, "guarantees"),
        created_at=_time(found, "createdAt"), expires_at=_time(found, "expiresAt"),
        last_used_at=_time(found, "lastUsedAt"), raw=found,
    )  # fmt: skip


def output(found: Mapping[str, Any], name: str) -> bytes:
    """Bytes that came as text, or in base64 where they are no text."""
    encoded = found.get(f"{name}Base64")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error:
            raise BadAnswer(f"the answer's {name} is not base64") from None
    return _text(found, name).encode("utf-8", "surrogatepass")


def result(value: object) -> Result:
    """An execution from its JSON."""
    found = members(value, "execution")
    code = found.get("exitCode")
    return Result(
        id=_text(found, "execId") or _text(found, "id"),
        sandbox_id=_text(found, "sandboxId"),
        state=_text(found, "state"),
        code=code if isinstance(code, int) else EXIT_CANNOT_BUILD,
        out=output(found, "stdout"), err=output(found, "stderr"),
        signal=_text(found, "signal"), timed_out=found.get("timedOut") is True,
        oom_killed=found.get("oomKilled") is True, exceeded=_text(found, "exceeded"),
        truncated=found.get("truncated") is True,
        duration=_number(found, "durationMs") / 1000, cpu_time=_number(found, "cpuMs") / 1000,
        max_rss_kb=int(_number(found, "maxRssKb")),
        started_at=_time(found, "startedAt"), ended_at=_time(found, "endedAt"),
        error=_text(found, "error"), attempts=int(_number(found, "attempts")) or 1, raw=found,
    )  # fmt: skip


def entry(value: object) -> Entry:
    """A file from its JSON."""
    found = members(value, "file")
    return Entry(
        path=_text(found, "path"),
        kind=_text(found, "kind") or _text(found, "type"),
        size=int(_number(found, "size")),
        # Written in octal.
        mode=int("0" + "".join(c for c in _text(found, "mode") if c in "01234567"), 8),
        modified_at=_time(found, "modifiedAt"), target=_text(found, "target"),
    )  # fmt: skip
