"""Every request of the API, once, for both clients. Pure.

A flow yields a `Call`, gets its `Answer`, and returns a value. Whoever drives it does the sending,
the waiting and the repeating.
"""

from __future__ import annotations

import base64
import json
import secrets
from urllib.parse import quote, urlencode

from ..record import Record
from . import values
from .errors import BadAnswer, NotConfigured

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from typing import Any, TypeVar

    from .values import (
        Entry,
        ExecOptions,
        Listing,
        Page,
        Result,
        RunOptions,
        SandboxInfo,
        SandboxOptions,
    )
    from .wire import Answer

    T = TypeVar("T")
    Flow = Generator["Call", Answer, T]
    Command = str | Sequence[str]

JSON, EVENTS, TAR, BYTES = (
    "application/json", "text/event-stream", "application/x-tar", "application/octet-stream",
)  # fmt: skip
PAGE = 100
# A command may wait for its turn, and cannot be asked for again.
QUEUED = 5


class Call(Record):
    """One request. `again`: sending it twice does no more than sending it once."""

    method: str
    # Percent-encoded, begins with "/".
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""
    accept: str = JSON
    again: bool = False
    # How many times longer than usual the answer may take to begin.
    patience: int = 1
    # Statuses that are no error although they say so.
    fine: tuple[int, ...] = ()


def path(*parts: str, query: Mapping[str, object] | None = None) -> str:
    """`/v1/…`; what is None is left out of the query."""
    if any(part in ("", ".", "..") for part in parts):
        raise NotConfigured("an id is empty or not an id")
    found = "/v1/" + "/".join(quote(part, safe="") for part in parts)
    chosen = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{found}?{urlencode(chosen, quote_via=quote)}" if chosen else found


def get(*parts: str, query: Mapping[str, object] | None = None) -> Call:
    """A question."""
    return Call(method="GET", path=path(*parts, query=query), again=True)


def post(*parts: str, body: Mapping[str, object] | None = None, **more: Any) -> Call:  # noqa: ANN401
    """An order, with JSON."""
    headers = (("Content-Type", JSON), *more.pop("headers", ()))
    return Call(
        method=more.pop("method", "POST"), path=path(*parts), headers=headers,
        body=json.dumps(body or {}).encode(), **more,
    )  # fmt: skip


def idempotent() -> tuple[tuple[str, str], ...]:
    """A key of its own: the same order sent again is the same order."""
    return (("Idempotency-Key", secrets.token_urlsafe(24)),)


def document(answer: Answer) -> object:
    """The JSON of an answer."""
    if not answer.body:
        return {}
    try:
        found: object = json.loads(answer.body)
    except (ValueError, RecursionError):
        raise BadAnswer(
            "the answer is not JSON", hint="does SANDBOX_API lead to the service?"
        ) from None
    return found


def page(answer: Answer, decode: Any) -> Page:  # noqa: ANN401 - one of values' readers
    """A part of a list."""
    found = values.members(document(answer), "list")
    items, cursor = found.get("items"), found.get("next")
    if not isinstance(items, list):
        raise BadAnswer("the answer has no list")
    return values.Page(
        items=tuple(decode(item) for item in items), next=cursor if isinstance(cursor, str) else ""
    )


# --- bodies


RESOURCES = {"memory": "memory", "cpus": "cpu", "pids": "pids", "disk": "disk"}
PLAIN = ("template", "backend", "image", "runtime", "metadata")


def sandbox_body(options: SandboxOptions) -> dict[str, object]:
    """The JSON of a wish for a sandbox."""
    given: Mapping[str, Any] = {k: v for k, v in options.items() if v is not None}
    body: dict[str, object] = {name: given[name] for name in (*PLAIN, "env") if name in given}
    resources = {RESOURCES[name]: given[name] for name in RESOURCES if name in given}
    if resources:
        body["resources"] = resources
    if "lifetime" in given:
        body["timeout"] = given["lifetime"]
    if "network" in given:
        body["network"] = network(given["network"])
    if given.get("files"):
        body["files"] = [file(name, data) for name, data in given["files"].items()]
    return body


def network(wish: str | Sequence[str] | Mapping[str, object]) -> object:
    """A mode by its name, a list of hosts, or all of it."""
    if isinstance(wish, str) or hasattr(wish, "keys"):
        return wish
    return {"mode": "allow", "allowOut": list(wish)}


def file(name: str, data: bytes | str) -> dict[str, object]:
    """A file in a wish."""
    if isinstance(data, str):
        return {"path": name, "content": data}
    return {"path": name, "contentBase64": base64.b64encode(data).decode()}


def exec_body(command: Command, options: ExecOptions, *, background: bool) -> dict[str, object]:
    """The JSON of a command: a text is for a shell, a list is started as it is."""
    given: Mapping[str, Any] = {k: v for k, v in options.items() if v is not None}
    body: dict[str, object] = {
        name: given[name] for name in ("cwd", "env", "timeout") if name in given
    }
    if isinstance(command, str):
        body["command"] = command
    else:
        body["cmd"] = list(command)
    if "input" in given:
        data = given["input"]
        name = "stdin" if isinstance(data, str) else "stdinBase64"
        body[name] = data if isinstance(data, str) else base64.b64encode(data).decode()
    if given.get("keep_input"):
        body["keepStdin"] = True
    if "tty" in given:
        body["tty"] = True
        body["rows"], body["cols"] = given["tty"]
    if background:
        body["background"] = True
    return body


# --- sandboxes


def create(options: SandboxOptions) -> Flow[SandboxInfo]:
    """Make one. The key makes it safe to ask again after a lost answer."""
    answer = yield post("sandboxes", body=sandbox_body(options), headers=idempotent(), again=True)
    return values.sandbox(document(answer))


def sandbox(sandbox_id: str) -> Flow[SandboxInfo]:
    """One of our own."""
    answer = yield get("sandboxes", sandbox_id)
    return values.sandbox(document(answer))


def sandboxes(
    state: str | None, metadata: Mapping[str, str] | None, after: str, limit: int = PAGE
) -> Flow[Page]:
    """A part of the list."""
    # The service takes no second encoding in it.
    chosen = "&".join(f"{name}={value}" for name, value in metadata.items()) if metadata else None
    query = {"state": state, "metadata": chosen, "after": after or None, "limit": limit}
    answer = yield get("sandboxes", query=query)
    return page(answer, values.sandbox)


def delete(sandbox_id: str) -> Flow[None]:
    """Remove it; one that is gone is removed."""
    yield Call(method="DELETE", path=path("sandboxes", sandbox_id), again=True, fine=(404,))


def renew(sandbox_id: str, seconds: float) -> Flow[SandboxInfo]:
    """Let it live so long from now."""
    answer = yield post("sandboxes", sandbox_id, "renew", body={"timeout": seconds}, again=True)
    return values.sandbox(document(answer))


def change(sandbox_id: str, verb: str) -> Flow[SandboxInfo]:
    """Pause or resume."""
    answer = yield post("sandboxes", sandbox_id, verb)
    return values.sandbox(document(answer))


def set_metadata(sandbox_id: str, changes: Mapping[str, str | None]) -> Flow[SandboxInfo]:
    """Merge; None takes a name away."""
    answer = yield post(
        "sandboxes", sandbox_id, "metadata", body=dict(changes), method="PATCH", again=True
    )
    return values.sandbox(document(answer))


def usage(sandbox_id: str) -> Flow[dict[str, Any]]:
    """What it uses now."""
    answer = yield get("sandboxes", sandbox_id, "metrics")
    return values.members(document(answer), "measurements")


# --- executions


def start(sandbox_id: str, command: Command, options: ExecOptions) -> Flow[Result]:
    """Start a command and do not wait. Not sent twice: it might run twice."""
    body = exec_body(command, options, background=True)
    answer = yield post("sandboxes", sandbox_id, "exec", body=body, patience=QUEUED)
    return values.result(document(answer))


def streamed(sandbox_id: str, command: Command, options: ExecOptions) -> Call:
    """Start a command and follow it on the same connection."""
    body = exec_body(command, options, background=False)
    return post("sandboxes", sandbox_id, "exec", body=body, accept=EVENTS, patience=QUEUED)


def run(command: Command, options: RunOptions) -> Call:
    """A sandbox for one command, followed. The key makes it safe to ask again."""
    exec_names = ("cwd", "env", "input", "keep_input", "timeout", "tty")
    inner: Any = {name: options[name] for name in exec_names if name in options}  # type: ignore[literal-required]
    outer: Any = {name: value for name, value in options.items() if name not in exec_names}
    body = {**sandbox_body(outer), **exec_body(command, inner, background=False)}
    if options.get("retry"):
        body["retry"] = True
    return post("run", body=body, accept=EVENTS, headers=idempotent(), again=True)


def events(exec_id: str, last: str) -> Call:
    """Follow a command, behind the event that was seen last."""
    call = get("execs", exec_id, "events")
    headers = (("Last-Event-ID", last),) if last else ()
    return call.replace(accept=EVENTS, headers=headers)


def execution(exec_id: str) -> Flow[Result]:
    """How far it is, with its output."""
    answer = yield get("execs", exec_id)
    return values.result(document(answer))


def logs(exec_id: str, since: int) -> Flow[tuple[Result, int, bool]]:
    """A part of what it has written, where the next part begins, and whether there is one."""
    answer = yield get("execs", exec_id, "logs", query={"since": since})
    found = values.members(document(answer), "logs")
    following = found.get("next")
    place = following if isinstance(following, int) else 0
    # A place that does not move would be asked for, for ever.
    more = found.get("more") is True and place > since
    return values.result({**found, "execId": exec_id}), place, more


def executions(sandbox_id: str | None, state: str | None, after: str) -> Flow[Page]:
    """A part of the list."""
    query = {"sandbox": sandbox_id, "state": state, "after": after or None, "limit": PAGE}
    answer = yield get("execs", query=query)
    return page(answer, values.result)


def write_input(exec_id: str, data: bytes, *, eof: bool) -> Flow[None]:
    """Input for a command. Not sent twice: it would read it twice."""
    body: dict[str, object] = {"dataBase64": base64.b64encode(data).decode(), "eof": eof}
    yield post("execs", exec_id, "stdin", body=body)


def signal(exec_id: str, name: str) -> Flow[None]:
    """A signal for the command itself."""
    yield post("execs", exec_id, "signal", body={"signal": name})


def resize(exec_id: str, rows: int, columns: int) -> Flow[None]:
    """Another size for its terminal."""
    yield post("execs", exec_id, "resize", body={"rows": rows, "cols": columns}, again=True)


def kill(exec_id: str) -> Flow[Result]:
    """End all of its processes."""
    answer = yield post("execs", exec_id, "kill", again=True)
    return values.result(document(answer))


# --- files


def where(sandbox_id: str, verb: str, name: str, **more: object) -> str:
    """The address of a file."""
    return path("sandboxes", sandbox_id, *verb.split("/"), query={"path": name, **more})


def read(sandbox_id: str, name: str) -> Call:
    """The content of a file."""
    target = where(sandbox_id, "files", name)
    return Call(method="GET", path=target, accept="*/*", again=True)


def write(sandbox_id: str, name: str, data: bytes, mode: int | None) -> Call:
    """Replace a file."""
    shown = None if mode is None else f"{mode:04o}"
    return Call(
        method="PUT", path=where(sandbox_id, "files", name, mode=shown), body=data,
        headers=(("Content-Type", BYTES),), again=True,
    )  # fmt: skip


def remove(sandbox_id: str, name: str, *, recursive: bool) -> Flow[None]:
    """Remove a file or a directory."""
    target = where(sandbox_id, "files", name, recursive="true" if recursive else None)
    yield Call(method="DELETE", path=target)


def listing(sandbox_id: str, name: str, depth: int) -> Flow[Listing]:
    """What is below a directory."""
    target = where(sandbox_id, "files/list", name, depth=depth)
    answer = yield Call(method="GET", path=target, again=True)
    found = values.members(document(answer), "list")
    items: list[Entry] = [values.entry(one) for one in found.get("items") or ()]
    return values.Listing(entries=tuple(items), truncated=found.get("truncated") is True)


def entry(sandbox_id: str, name: str, *, make: bool) -> Flow[Entry]:
    """What is known of a file; or a directory, made with its parents."""
    target = where(sandbox_id, "files/directory" if make else "files/stat", name)
    answer = yield Call(method="POST" if make else "GET", path=target, again=True)
    return values.entry(document(answer))


def archive(sandbox_id: str, name: str) -> Call:
    """A tree as a tar."""
    target = where(sandbox_id, "archive", name)
    return Call(method="GET", path=target, accept="*/*", again=True)


def unpack(sandbox_id: str, name: str) -> Call:
    """A tar into a directory."""
    target = where(sandbox_id, "archive", name)
    return Call(method="PUT", path=target, headers=(("Content-Type", TAR),))


# --- about


def whoami() -> Flow[dict[str, Any]]:
    """Who we are to the service, our limits and what we use."""
    answer = yield get("whoami")
    return values.members(document(answer), "identity")


def policy() -> Flow[dict[str, Any]]:
    """What the service allows."""
    answer = yield get("policy")
    return values.members(document(answer), "policy")


def check(options: SandboxOptions) -> Flow[dict[str, Any]]:
    """What would become of a wish; nothing is made."""
    answer = yield post("policy", "check", body=sandbox_body(options), again=True)
    return values.members(document(answer), "verdict")


def audit(chosen: Mapping[str, object]) -> Flow[Page]:
    """Lines of the audit."""
    answer = yield get("audit", query=chosen)
    return page(answer, lambda line: values.members(line, "line"))


def any_call(method: str, target: str, body: object | None) -> Flow[object]:
    """Whatever else the service offers."""
    sent = b"" if body is None else json.dumps(body).encode()
    headers = () if body is None else (("Content-Type", JSON),)
    answer = yield Call(
        method=method, path=target, body=sent, headers=headers, again=method in ("GET", "HEAD")
    )
    return document(answer)
