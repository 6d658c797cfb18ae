"""An engine of names: who owns what, as inspect would say it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from agent_sandbox.policy.docker.decision import decide, provision, rebuild
from agent_sandbox.policy.docker.values import (
    Bind,
    Decision,
    Engine,
    Found,
    Grants,
    Reference,
    Request,
    Upstream,
)

OWNER = "run1"
GRANTS = Grants(
    owner=OWNER,
    images=("alpine", "python:3.*", "allowed/*", "ghcr.io/team/**"),
    registries=("docker.io", "ghcr.io/team/**"),
    binds=(
        Bind(host_path="/ws", writable=True),
        Bind(host_path="/ws/.git", writable=True),
        Bind(host_path="/ws/.git/hooks", writable=False),
        Bind(host_path="/ws/.env", writable=False, hidden=True, directory=False),
        Bind(host_path="/ws/secrets", writable=False, hidden=True),
        Bind(host_path="/usr", writable=False),
    ),
    network="on",
    memory=1 << 30,
    cpus=1.5,
    pids=200,
    containers=4,
    engine=Engine(api="1.41"),
    socket="/run/agent-sandbox/docker.sock",
)
SUBPATH = GRANTS.replace(engine=Engine(api="1.47", subpath=True))
CLOSED = GRANTS.replace(network="off")

OWN = {
    "container": ("MINE", "mine-db", "web"),
    "network": ("mine", "proj_default", f"agent-sandbox-{OWNER}"),
    "volume": ("mine", "proj_data"),
    "exec": ("e" * 64,),
    "image": (f"agent-sandbox-{OWNER}/app:latest",),
}
FOREIGN = {
    "container": ("VICTIM", "victim", "victim-name"),
    "network": ("other-tenant-net", "bridge", "host"),
    "volume": ("other-tenant",),
    "image": (
        "alpine:latest", "python:3.11", "private/other:1", "private:latest", "allowed/a:1",
        "agent-sandbox-run2/app:latest",
    ),
}  # fmt: skip


def id_of(kind: str, name: str) -> str:
    if kind == "volume":
        return name
    number = hashlib.sha256(f"{kind} {name}".encode()).hexdigest()
    return f"sha256:{number}" if kind == "image" else number


def _entries() -> dict[Reference, Found]:
    entries = {}
    for owner, table in ((OWNER, OWN), ("somebody", FOREIGN)):
        for kind, names in table.items():
            for name in names:
                shown = "" if kind == "image" and owner != OWNER else owner
                extra: dict[str, object] = {}
                if kind == "image":
                    extra = {"tags": [name], "digests": [], "ports": ["80/tcp"]}
                found = Found(id=id_of(kind, name), owner=shown, extra=extra)
                entries[Reference(kind=kind, name=name)] = found
                entries[Reference(kind=kind, name=found.id)] = found
    return entries


ENTRIES = _entries()


def look(references: tuple[Reference, ...], grants: Grants) -> dict[Reference, Found | None]:
    """What the shell would find; fixtures of the run are made on the way."""
    found = {reference: ENTRIES.get(reference) for reference in references}
    for reference in references:
        if reference.kind == "count":
            found[reference] = Found(id="", owner=OWNER, extra={"count": 0})
        elif found[reference] is None and provision(reference, grants) is not None:
            found[reference] = Found(
                id=id_of(reference.kind, reference.name), owner=OWNER, extra={}
            )
    return found


def request(
    method: str,
    target: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
    raw: bytes = b"",
) -> Request:
    content = raw or (json.dumps(body).encode() if body is not None else b"")
    return Request(
        method=method, target=target, headers=tuple((headers or {}).items()), body=content
    )


def ask(sent: Request, grants: Grants = GRANTS) -> Decision | Upstream:
    """Decision, look-up and rebuild."""
    decision = decide(sent, grants)
    return rebuild(decision, grants, look(decision.references, grants))


def again(upstream: Upstream) -> Request:
    """What was rebuilt, as a request."""
    target = upstream.path + (f"?{upstream.query}" if upstream.query else "")
    return Request(
        method=upstream.method, target=target, headers=upstream.headers, body=upstream.body
    )


def create(
    config: object = None, host: object = None, grants: Grants = GRANTS, **more: object
) -> Decision | Upstream:
    """The verdict on a container."""
    body = {"Image": "alpine", **(config if isinstance(config, dict) else {})}
    if host is not None:
        body["HostConfig"] = host
    return ask(request("POST", "/v1.41/containers/create", {**body, **more}), grants)


def refusal(answer: Decision | Upstream) -> str:
    """The rule, with a message that a client prints and an error status."""
    assert isinstance(answer, Decision), answer
    assert not answer.allowed
    assert answer.status >= 400
    assert answer.rule in answer.message
    return answer.rule


def sent(answer: Decision | Upstream) -> dict[str, Any]:
    """The body that the engine gets."""
    assert isinstance(answer, Upstream), answer
    document = json.loads(answer.body)
    assert isinstance(document, dict)
    return document


def host(answer: Decision | Upstream) -> dict[str, Any]:
    made = sent(answer)["HostConfig"]
    assert isinstance(made, dict)
    return made
