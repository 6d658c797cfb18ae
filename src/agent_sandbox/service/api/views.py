"""Values of the service as the JSON of answers. `answers` has the shapes."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime

from ..values import LOST, RUNNING

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..backend.interface import Entry, Support
    from ..core.about import Check, Identity
    from ..core.policy import Decision
    from ..values import Execution, Network, Resources, Sandbox

    JSON = dict[str, object]


def when(seconds: float) -> str | None:
    """A time as RFC 3339 in UTC; None for never."""
    if not seconds:
        return None
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def clean(text: str) -> str:
    """Text that can be sent: bytes of a name that are no UTF-8 are shown as replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return text


def sandbox(found: Sandbox) -> JSON:
    """A sandbox. Values of variables may be secrets: only their names are told."""
    return {
        "id": found.id, "state": found.state, "owner": found.owner, "backend": found.backend,
        "template": found.template, "image": found.image, "digest": found.digest,
        "runtime": found.runtime, "createdAt": when(found.created),
        "expiresAt": when(found.expires), "lastUsedAt": when(found.last_used or found.created),
        "metadata": dict(found.metadata), "envNames": sorted(found.env),
        "resources": resources(found.resources),
        "effective": effective(found.resources, found.enforced),
        "network": network(found.network), "guarantees": dict(found.enforced),
        "inner": found.inner, "reason": clean(found.reason),
    }  # fmt: skip


def resources(found: Resources) -> JSON:
    """Bounds, or what is used of them."""
    return {"cpu": found.cpus, "memory": found.memory, "pids": found.pids, "disk": found.disk}


def effective(found: Resources, enforced: Mapping[str, str]) -> JSON:
    """Each bound with what keeps it: a limit that nothing keeps must not look like one."""
    shown = {}
    for name, value in resources(found).items():
        by = enforced.get("cpus" if name == "cpu" else name, "")
        shown[name] = {"limit": value, "enforced": bool(by), "enforcedBy": by}
    return dict(shown)


def network(found: Network) -> JSON:
    """The rules of its network."""
    return {"mode": found.mode, "allowOut": list(found.allow), "denyOut": list(found.deny)}


def execution(found: Execution) -> JSON:
    """An execution without its output."""
    running = found.state == RUNNING
    known = found.started and found.ended and found.state != LOST
    return {
        "execId": found.id, "id": found.id, "sandboxId": found.sandbox, "owner": found.owner,
        "state": found.state,
        "command": [clean(word) for word in found.command], "cwd": found.cwd, "tty": found.tty,
        "background": found.background, "timeout": found.timeout,
        "exitCode": None if running else found.exit_code, "signal": found.signal or None,
        "timedOut": found.timed_out, "oomKilled": found.oom_killed,
        "exceeded": found.exceeded or None, "truncated": found.truncated,
        "stdoutBytes": found.stdout_bytes, "stderrBytes": found.stderr_bytes,
        "durationMs": max(0, round((found.ended - found.started) * 1000)) if known else None,
        "cpuMs": found.cpu_ms, "maxRssKb": found.max_rss_kb, "startedAt": when(found.started),
        "endedAt": when(found.ended), "error": clean(found.error),
        "attempts": found.attempts,
    }  # fmt: skip


def result(found: Execution, stdout: bytes, stderr: bytes, *, cut: bool) -> JSON:
    """An execution with its output; exact bytes beside the text where it is no UTF-8."""
    shown = execution(found)
    shown["encoding"] = "utf-8"
    for name, data in (("stdout", stdout), ("stderr", stderr)):
        try:
            shown[name] = data.decode()
        except UnicodeDecodeError:
            shown[name] = data.decode("utf-8", "replace")
            shown[f"{name}Base64"] = b64encode(data).decode("ascii")
            shown["encoding"] = "base64"
    shown["truncated"] = found.truncated or cut
    return shown


def piece(data: bytes) -> JSON:
    """A part of a stream: text, or base64 where a character was cut or it is none."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"dataBase64": b64encode(data).decode("ascii")}


def entry(found: Entry) -> JSON:
    """A file."""
    path = clean(found.path)
    shown: JSON = {
        "path": path, "name": path.rpartition("/")[2], "type": found.kind, "size": found.size,
        "mode": f"{found.mode & 0o7777:04o}",
        # Inside, a file may have any time; outside the calendar it is no time.
        "modifiedAt": when(min(max(found.modified, 1e-3), 253402300799)),
    }  # fmt: skip
    return {**shown, "target": clean(found.target)} if found.kind == "symlink" else shown


def backend(name: str, found: Support, *, default: bool) -> JSON:
    """What a backend can do here."""
    return {
        "name": name, "default": default, "ok": found.ok, "reason": found.reason,
        "images": found.images, "pause": found.pause, "networks": list(found.networks),
        "runtimes": list(found.runtimes), "enforced": dict(found.enforced),
        "inner": found.inner,
    }  # fmt: skip


def identity(found: Identity, limits: JSON) -> JSON:
    """Who asks."""
    agent = found.agent
    return {
        "agent": agent.name, "key": agent.key, "scopes": sorted(agent.scopes),
        "admin": agent.is_admin, "images": None if agent.images is None else list(agent.images),
        "templates": None if agent.templates is None else list(agent.templates),
        "limits": limits,
        "usage": {"sandboxes": found.sandboxes, "runningExecs": found.running,
                  "queuedExecs": found.queued},
    }  # fmt: skip


def outcome(found: Check) -> JSON:
    """The answer of a dry run."""
    return {
        "allowed": found.allowed,
        "refusals": [
            {"code": r.code, "rule": r.rule, "reason": r.reason, "hint": r.hint, "field": r.field}
            for r in found.refusals
        ],
        "effective": _made(found.effective, found.digest) if found.effective else None,
    }


def _made(found: Decision, digest: str) -> JSON:
    return {
        "template": found.template, "backend": found.backend, "image": found.image,
        "digest": digest, "runtime": found.runtime, "timeout": found.timeout,
        "resources": resources(found.resources),
        "effective": effective(found.resources, found.enforced),
        "network": network(found.network), "inner": found.inner,
    }  # fmt: skip
