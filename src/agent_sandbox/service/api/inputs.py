"""What requests may say: the tables of their fields."""

from __future__ import annotations

import binascii
import re

from ..values import SCOPES
from .schema import Either, Flag, Items, Kind, Map, Number, Shape, Text, invalid, whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# The kernel takes no longer argument (MAX_ARG_STRLEN, with its NUL) and no longer path.
MOST_ARGUMENT = 128 * 1024 - 1
MOST_PATH = 4095
# As the rest of agent-sandbox has it: M and Mi are both 1024².
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
SIZE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,3}))?([KMGT]?)(?:i?B?)", re.IGNORECASE)
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
# Signals that mean something to a command; the rest is the kernel's or the terminal's business.
SIGNALS = (
    "SIGTERM", "SIGINT", "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGSTOP",
    "SIGCONT", "SIGWINCH", "SIGALRM",
)  # fmt: skip


class Argument(Text):
    """Text that is handed to the kernel, whose bounds are in bytes."""

    def read(self, value: object, where: str) -> str:
        """In UTF-8 it must be short enough, too."""
        text = super().read(value, where)
        if len(text) * 4 > self.most and len(text.encode()) > self.most:
            raise invalid(where, f"must have at most {self.most} bytes in UTF-8")
        return text


class Size(Text):
    """Bytes with a unit: "512Mi", "1.5G"."""

    def __init__(self) -> None:
        super().__init__(
            least=1, most=24, pattern="[0-9]{1,15}(?:\\.[0-9]{1,3})?[KMGTkmgt]?(?:i?B?)",
            says="must be a size such as 512Mi, 2G or a number of bytes",
        )  # fmt: skip

    def read(self, value: object, where: str) -> int:  # type: ignore[override]  # the bytes
        """In bytes."""
        found = SIZE.fullmatch(super().read(value, where))
        if found is None:
            raise invalid(where, self.says)
        digits, fraction, unit = found.groups()
        amount = int(float(f"{digits}.{fraction or 0}") * UNITS[unit.upper()])
        if not 0 < amount < 1 << 53:
            raise invalid(where, "must be above zero, and a size that exists")
        return amount


class Share(Text):
    """Processors as Kubernetes writes them: "500m", "1.5"."""

    def __init__(self) -> None:
        super().__init__(
            least=1, most=12, pattern="[0-9]{1,6}m|[0-9]{1,4}(?:\\.[0-9]{1,3})?",
            says="must be a number of processors such as 1.5 or 500m",
        )  # fmt: skip

    def read(self, value: object, where: str) -> float:  # type: ignore[override]  # the number
        """In processors."""
        text = super().read(value, where)
        share = int(text[:-1]) / 1000 if text.endswith("m") else float(text)
        if share <= 0:
            raise invalid(where, "must be above zero")
        return share


class Base64(Text):
    """Bytes in base64."""

    def __init__(self, **more: Any) -> None:  # noqa: ANN401
        super().__init__(
            most=16 << 20, says="must be base64 with its padding", format="byte", **more,
            pattern="(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
        )  # fmt: skip
        # The pattern is for readers of the document: on megabytes the decoder is the faster check.
        self.matches = None

    def read(self, value: object, where: str) -> bytes:  # type: ignore[override]  # the bytes
        """The bytes."""
        text = super().read(value, where)
        try:
            return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
        except (ValueError, UnicodeEncodeError):
            raise invalid(where, self.says) from None

    def shape(self) -> dict[str, Any]:
        """As OpenAPI 3.1 says it."""
        pattern = f"^(?:{self.pattern})$"
        return {"type": "string", "contentEncoding": "base64", "pattern": pattern}


# --- parts

ENV = Map(
    Argument(most=MOST_ARGUMENT), keys="[A-Za-z_][A-Za-z0-9_]*", longest=256, most=256,
    says="a variable's name has letters, digits and _, and no digit first",
    help="Variables of the command.",
)  # fmt: skip
METADATA_KEY = "[A-Za-z0-9][A-Za-z0-9._/-]*"
METADATA_TEXT = Text(most=1024)
METADATA = Map(
    METADATA_TEXT, keys=METADATA_KEY, longest=128, most=32, help="Labels of your own.",
    says="a name has up to 128 letters, digits and ._/- and begins with a letter or digit",
)  # fmt: skip


class Gone(Kind):
    """null, where it removes something."""

    def read(self, value: object, where: str) -> None:
        """None."""

    def shape(self) -> dict[str, Any]:
        """Only null."""
        return {"type": "null"}


METADATA_CHANGE = Map(
    Either({str: METADATA_TEXT, type(None): Gone()}, wanted="text or null"), keys=METADATA_KEY,
    longest=128, most=32, name="MetadataChange",
    help="Members that change; null removes one.",
    says="a name has up to 128 letters, digits and ._/- and begins with a letter or digit",
)  # fmt: skip
SIZE_OR_BYTES = Either({str: Size(), int: whole(1), float: whole(1)}, wanted="a size")
RESOURCES = Shape(
    {
        "cpu": Either(
            {str: Share(), int: (cpu := Number(above=0, most=4096)), float: cpu},
            wanted="a number of processors", help='Processors: 1.5, "1.5" or "1500m".',
        ),
        "memory": SIZE_OR_BYTES,
        "pids": whole(1, 1 << 22, help="Processes and threads."),
        "disk": SIZE_OR_BYTES,
    },
    name="ResourcesWanted", help="Bounds; above a maximum the request is refused, never clamped.",
    example={"cpu": 0.5, "memory": "256Mi", "pids": 64, "disk": "64Mi"},
)  # fmt: skip
HOSTS = Items(Text(least=1, most=300), most=256)
NETWORK = Either(
    {
        str: Text(choices=("off", "public")),
        dict: Shape(
            {
                "mode": Text(choices=("off", "public", "allow")),
                "allowOut": HOSTS,
                "denyOut": HOSTS,
            },
            name="NetworkWanted",
            help="allowOut: hosts as `name`, `name:port`, `*.suffix`, address or network; denyOut "
            "beats it. Without a mode: `allow` when allowOut is there, else `off`.",
            example={"mode": "allow", "allowOut": ["pypi.org", "*.pythonhosted.org"]},
        ),
    },
    wanted="off, public or an object",
)  # fmt: skip
PATH = Argument(least=1, most=MOST_PATH, help="Absolute, or below /workspace.")
MODE = Text(pattern="0?[0-7]{3}", least=3, most=4, says="must be octal digits such as 644")
FILE = Shape(
    {"path": PATH, "content": Text(most=16 << 20, nul=True), "contentBase64": Base64(),
     "mode": MODE},
    needed=("path",), one_of=("content", "contentBase64"), name="FileWanted",
    example={"path": "hello.txt", "content": "hello\n"},
)  # fmt: skip
SECONDS = Number(above=0, most=10 * 365 * 86400)

SANDBOX_FIELDS: dict[str, Kind] = {
    "template": Text(pattern=NAME, least=1, most=64, help="A preset of the server."),
    "backend": Text(pattern=NAME, least=1, most=32),
    "image": Text(pattern="[A-Za-z0-9][A-Za-z0-9._/:@-]*", least=1, most=512,
                  says="must be the name of an image", help="For backends with images."),
    "runtime": Text(pattern=NAME, least=1, most=64),
    "env": ENV,
    "metadata": METADATA,
    "timeout": Number(above=0, most=10 * 365 * 86400, help="Seconds until it expires."),
    "resources": RESOURCES,
    "network": NETWORK,
    "files": Items(FILE, most=256, help="Files that are there from the start."),
}  # fmt: skip
CREATE = Shape(
    SANDBOX_FIELDS, name="SandboxWanted",
    example={"timeout": 600, "metadata": {"task": "42"}, "env": {"LANG": "C.UTF-8"},
             "resources": {"memory": "256Mi"}, "files": [{"path": "a.txt", "content": "a"}]},
)  # fmt: skip

ARGV = Items(Argument(most=MOST_ARGUMENT), least=1, most=4096)
EXEC_FIELDS: dict[str, Kind] = {
    "command": Either(
        {str: Argument(least=1, most=MOST_ARGUMENT), list: ARGV}, wanted="text or a list of texts",
        help="Text for /bin/sh -c, or an argument list.",
    ),
    "cmd": Items(Argument(most=MOST_ARGUMENT), least=1, most=4096, help="An argument list."),
    "cwd": PATH,
    "env": ENV,
    "stdin": Text(most=16 << 20, nul=True, help="All of the input, or its beginning."),
    "stdinBase64": Base64(help="As `stdin`, for bytes that are no text."),
    "keepStdin": Flag(help="More input follows by POST …/stdin."),
    "timeout": Number(above=0, most=10 * 365 * 86400, help="Seconds from the command's start."),
    "tty": Flag(help="Give it a terminal; its output is all stdout."),
    "rows": whole(1, 10000),
    "cols": whole(1, 10000),
    "background": Flag(help="Answer at once; the state is Running."),
    "cancelOnDisconnect": Flag(help="End it when this client goes away before its end."),
}  # fmt: skip
APART = (("stdin", "stdinBase64"),)
EXEC = Shape(
    EXEC_FIELDS, one_of=("command", "cmd"), apart=APART, name="ExecWanted",
    example={"command": "echo hello; exit 3", "timeout": 10},
)  # fmt: skip
# By which name the code of a language is kept, and how it is run.
LANGUAGES = {
    "python": ("main.py", "python3"), "javascript": ("main.js", "node"),
    "bash": ("main.sh", "bash"), "sh": ("main.sh", "/bin/sh"), "ruby": ("main.rb", "ruby"),
    "perl": ("main.pl", "perl"),
}  # fmt: skip
RUN_FIELDS: dict[str, Kind] = {
    "retry": Flag(help="Start it once more, in a new sandbox, should its machine be lost under it. "
                       "Without it nothing runs twice."),
}  # fmt: skip
CODE_FIELDS: dict[str, Kind] = {
    "code": Text(most=16 << 20, nul=True, help="A program, instead of a command."),
    "language": Text(choices=tuple(LANGUAGES), help="Of `code`; the sandbox must have it."),
}
# `timeout` is the command's here: the sandbox has no life without it.
RUN = Shape(
    {**SANDBOX_FIELDS, **EXEC_FIELDS, **RUN_FIELDS, **CODE_FIELDS},
    one_of=("command", "cmd", "code"), apart=APART, together=(("code", "language"),),
    name="RunWanted",
    example={"cmd": ["cat", "in.txt"], "files": [{"path": "in.txt", "content": "hello"}]},
)  # fmt: skip
MOMENT = (
    "[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\\.[0-9]{1,9})?"
    "(?:[Zz]|[+-][0-9]{2}:[0-9]{2})"
)
RENEW = Shape(
    {
        "timeout": Number(above=0, most=10 * 365 * 86400, help="Seconds from now."),
        "expiresAt": Text(
            pattern=MOMENT, most=40, format="date-time",
            says="must be a time such as 2030-01-02T03:04:05Z",
        ),
    },
    one_of=("timeout", "expiresAt"), name="Renewal", example={"timeout": 600},
)  # fmt: skip
STDIN = Shape(
    {"data": Text(most=16 << 20, nul=True), "dataBase64": Base64(),
     "eof": Flag(help="No more input after this.")},
    apart=(("data", "dataBase64"),), name="Input", example={"data": "line\n", "eof": True},
)  # fmt: skip
SIGNAL = Shape(
    {"signal": Either({str: Text(choices=(*SIGNALS, *(name[3:] for name in SIGNALS))),
                       int: (number := whole(1, 31)), float: number}, wanted="a signal")},
    needed=("signal",), name="SignalWanted", example={"signal": "SIGTERM"},
)  # fmt: skip
RESIZE = Shape(
    {"rows": whole(1, 10000), "cols": whole(1, 10000)}, needed=("rows", "cols"),
    name="TerminalSize",
    example={"rows": 40, "cols": 120},
)  # fmt: skip
LOGIN = Shape(
    {"token": Text(least=1, most=512)}, needed=("token",), name="Login",
)  # fmt: skip
# As `sandboxctl token new` has it.
TOKEN = Shape(
    {
        "name": Text(pattern=NAME, least=1, most=64, help="The agent's name."),
        "scopes": Items(Text(choices=SCOPES), most=len(SCOPES)),
        "images": Items(Text(least=1, most=512), most=64, help="Globs."),
        "templates": Items(Text(pattern=NAME, least=1, most=64), most=64),
        "quotas": Map(
            Either({str: Text(most=64), int: (amount := Number(least=0)), float: amount},
                   wanted="a number or a size"),
            keys="[A-Z][A-Z_]*", longest=64, most=64, help="Limits by their names in /v1/policy.",
        ),
        "expiresIn": Number(above=0, most=100 * 365 * 86400, help="Seconds."),
        "uid": whole(0, (1 << 32) - 2, help="The user whose unix-socket callers are this agent."),
    },
    needed=("name",), name="TokenWanted",
    example={"name": "worker-1", "scopes": ["sandbox:create", "exec"], "expiresIn": 86400},
)  # fmt: skip
ROTATE = Shape(
    {"grace": Number(least=0, most=30 * 86400, help="Seconds for which the old one still works.")},
    name="Rotation", example={"grace": 0},
)  # fmt: skip
# A dry run of a sandbox, of a command in a new one, or of both.
CHECK = Shape(
    {**SANDBOX_FIELDS, **EXEC_FIELDS}, apart=(*APART, ("command", "cmd")), name="PolicyQuestion",
    example={"resources": {"memory": "64G"}, "network": "public"},
)  # fmt: skip
