"""Secrets that stay outside: entries of the user's policy file, and what the command gets instead.

Pure. A command gets a placeholder; the proxy puts the value in its place, in one header, for one
host. Only the user's own file may have such entries: an entry makes us read what it names.
"""

from __future__ import annotations

from ..errors import PolicyError
from ..record import Record
from .model import CONTROLLED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from .model import Policy
    from .network import Egress

HTTPS_PORT = 443
# Where the value comes from.
ENV, FILE, COMMAND = "env", "file", "command"
KEYS = (
    "name", "host", "header", "format", ENV, FILE, COMMAND, "variable", "base-url", "base-path",
)  # fmt: skip
TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
# What frames a request is written by the proxy itself.
FRAMING = frozenset((
    "host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer",
    "keep-alive", "expect",
))  # fmt: skip

# The first port for base URLs, on the loopback inside; the proxy's own is below.
FIRST_BASE_PORT = 3129
# Where the certificates are inside, for programs that let a variable name them.
BUNDLE = "/run/agent-sandbox/ca.pem"
BUNDLE_FILE = "ca.pem"
CA_VARIABLES = (
    "SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT",
    "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "CARGO_HTTP_CAINFO", "DENO_CERT",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE", "NIX_SSL_CERT_FILE", "BUNDLE_SSL_CA_CERT",
    "npm_config_cafile",
)  # fmt: skip

MIN_VALUE = 8
MAX_VALUE = 8192
# Enough that nobody guesses it, and that it is in no other text by chance.
RANDOM_CHARACTERS = 24
# What tools look at before they take a key. Public, and so no part of the secret.
PREFIXES = (
    "sk-ant-api03-", "sk-ant-oat01-", "sk-ant-", "sk-proj-", "sk-or-v1-", "sk-", "github_pat_",
    "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "glpat-", "xoxb-", "xoxp-", "xapp-", "hf_", "npm_",
    "pypi-", "gsk_", "r8_", "pplx-", "AIza", "AKIA", "ASIA", "dckr_pat_", "dop_v1_", "tvly-",
)  # fmt: skip
HEX = "0123456789abcdef"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


class Secret(Record):
    """One entry: where the value is, and the only place where it may go."""

    name: str
    host: str
    port: int
    header: str
    # How the value stands in the header; empty: as the command wrote the placeholder.
    format: str
    # ENV, FILE or COMMAND, and a name, a path or an argument vector.
    kind: str
    origin: tuple[str, ...]
    variable: str
    # The variable that leads to a plain listener inside, and the path below it; or empty.
    base_url: str = ""
    base_path: str = ""
    where: str = ""
    # The listener's port, once it is known.
    base_port: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """Files that hold the value."""
        return self.origin if self.kind == FILE else ()


# --- from a policy file


def decode(entries: object, where: str) -> tuple[Secret, ...]:
    """Every `[[secret]]` of a file."""
    if not isinstance(entries, (list, tuple)):
        raise _bad("secret", where, "must be [[secret]] tables")
    found = tuple(_entry(one, where) for one in entries)
    for field in ("name", "variable", "base_url"):
        used = [value for one in found if (value := getattr(one, field))]
        again = {value for value in used if used.count(value) > 1}
        if again:
            key = field.replace("_", "-")
            raise _bad("secret", where, f"{key} = '{min(again)}' stands there twice")
    return found


def _entry(table: object, where: str) -> Secret:
    if not isinstance(table, dict):
        raise _bad("secret", where, "must be [[secret]] tables")
    unknown = [str(key) for key in table if key not in KEYS]
    if unknown:
        raise _bad("secret", where, f"unknown key '{unknown[0]}'", "known: " + ", ".join(KEYS))
    name = _text(table, "name", where)
    if not all(c.isalnum() or c in "-_." for c in name):
        raise _bad("secret.name", where, "must be a name of letters, digits, '-' and '_'")
    at = f"{where} '{name}'"
    host, port = _host(_text(table, "host", at), at)
    kind, origin = _origin(table, at)
    base_url = _variable(table, "base-url", at) if "base-url" in table else ""
    return Secret(
        name=name, host=host, port=port, header=_header(_text(table, "header", at), at),
        format=_format(table, at), kind=kind, origin=origin,
        variable=_variable(table, "variable", at), base_url=base_url,
        base_path=_base_path(table, at, base_url), where=where,
    )  # fmt: skip


def _text(table: Mapping[str, object], key: str, where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value or not value.isascii() or not value.isprintable():
        raise _bad(f"secret.{key}", where, "must be a text of printable ASCII")
    return value


def _host(text: str, where: str) -> tuple[str, int]:
    from .endpoints import EVERY_PORT, NAME, parse

    rule = parse(text, where)
    if rule.kind != NAME or rule.ports == EVERY_PORT:
        # A value that goes to whoever has a name below a suffix is nobody's secret.
        raise _bad("secret.host", where, "must be one name, with a port or without")
    return rule.host, rule.ports[0] if rule.ports else HTTPS_PORT


def _header(text: str, where: str) -> str:
    if not TOKEN.issuperset(text) or text.lower() in FRAMING or text.lower().startswith("proxy-"):
        raise _bad("secret.header", where, "must be a header such as x-api-key or Authorization")
    return text.lower()


def _format(table: Mapping[str, object], where: str) -> str:
    if "format" not in table:
        return ""
    text = _text(table, "format", where)
    if text.count("{}") != 1 or text.strip() != text:
        raise _bad("secret.format", where, "must have {} in it once, as in 'Bearer {}'")
    return text


def _origin(table: Mapping[str, object], where: str) -> tuple[str, tuple[str, ...]]:
    given = [kind for kind in (ENV, FILE, COMMAND) if kind in table]
    if len(given) != 1:
        raise _bad("secret", where, "needs exactly one of env, file and command")
    kind, value = given[0], table[given[0]]
    if kind == ENV:
        return kind, (_variable(table, ENV, where),)
    if kind == FILE:
        if not isinstance(value, str) or not value.startswith(("/", "~/")) or "\0" in value:
            raise _bad("secret.file", where, "must be a path that begins with / or ~/")
        return kind, (value,)
    words = tuple(value) if isinstance(value, (list, tuple)) else ()
    if not words or not all(isinstance(w, str) and "\0" not in w for w in words) or not words[0]:
        raise _bad("secret.command", where, 'must be a list such as ["pass", "show", "x"]')
    return kind, words


def _variable(table: Mapping[str, object], key: str, where: str) -> str:
    from .environment import OURS

    name = _text(table, key, where)
    if not name.replace("_", "a").isalnum() or name[0].isdigit() or name in OURS:
        raise _bad(f"secret.{key}", where, "must be the name of a variable")
    return name


def _base_path(table: Mapping[str, object], where: str, base_url: str) -> str:
    if "base-path" not in table:
        return ""
    text = _text(table, "base-path", where)
    if not base_url or not text.startswith("/") or " " in text:
        raise _bad("secret.base-path", where, "must be a path such as /v1, beside a base-url")
    return text


def _bad(key: str, where: str, problem: str, hint: str = "") -> PolicyError:
    # Never the value: people put a secret itself where its name belongs.
    return PolicyError(
        f"cannot use {key} in {where}: {problem}",
        hint=hint or "see the documentation: docs/network.md, 'Secrets'",
        code="bad-secret",
    )


# --- in a plan


def active(
    policy: Policy, egress: Egress | None, caller: Mapping[str, str], notices: list[str]
) -> tuple[Secret, ...]:
    """The secrets that a run can use: those of hosts that its rules allow. Others are not read."""
    from .network import capture, decide

    secrets = [s.value for s in policy.secrets if isinstance(s.value, Secret)]
    if egress is None:
        if policy.network.value not in (*CONTROLLED, "off"):
            notices += [
                f"secret '{one.name}' ({one.where}) is not used: with network = on there is no "
                f"proxy, so the command gets no {one.variable}"
                for one in secrets
            ]
        return ()
    allowed = [one for one in secrets if decide(egress, one.host, one.port).allowed]
    unset = [
        one for one in allowed if one.kind == ENV and not caller.get(one.origin[0], "").strip()
    ]
    notices += [f"secret '{one.name}' is not used: ${one.origin[0]} is not set" for one in unset]
    allowed = [one for one in allowed if one not in unset]
    taken = {port for _, port in capture(egress)}
    free = (port for port in range(FIRST_BASE_PORT, 1 << 16) if port not in taken)
    return tuple(one.replace(base_port=next(free)) if one.base_url else one for one in allowed)


def intercepted(secrets: Iterable[Secret]) -> bool:
    """Whether TLS of some host has to be opened."""
    return any(not one.base_url for one in secrets)


def put_in(
    env: dict[str, str], why: dict[str, str], policy: Policy, secrets: Sequence[Secret]
) -> None:
    """Take the caller's own values out of the environment, and put stand-ins there."""
    for setting in policy.secrets:
        one = setting.value
        if isinstance(one, Secret):
            for name in (one.variable, *(one.origin if one.kind == ENV else ())):
                env.pop(name, None)
                why.pop(name, None)
    for one in secrets:
        said = f"secret {one.name} ({one.where})"
        env[one.variable], why[one.variable] = f"(placeholder of secret {one.name})", said
        if one.base_url:
            env[one.base_url] = f"http://127.0.0.1:{one.base_port}{one.base_path}"
            why[one.base_url] = said
    if intercepted(secrets):
        env.update(dict.fromkeys(CA_VARIABLES, BUNDLE))
        why.update(dict.fromkeys(CA_VARIABLES, "secrets: certificates of the proxy"))


# --- values


def problem_of(value: str) -> str:
    """Why a text cannot be the value of a secret; empty if it can. Never tells the text."""
    if not value.isascii() or not value.isprintable():
        return "it is not one line of printable ASCII"
    if not MIN_VALUE <= len(value) <= MAX_VALUE:
        return f"it has {len(value)} characters, not {MIN_VALUE} to {MAX_VALUE}"
    return ""


def placeholder(value: str, choose: Callable[[str], str]) -> str:
    """A text of the same shape: prefix, length and alphabet. `choose` takes one character."""
    prefix = next((p for p in PREFIXES if value.startswith(p)), "")
    rest = value[len(prefix) :]
    plain = LETTERS + "".join(c for c in "-_" if c in rest)
    alphabet = HEX if set(rest) <= set(HEX) else plain
    return prefix + "".join(choose(alphabet) for _ in range(max(len(rest), RANDOM_CHARACTERS)))


def exposed(value: str, env: Mapping[str, str], argv: Sequence[str]) -> str:
    """Where the command would see a value all the same; empty if nowhere."""
    for name, text in sorted(env.items()):
        if value in text:
            return f"the variable {name}, which the command gets, holds it"
    return "the command's arguments hold it" if any(value in word for word in argv) else ""
