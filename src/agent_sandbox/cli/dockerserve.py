"""`sandboxctl docker serve`: the Docker filter in the foreground, for others than a sandbox."""

from __future__ import annotations

import gc
import os
import secrets
import sys

from ..errors import HostError, UsageError, reason
from ..policy import engines
from ..policy.docker.decision import OWNER
from ..policy.docker.values import Grants
from ..proxy.docker import foreground, life
from ..record import Record
from . import output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.dockerfilter import DockerFilter

USAGE = (
    "sandboxctl docker serve --socket PATH [--engine PATH] [--mode OCTAL] [--group GID] "
    "[--owner NAME] [--audit FILE|-] [--read-only [--label NAME=VALUE]… [--own-project] | flags]"
)
SWITCHES = ("--read-only", "--own-project")
VALUES = ("--socket", "--engine", "--mode", "--group", "--owner", "--audit", "--label")
# An onlooker is shown the machine as it is.
WHOLE: dict[str, float] = {"memory": 1 << 62, "cpus": 1 << 20}


class Wanted(Record):
    """What was asked for."""

    socket: str
    engine: str
    owner: str
    mode: int
    group: int
    audit: str
    read_only: bool
    labels: tuple[str, ...]
    own_project: bool
    # Flags of agent-sandbox.
    rest: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Serve until a signal; 0."""
    wanted = parse(arguments)
    foreground.reach(wanted.engine)
    orders = orders_of(wanted)
    place = foreground.Place(wanted.socket, mode=wanted.mode, group=wanted.group)

    def ready() -> None:
        how = "read-only" if wanted.read_only else f"owner {orders.grants.owner}"
        seen = f", {', '.join(orders.grants.labels)}" if orders.grants.labels else ""
        _say(f"serving {wanted.socket} before {wanted.engine} ({how}{seen})")

    # The checkout's command has switched it off, for commands that end soon.
    gc.enable()
    try:
        report = life.foreground(orders, place.listener, ready)
    except OSError as error:
        raise HostError(
            f"cannot serve: {reason(error)}", code="docker-serve",
            hint="another filter may have this --owner, or the file of --audit cannot be written",
        ) from error  # fmt: skip
    finally:
        place.close()
    left = report.get("left")
    for line in left if isinstance(left, list) else ():
        _say(f"could not remove {line}")
    if "audit" in report:
        _say(str(report["audit"]))
    _say(f"ended after {report['requests']} requests")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"sandboxctl: notice: {output.printable(text)}\n")
    sys.stderr.flush()


# --- the command line


def _usage(message: str) -> UsageError:
    return UsageError(message, hint=USAGE, code="usage")


def parse(arguments: list[str]) -> Wanted:
    """What the words say."""
    given, rest = _split(arguments)
    last = {name: values[-1] for name, values in given.items()}
    read_only, labels = "--read-only" in given, tuple(given.get("--label", ()))
    if not last.get("--socket"):
        raise _usage("docker serve needs --socket PATH")
    if read_only and rest:
        raise _usage(f"'{rest[0]}' means nothing with --read-only")
    if not read_only and (labels or "--own-project" in given):
        raise _usage("--label and --own-project belong to --read-only")
    if any(not label.partition("=")[0] or "=" not in label for label in labels):
        raise _usage("--label takes NAME=VALUE")
    owner = last.get("--owner", f"serve-{secrets.token_hex(4)}")
    if not OWNER.fullmatch(owner):
        raise _usage("--owner takes small letters and digits, with dashes between them")
    return Wanted(
        socket=os.path.abspath(last["--socket"]), engine=_engine(last.get("--engine", "")),
        owner=owner, mode=_octal(last.get("--mode", "600")), group=_gid(last.get("--group", "")),
        audit=_file(last.get("--audit", "")), read_only=read_only, labels=labels,
        own_project="--own-project" in given, rest=tuple(rest),
    )  # fmt: skip


def _split(arguments: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Our own flags with their values, and the words that are left."""
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in SWITCHES and not equals:
            given[name] = [""]
        elif name in VALUES:
            found = value if equals else next(words, "")
            if not found:
                raise _usage(f"flag {name} needs a value")
            given.setdefault(name, []).append(found)
        else:
            rest.append(word)
    return given, rest


def _octal(text: str) -> int:
    if len(text.removeprefix("0")) != 3 or not set("01234567").issuperset(text):
        raise _usage("--mode takes three octal digits, for instance 660")
    return int(text, 8)


def _gid(text: str) -> int:
    if not text:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise _usage("--group takes a number")
    return int(text)


def _file(text: str) -> str:
    return text if text in ("", "-") else os.path.abspath(text)


def _engine(named: str) -> str:
    address = named or os.environ.get("DOCKER_HOST", "") or engines.STANDARD
    path = engines.unix_path(address)
    if not path or not path.startswith("/"):
        raise HostError(
            f"cannot filter the container engine at '{address}': not a unix socket",
            hint="name its socket with --engine", code="docker-not-unix",
        )  # fmt: skip
    return path


# --- what the filter is told


def orders_of(wanted: Wanted) -> life.Orders:
    """Orders for an onlooker's filter, or for one that owns what is made through it."""
    if wanted.read_only:
        return _watching(wanted)
    from . import docker

    state, found = docker.filter_with(list(wanted.rest))
    _opened(state)
    return life.Orders(
        engine=wanted.engine, audit=wanted.audit or f"{state}/audit/docker.jsonl",
        records=f"{state}/docker", keep=found.keep, mode=found.mode,
        grants=_owning(wanted, found),
    )  # fmt: skip


def _watching(wanted: Wanted) -> life.Orders:
    labels = list(wanted.labels)
    if wanted.own_project:
        labels.append(foreground.own_project(wanted.engine))
    grants = Grants(
        owner=wanted.owner, read_only=True, watches=True, labels=tuple(labels), **WHOLE,  # type: ignore[arg-type]
    )  # fmt: skip
    # It makes nothing, so there is nothing to remove, and it must not remove what others left.
    return life.Orders(
        engine=wanted.engine, audit=wanted.audit or f"{_state()}/audit/docker.jsonl", records="",
        keep=True, mode="enforce", grants=grants,
    )  # fmt: skip


def _owning(wanted: Wanted, found: DockerFilter) -> Grants:
    """No directory of the host: what the clients see of it, nobody knows here."""
    return Grants(
        owner=wanted.owner, network=found.network, read_only=found.read_only,
        **found.granted,  # type: ignore[arg-type]
    )  # fmt: skip


def _state() -> str:
    from ..host import facts

    home = os.environ.get("HOME", "/")
    return _opened(facts.state_dir(os.environ, home, os.getuid()))


def _opened(state: str) -> str:
    """A state directory that nobody else can write, or an error."""
    from ..launch import workspace

    workspace.open_state(state, os.getuid())
    return state
