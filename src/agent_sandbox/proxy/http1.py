"""HTTP/1 requests, strictly read and built anew, so that a server reads what we have read. Pure.

What two parsers could read differently is an error here: that is how one request hides another.
Nothing of the client's head goes out as it came.
"""

from __future__ import annotations

from ..record import Record

MAX_HEAD = 64 * 1024
MAX_REQUEST_LINE = 16 * 1024
MAX_FIELDS = 256
# 15 digits in hexadecimal are 2^60 bytes.
MAX_SIZE_DIGITS = 15
MAX_LENGTH_DIGITS = 18
MAX_TRAILERS = 8 * 1024
END_OF_HEAD = b"\r\n\r\n"

TOKEN = frozenset("!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
HEX = frozenset(b"0123456789abcdefABCDEF")
FRAMING = ("content-length", "transfer-encoding")
# Meant for the next hop, which is us, or made by us.
HOP_BY_HOP = frozenset((
    "connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate",
    "te", "trailer", "upgrade", "http2-settings", "host", *FRAMING,
))  # fmt: skip


class BadRequest(ValueError):
    """A request that is not passed on."""

    def __init__(self, why: str, status: int = 400) -> None:
        super().__init__(why)
        self.status = status


class Request(Record):
    """A head, and how long the body is."""

    method: str
    target: str
    version: str
    fields: tuple[tuple[str, str], ...]
    # The one Host field; "" in a request of HTTP/1.0 that has none.
    host: str
    # Whether a Content-Length was given, and the number.
    sized: bool
    length: int
    chunked: bool
    # A WebSocket. Any other upgrade (h2c) would put requests behind the switch that nobody reads.
    upgrade: bool


class Target(Record):
    """Where a request says that it goes; "" and 0 where it does not say."""

    host: str
    port: int
    path: str


# --- reading a head


def head_length(data: bytes) -> int:
    """How long the head at the start of the input is, its empty line included; 0: not all there."""
    end = data.find(END_OF_HEAD, 0, MAX_HEAD)
    head = data[: end + len(END_OF_HEAD)] if end >= 0 else data[:MAX_HEAD]
    if head.count(b"\n") != head.count(b"\r\n"):
        raise BadRequest("a line that ends in a bare LF")
    if b"\n" not in data[: MAX_REQUEST_LINE + 2] and len(data) > MAX_REQUEST_LINE:
        raise BadRequest(f"the first line is longer than {MAX_REQUEST_LINE} bytes", 414)
    if end < 0 and len(data) >= MAX_HEAD:
        raise BadRequest(f"the head is larger than {MAX_HEAD} bytes", 431)
    return end + len(END_OF_HEAD) if end >= 0 else 0


def parse(head: bytes, *, nameless: bool = False) -> Request:
    """A head that `head_length` has measured. `nameless`: on a socket without names, an empty Host.

    RFC 9112 3.2 wants it where the target has no authority, and Docker's client 20.10 sends it.
    """
    lines = head.removesuffix(END_OF_HEAD).decode("latin-1").split("\r\n")
    if len(lines[0]) > MAX_REQUEST_LINE:
        raise BadRequest(f"the first line is longer than {MAX_REQUEST_LINE} bytes", 414)
    if len(lines) > MAX_FIELDS + 1:
        raise BadRequest(f"more than {MAX_FIELDS} fields", 431)
    method, target, version = _request_line(lines[0])
    fields = tuple(_field(line) for line in lines[1:])
    values = _collect(fields)
    sized, length, chunked = _framing(values, version)
    return Request(
        method=method, target=target, version=version, fields=fields,
        host=_host(values, method, version, nameless=nameless),
        sized=sized, length=length, chunked=chunked,
        upgrade=_is_websocket(values, method, version) and not chunked and not length,
    )  # fmt: skip


def _request_line(line: str) -> tuple[str, str, str]:
    parts = line.split(" ")
    if len(parts) != 3:
        raise BadRequest("the first line is not METHOD TARGET VERSION")
    method, target, version = parts
    if not method or not TOKEN.issuperset(method):
        raise BadRequest("a method that is no token")
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise BadRequest("not HTTP/1.0 or HTTP/1.1", 505)
    # Printable ASCII, and the space is gone by the split: "!" to "~", found without a loop.
    if not (target and target.isascii() and target.isprintable()) or "#" in target:
        raise BadRequest("a target with characters that do not belong there")
    return method, target, version


def _field(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    # Also a folded line, which begins with a blank, and a blank before the colon.
    if not colon or not name or not TOKEN.issuperset(name):
        raise BadRequest("a field that is not NAME: VALUE")
    # Most values are plain and are found to be so without a loop.
    plain = value.isascii() and value.isprintable()
    if not plain and any((char < " " and char != "\t") or char == "\x7f" for char in value):
        raise BadRequest(f"a control character in {name}")
    if "_" in name and name.lower().replace("_", "-") in FRAMING:
        # CGI and its heirs cannot tell the two apart.
        raise BadRequest(f"{name} with an underscore")
    return name, value.strip(" \t")


def _collect(fields: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in fields:
        found.setdefault(name.lower(), []).append(value)
    return found


def _host(values: dict[str, list[str]], method: str, version: str, *, nameless: bool) -> str:
    hosts = values.get("host", [])
    if len(hosts) > 1:
        raise BadRequest("more than one Host")
    if not hosts and version == "HTTP/1.1" and method != "CONNECT":
        raise BadRequest("no Host")
    if hosts and not hosts[0] and not nameless:
        raise BadRequest("an empty Host")
    return hosts[0] if hosts else ""


def _framing(values: dict[str, list[str]], version: str) -> tuple[bool, int, bool]:
    lengths, codings = (values.get(name, []) for name in FRAMING)
    if lengths and codings:
        raise BadRequest("both Content-Length and Transfer-Encoding")
    if codings:
        if version != "HTTP/1.1" or [coding.lower() for coding in codings] != ["chunked"]:
            raise BadRequest("a Transfer-Encoding that is not chunked alone")
        return False, 0, True
    if not lengths:
        return False, 0, False
    text = lengths[0]
    if len(lengths) > 1 or not (text.isascii() and text.isdigit()) or len(text) > MAX_LENGTH_DIGITS:
        raise BadRequest("a Content-Length that is not one number")
    return True, int(text), False


def tokens(values: list[str]) -> set[str]:
    """The words of a field that is a list, in lower case."""
    return {word.strip(" \t").lower() for value in values for word in value.split(",")}


def _is_websocket(values: dict[str, list[str]], method: str, version: str) -> bool:
    asked = "upgrade" in tokens(values.get("connection", []))
    wanted = [value.lower() for value in values.get("upgrade", [])]
    return asked and wanted == ["websocket"] and method == "GET" and version == "HTTP/1.1"


# --- where it goes


def authority(text: str) -> tuple[str, int]:
    """`host`, `host:port` or `[v6]:port` → host, port; 0 if there is none."""
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or ":" not in host or (rest and not rest.startswith(":")):
            raise BadRequest("not a host")
        port = rest[1:] if rest else None
    else:
        host, colon, tail = text.partition(":")
        port = tail if colon else None
    if not host or "@" in host or any(not "!" <= char <= "~" for char in host):
        raise BadRequest("not a host")
    if port is None:
        return host, 0
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise BadRequest("not a port")
    return host, int(port)


def target(request: Request) -> Target:
    """What the first line names."""
    if request.method == "CONNECT":
        host, port = authority(request.target)
        if not port or request.chunked or request.length:
            raise BadRequest("CONNECT needs host:port and has no body")
        return Target(host=host, port=port, path="")
    if request.target.startswith("/") or (request.target, request.method) == ("*", "OPTIONS"):
        return Target(host="", port=0, path=request.target)
    scheme, mark, rest = request.target.partition("://")
    if not mark or scheme.lower() != "http":
        raise BadRequest("a target that is neither a path nor http://")
    cut = min((at for at in (rest.find("/"), rest.find("?")) if at >= 0), default=len(rest))
    path = rest[cut:]
    host, port = authority(rest[:cut])
    return Target(host=host, port=port or 80, path=path if path[:1] == "/" else "/" + path)


# --- building anew


def rebuild(request: Request, host: str, path: str) -> bytes:
    """The head that goes out."""
    listed = [value for name, value in request.fields if name.lower() == "connection"]
    dropped = HOP_BY_HOP | tokens(listed)
    lines = [f"{request.method} {path} {request.version}", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in request.fields if name.lower() not in dropped]
    if request.chunked:
        lines.append("Transfer-Encoding: chunked")
    elif request.sized:
        lines.append(f"Content-Length: {request.length}")
    if request.upgrade:
        lines += ["Connection: Upgrade", "Upgrade: websocket"]
    else:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def host_field(host: str, port: int) -> str:
    """A Host field for a canonical host."""
    shown = f"[{host}]" if ":" in host else host
    return shown if port == 80 else f"{shown}:{port}"


class Chunks:
    """A chunked body: `feed` gives what to pass on. No extensions, and trailers are dropped.

    `framed`: what comes out is chunked again; otherwise it is the content alone.
    """

    def __init__(self, *, framed: bool = True) -> None:
        self._framed = framed
        self._data = b""
        # How far it is read: a thousand small chunks must not copy the rest a thousand times.
        self._at = 0
        # Bytes of the current chunk still to come; None between chunks.
        self._left: int | None = None
        self._trailers = -1
        self.done = False

    @property
    def rest(self) -> bytes:
        """What came behind the end: not the body's."""
        return self._data if self.done else b""

    def feed(self, data: bytes) -> bytes:
        """More of the body."""
        self._data += data
        out: list[bytes] = []
        while not self.done and self._step(out):
            pass
        self._data, self._at = self._data[self._at :], 0
        return b"".join(out)

    def _step(self, out: list[bytes]) -> bool:
        """Read one piece; False if more is needed."""
        if self._trailers >= 0:
            return self._trailer(out)
        if self._left is None:
            return self._size(out)
        if self._left:
            piece = self._data[self._at : self._at + self._left]
            self._at += len(piece)
            self._left -= len(piece)
            out.append(piece)
            return bool(piece)
        end = self._data[self._at : self._at + 2]
        if len(end) < 2 and b"\r\n".startswith(end):
            return False
        if end != b"\r\n":
            raise BadRequest("a chunk that is longer than it says")
        self._at += 2
        self._left = None
        self._frame(out, b"\r\n")
        return True

    def _frame(self, out: list[bytes], text: bytes) -> None:
        if self._framed:
            out.append(text)

    def _line(self, most: int) -> tuple[bytes, bool]:
        """The line that begins here, or as much of it as there is; and whether it is whole."""
        end = self._data.find(b"\r\n", self._at, self._at + most + 2)
        if end < 0:
            return self._data[self._at : self._at + most + 2], False
        line, self._at = self._data[self._at : end], end + 2
        return line, True

    def _size(self, out: list[bytes]) -> bool:
        line, whole = self._line(MAX_SIZE_DIGITS)
        digits = line if whole else line.removesuffix(b"\r")
        if len(digits) > MAX_SIZE_DIGITS or not HEX.issuperset(digits) or (whole and not digits):
            raise BadRequest("a chunk's size that is not a number in hexadecimal")
        if not whole:
            return False
        size = int(digits, 16)
        if size == 0:
            self._trailers = 0
            return True
        self._left = size
        self._frame(out, b"%x\r\n" % size)
        return True

    def _trailer(self, out: list[bytes]) -> bool:
        line, whole = self._line(MAX_TRAILERS)
        if self._trailers + len(line) > MAX_TRAILERS or b"\n" in line:
            raise BadRequest("trailers that are too long or end in a bare LF")
        if not whole:
            return False
        self._trailers += len(line) + 2
        if not line:
            self._frame(out, b"0\r\n\r\n")
            self.done = True
        else:
            _field(line.decode("latin-1"))
        return True


# --- answers, as far as an upgrade needs them


class Answer(Record):
    """The head of an answer."""

    status: int
    length: int


def answer(data: bytes) -> Answer | None:
    """The head of an answer at the start of the input; None if more is needed.

    A status of 0: not an answer that we understand. It must not open the way for the client.
    """
    end = data.find(END_OF_HEAD)
    if end < 0:
        return Answer(status=0, length=len(data)) if len(data) > MAX_HEAD else None
    status = data[9:12]
    known = data.startswith(b"HTTP/1.1 ") and status.isdigit() and data[12:13] in (b" ", b"\r")
    return Answer(status=int(status) if known else 0, length=end + len(END_OF_HEAD))


def closing(head: bytes) -> bytes:
    """The head of an answer, with word for the client that no second request will be taken."""
    line, end, rest = head.partition(b"\r\n")
    return line + end + b"Connection: close\r\n" + rest if end else head
