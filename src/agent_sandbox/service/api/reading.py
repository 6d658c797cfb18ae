"""Bodies that fit their tables, as wishes of the core. Pure."""

from __future__ import annotations

import signal
from datetime import datetime

from ..backend.interface import WORK, Terminal
from ..core.wishes import ExecWish, FilePut, RunWish, Wish, shell
from ..values import Network, Resources
from .inputs import EXEC_FIELDS, LANGUAGES, SANDBOX_FIELDS
from .schema import invalid

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..problems import Problem

    Body = Mapping[str, Any]


def wish(body: Body) -> Wish:
    """A sandbox."""
    return Wish(
        template=body.get("template", ""), backend=body.get("backend", ""),
        image=body.get("image", ""), runtime=body.get("runtime", ""), env=body.get("env", {}),
        metadata=body.get("metadata", {}), timeout=body.get("timeout"),
        resources=_resources(body.get("resources", {})), network=_network(body.get("network")),
        files=tuple(_file(file) for file in body.get("files", ())),
    )  # fmt: skip


def _resources(given: Body) -> Resources:
    return Resources(
        memory=given.get("memory"), cpus=given.get("cpu"), pids=given.get("pids"),
        disk=given.get("disk"),
    )  # fmt: skip


def _network(given: str | Body | None) -> Network | None:
    if given is None or isinstance(given, str):
        return None if given is None else Network(mode=given)
    allow, deny = tuple(given.get("allowOut", ())), tuple(given.get("denyOut", ()))
    mode = given.get("mode") or ("allow" if allow else "off")
    if allow and mode != "allow":
        raise invalid("network.allowOut", f"means nothing with the mode {mode}")
    if deny and mode == "off":
        raise invalid("network.denyOut", "means nothing with the mode off")
    return Network(mode=mode, allow=allow, deny=deny)


def _file(given: Body) -> FilePut:
    data = given["content"].encode() if "content" in given else given["contentBase64"]
    return FilePut(path=given["path"], data=data, mode=mode_of(given.get("mode", "644")))


def mode_of(text: str) -> int:
    """Octal digits. Setuid and its like have no place in a sandbox."""
    return int(text, 8) & 0o777


def execution(body: Body) -> ExecWish:
    """A command."""
    # The tables say that exactly one of them is there.
    command = body["cmd"] if "cmd" in body else body["command"]
    argv = shell(command) if isinstance(command, str) else tuple(command)
    if not argv[0]:
        raise invalid("cmd[0]" if "cmd" in body else "command[0]", "must name a program")
    tty = bool(body.get("tty"))
    for name in ("rows", "cols"):
        if name in body and not tty:
            raise invalid(name, "means nothing without tty")
    stdin = body["stdin"].encode() if "stdin" in body else body.get("stdinBase64")
    return ExecWish(
        argv=argv, cwd=body.get("cwd", ""), env=body.get("env", {}), stdin=stdin,
        keep_input=bool(body.get("keepStdin")), timeout=body.get("timeout"),
        terminal=Terminal(rows=body.get("rows", 24), columns=body.get("cols", 80)) if tty else None,
        background=bool(body.get("background")),
        cancel_on_disconnect=bool(body.get("cancelOnDisconnect")),
    )  # fmt: skip


def run(body: Body) -> RunWish:
    """A sandbox for one command: variables and the time belong to the command."""
    own = {name: body[name] for name in SANDBOX_FIELDS if name in body}
    own.pop("timeout", None)
    own.pop("env", None)
    command = {name: body[name] for name in EXEC_FIELDS if name in body}
    if "code" in body:
        name, program = LANGUAGES[body["language"]]
        command["cmd"] = [program, f"{WORK}/{name}"]
        own["files"] = [*own.get("files", ()), {"path": f"{WORK}/{name}", "content": body["code"]}]
    retry = bool(body.get("retry"))
    return RunWish(command=execution(command), sandbox=wish(own), retry=retry)


def signal_number(given: str | int) -> int:
    """The number of a signal, by either of its names."""
    if isinstance(given, int):
        return given
    return int(signal.Signals[given if given.startswith("SIG") else f"SIG{given}"])


def moment(text: str, where: str) -> float:
    """RFC 3339 as seconds since the epoch."""
    try:
        # Nine digits of a second are RFC 3339; this Python reads six.
        head, dot, rest = text.partition(".")
        if dot:
            zone = rest.lstrip("0123456789")
            digits = rest[: len(rest) - len(zone)][:6].ljust(6, "0")
            text = f"{head}.{digits}{zone}"
        return datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise invalid(where, "is no time of the calendar") from None


def filters(text: str) -> dict[str, str]:
    """`?metadata=`: `name=value` pairs, joined by & or commas."""
    found: dict[str, str] = {}
    for pair in text.replace(",", "&").split("&"):
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise invalid("metadata", "must be name=value, joined by commas")
        if name in found:
            raise invalid("metadata", f"names {name} twice")
        found[name] = value
    return found


def meaningless(name: str) -> Problem:
    """A field of a command where there is none."""
    return invalid(name, "means nothing without a command")
