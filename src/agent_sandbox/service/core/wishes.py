"""What an agent asks for, as values: shapes are checked, permission is not decided yet."""

from __future__ import annotations

import hashlib
import json

from ...record import Record
from ..problems import Problem
from ..values import Network, Resources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..backend.interface import Terminal


class FilePut(Record):
    """A file that is in a sandbox from its start. The path is inside, absolute or below WORK."""

    path: str
    data: bytes
    mode: int = 0o644


class Wish(Record):
    """A sandbox. "" and None: as the template or the server has it."""

    template: str = ""
    backend: str = ""
    image: str = ""
    runtime: str = ""
    env: Mapping[str, str] = {}
    metadata: Mapping[str, str] = {}
    # Seconds until it expires.
    timeout: float | None = None
    resources: Resources = Resources()
    network: Network | None = None
    files: tuple[FilePut, ...] = ()


class ExecWish(Record):
    """A command in a sandbox."""

    argv: tuple[str, ...]
    cwd: str = ""
    env: Mapping[str, str] = {}
    # All of its input, or the first part of it with `keep_input`; None: none.
    stdin: bytes | None = None
    # More input comes later, by `Service.stdin`. A terminal always takes more.
    keep_input: bool = False
    # Seconds from its start; None: DEFAULT_EXECUTION_TIME.
    timeout: float | None = None
    terminal: Terminal | None = None
    # Nobody waits for the end.
    background: bool = False
    # For the front end: it calls `Service.kill` when its client goes away.
    cancel_on_disconnect: bool = False


class RunWish(Record):
    """A sandbox for one command, gone with it."""

    command: ExecWish
    sandbox: Wish = Wish()
    # Start it once more, in a new sandbox, should the first be lost under it.
    retry: bool = False


def repeatable(wish: RunWish) -> Wish:
    """The sandbox of a command that may be started twice: with the same input both times."""
    if wish.command.keep_input or wish.command.terminal is not None:
        raise Problem(
            "INVALID", "input that comes later cannot be given twice", field="retry",
            hint="send all of it with the command, or leave `retry` out", rule="request.retry",
        )  # fmt: skip
    return wish.sandbox


# What the kernel takes of arguments and variables together is 2 MiB on most machines (execve(2));
# bwrap and the sandbox's own variables need some of it. And the service keeps them in memory.
MOST_ARGUMENTS = 1 << 20
# What is kept of a command when it has ended.
MOST_KEPT = 16 * 1024


def check_arguments(argv: Iterable[str], env: Mapping[str, str]) -> None:
    """Refuse what no program could be started with."""
    texts = (*argv, *env, *env.values())
    if sum(map(len, texts)) > MOST_ARGUMENTS:
        raise Problem(
            "INVALID", f"arguments and variables have more than {MOST_ARGUMENTS} characters",
            hint="send what is large as a file, or as input", rule="request.arguments",
        )  # fmt: skip


def shortened(argv: tuple[str, ...]) -> tuple[str, ...]:
    """A command as it is remembered: the beginning of one that is very long."""
    if sum(map(len, argv)) <= MOST_KEPT:
        return argv
    kept, room = [], MOST_KEPT
    for word in argv:
        if room <= 0:
            break
        kept.append(word if len(word) <= room else f"{word[:room]}…")
        # A word costs something, also an empty one.
        room -= len(word) + 1
    return (*kept, "…")


def shell(command: str) -> tuple[str, ...]:
    """The argument list of a shell command."""
    return ("/bin/sh", "-c", command)


# Fields that a wish did not have from the first version on, with what they are unless somebody
# says otherwise: then they are no part of a fingerprint. Keys from before an update live for a day,
# and a request that is repeated after it is still the same.
ADDED: Mapping[str, Mapping[str, object]] = {"RunWish": {"retry": False}}


def _plain(value: object) -> object:
    """For JSON: records as [name, fields], bytes by their hash."""
    if isinstance(value, Record):
        name = type(value).__name__
        added = ADDED.get(name, {})
        fields = {field: getattr(value, field) for field in value.__fields__}
        return [name, {k: v for k, v in fields.items() if k not in added or v != added[k]}]
    if isinstance(value, bytes):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return dict(value)  # type: ignore[call-overload]  # a mapping of some other kind


def fingerprint(wish: Wish | RunWish) -> str:
    """The hash by which two requests are the same, whatever the order of their fields."""
    text = json.dumps(wish, default=_plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
