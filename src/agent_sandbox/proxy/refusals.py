"""What a client is told when it may not, or cannot, get through: in its own protocol. Pure."""

from __future__ import annotations

from ..policy.endpoints import as_rule
from ..record import Record
from . import socks

# How a client can be spoken to at the moment.
OPAQUE, HTTP, CONNECT, TLS, SSH, SOCKS4, SOCKS5 = (
    "opaque", "http", "connect", "tls", "ssh", "socks4", "socks5",
)  # fmt: skip

# Kinds of problems.
FORBIDDEN, MALFORMED, UNREACHABLE, BUSY = "forbidden", "malformed", "unreachable", "busy"

STATUS = {FORBIDDEN: 403, MALFORMED: 400, UNREACHABLE: 502, BUSY: 503}
PHRASES = {
    400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 414: "URI Too Long",
    431: "Request Header Fields Too Large", 502: "Bad Gateway", 503: "Service Unavailable",
    505: "HTTP Version Not Supported",
}  # fmt: skip
# RFC 8446, 6: access_denied, decode_error, internal_error.
ALERTS = {FORBIDDEN: 49, MALFORMED: 50, UNREACHABLE: 80, BUSY: 80}
SOCKS_OUTCOMES = {
    FORBIDDEN: socks.FORBIDDEN, MALFORMED: socks.FAILED, UNREACHABLE: socks.UNREACHABLE,
    BUSY: socks.FAILED,
}  # fmt: skip
# RFC 4253, 11.1: host not allowed to connect, protocol error, connection lost, too many.
DISCONNECTS = {FORBIDDEN: 1, MALFORMED: 2, UNREACHABLE: 10, BUSY: 12}
BANNER = b"SSH-2.0-agent-sandbox\r\n"
SSH_BLOCK = 8


class Page:
    """What a refused client may read about its sandbox. A proxy's process is that of one run."""

    path = ""


class Problem(Exception):
    """Why a connection ends before it begins."""

    def __init__(
        self, kind: str, why: str, *, host: str = "", port: int = 0, rule: str = "",
        denied: bool = False, status: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(why)
        self.kind = kind
        self.why = why
        self.host = host
        self.port = port
        self.rule = rule
        # --allow would not help: a deny rule, an address, or something in the stream decides.
        self.denied = denied
        self.status = status or STATUS[kind]


class Words(Record):
    """What is said, without the protocol around it."""

    text: str
    hint: str


def words(problem: Problem) -> Words:
    """One line, and what would help."""
    where = as_rule(problem.host, problem.port) if problem.host else "this connection"
    if problem.host and ":" not in where:
        where = f"{where}:{problem.port}"
    verb = {UNREACHABLE: "cannot be reached", BUSY: "has to wait"}.get(problem.kind, "is refused")
    hint = ""
    if problem.kind == FORBIDDEN and problem.host and not problem.denied:
        hint = f"allow it with --allow '{as_rule(problem.host, problem.port)}'"
    return Words(text=f"agent-sandbox: {where} {verb}: {problem.why}", hint=hint)


def pointer(problem: Problem) -> str:
    """Where a client that was refused can read more."""
    return f"see {Page.path}" if Page.path and problem.kind == FORBIDDEN else ""


def say(voice: str, problem: Problem) -> bytes:
    """The bytes for a client that can be spoken to in this way; empty: just close."""
    if voice in (HTTP, CONNECT):
        return _http(problem)
    if voice == TLS:
        # TLS 1.2 in the header, as RFC 8446 wants it; fatal.
        return bytes((21, 3, 3, 0, 2, 2, ALERTS[problem.kind]))
    if voice == SSH:
        return _ssh(problem)
    if voice in (SOCKS4, SOCKS5):
        version = socks.VERSION_4 if voice == SOCKS4 else socks.VERSION_5
        return socks.reply(version, SOCKS_OUTCOMES[problem.kind])
    return b""


def plain(text: str) -> str:
    """Text that fits into a header field or a terminal: no controls, ASCII."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def _http(problem: Problem) -> bytes:
    said = words(problem)
    told = (said.text, said.hint, pointer(problem))
    body = "".join(plain(line) + "\n" for line in told if line).encode("ascii")
    lines = [
        f"HTTP/1.1 {problem.status} {PHRASES.get(problem.status, 'Refused')}",
        "Content-Type: text/plain; charset=us-ascii",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if problem.kind == FORBIDDEN:
        lines.append(f"X-Agent-Sandbox-Rule: {plain(problem.rule) or 'none'}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _ssh(problem: Problem) -> bytes:
    """A server's first line, and a disconnect in the clear, which is allowed before the keys."""
    said = words(problem)
    told = (said.text, said.hint, pointer(problem))
    text = plain("; ".join(part for part in told if part)).encode("ascii")
    payload = b"\x01" + DISCONNECTS[problem.kind].to_bytes(4, "big")
    payload += len(text).to_bytes(4, "big") + text + bytes(4)
    # RFC 4253, 6: at least four bytes of padding, and a multiple of eight in all.
    padding = SSH_BLOCK - (5 + len(payload)) % SSH_BLOCK
    padding += SSH_BLOCK if padding < 4 else 0
    packet = (1 + len(payload) + padding).to_bytes(4, "big") + bytes((padding,))
    return BANNER + packet + payload + bytes(padding)
