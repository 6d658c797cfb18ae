"""Where the API server is and who we are there: a kubeconfig, or a pod's own account. Pure.

Read strictly: what would be ignored might be what keeps a connection safe.
"""

from __future__ import annotations

import base64
import binascii
import os.path
from urllib.parse import urlsplit

from ...errors import UsageError
from ...record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Where a pod finds its account.
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
EXEC_VERSIONS = tuple(f"client.authentication.k8s.io/{v}" for v in ("v1", "v1beta1"))
DEFAULT_NAMESPACE = "default"


class Plugin(Record):
    """A program that makes credentials."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    version: str = EXEC_VERSIONS[0]
    # Whether it is told about the cluster.
    cluster_info: bool = False


class Access(Record):
    """How to reach an API server, and by what we are known there."""

    host: str
    port: int
    tls: bool = True
    # The path that all requests begin with, such as that of a proxy.
    prefix: str = ""
    # The name in its certificate; "": the host.
    server_name: str = ""
    # PEM; "": those that the system trusts.
    authority: str = ""
    namespace: str = DEFAULT_NAMESPACE
    token: str = ""
    # Read again before it is used: it is replaced every hour.
    token_file: str = ""
    certificate: str = ""
    key: str = ""
    plugin: Plugin | None = None


def bad(what: str, hint: str = "") -> UsageError:
    """The words for a mistake."""
    return UsageError(f"cannot use the kubeconfig: {what}", hint=hint, code="bad-kubeconfig")


# --- in a pod


def in_cluster(environ: Mapping[str, str], read: Callable[[str], str]) -> Access:
    """The account of the pod that we run in. `read`: a file as text."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST", ""), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not (port or "443").isdecimal():
        raise UsageError(
            "there is no kubeconfig, and this is not a pod",
            hint="--kubeconfig FILE, or KUBECONFIG", code="bad-kubeconfig",
        )  # fmt: skip
    try:
        authority = read(f"{ACCOUNT}/ca.crt")
        namespace = read(f"{ACCOUNT}/namespace").strip()
        read(f"{ACCOUNT}/token")
    except OSError as error:
        raise bad(
            f"the pod's service account cannot be read: {error.strerror}",
            "automountServiceAccountToken: true in the service's own pod",
        ) from error
    return Access(
        host=host, port=int(port or "443"), authority=authority,
        namespace=namespace or DEFAULT_NAMESPACE, token_file=f"{ACCOUNT}/token",
    )  # fmt: skip


# --- a kubeconfig


def merge(documents: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Several files as one: of two entries of a name the first counts, as kubectl has it."""
    whole: dict[str, object] = {"clusters": {}, "users": {}, "contexts": {}, "current-context": ""}
    for path, document in documents:
        if not isinstance(document, dict):
            raise bad(f"'{path}' is not a mapping")
        base = os.path.dirname(os.path.abspath(path))
        for plural, single in (("clusters", "cluster"), ("users", "user"), ("contexts", "context")):
            held = whole[plural]
            assert isinstance(held, dict)  # noqa: S101 - made above
            for name, entry in _entries(document.get(plural), plural, single).items():
                held.setdefault(name, (base, entry))
        current = document.get("current-context")
        if isinstance(current, str) and not whole["current-context"]:
            whole["current-context"] = current
    return whole


def _entries(listed: object, plural: str, single: str) -> dict[str, dict[str, object]]:
    if listed is None:
        return {}
    if not isinstance(listed, list):
        raise bad(f"{plural} is not a list")
    found: dict[str, dict[str, object]] = {}
    for one in listed:
        name = one.get("name") if isinstance(one, dict) else None
        entry = one.get(single) if isinstance(one, dict) else None
        if not isinstance(name, str) or not isinstance(entry, dict | None):
            raise bad(f"an entry of {plural} has no name, or no {single}")
        found.setdefault(name, {str(key): value for key, value in (entry or {}).items()})
    return found


def decode(whole: Mapping[str, object], *, context: str = "", read: Callable[[str], str]) -> Access:
    """What a context of a merged kubeconfig says. `read`: a file as text."""
    name = context or _text(whole, "current-context")
    if not name:
        raise bad("it has no current-context", "--kube-context NAME")
    _, chosen = _named(whole, "contexts", name)
    base, cluster = _named(whole, "clusters", _text(chosen, "cluster"))
    user_base, user = _named(whole, "users", _text(chosen, "user")) if chosen.get("user") else (base, {})  # noqa: E501 # fmt: skip
    _refuse(cluster, CLUSTER_REFUSED)
    _refuse(user, USER_REFUSED)
    address = _address(_text(cluster, "server"))
    plugin = _plugin(user.get("exec"), user_base)
    token_file = _text(user, "tokenFile")
    found = address.replace(
        server_name=_text(cluster, "tls-server-name"),
        authority=_material(cluster, "certificate-authority", base, read),
        namespace=_text(chosen, "namespace") or DEFAULT_NAMESPACE,
        token=_text(user, "token"),
        token_file=os.path.join(user_base, token_file) if token_file else "",
        certificate=_material(user, "client-certificate", user_base, read),
        key=_material(user, "client-key", user_base, read),
        plugin=plugin,
    )
    if bool(found.certificate) != bool(found.key):
        raise bad("client-certificate and client-key belong together")
    return found


# What we do not do, with what helps. To leave it out silently could be unsafe, or lead elsewhere.
CLUSTER_REFUSED = {
    "insecure-skip-tls-verify": "name the server's certificate-authority instead",
    "proxy-url": "a proxy is not supported: run the service where the API server can be reached",
}
USER_REFUSED = {
    "auth-provider": "it was removed from Kubernetes: use an exec plugin",
    "username": "basic authentication was removed from Kubernetes: use a token",
    "password": "basic authentication was removed from Kubernetes: use a token",
    "as": "make a credential for the service itself: it does not impersonate",
    "as-uid": "make a credential for the service itself: it does not impersonate",
    "as-groups": "make a credential for the service itself: it does not impersonate",
    "as-user-extra": "make a credential for the service itself: it does not impersonate",
}


def _refuse(entry: Mapping[str, object], table: Mapping[str, str]) -> None:
    for key, hint in table.items():
        if entry.get(key):
            raise bad(f"it has {key}", hint)


def _named(whole: Mapping[str, object], plural: str, name: str) -> tuple[str, dict[str, object]]:
    held = whole[plural]
    assert isinstance(held, dict)  # noqa: S101 - made by `merge`
    if name not in held:
        raise bad(f"it has no '{name}' in {plural}", f"there is: {', '.join(held) or 'nothing'}")
    found: tuple[str, dict[str, object]] = held[name]
    return found


def _text(entry: Mapping[str, object], key: str) -> str:
    value = entry.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value or "\n" in value.strip():
        raise bad(f"{key} is not a text")
    return value.strip()


def _material(entry: Mapping[str, object], key: str, base: str, read: Callable[[str], str]) -> str:
    """PEM, in the file itself (`…-data`, which wins) or in another one."""
    inline = _text(entry, f"{key}-data")
    if inline:
        try:
            return base64.b64decode(inline, validate=True).decode("ascii")
        except (binascii.Error, UnicodeDecodeError) as error:
            raise bad(f"{key}-data is not base64 of PEM") from error
    path = _text(entry, key)
    if not path:
        return ""
    try:
        return read(os.path.join(base, path))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is not PEM"
        raise bad(f"{key} '{path}' cannot be read: {words}") from error


def _address(server: str) -> Access:
    try:
        parts = urlsplit(server)
        port = parts.port
    except ValueError as error:
        raise bad(f"the server '{server}' is not an address") from error
    host = parts.hostname or ""
    if parts.scheme not in ("https", "http") or not host or parts.username or parts.query:
        raise bad(f"the server '{server}' is not an address", "https://HOST:PORT")
    if parts.scheme == "http" and host not in ("127.0.0.1", "::1", "localhost"):
        raise bad(f"the server '{server}' would be asked without TLS", "https://HOST:PORT")
    tls = parts.scheme == "https"
    return Access(
        host=host, port=port or (443 if tls else 80), tls=tls, prefix=parts.path.rstrip("/")
    )


def _plugin(entry: object, base: str) -> Plugin | None:
    if entry is None:
        return None
    if not isinstance(entry, dict):
        raise bad("exec is not a mapping")
    command, version = _text(entry, "command"), _text(entry, "apiVersion")
    args, env = entry.get("args") or [], entry.get("env") or []
    if not command or not isinstance(args, list) or not isinstance(env, list):
        raise bad("exec needs a command, and args and env are lists")
    if version not in EXEC_VERSIONS:
        raise bad(f"exec has the apiVersion '{version}'", f"one of: {', '.join(EXEC_VERSIONS)}")
    if _text(entry, "interactiveMode") == "Always":
        raise bad("its exec plugin asks people", "a service needs a credential of its own")
    if not all(isinstance(one, str) for one in args):
        raise bad("args of exec are not texts")
    pairs = {_text(one, "name"): _text(one, "value") for one in env if isinstance(one, dict)}
    # As kubectl has it: a path with a slash is relative to the file, a name is looked up.
    path = os.path.join(base, command) if "/" in command else command
    return Plugin(
        command=path, args=tuple(args), env=pairs, version=version,
        cluster_info=bool(entry.get("provideClusterInfo")),
    )  # fmt: skip
