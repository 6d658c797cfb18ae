"""Files that an agent inside and the same agent outside both write: what may travel which way.

Pure. The file inside is hostile. Three versions of it are compared key by key: the host's as it was
when both were last in step, the host's now, and the one inside. What the host has changed goes in.
What the inside has changed goes out only if its key is listed here and its value has the listed
shape: logins and counters. Whatever would make the host run or trust something (MCP servers, hooks,
allowed tools, accepted dialogs, addresses of servers) is in no list.
"""

from __future__ import annotations

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Shape = Callable[[object], bool]
    # A document with its keys as paths: one name, or ("projects", DIRECTORY, name).
    Flat = dict[tuple[str, ...], object]

LONGEST_TEXT = 16_384
MOST_ENTRIES = 1000
DEEPEST = 4
# Of one value that goes out, in characters: what the sandbox can add to the host's file is bounded.
HEAVIEST = 65_536
# Of a whole document inside. Deeper, its indented form is many times as large.
DEEPEST_INSIDE = 20
# Beyond it, numbers are not exact in JavaScript.
LARGEST = 2**53
# What a token, an account or a date consists of. Not "!" and "$": pi runs a key that begins so.
PLAIN = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._~+/=:|@, -")
# Names that mean something to JavaScript itself.
MAGIC = ("__proto__", "prototype", "constructor")
PROJECTS = "projects"
# The user is told when one of these was changed inside; of all others a usual run changes some.
TOLD = ("mcpServers", "hooks", "apiKeyHelper", "env", "allowedTools")
_NONE = object()


def flag(value: object) -> bool:
    """True or false."""
    return isinstance(value, bool)


def number(value: object) -> bool:
    """A number that JavaScript has exactly."""
    exact = isinstance(value, (int, float)) and not isinstance(value, bool)
    return exact and -LARGEST < value < LARGEST  # type: ignore[operator]


def word(value: object) -> bool:
    """A token, name or date."""
    return isinstance(value, str) and len(value) <= LONGEST_TEXT and PLAIN.issuperset(value)


def data(value: object, depth: int = DEEPEST) -> bool:
    """Words, numbers and flags, in tables and lists that are not deep."""
    if value is None or flag(value) or number(value) or word(value):
        return True
    if not depth or not isinstance(value, (dict, list)) or len(value) > MOST_ENTRIES:
        return False
    if isinstance(value, list):
        return all(data(item, depth - 1) for item in value)
    return all(
        word(name) and name not in MAGIC and data(item, depth - 1) for name, item in value.items()
    )


def _entry(types: tuple[str, ...], *fields: str) -> Shape:
    """A login of one provider: of a known type, with known fields alone."""

    def fits(value: object) -> bool:
        return (
            isinstance(value, dict)
            and value.get("type") in types
            and all(name in fields and (item is None or word(item) or number(item))
                    for name, item in value.items())
        )  # fmt: skip

    return fits


def _one_of(*words: str) -> Shape:
    return lambda value: isinstance(value, str) and value in words


def _github_user(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"host", "login"}
        and value.get("host") == "https://github.com"
        and word(value.get("login"))
    )


def _github_users(value: object) -> bool:
    return isinstance(value, list) and len(value) < MOST_ENTRIES and all(map(_github_user, value))


def _github_tokens(value: object) -> bool:
    return (
        isinstance(value, dict)
        and len(value) < MOST_ENTRIES
        and all(
            name.startswith("https://github.com:") and word(name) and word(token)
            for name, token in value.items()
        )
    )


class Keys(Record):
    """What may travel out of one kind of file."""

    # Name → shape; "*" for every other name.
    top: Mapping[str, Shape]
    # The same for this project's entry below "projects". Other entries do not travel, either way.
    project: Mapping[str, Shape] = {}
    # Whether only what `top` names goes in, too.
    closed: bool = False
    # The agent's own lock: a directory of this ending beside the file.
    lock: str = ""
    # Where a document says how new it is: the newer login wins where both sides have changed.
    newer: tuple[str, ...] = ()


_NUMBERS = (
    "lastCost", "lastAPIDuration", "lastAPIDurationWithoutRetries", "lastToolDuration",
    "lastDuration", "lastLinesAdded", "lastLinesRemoved", "lastTotalInputTokens",
    "lastTotalOutputTokens", "lastTotalCacheCreationInputTokens",
    "lastTotalCacheReadInputTokens", "lastTotalWebSearchRequests", "projectOnboardingSeenCount",
    "exampleFilesGeneratedAt",
)  # fmt: skip

TABLES: dict[str, Keys] = {
    "claude": Keys(
        top={
            "oauthAccount": data, "primaryApiKey": word, "userID": word, "anonymousId": word,
            "hasCompletedOnboarding": flag, "lastOnboardingVersion": word,
            "hasAvailableSubscription": flag, "claudeCodeFirstTokenDate": word,
            "firstStartTime": word, "numStartups": number, "promptQueueUseCount": number,
            "subscriptionNoticeCount": number, "tipsHistory": data, "theme": word,
            "lastReleaseNotesSeen": word, "changelogLastFetched": number,
            "hasUsedBackslashReturn": flag, "hasSeenTasksHint": flag,
        },
        project={
            **dict.fromkeys(_NUMBERS, number), "lastSessionId": word, "lastModelUsage": data,
            "hasCompletedProjectOnboarding": flag,
        },
        lock=".lock",
    ),
    # The file holds tokens of MCP servers and secrets of plugins as well (mcpOAuth): not shown.
    "claude-login": Keys(
        top={"claudeAiOauth": data, "organizationUuid": word},
        closed=True,
        newer=("claudeAiOauth", "expiresAt"),
    ),
    "codex-login": Keys(
        top={
            "OPENAI_API_KEY": lambda value: value is None or word(value), "auth_mode": word,
            "tokens": data, "last_refresh": word,
        },
        newer=("last_refresh",),
    ),
    # Not "wellknown", whose host may name programs, nor any field with an address.
    "opencode-login": Keys(
        top={
            "*": _entry(
                ("oauth", "api"), "type", "key", "refresh", "access", "expires", "accountId"
            )
        },
    ),
    "pi-login": Keys(
        top={
            "*": _entry(
                ("oauth", "api_key"), "type", "key", "refresh", "access", "expires", "accountId",
                "projectId", "email",
            )
        },
        lock=".lock",
    ),
    "gemini-login": Keys(
        top=dict.fromkeys(
            ("access_token", "refresh_token", "scope", "token_type", "id_token", "expiry_date"),
            lambda value: word(value) or number(value),
        ),
        newer=("expiry_date",),
    ),
    "gemini-accounts": Keys(top={"active": data, "old": data}),
    # An endpoint of somebody else would be sent the host's prompts, and answer with commands.
    "qwen-login": Keys(
        top={
            "access_token": word, "refresh_token": word, "token_type": word, "expiry_date": number,
            "resource_url": _one_of("portal.qwen.ai", "chat.qwen.ai"),
        },
        newer=("expiry_date",),
    ),
    "copilot-login": Keys(
        top={
            "loggedInUsers": _github_users, "lastLoggedInUser": _github_user,
            "copilotTokens": _github_tokens,
            # As older versions spell them.
            "logged_in_users": _github_users, "last_logged_in_user": _github_user,
            "copilot_tokens": _github_tokens,
        },
    ),
}  # fmt: skip


class Merged(Record):
    """The three versions after a step."""

    host: dict[str, object]
    inside: dict[str, object]
    base: dict[str, object]
    # Names that were changed inside and must not travel, for the user to see.
    kept: tuple[str, ...] = ()


def merge(
    keys: Keys, project: str, *, base: dict[str, object], host: dict[str, object],
    inside: dict[str, object] | None,
) -> Merged:  # fmt: skip
    """One step. `inside` is None where there is no file yet."""
    seen, old = flatten(host, keys, project), flatten(base, keys, project)
    if inside is None:
        shown = build(seen)
        return Merged(host=host, inside=shown, base=shown)
    mine = flatten(inside, keys, project)
    newer = _is_newer(keys, inside, host)
    kept: list[str] = []
    for at in sorted({*seen, *old, *mine}):
        was, out, own = old.get(at, _NONE), seen.get(at, _NONE), mine.get(at, _NONE)
        if own in (was, out) or own is _NONE:
            # Nothing new inside. What was removed there stays removed until the host changes it.
            if out != was:
                _put(mine, at, out)
        elif not travels(keys, at, own) or (len(at) > 1 and not _has_entry(host, at)):
            if out != was:
                _put(mine, at, out)
            elif at[-1] in TOLD and own:
                kept.append(at[-1])
        elif out == was or newer:
            seen[at] = own
        else:
            _put(mine, at, out)
    return Merged(
        host=_written(host, seen), inside=_rebuilt(inside, mine, keys, project),
        base=build(seen), kept=tuple(dict.fromkeys(kept)),
    )  # fmt: skip


def excess(document: Mapping[str, object], project: str) -> str:
    """Why a document of the sandbox is not looked at; empty when it may be.

    Time and memory of a step follow from it, and other programs wait for a step.
    """
    projects = document.get(PROJECTS)
    entry = projects.get(project) if isinstance(projects, dict) else None
    for table in (document, projects, entry):
        if isinstance(table, (dict, list)) and len(table) > MOST_ENTRIES:
            return "too many entries"
    # Level by level: recursion would end before the depth is known.
    level: list[object] = [document]
    for _ in range(DEEPEST_INSIDE + 1):
        level = [
            item
            for held in level
            for item in (held.values() if isinstance(held, dict) else held)  # type: ignore[attr-defined]
            if isinstance(item, (dict, list))
        ]
        if not level:
            return ""
    return "too deep"


def travels(keys: Keys, at: tuple[str, ...], value: object) -> bool:
    """Whether a value may go out to the host."""
    table = keys.project if len(at) > 1 else keys.top
    shape = table.get(at[-1]) or (table.get("*") if at[-1] not in MAGIC and word(at[-1]) else None)
    return shape is not None and shape(value) and _weight(value) <= HEAVIEST


def _weight(value: object) -> int:
    """About how many characters a value takes. Only for what has a shape: it is not deep."""
    if isinstance(value, dict):
        return sum(8 + len(name) + _weight(item) for name, item in value.items())
    if isinstance(value, list):
        return sum(8 + _weight(item) for item in value)
    return len(value) if isinstance(value, str) else 8


def _put(flat: Flat, at: tuple[str, ...], value: object) -> None:
    if value is _NONE:
        flat.pop(at, None)
    else:
        flat[at] = value


def flatten(document: Mapping[str, object], keys: Keys, project: str) -> Flat:
    """What of a document either side may know, by path."""
    found: Flat = {}
    for name, value in document.items():
        if name == PROJECTS and keys.project:
            # Not those of directories around it either: they have tokens of their MCP servers.
            entry = value.get(project) if isinstance(value, dict) else None
            if isinstance(entry, dict):
                found.update({(PROJECTS, project, key): v for key, v in entry.items()})
        elif not keys.closed or name in keys.top:
            found[name,] = value
    return found


def build(flat: Flat) -> dict[str, object]:
    """A document of its paths."""
    return _written({}, flat)


def _written(document: Mapping[str, object], flat: Flat) -> dict[str, object]:
    """A document with values put in; nothing else in it changes."""
    made = dict(document)
    fresh: dict[str, dict[str, object]] = {}
    for at, value in flat.items():
        if len(at) == 1:
            made[at[0]] = value
        else:
            fresh.setdefault(at[1], {})[at[2]] = value
    if fresh:
        # Copied once: the sandbox says how many entries there are.
        held = made.get(PROJECTS)
        entries = dict(held) if isinstance(held, dict) else {}
        for directory, values in fresh.items():
            entry = entries.get(directory)
            entries[directory] = {**(entry if isinstance(entry, dict) else {}), **values}
        made[PROJECTS] = entries
    return made


def _rebuilt(
    inside: Mapping[str, object], flat: Flat, keys: Keys, project: str
) -> dict[str, object]:
    """The file inside: what it had in its order, without what the host has taken away."""
    gone = flatten(inside, keys, project).keys() - flat.keys()
    return _written(_without(inside, gone), flat)


def _without(document: Mapping[str, object], gone: set[tuple[str, ...]]) -> dict[str, object]:
    made = {name: value for name, value in document.items() if (name,) not in gone}
    held = made.get(PROJECTS)
    if isinstance(held, dict) and any(len(at) > 1 for at in gone):
        made[PROJECTS] = {
            directory: {k: v for k, v in entry.items() if (PROJECTS, directory, k) not in gone}
            if isinstance(entry, dict)
            else entry
            for directory, entry in held.items()
        }
    return made


def _has_entry(host: Mapping[str, object], at: tuple[str, ...]) -> bool:
    """Whether the host knows the project: an entry of counters alone would confuse its agent."""
    held = host.get(PROJECTS)
    return isinstance(held, dict) and isinstance(held.get(at[1]), dict)


def _is_newer(keys: Keys, inside: object, host: object) -> bool:
    """Whether the login inside is the newer one."""
    if not keys.newer:
        return False
    for name in keys.newer:
        inside = inside.get(name) if isinstance(inside, dict) else None
        host = host.get(name) if isinstance(host, dict) else None
    if isinstance(inside, (int, float)) and isinstance(host, (int, float)):
        return inside > host
    return isinstance(inside, str) and isinstance(host, str) and inside > host
