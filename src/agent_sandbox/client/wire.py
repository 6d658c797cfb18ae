"""HTTP/1.1 as a client speaks it, without a socket: both clients feed the same reader. Pure.

An answer is read strictly. Whoever stands between us and the service must not be able to make one
answer look like two, so whatever is unclear ends the connection.
"""

from __future__ import annotations

from .. import __version__
from ..record import Record
from .errors import BadAnswer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .address import Address, Settings
    from .calls import Call

MAX_HEAD = 64 * 1024
MAX_LINE = 8 * 1024
# Bytes taken from a socket at once.
PIECE = 256 * 1024
END = b"\r\n\r\n"
CONNECT_SECONDS = 10.0
# The service closes connections that are idle for longer. One that is closing just now looks
# alive, so what must not be sent twice gets a fresher one.
IDLE_SECONDS, FRESH_SECONDS = 30.0, 2.0
MOST_IDLE = 8
SWITCHING = 101
AGENT = f"agent-sandbox/{__version__}"


class Head(Record):
    """The head of an answer. Names are in lower case."""

    status: int
    headers: Mapping[str, str]
    version: str = "HTTP/1.1"


class Answer(Record):
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def request_head(method: str, target: str, host: str, headers: Iterable[tuple[str, str]]) -> bytes:
    """The head of a request. A line break in a value is our own error, and is not sent."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers]
    for line in lines:
        if any((char < " " and char != "\t") or not char.isascii() for char in line):
            raise BadAnswer(f"cannot send the header {line.partition(':')[0]!r}: not plain text")
    return "\r\n".join([*lines, "", ""]).encode("ascii")


def head_of(call: Call, settings: Settings, *, chunked: bool) -> bytes:
    """The head of a call to the service."""
    headers = [("Accept", call.accept), ("User-Agent", AGENT), *settings.authorization()]
    if chunked:
        headers.append(("Transfer-Encoding", "chunked"))
    elif call.body or call.method not in ("GET", "HEAD", "DELETE"):
        headers.append(("Content-Length", str(len(call.body))))
    target = settings.address.prefix + call.path
    return request_head(call.method, target, settings.address.authority, [*headers, *call.headers])


def idle_seconds(call: Call) -> float:
    """How long a connection may have been idle to carry this call."""
    return IDLE_SECONDS if call.again else FRESH_SECONDS


def tunnel_target(address: Address) -> str:
    """What a proxy is asked to connect us to."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{host}:{address.port}"


def check_tunnel(head: Head) -> None:
    """Whether the proxy did it."""
    if head.status != 200:
        raise BadAnswer(
            f"the proxy of https_proxy refuses a connection to the service ({head.status})",
            hint="name the service in no_proxy if it can be reached without",
        )


def chunk(data: bytes) -> bytes:
    """A piece of a body whose length is not known before."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


class Reader:
    """One answer: feed it bytes, take the head, then the body piece by piece."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._data = bytearray()
        self._ended = False
        self.head: Head | None = None
        # Bytes of the body, or of its chunk, still to come; None: until the end of the connection.
        self._left: int | None = 0
        self._chunked = False
        self._trailers = False
        self.done = False
        # Whether the connection may carry another request afterwards.
        self.keep = False

    @property
    def rest(self) -> bytes:
        """What came behind the answer: after 101 it is the other protocol's."""
        return bytes(self._data)

    def feed(self, data: bytes) -> None:
        """What the socket gave; empty: its end."""
        if data:
            self._data += data
        else:
            self._ended = True
            self.keep = False
        if self.head is None:
            self._read_head()

    def body(self) -> bytes:
        """What there is of the body; b"" means feed more, unless `done`."""
        if self.head is None or self.done:
            return b""
        found = self._chunks() if self._chunked else self._plain()
        if self._ended and not self.done:
            if self._left is None and not self._chunked:
                self.done = True
            elif not found:
                raise ConnectionResetError("the connection ended within the answer")
        return found

    # --- the head

    def _read_head(self) -> None:
        while self.head is None:
            end = self._data.find(END)
            if end < 0:
                if len(self._data) > MAX_HEAD:
                    raise BadAnswer("the head of the answer is too large")
                if self._ended:
                    raise ConnectionResetError("the connection ended before an answer")
                return
            head = parse_head(bytes(self._data[:end]))
            del self._data[: end + len(END)]
            # 100 Continue and its like come before the answer.
            if head.status >= 200 or head.status == SWITCHING:
                self._begin(head)

    def _begin(self, head: Head) -> None:
        headers = head.headers
        words = {word.strip().lower() for word in headers.get("connection", "").split(",")}
        self.keep = head.version == "HTTP/1.1" and "close" not in words and not self._ended
        coding, length = headers.get("transfer-encoding", ""), headers.get("content-length")
        if head.status == SWITCHING or head.status in (204, 304) or self._method == "HEAD":
            self.done = True
        elif coding:
            if coding.lower() != "chunked" or length is not None:
                raise BadAnswer("the answer's length is unclear")
            self._chunked, self._left = True, None
        elif length is not None:
            if not (length.isascii() and length.isdigit() and len(length) < 19):
                raise BadAnswer("the answer's Content-Length is not a number")
            self._left = int(length)
            self.done = self._left == 0
        else:
            self._left, self.keep = None, False
        self.head = head

    # --- the body

    def _take(self, most: int) -> bytes:
        found = bytes(self._data[:most])
        del self._data[:most]
        return found

    def _plain(self) -> bytes:
        found = self._take(len(self._data) if self._left is None else self._left)
        if self._left is not None:
            self._left -= len(found)
            self.done = self._left == 0
        return found

    def _chunks(self) -> bytes:
        out = []
        while not self.done:
            if self._left is None:
                if not self._read_size():
                    break
            elif self._left:
                piece = self._take(self._left)
                if not piece:
                    break
                self._left -= len(piece)
                out.append(piece)
            elif not self._read_end():
                break
        return b"".join(out)

    def _line(self) -> bytes | None:
        end = self._data.find(b"\r\n", 0, MAX_LINE)
        if end < 0:
            if len(self._data) >= MAX_LINE:
                raise BadAnswer("a line of the answer's body is too long")
            return None
        line = self._take(end)
        self._take(2)
        return line

    def _read_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if self._trailers:
            # Trailers; the empty line is the end.
            self.done = not line
            return True
        digits = line.partition(b";")[0].strip()
        if (
            not digits
            or len(digits) > 15
            or not all(c in b"0123456789abcdefABCDEF" for c in digits)
        ):
            raise BadAnswer("a chunk of the answer has no size")
        size = int(digits, 16)
        self._trailers = size == 0
        self._left = size or None
        return True

    def _read_end(self) -> bool:
        if len(self._data) < 2:
            return False
        if self._take(2) != b"\r\n":
            raise BadAnswer("a chunk of the answer is longer than it says")
        self._left = None
        return True


def parse_head(raw: bytes) -> Head:
    """The status and the headers of an answer."""
    lines = raw.decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = rest[:3]
    if not version.startswith("HTTP/1.") or not (status.isascii() and status.isdigit()):
        raise BadAnswer(
            "what answered does not speak HTTP/1.1",
            hint="is it another program's port, or https where http was asked for?",
        )
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        key = name.lower()
        if not colon or not name or name != name.strip():
            raise BadAnswer("a header of the answer cannot be read")
        if key in headers and key in ("content-length", "transfer-encoding"):
            raise BadAnswer("the answer's length is unclear")
        headers[key] = value.strip()
    return Head(status=int(status), headers=headers, version=version)


class Broken(Exception):
    """A connection failed. `sent`: the whole request had gone out before."""

    def __init__(self, error: OSError, *, sent: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.sent = sent
