"""`sandboxctl docker`: `check` says what the Docker filter says to a request, `serve` runs it.

For `check` no engine is asked. `serve` is in `dockerserve`.
"""

from __future__ import annotations

import json
import os
import sys

from ..errors import UsageError
from ..policy import dockerfilter, merge
from ..policy.docker import decision as filter_of
from ..policy.docker.values import Bind, Decision, Engine, Found, Grants, Request, Upstream
from ..policy.model import FLAGS, Layer, Setting, Source
from ..sandbox import prepare
from . import options, output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..policy.docker.values import Reference
    from ..policy.dockerfilter import DockerFilter
    from ..sandbox.prepare import Prepared

USAGE = "sandboxctl docker check [flags] [--json] FILE.json | serve --socket PATH …"
OWNER = "check"
MAX_FILE = 16 << 20
# Names of the target and of a body that is no JSON, as different tools write them.
TARGETS = ("target", "path")
TEXTS = ("text", "raw_body")


def main(arguments: list[str]) -> int:
    """Print the verdict; 0: it would pass, 1: it would be refused."""
    if arguments[:1] == ["serve"]:
        from . import dockerserve

        return dockerserve.main(arguments[1:])
    if arguments[:1] != ["check"]:
        raise UsageError("docker has two verbs: check and serve", hint=USAGE, code="usage")
    wants_json = "--json" in arguments
    parsed = options.parse([word for word in arguments[1:] if word != "--json"])
    if len(parsed.command) != 1:
        raise UsageError("docker check needs one file", hint=USAGE, code="usage")
    request = read(parsed.command[0])
    answer = verdict(request, grants_of(planned(parsed)))
    if wants_json:
        sys.stdout.write(json.dumps({"version": 1, **answer}) + "\n")
    else:
        sys.stdout.write("".join(output.printable(line) + "\n" for line in lines(answer)))
    return 0 if answer["verdict"] == "allowed" else 1


def planned(parsed: options.Parsed) -> Prepared:
    """The plan of a run with these flags."""
    # `--docker` here is what is asked about: no engine has to be there.
    values = {**parsed.values, "docker": _setting("off")}
    return prepare.plan(
        prepare.Request(
            argv=("",), values=values, env=os.environ, cwd=parsed.cwd, config=parsed.config
        )
    )


def filter_with(words: list[str]) -> tuple[str, DockerFilter]:
    """The state directory, and the filter of a run with these flags."""
    parsed = options.parse(words)
    if parsed.command:
        raise UsageError(f"docker takes no '{parsed.command[0]}' here", hint=USAGE, code="usage")
    prepared = planned(parsed)
    return prepared.facts.state_dir, filter_of_run(prepared)


def _setting(value: str) -> Setting:
    return Setting(value=value, source=Source(layer=FLAGS, where="sandboxctl docker"))


# --- the question


def read(name: str) -> Request:
    """A request from a file, `-` for standard input."""
    try:
        if name == "-":
            text = sys.stdin.read(MAX_FILE)
        else:
            with open(name, encoding="utf-8") as file:
                text = file.read(MAX_FILE)
        return request_of(json.loads(text))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"cannot read a request from '{name}': {error}",
            hint='a JSON object with "method", "path" and, if there is one, "headers" and "body"',
            code="usage",
        ) from error


def request_of(document: object) -> Request:
    """A request from its JSON form."""
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004 - one error for all of the file
    target = next((document[name] for name in TARGETS if name in document), None)
    method, headers = document.get("method", "GET"), document.get("headers") or {}
    if not isinstance(target, str) or not isinstance(method, str) or not isinstance(headers, dict):
        raise ValueError("method and path must be strings, headers an object")  # noqa: TRY004
    body = b""
    if document.get("body") is not None:
        body = json.dumps(document["body"]).encode()
    for name in TEXTS:
        if isinstance(document.get(name), str):
            body = document[name].encode("utf-8", "surrogatepass")
    return Request(
        method=method, target=target, body=body,
        headers=tuple((str(key), str(value)) for key, value in headers.items()),
    )  # fmt: skip


def filter_of_run(prepared: Prepared) -> DockerFilter:
    """What the filter of a run with these flags would be told."""
    facts = prepared.facts
    layer = Layer(rank=FLAGS, values={"docker": _setting("filtered")})
    policy = merge.merge(
        [*prepared.layers, layer], project=facts.cwd.real, home=facts.home.real, command="",
        env=dict(facts.env),
    )  # fmt: skip
    named = frozenset(prepared.plan.decided)
    return dockerfilter.build(policy, facts, prepared.plan.mounts, named)


def grants_of(prepared: Prepared) -> Grants:
    """What a run with these flags would be granted."""
    wanted = filter_of_run(prepared)
    binds = tuple(
        Bind(host_path=path, writable=rw, swappable=swappable, hidden=hidden, directory=directory)
        for path, rw, swappable, hidden, directory in wanted.binds
    )
    granted: Mapping[str, object] = wanted.granted
    return Grants(
        owner=OWNER, binds=binds, network=wanted.network, read_only=wanted.read_only,
        socket="/run/agent-sandbox/docker.sock", engine=Engine(), **granted,  # type: ignore[arg-type]
    )  # fmt: skip


# --- the answer


def verdict(request: Request, grants: Grants) -> dict[str, object]:
    """The verdict, where every name is taken to be one of the run's own."""
    decided = filter_of.decide(request, grants)
    found = {reference: assumed(reference, grants) for reference in decided.references}
    made = filter_of.rebuild(decided, grants, found)
    names = [{"kind": r.kind, "name": r.name} for r in decided.references if r.kind != "count"]
    shown: dict[str, object] = {
        "verdict": "allowed", "rule": decided.rule, "status": 200, "message": "",
        "route": decided.route, "path": decided.normalised,
        "mutations": list(decided.mutations), "references": names, "request": None,
    }  # fmt: skip
    if isinstance(made, Decision):
        shown.update(verdict="refused", rule=made.rule, status=made.status, message=made.message)
    else:
        shown["request"] = as_json(made)
    return shown


def assumed(reference: Reference, grants: Grants) -> Found | None:
    """What inspect might say: everything exists, and belongs to the run, but for images."""
    number = "0" * 64
    if reference.kind == "image":
        # A tag of the run's own would be looked at first; whether there is one, nobody knows here.
        own = reference.name.startswith(f"agent-sandbox-{grants.owner}/")
        return None if own else Found(id=f"sha256:{number}", owner="", extra={})
    names = {"volume": reference.name, "path": f"agent-sandbox-{grants.owner}-held"}
    return Found(id=names.get(reference.kind, number), owner=grants.owner, extra={"count": 0})


def as_json(made: Upstream) -> dict[str, object]:
    """The request that the engine would get."""
    query = f"?{made.query}" if made.query else ""
    return {
        "method": made.method, "path": made.path + query,
        "body": json.loads(made.body) if made.body else None, "stream": made.stream,
    }  # fmt: skip


def lines(answer: Mapping[str, object]) -> list[str]:
    """The answer for a person."""
    if answer["verdict"] == "refused":
        return [f"refused with {answer['status']}: {answer['message']}"]
    found = [f"allowed ({answer['rule']}): {answer['path']}"]
    changed, names = answer["mutations"], answer["references"]
    if isinstance(changed, list) and changed:
        found.append("  changed: " + ", ".join(str(one) for one in changed))
    if isinstance(names, list) and names:
        shown = ", ".join(f"{one['kind']} {one['name']}" for one in names)
        found.append(f"  if they are there and may be used: {shown}")
    request = answer["request"]
    if isinstance(request, dict) and request["stream"] == "upload":
        found.append("  its tar is checked while it is sent")
    return found
