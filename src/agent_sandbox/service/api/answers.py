"""What answers say: the tables of their fields, for the OpenAPI document and the tests."""

from __future__ import annotations

from ..values import INNER
from .inputs import SIGNALS
from .schema import Anything, Flag, Items, Kind, Map, Number, Shape, Text, whole

ID = Text(pattern="sbx-[a-z2-7]{26}", most=30)
EXEC_ID = Text(pattern="exc-[a-z2-7]{26}", most=30)
TIME = Text(format="date-time", most=40)
TIME_OR_NULL = Text(format="date-time", most=40, null=True)
PLAIN = Text(most=1 << 21)
ANY_TEXT = Text(most=1 << 30, nul=True)
NAMES = Map(PLAIN, keys="[^\\x00]*", longest=1024, most=1024)


def full(
    fields: dict[str, Kind], name: str, *, maybe: tuple[str, ...] = (), help: str = ""
) -> Shape:
    """An answer in which everything is always there, but for `maybe`."""
    needed = [field for field in fields if field not in maybe]
    return Shape(fields, needed=needed, name=name, help=help)


PROBLEM = full(
    {
        "code": Text(most=64, help="Stable; see the reference."),
        "message": PLAIN, "hint": PLAIN, "rule": PLAIN, "field": PLAIN,
        "requestId": Text(most=64, help="Missing where the bytes were no request."),
    },
    "Problem", maybe=("hint", "rule", "field", "requestId"),
)  # fmt: skip

BYTES = whole(0, null=True)
RESOURCES = full(
    {"cpu": Number(least=0, null=True), "memory": BYTES, "pids": BYTES, "disk": BYTES},
    "Resources", help="null: not bounded, or not known.",
)  # fmt: skip
BOUND = full(
    {
        "limit": Number(least=0, null=True), "enforced": Flag(),
        "enforcedBy": Text(most=64, help="cgroup, rlimit, server, engine; empty: by nothing."),
    },
    "Bound",
)  # fmt: skip
EFFECTIVE = full(
    {"cpu": BOUND, "memory": BOUND, "pids": BOUND, "disk": BOUND}, "Effective",
    help="Each bound as it holds, and what keeps it.",
)  # fmt: skip
NETWORK = full(
    {"mode": Text(most=32), "allowOut": Items(PLAIN), "denyOut": Items(PLAIN)}, "Network"
)
SANDBOX = full(
    {
        "id": ID, "state": Text(choices=("Pending", "Running", "Paused", "Stopping", "Terminated",
                                         "Failed")),
        "owner": PLAIN, "backend": PLAIN, "template": PLAIN, "image": PLAIN, "digest": PLAIN,
        "runtime": PLAIN, "createdAt": TIME, "expiresAt": TIME, "lastUsedAt": TIME,
        "metadata": NAMES, "envNames": Items(PLAIN), "resources": RESOURCES,
        "effective": EFFECTIVE, "network": NETWORK,
        "guarantees": Map(PLAIN, keys="[^\\x00]*", longest=64, most=64,
                          help="What keeps what in this very sandbox; empty text: nothing does."),
        "inner": Text(choices=INNER, help="Whether commands are to be behind bwrap in there."),
        "reason": Text(most=1 << 21, help="Why it has failed, or was lost."),
    },
    "Sandbox",
)  # fmt: skip
EXECUTION_FIELDS: dict[str, Kind] = {
    "execId": EXEC_ID,
    "id": EXEC_ID,
    "sandboxId": ID,
    "owner": PLAIN,
    "state": Text(choices=("Pending", "Running", "Exited", "Failed", "Lost"),
                  help="Lost: nobody has seen its end; `error` says why."),
    "command": Items(ANY_TEXT, most=8192),
    "cwd": PLAIN,
    "tty": Flag(),
    "background": Flag(),
    "timeout": Number(least=0, help="Seconds, as it holds."),
    "exitCode": whole(0, 255, null=True,
                      help="128 plus the number after a signal; null: it runs, or is lost."),
    "signal": Text(most=32, null=True),
    "timedOut": Flag(),
    "oomKilled": Flag(),
    "exceeded": Text(most=64, null=True, help="The limit that ended it."),
    "truncated": Flag(help="Output is missing, here or altogether: compare the bytes."),
    "stdoutBytes": whole(),
    "stderrBytes": whole(),
    "durationMs": whole(0, null=True),
    "cpuMs": whole(),
    "maxRssKb": whole(),
    "startedAt": TIME_OR_NULL,
    "endedAt": TIME_OR_NULL,
    "error": PLAIN,
    "attempts": whole(1, 2, help="2: it was lost, and run again as the request asked (`retry`)."),
}  # fmt: skip
EXECUTION = full(EXECUTION_FIELDS, "Execution")
RESULT = full(
    {
        **EXECUTION_FIELDS,
        "stdout": Text(most=1 << 30, nul=True, help="Text; bytes that are none are replaced."),
        "stderr": ANY_TEXT,
        "stdoutBase64": Text(most=1 << 31, help="The exact bytes, only where stdout is no UTF-8."),
        "stderrBase64": Text(most=1 << 31),
        "encoding": Text(choices=("utf-8", "base64"), help="base64: see …Base64 for exact bytes."),
    },
    "Result", maybe=("stdoutBase64", "stderrBase64"),
)  # fmt: skip
ENTRY = full(
    {
        "path": PLAIN, "name": PLAIN,
        "type": Text(choices=("file", "directory", "symlink", "other")),
        "size": whole(), "mode": Text(most=8), "modifiedAt": TIME, "target": PLAIN,
    },
    "Entry", maybe=("target",),
)  # fmt: skip
LISTING = full({"items": Items(ENTRY, most=100_000), "truncated": Flag()}, "Listing")
LOGS = full(
    {
        "stdout": ANY_TEXT, "stderr": ANY_TEXT, "stdoutBase64": Text(most=1 << 31),
        "stderrBase64": Text(most=1 << 31), "encoding": Text(choices=("utf-8", "base64")),
        "truncated": Flag(), "state": PLAIN, "attempts": EXECUTION_FIELDS["attempts"],
        "next": whole(help="For ?since=."), "more": Flag(help="There is more at once."),
    },
    "Logs", maybe=("stdoutBase64", "stderrBase64"),
)  # fmt: skip
UNPACKED = full({"entries": whole()}, "Unpacked")


def page(of: Kind, name: str) -> Shape:
    """A part of a list, and where it goes on."""
    return full(
        {"items": Items(of, most=1000),
         "next": Text(most=512, null=True, help="For ?after=; null: this was the last part.")},
        name,
    )  # fmt: skip


SANDBOXES = page(SANDBOX, "SandboxPage")
EXECUTIONS = page(EXECUTION, "ExecutionPage")
AUDIT = full({"items": Items(Anything(), most=1000), "next": Text(most=64, null=True)}, "AuditPage")
USAGE = full(
    {"sandboxes": whole(), "runningExecs": whole(), "queuedExecs": whole()}, "Usage"
)  # fmt: skip
LIMITS = Map(
    Anything(), keys="[A-Za-z]+", longest=64, most=256, name="Limits",
    help="By the names of the environment variables, in camelCase; seconds and bytes.",
)  # fmt: skip
WHOAMI = full(
    {
        "agent": PLAIN, "key": PLAIN, "scopes": Items(PLAIN), "admin": Flag(),
        "images": Items(PLAIN, null=True), "templates": Items(PLAIN, null=True),
        "limits": LIMITS, "usage": USAGE,
    },
    "Identity",
)  # fmt: skip
BACKEND = full(
    {
        "name": PLAIN, "default": Flag(), "ok": Flag(), "reason": PLAIN, "images": Flag(),
        "pause": Flag(), "networks": Items(PLAIN), "runtimes": Items(PLAIN), "enforced": NAMES,
        "inner": Flag(help="Commands can be had behind bwrap there."),
    },
    "Backend",
)  # fmt: skip
POLICY = full(
    {
        "limits": LIMITS, "backends": Items(BACKEND), "templates": Items(PLAIN),
        "scopes": Items(PLAIN), "signals": Items(Text(choices=SIGNALS)),
    },
    "Policy",
)  # fmt: skip
REFUSAL = full(
    {"code": PLAIN, "rule": PLAIN, "reason": PLAIN, "hint": PLAIN, "field": PLAIN}, "Refusal"
)
OUTCOME = full(
    {
        "allowed": Flag(), "refusals": Items(REFUSAL),
        "effective": Anything(help="What would be made: as in Sandbox; null when refused."),
    },
    "PolicyAnswer",
)  # fmt: skip
TOKEN_FIELDS: dict[str, Kind] = {
    "id": PLAIN, "name": PLAIN, "scopes": Items(PLAIN), "images": Items(PLAIN, null=True),
    "templates": Items(PLAIN, null=True), "quotas": Map(Anything(), keys="[A-Za-z_]+"),
    "createdAt": TIME_OR_NULL, "expiresAt": TIME_OR_NULL, "revokedAt": TIME_OR_NULL,
    "uid": whole(0, null=True), "source": Text(choices=("cli", "file")),
    "state": Text(choices=("live", "expired", "revoked")),
}  # fmt: skip
TOKEN = full(TOKEN_FIELDS, "Token")
NEW_TOKEN = full(
    {**TOKEN_FIELDS, "token": Text(most=512, help="Shown this once.")}, "NewToken"
)  # fmt: skip
TOKENS = full({"items": Items(TOKEN, most=100_000)}, "Tokens")
SESSION = full(
    {"agent": PLAIN, "scopes": Items(PLAIN), "admin": Flag(),
     "csrfToken": Text(most=128, null=True, help="For X-CSRF-Token; null without a cookie."),
     "expiresAt": TIME_OR_NULL},
    "Session",
)  # fmt: skip
HEALTH = full({"status": Text(choices=("ok",))}, "Health")
READY = full(
    {"status": Text(choices=("ok", "unready")), "reason": PLAIN}, "Ready", maybe=("reason",)
)
