"""The table of routes: what may be asked, by whom, with what, and what comes back.

Dispatch, the OpenAPI document and the tests are made of it.
"""

from __future__ import annotations

from ..values import ADMIN, AUDIT, CREATE, EXEC, FILES
from . import about, answers, execs, files, identity, inputs, operations, sandboxes
from .call import BYTES, EVENTS, LARGE, TAR, Answer, Param, Route
from .schema import Anything, Flag, Map, Shape, Text, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .call import Handler
    from .schema import Kind

NOTHING = Shape({}, help="Nothing; an empty object is fine.")
# Refusals of a wish for a sandbox, and of one for a command.
WISHES = (
    "IMAGE_NOT_ALLOWED", "RUNTIME_NOT_ALLOWED", "NETWORK_NOT_ALLOWED", "TEMPLATE_NOT_ALLOWED",
    "LIMIT_EXCEEDED", "LIMIT_NOT_ENFORCEABLE", "UNSUPPORTED", "QUOTA_EXCEEDED",
    "BACKEND_UNAVAILABLE", "DISK_FULL",
)  # fmt: skip
STARTS = ("LIMIT_EXCEEDED", "WRONG_STATE", "BUSY", "QUOTA_EXCEEDED", "BACKEND_UNAVAILABLE",
          "DISK_FULL")  # fmt: skip
TOUCHES = ("WRONG_STATE", "UNSUPPORTED", "BACKEND_UNAVAILABLE")

AFTER = Param(kind=Text(least=1, most=256, pattern="[A-Za-z0-9_-]+"),
              help="`next` of the part before.")  # fmt: skip
LIMIT = Param(kind=whole(1, sandboxes.MOST_ITEMS), help="Items in this part.")
OWNER = Param(kind=Text(least=1, most=64), help="Only this agent's; for admins.")
ORDER = Param(kind=Text(choices=("asc", "desc")), help="desc: the newest first.")
KEY = Param(
    kind=Text(least=1, most=255, pattern="[\\x21-\\x7e](?:[\\x20-\\x7e]*[\\x21-\\x7e])?"),
    help="The same key with the same body is the same request; with another body: 409.",
)  # fmt: skip
LAST = Param(kind=Text(pattern="[0-9]{0,15}", most=15), help="The id of the last event seen.")
PATH = Param(kind=inputs.PATH, help="Absolute, or below /workspace.", needed=True)
WHERE = Param(kind=inputs.PATH, help="A directory; /workspace if left out.")
TIMES = Text(pattern=inputs.MOMENT, most=40, says="must be a time such as 2030-01-02T03:04:05Z")
SANDBOX_STATE = Param(kind=answers.SANDBOX.fields["state"], help="Only those in this state.")
EXEC_STATE = Param(kind=answers.EXECUTION_FIELDS["state"], help="Only those in this state.")


def ok(kind: Kind | None, help: str, status: int = 200) -> dict[int, Answer]:
    """The one answer that is not a refusal."""
    return {status: Answer(help=help, kind=kind)}


GONE = ok(None, "Done.", 204)
FOUND = ok(answers.SANDBOX, "The sandbox.")
ENDS: dict[int, Answer] = {
    200: Answer(
        help="It has ended. As events: start, stdout, stderr, retry, exit, error; the id of an "
        "event is the offset behind it. `data` is text, `dataBase64` bytes that are none. After "
        "retry, output is that of the second start.",
        kind=answers.RESULT, media=(EVENTS,),
    ),
    202: Answer(help="It runs in the background.", kind=answers.EXECUTION),
}  # fmt: skip

S, X, F = "/v1/sandboxes/{sandboxId}", "/v1/execs/{execId}", "/v1/sandboxes/{sandboxId}/files"


def route(  # noqa: PLR0917 - columns of a table
    method: str, path: str, handler: Handler, summary: str, tag: str, action: str, **more: object
) -> Route:
    """A row; its name in the document is the handler's own."""
    name = f"{handler.__module__.rpartition('.')[2]}_{handler.__name__}"
    return Route(
        method=method, path=path, handler=handler, summary=summary, tag=tag, action=action,
        **{"name": name, **more},  # type: ignore[arg-type]
    )  # fmt: skip


def _sandboxes() -> tuple[Route, ...]:
    own = (CREATE,)
    renew = {"scopes": own, "body": inputs.RENEW, "answers": FOUND,
             "codes": ("LIMIT_EXCEEDED", *TOUCHES)}  # fmt: skip
    still = {"scopes": own, "body": NOTHING, "optional": True, "answers": FOUND, "codes": TOUCHES}
    return (
        route("POST", "/v1/sandboxes", sandboxes.create, "Make a sandbox", "sandboxes",
              "sandbox.create", scopes=own, body=inputs.CREATE, optional=True, most=LARGE,
              makes=True, headers={"Idempotency-Key": KEY}, codes=(*WISHES, "IDEMPOTENCY_CONFLICT"),
              answers=ok(answers.SANDBOX, "It is ready.", 201)),
        route("GET", "/v1/sandboxes", sandboxes.listed, "List sandboxes", "sandboxes",
              "sandbox.list", answers=ok(answers.SANDBOXES, "A part of the list."),
              query={"state": SANDBOX_STATE, "owner": OWNER, "after": AFTER, "limit": LIMIT,
                     "order": ORDER,
                     "metadata": Param(kind=Text(most=4096, pattern="[^\\x00=&,]+=[^\\x00&,]*"
                                                 "(?:[&,][^\\x00=&,]+=[^\\x00&,]*)*"),
                                       help="name=value pairs, joined by commas.")}),
        route("GET", S, sandboxes.find, "Look at a sandbox", "sandboxes", "sandbox.get",
              answers=FOUND),
        route("DELETE", S, sandboxes.delete, "End a sandbox", "sandboxes", "sandbox.delete",
              scopes=own, answers=GONE, codes=TOUCHES),
        route("POST", f"{S}/renew", sandboxes.renew, "Let it live longer", "sandboxes",
              "sandbox.renew", **renew),
        route("POST", f"{S}/timeout", sandboxes.renew, "As renew, by E2B's name", "sandboxes",
              "sandbox.renew", **renew, name="sandboxes_timeout"),
        route("POST", f"{S}/renew-expiration", sandboxes.renew, "As renew, by OpenSandbox's name",
              "sandboxes", "sandbox.renew", **renew, name="sandboxes_renew_expiration"),
        route("POST", f"{S}/pause", sandboxes.pause, "Stop its processes where they are",
              "sandboxes", "sandbox.pause", **still),
        route("POST", f"{S}/resume", sandboxes.resume, "Let them go on", "sandboxes",
              "sandbox.resume", **still),
        route("PATCH", f"{S}/metadata", sandboxes.set_metadata, "Change its labels", "sandboxes",
              "sandbox.metadata", scopes=own, body=inputs.METADATA_CHANGE, answers=FOUND,
              codes=TOUCHES),
        route("GET", f"{S}/metrics", sandboxes.usage, "What it uses now", "sandboxes",
              "sandbox.usage", answers=ok(answers.RESOURCES, "What is used."), codes=TOUCHES),
    )  # fmt: skip


def _execs() -> tuple[Route, ...]:
    own = (EXEC,)
    part = {"after": AFTER, "limit": LIMIT, "state": EXEC_STATE, "owner": OWNER, "order": ORDER}
    lists = {"scopes": own, "answers": ok(answers.EXECUTIONS, "A part of the list.")}
    acts = {"scopes": own, "answers": GONE, "codes": TOUCHES}
    return (
        route("POST", f"{S}/exec", execs.execute, "Run a command", "execs", "exec.start",
              scopes=own, body=inputs.EXEC, most=LARGE, answers=ENDS,
              codes=(*STARTS, "NOT_ACCEPTABLE")),
        route("POST", "/v1/run", execs.run, "Run a command in a sandbox of its own", "execs",
              "run", scopes=(CREATE, EXEC), body=inputs.RUN, most=LARGE, answers=ENDS,
              headers={"Idempotency-Key": KEY},
              codes=(*WISHES, *STARTS, "IDEMPOTENCY_CONFLICT", "NOT_ACCEPTABLE")),
        route("GET", f"{S}/execs", execs.listed, "Commands of a sandbox", "execs", "exec.list",
              **lists, query=part, name="execs_of_sandbox"),
        route("GET", "/v1/execs", execs.listed, "List commands", "execs", "exec.list", **lists,
              query={**part, "sandbox": Param(kind=Text(least=1, most=64), help="Its id.")}),
        route("GET", X, execs.find, "How far it is, with its output", "execs", "exec.get",
              scopes=own, answers=ok(answers.RESULT, "The execution.")),
        route("GET", f"{X}/logs", execs.logs, "Its output so far, without waiting", "execs",
              "exec.logs", scopes=own, answers=ok(answers.LOGS, "What came behind `since`."),
              query={"since": Param(kind=whole(), help="`next` of the part before."),
                     "limit": Param(kind=whole(1, execs.MOST_PART), help="Bytes.")}),
        route("GET", f"{X}/events", execs.events, "Follow it, as Server-Sent Events", "execs",
              "exec.events", scopes=own, headers={"Last-Event-ID": LAST},
              answers={200: Answer(help="Events until its end.", media=(EVENTS,))}),
        route("GET", f"{X}/ws", execs.terminal, "Its terminal, as a WebSocket", "execs",
              "exec.attach", scopes=own, websocket=True, codes=("UPGRADE_REQUIRED",),
              query={"since": Param(kind=whole(), help="An offset of its output.")},
              answers={101: Answer(help="Binary: bytes of the terminal. Text: JSON with `type` "
                                        "resize, signal, eof, input; retry, exit, error: ours.")}),
        route("POST", f"{X}/stdin", execs.stdin, "Give it input", "execs", "exec.stdin", **acts,
              body=inputs.STDIN, most=LARGE),
        route("POST", f"{X}/signal", execs.signal, "Signal it", "execs", "exec.signal", **acts,
              body=inputs.SIGNAL),
        route("POST", f"{X}/resize", execs.resize, "Resize its terminal", "execs", "exec.resize",
              **acts, body=inputs.RESIZE),
        route("POST", f"{X}/kill", execs.kill, "End all of its processes", "execs", "exec.kill",
              scopes=own, body=NOTHING, optional=True, codes=TOUCHES,
              answers=ok(answers.RESULT, "Its end.")),
        route("DELETE", X, execs.forget, "End it, and forget its result", "execs", "exec.forget",
              **acts),
    )  # fmt: skip


def _files() -> tuple[Route, ...]:
    own, path = (FILES,), {"path": PATH}
    entry = ok(answers.ENTRY, "The entry.")
    codes = ("CONFLICT", "FORBIDDEN", *TOUCHES)
    writes = (*codes, "DISK_FULL", "TOO_LARGE", "LENGTH_REQUIRED", "LIMIT_EXCEEDED")
    return (
        route("GET", F, files.get, "Read a file", "files", "file.get", scopes=own, query=path,
              codes=codes, headers={"Range": Param(kind=Text(most=64, pattern="bytes=[0-9]{1,15}-"),
                                                   help="From this byte on.")},
              answers={200: Answer(help="Its bytes.", media=(BYTES,)),
                       206: Answer(help="Its bytes, from the one asked for.", media=(BYTES,))}),
        route("PUT", F, files.put, "Replace a file", "files", "file.put", scopes=own, raw=BYTES,
              query={**path, "mode": Param(kind=inputs.MODE, help="Octal; 644 if left out.")},
              codes=writes, answers=entry),
        route("DELETE", F, files.delete, "Remove a file or directory", "files", "file.delete",
              scopes=own, codes=codes, answers=GONE,
              query={**path, "recursive": Param(kind=Flag(), help="With all that is below.")}),
        route("GET", f"{F}/stat", files.stat, "Look at a file", "files", "file.stat", scopes=own,
              query=path, codes=codes, answers=entry),
        route("POST", f"{F}/directory", files.make, "Make a directory", "files", "file.make",
              scopes=own, query=path, body=NOTHING, optional=True, codes=writes, answers=entry),
        route("GET", f"{F}/list", files.listed, "List a directory", "files", "file.list",
              scopes=own, codes=codes, answers=ok(answers.LISTING, "What is below."),
              query={"path": WHERE, "depth": Param(kind=whole(1, 64), help="1: no deeper."),
                     "limit": Param(kind=whole(1, files.MOST_LISTED), help="Entries.")}),
        route("GET", f"{S}/archive", files.pack, "A tree as tar", "files", "file.pack", scopes=own,
              query={"path": WHERE}, codes=codes,
              answers={200: Answer(help="An uncompressed tar.", media=(TAR,))}),
        route("PUT", f"{S}/archive", files.unpack, "Unpack a tar", "files", "file.unpack",
              scopes=own, raw=TAR, query={"path": WHERE}, codes=writes,
              answers=ok(answers.UNPACKED, "It is unpacked.")),
    )  # fmt: skip


def _about() -> tuple[Route, ...]:
    admin = (ADMIN,)
    named = {"scopes": admin, "codes": ("CONFLICT",)}
    word = Text(least=1, most=128)
    return (
        route("GET", "/v1/whoami", about.whoami, "Who you are, and what you may use", "about",
              "about.whoami", answers=ok(answers.WHOAMI, "You.")),
        route("GET", "/v1/policy", about.policy, "What holds for you", "about", "about.policy",
              answers=ok(answers.POLICY, "Limits, backends, templates.")),
        route("POST", "/v1/policy/check", about.check, "A dry run", "about", "policy.check",
              body=inputs.CHECK, most=LARGE, answers=ok(answers.OUTCOME, "What would happen.")),
        route("GET", "/v1/audit", about.audit, "What has happened", "about", "audit.read",
              scopes=(AUDIT,), answers=ok(answers.AUDIT, "Lines, the newest first."),
              query={"agent": Param(kind=word, help="Only of this agent."),
                     "action": Param(kind=word, help="Only this action; `exec.` for all of exec."),
                     "decision": Param(kind=Text(choices=("allow", "deny")), help="Only these."),
                     "target": Param(kind=word, help="Only about this id."),
                     "since": Param(kind=TIMES, help="From this time on."),
                     "until": Param(kind=TIMES, help="Before this time."),
                     "after": Param(kind=whole(), help="`next` of the part before."),
                     "limit": Param(kind=whole(1, 1000), help="Lines.")}),
        route("GET", "/v1/tokens", identity.tokens, "All tokens", "tokens", "token.list",
              scopes=admin, answers=ok(answers.TOKENS, "Without their secrets.")),
        route("POST", "/v1/tokens", identity.new_token, "Make a token", "tokens", "token.new",
              **named, body=inputs.TOKEN, answers=ok(answers.NEW_TOKEN, "Shown once.", 201)),
        route("DELETE", "/v1/tokens/{tokenName}", identity.revoke_token, "Revoke a token",
              "tokens", "token.revoke", **named, answers=GONE),
        route("POST", "/v1/tokens/{tokenName}/rotate", identity.rotate_token, "A new secret",
              "tokens", "token.rotate", **named, body=inputs.ROTATE, optional=True,
              answers=ok(answers.NEW_TOKEN, "Shown once.")),
        route("POST", "/v1/session", identity.login, "A cookie for a token", "session",
              "session.open", public=True, body=inputs.LOGIN, codes=("UNAUTHENTICATED",),
              answers=ok(answers.SESSION, "You are in.")),
        route("GET", "/v1/session", identity.session, "Who is logged in", "session", "session.get",
              answers=ok(answers.SESSION, "You.")),
        route("DELETE", "/v1/session", identity.logout, "Log out", "session", "session.close",
              answers=GONE),
    )  # fmt: skip


def _operations() -> tuple[Route, ...]:
    page = {"public": True, "hidden": True, "always": True}
    text = {200: Answer(help="As Prometheus reads it.", media=("text/plain",))}
    mcp = {"hidden": True, "raw": "application/json"}
    return (
        route("GET", "/healthz", operations.healthz, "Whether it lives", "operations", "health",
              public=True, always=True, answers=ok(answers.HEALTH, "It does.")),
        route("GET", "/readyz", operations.readyz, "Whether it takes work", "operations", "ready",
              public=True, always=True,
              answers={200: Answer(help="It does.", kind=answers.READY),
                       503: Answer(help="It does not.", kind=answers.READY)}),
        route("GET", "/metrics", operations.metrics, "Measurements", "operations", "metrics",
              scopes=(AUDIT,), always=True, answers=text),
        route("GET", "/openapi.json", operations.document, "This document", "operations",
              "openapi", public=True, always=True,
              answers=ok(Map(Anything(), keys="[^\\x00]*"), "OpenAPI 3.1.")),
        route("GET", "/", operations.page, "The dashboard", "operations", "dashboard", **page),
        route("GET", "/assets/{asset}", operations.page, "The dashboard's files", "operations",
              "dashboard", **page, name="operations_asset"),
        *(route(method, "/mcp", operations.mcp, "The Model Context Protocol", "operations", "mcp",
                **mcp, name=f"mcp_{method.lower()}") for method in ("GET", "POST", "DELETE")),
    )  # fmt: skip


ROUTES: tuple[Route, ...] = (*_sandboxes(), *_execs(), *_files(), *_about(), *_operations())


# --- finding one


class Node:
    """Routes by segments; `below[None]` takes any."""

    __slots__ = ("below", "methods", "name")

    def __init__(self) -> None:
        self.below: dict[str | None, Node] = {}
        self.methods: dict[str, Route] = {}
        self.name = ""


def _tree(routes: tuple[Route, ...]) -> Node:
    root = Node()
    for row in routes:
        node = root
        for segment in row.path[1:].split("/") if row.path != "/" else ():
            key = None if segment.startswith("{") else segment
            node = node.below.setdefault(key, Node())
            if key is None:
                node.name = segment[1:-1]
        node.methods[row.method] = row
    return root


TREE = _tree(ROUTES)


def find(path: str, tree: Node = TREE) -> tuple[dict[str, Route], dict[str, str]] | None:
    """The routes at a path by method, and the ids in it; None: nothing is there."""
    node, ids = tree, {}
    for segment in path[1:].split("/") if path != "/" else ():
        found = node.below.get(segment)
        if found is None:
            found = node.below.get(None)
            if found is None:
                return None
            ids[found.name] = segment
        node = found
    return (node.methods, ids) if node.methods else None
