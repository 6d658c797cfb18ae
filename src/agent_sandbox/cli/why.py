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
    from ..policy.network import Egress
    from ..sandbox.prepare import Prepared


# Of a host that is asked for without one.
DEFAULT_PORT = 443


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
    if "://" in target:
        # An error that says which host to ask for.
        _endpoint(target)
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
    if prepared.plan.egress is not None:
        return _judged(
            prepared.plan.egress, target, f"network = {network.value} ({network.source})"
        )
    on = network.value == "on"
    return Answer(
        target=target,
        kind="host",
        verdict="allowed" if on else "refused",
        detail="reachable: the host's network is shared" if on else "not reachable: no network",
        rule=f"network = {network.value} ({network.source})",
    )


def _judged(egress: Egress, target: str, mode: str) -> Answer:
    """What the proxy would say. Nothing is looked up: a question to a resolver leaves the host."""
    from ..policy import network

    host, port = _endpoint(target)
    if network.is_address(host):
        verdict = network.admit(egress, host, port, host, ())
    else:
        verdict = network.decide(egress, host, port)
    detail = f"{'reachable' if verdict.allowed else 'not reachable'}: {verdict.reason}"
    if verdict.allowed and not network.is_address(host) and host != network.LOCALHOST:
        detail += "; refused all the same if its address is not public and no rule names it"
    return Answer(
        target=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
        kind="host",
        verdict="allowed" if verdict.allowed else "refused",
        detail=detail,
        rule=f"{verdict.rule} ({verdict.source})" if verdict.rule else mode,
    )


def _endpoint(target: str) -> tuple[str, int]:
    """Host and port of a question, spelt as in a rule; 443 if no port is given."""
    from ..policy import network

    # Read as a deny rule: those may name all of localhost.
    rule = network.parse(target, "the question", deny=True)
    if rule.kind in (network.ANY, network.SUFFIX) or rule.ports == network.EVERY_PORT:
        raise UsageError(
            f"cannot answer for '{target}': it is more than one host and port",
            hint="ask for one: sandboxctl why example.com:443",
            code="usage",
        )
    host = rule.host.partition("/")[0]
    return host, rule.ports[0] if rule.ports else DEFAULT_PORT


def _abstract(prepared: Prepared, target: str) -> Answer:
    from ..launch import landlock

    network = prepared.policy.network
    if network.value != "on":
        detail = "not reachable: it belongs to the host's network"
        rule = f"network = {network.value} ({network.source})"
    elif landlock.abi() >= landlock.SCOPE_ABI:
        detail, rule = "not reachable: Landlock scope", "always"
    else:
        detail = "reachable: this kernel cannot close abstract sockets while the network is shared"
        rule = f"network = on ({network.source})"
    verdict = "allowed" if detail.startswith("reachable") else "refused"
    return Answer(target=target, kind="socket", verdict=verdict, detail=detail, rule=rule)
