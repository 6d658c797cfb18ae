"""Where the service is, and with which token: read from arguments or the environment, checked."""

from __future__ import annotations

import os

from ..record import Record
from .errors import NotConfigured

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

URL_NAMES = ("SANDBOX_API", "SANDBOX_URL")
TOKEN_NAME, TOKEN_FILE_NAME, CA_NAME = "SANDBOX_TOKEN", "SANDBOX_TOKEN_FILE", "SANDBOX_CA"
DEFAULT_URL = "http://127.0.0.1:8650"
SOCKET = "service.sock"
PORTS = {"http": 80, "https": 443}
MAX_TOKEN = 4096
HOW_TO_GET_ONE = "'sandboxctl token new NAME' on the server makes one"


class Address(Record):
    """A place to connect to. `socket` is the path for "unix"; `prefix` comes before "/v1"."""

    scheme: str
    host: str = "localhost"
    port: int = 0
    socket: str = ""
    prefix: str = ""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine: what is sent stays on it."""
        loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return self.scheme == "unix" or loopback

    @property
    def authority(self) -> str:
        """What the Host field says."""
        if self.scheme == "unix":
            return "localhost"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.socket}"
        return f"{self.scheme}://{self.authority}{self.prefix}"


class Settings:
    """An address and how to identify ourselves. Never shows its token."""

    __slots__ = ("_token", "address", "ca_file", "token_source")

    def __init__(self, address: Address, token: str, token_source: str, ca_file: str) -> None:
        self.address = address
        self._token = token
        # For error messages: the name of a variable or of a file.
        self.token_source = token_source
        self.ca_file = ca_file

    def __repr__(self) -> str:
        return f"Settings({str(self.address)!r}, token={'set' if self._token else 'none'})"

    def authorization(self) -> tuple[tuple[str, str], ...]:
        """The header that says who we are."""
        return (("Authorization", f"Bearer {self._token}"),) if self._token else ()

    @property
    def token(self) -> str:
        """The token itself."""
        return self._token


def settings(
    url: str | None, token: str | None, ca_file: str | None, environ: Mapping[str, str]
) -> Settings:
    """Arguments first, then the environment, then the service on this machine."""
    address = parse(url or _first(environ, URL_NAMES) or default_url(environ))
    found, source = token or "", "the token argument"
    if token is None:
        found, source = _token(environ)
    return Settings(
        address,
        _checked(found, source),
        source if found else "",
        ca_file or environ.get(CA_NAME, ""),
    )


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def default_url(environ: Mapping[str, str]) -> str:
    """The socket of a service of this user or machine, or its loopback port."""
    state = environ.get("XDG_STATE_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".local/state"
    )
    own = "/var/lib/agent-sandbox" if os.geteuid() == 0 else f"{state}/agent-sandbox/service"
    path = os.path.join(environ.get("SANDBOX_DATA") or own, SOCKET)
    return f"unix://{path}" if os.path.exists(path) else DEFAULT_URL


# --- the address


def parse(url: str) -> Address:
    """`http://`, `https://` or `unix:///path`."""
    from urllib.parse import urlsplit

    # An address that may hold a password is not repeated.
    shown = "with a name or password in it" if "@" in url else repr(url[:200])
    if any(not "!" <= char <= "~" for char in url):
        raise _bad(shown, "it has a blank or a character that does not belong in a URL")
    if url.startswith("unix://"):
        path = url.removeprefix("unix://")
        if not path.startswith("/"):
            raise _bad(shown, "write three slashes: unix:///run/agent-sandbox/service.sock")
        return Address(scheme="unix", socket=path)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _bad(shown, "its port must be a number up to 65535") from None
    if parts.scheme not in PORTS or not parts.hostname:
        raise _bad(shown, "use http://HOST:PORT, https://HOST:PORT or unix:///PATH")
    if parts.username is not None or parts.password is not None:
        raise _bad(shown, f"the token belongs in {TOKEN_NAME}, not in the address")
    if parts.query or parts.fragment:
        raise _bad(shown, "leave out what begins with '?' or '#'")
    return Address(
        scheme=parts.scheme, host=parts.hostname, port=port or PORTS[parts.scheme],
        prefix=parts.path.rstrip("/").removesuffix("/v1"),
    )  # fmt: skip


def _bad(shown: str, hint: str) -> NotConfigured:
    return NotConfigured(f"cannot use the service's address {shown}", hint=hint)


# --- the token


def _token(environ: Mapping[str, str]) -> tuple[str, str]:
    if environ.get(TOKEN_NAME):
        return environ[TOKEN_NAME].strip(), TOKEN_NAME
    path = environ.get(TOKEN_FILE_NAME, "")
    if not path:
        return "", ""
    try:
        with open(path, encoding="ascii") as file:
            return file.read(MAX_TOKEN + 1).strip(), f"{TOKEN_FILE_NAME} ({path})"
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not plain text"
        raise NotConfigured(
            f"cannot read the token from {path}: {why}",
            hint=f"{TOKEN_FILE_NAME} must name a file with a token; {HOW_TO_GET_ONE}",
        ) from None


def _checked(token: str, source: str) -> str:
    # A line break in it would begin a header of its own.
    if len(token) > MAX_TOKEN or any(not "!" <= char <= "~" for char in token):
        raise NotConfigured(
            f"the token from {source} is not a token: it is too long, or has blanks in it",
            hint=f"it begins with sbx_ and is one word; {HOW_TO_GET_ONE}",
        )
    return token


# --- TLS


def tls_context(chosen: Settings) -> ssl.SSLContext | None:
    """Certificates are checked, always; with a CA file, against that alone."""
    if chosen.address.scheme != "https":
        return None
    import ssl

    try:
        context = ssl.create_default_context(cafile=chosen.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise NotConfigured(
            f"cannot use the certificates in {chosen.ca_file}: {error.strerror or error}",
            hint=f"{CA_NAME} must name a PEM file with the certificate of the service's authority",
        ) from None
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def proxy_of(address: Address, environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The proxy through which an https service is reached, as the environment says.

    Only for https: a proxy on the way to http would see the token. Never for this machine, where
    it would not lead back to us.
    """
    if address.scheme != "https" or address.is_local:
        return None
    from urllib.parse import urlsplit

    value = _first(environ, ("https_proxy", "HTTPS_PROXY"))
    if not value or _is_exempt(address, _first(environ, ("no_proxy", "NO_PROXY"))):
        return None
    try:
        parts = urlsplit(value if "://" in value else f"http://{value}")
        port = parts.port or 80
    except ValueError:
        parts, port = urlsplit(""), 0
    if parts.scheme != "http" or not parts.hostname or parts.username is not None:
        raise NotConfigured(
            "cannot use the proxy in https_proxy: it must be http://HOST:PORT, without a password",
            hint=f"or name the service in no_proxy: {address.host}",
        )
    return parts.hostname, port


def _is_exempt(address: Address, names: str) -> bool:
    """`no_proxy`: hosts and domains, with or without a dot before or a port behind; or `*`."""
    own = (address.host, f"{address.host}:{address.port}")
    for name in names.lower().replace(" ", "").split(","):
        domain = name.removeprefix("*").removeprefix(".")
        if name == "*" or (domain and any(f".{one}".endswith(f".{domain}") for one in own)):
            return True
    return False
