"""`sandboxctl why`: what the policy says about a path, host or socket, and by which rule."""

from __future__ import annotations

import json
import os
import sys

from ..errors import UsageError
from ..policy import explain, paths
from ..policy.model import SOCKET
from ..record import Record
from ..sandbox import prepare
from . import options, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..policy.model import Match
    from ..sandbox.prepare import Prepared


class Answer(Record):
    """One answer, for a person and for a program."""

    target: str
    kind: str
    verdict: str
    detail: str
    rule: str


def main(arguments: list[str]) -> int:
    """Answer for one target; takes the flags of agent-sandbox."""
    wants_json = "--json" in arguments
    parsed = options.parse([word for word in arguments if word != "--json"])
    if len(parsed.command) != 1:
        raise UsageError(
            "why needs one target: a path, HOST[:PORT] or @SOCKET",
            hint="for example: sandboxctl why ~/.ssh",
            code="usage",
        )
    prepared = prepare.plan(
        prepare.Request(
            argv=("",),
            values=parsed.values,
            env=os.environ,
            cwd=parsed.cwd,
            config=parsed.config,
        )
    )
    answer = answer_for(prepared, parsed.command[0])
    if wants_json:
        fields = {name: getattr(answer, name) for name in Answer.__fields__}
        sys.stdout.write(json.dumps({"version": 1, **fields}) + "\n")
    else:
        lines = (f"{answer.target}: {answer.detail}", f"  rule: {answer.rule}")
        sys.stdout.write("".join(output.printable(line) + "\n" for line in lines))
    return 0


def answer_for(prepared: Prepared, target: str) -> Answer:
    """Tell a path from a host from an abstract socket, and answer."""
    if target.startswith("@"):
        return _abstract(prepared, target)
    written = "/" in target or target.startswith(("~", "."))
    if written or os.path.lexists(os.path.join(prepared.facts.cwd.path, target)):
        return _path(prepared, target)
    return _host(prepared, target)


def _path(prepared: Prepared, target: str) -> Answer:
    facts, made = prepared.facts, prepared.plan
    home = target == "~" or target.startswith("~/")
    full = paths.normalise(
        facts.home.real + target[1:] if home else os.path.join(facts.cwd.real, target)
    )
    real = os.path.realpath(full)
    view = explain.look_up(made, real)
    link = explain.link_target(made, full)
    if view.level == explain.ABSENT and link is not None:
        view = explain.look_up(made, link)
    rule = explain.rule_of(made, view)
    detail = explain.LEVEL_WORDS[view.level]
    if real != full:
        detail += f" (leads to {real})"
    if _is_socket(real) and view.level in ("ro", "rw"):
        detail += "; it is a socket and can be connected to"
    return Answer(target=full, kind="path", verdict=view.level, detail=detail, rule=rule)


def _is_socket(path: str) -> bool:
    from ..host.locate import Locator

    found: Match | None = Locator().find(path)
    return found is not None and found.kind == SOCKET


def _host(prepared: Prepared, target: str) -> Answer:
    network = prepared.policy.network
    on = network.value == "on"
    return Answer(
        target=target,
        kind="host",
        verdict="allowed" if on else "refused",
        detail="reachable: the host's network is shared" if on else "not reachable: no network",
        rule=f"network = {network.value} ({network.source})",
    )


def _abstract(prepared: Prepared, target: str) -> Answer:
    from ..launch import landlock

    network = prepared.policy.network
    if network.value != "on":
        detail, rule = "not reachable: no network", f"network = off ({network.source})"
    elif landlock.abi() >= landlock.SCOPE_ABI:
        detail, rule = "not reachable: Landlock scope", "always"
    else:
        detail = "reachable: this kernel cannot close abstract sockets while the network is shared"
        rule = f"network = on ({network.source})"
    verdict = "allowed" if detail.startswith("reachable") else "refused"
    return Answer(target=target, kind="socket", verdict=verdict, detail=detail, rule=rule)
