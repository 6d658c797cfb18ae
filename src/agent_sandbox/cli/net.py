"""`sandboxctl net`: the network rules of a running sandbox, shown and changed.

Each run with a proxy has a control socket in its workspace, outside. Rules that are given here hold
for that run and end with it.
"""

from __future__ import annotations

import os
import sys
import time

from ..errors import HostError, PolicyError, UsageError, reason
from ..host import facts
from ..host.locate import Locator
from .output import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

VERSION = 1
USAGE = "net takes [list], allow RULE… or deny RULE…, with [--run ID] [--json]"
VERBS = ("list", "allow", "deny")
SECONDS = 30.0
# A proxy is loaded after its command has started.
LOADING_SECONDS = 3.0
MAX_ANSWER = 16 << 20


class Run:
    """A running sandbox with a proxy, and what it answered."""

    def __init__(self, name: str, place: str, answer: dict[str, Any]) -> None:
        self.name = name
        self.place = place
        self.answer = answer

    @property
    def project(self) -> str:
        """Where it runs."""
        return str(self.answer.get("project", ""))


def main(arguments: list[str]) -> int:
    """Show or change."""
    verb, rules, wanted, as_json = _parse(arguments)
    place = facts.place(os.environ, None, Locator())
    base = f"{place.state_dir}/run"
    run = choose(_runs(base), wanted, place.real)
    answer = run.answer
    if verb != "list":
        answer = ask(run.place, {"do": verb, "rules": rules})
    if not answer.get("ok"):
        raise PolicyError(
            str(answer.get("error", "the proxy refused")), hint=str(answer.get("hint", "")),
            code="bad-network-rule",
        )  # fmt: skip
    if as_json:
        import json

        shown = {k: v for k, v in answer.items() if k != "ok"}
        sys.stdout.write(
            json.dumps({"version": VERSION, "run": run.name, **shown}, indent=2) + "\n"
        )
    else:
        sys.stdout.write(table(run.name, answer))
    return 0


def _parse(arguments: list[str]) -> tuple[str, list[str], str, bool]:
    words = list(arguments)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    wanted = ""
    for at, word in enumerate(words):
        if word == "--run" or word.startswith("--run="):
            wanted = word.partition("=")[2] or (words[at + 1] if at + 1 < len(words) else "")
            if not wanted:
                raise _usage()
            del words[at : at + (1 if "=" in word else 2)]
            break
    verb, rules = (words[0], words[1:]) if words else ("list", [])
    if (
        verb not in VERBS
        or any(r.startswith("-") for r in rules)
        or (verb == "list") == bool(rules)
    ):
        raise _usage()
    return verb, rules, wanted, as_json


def _usage() -> UsageError:
    return UsageError(USAGE, hint="see 'sandboxctl net --help'", code="usage")


# --- which run


def choose(runs: Sequence[Run], wanted: str, project: str) -> Run:
    """The one that is meant: by its name, the only one, or the only one of this project. Pure."""
    if not runs:
        raise HostError(
            "no running sandbox has rules for its network",
            hint="only runs with --network=allow, public or learn have a proxy",
            code="no-run",
        )
    fitting = [run for run in runs if run.name.startswith(wanted)]
    if len(fitting) != 1 and not wanted:
        fitting = [run for run in runs if run.project == project]
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(f"{run.name} ({printable(run.project)})" for run in runs)
    problem = f"no run is called '{printable(wanted)}'" if wanted and not fitting else "several run"
    raise UsageError(
        f"cannot tell which sandbox is meant: {problem}: {listed}",
        hint="name one with --run ID",
        code="which-run",
    )


def _runs(base: str) -> list[Run]:
    """Every run that answers."""
    found = []
    try:
        names = sorted(os.listdir(base))
    except FileNotFoundError:
        return []
    deadline = time.monotonic() + LOADING_SECONDS
    for name in names:
        while _is_loading(f"{base}/{name}") and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            answer = ask(f"{base}/{name}", {"do": "list"})
        except HostError:
            # Another kind of run, or one that ends at this moment.
            continue
        found.append(Run(name, f"{base}/{name}", answer))
    return found


def _is_loading(work: str) -> bool:
    """Whether a run has just begun: it has files for a proxy's names, and no socket yet."""
    return os.path.isdir(f"{work}/net") and not os.path.lexists(f"{work}/control")


def ask(place: str, order: dict[str, object]) -> dict[str, Any]:
    """Give the proxy of a workspace an order; what it answers."""
    import json
    import socket

    try:
        # An address has room for 107 bytes, and state directories may lie deep.
        fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(SECONDS)
                line.connect(f"/proc/self/fd/{fd}/control")
                line.sendall(json.dumps(order).encode() + b"\n")
                data = b""
                while not data.endswith(b"\n") and len(data) < MAX_ANSWER:
                    chunk = line.recv(1 << 16)
                    if not chunk:
                        break
                    data += chunk
        finally:
            os.close(fd)
        answer = json.loads(data)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else "it gave no answer"
        raise HostError(
            f"cannot speak to the proxy of '{os.path.basename(place)}': {why}",
            hint="the run may have ended; see 'sandboxctl net list'",
            code="no-run",
        ) from error
    return answer if isinstance(answer, dict) else {}


# --- what is shown


def table(name: str, answer: dict[str, Any]) -> str:
    """The rules and the hosts of one run, for people. Pure."""
    lines = [f"run {name}  network = {answer['mode']}  {printable(str(answer.get('project', '')))}"]
    for kind in ("allow", "deny"):
        lines += [f"  {kind:<5}  {printable(text)}  [{printable(s)}]" for text, s in answer[kind]]
    for host in answer.get("hosts", ()):
        word = "allowed" if host["allowed"] else "refused"
        where = f"[{host['host']}]" if ":" in host["host"] else host["host"]
        lines.append(
            f"  {printable(where)}:{host['port']}  {word} {host['count']} times, "
            f"{host['sent']} bytes sent, {host['received']} received"
            + ("" if host["allowed"] else f": {printable(host['reason'])}")
        )
    return "\n".join(lines) + "\n"
