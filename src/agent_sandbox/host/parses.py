"""What policy files said at earlier starts, so that most starts load no parser.

`tomllib` and `json` take 10 to 15 ms, mostly for regular expressions. What a text was parsed to
lies in the state directory, which no sandbox can see, and is used for exactly that text only. This
module reads; `sandbox.prepare` has it written.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ..policy.model import Layer

    Table = dict[tuple[str, str], object]

NAME = "parses"
# How many texts are remembered, and how long one may be.
MOST = 8
LONGEST = 1 << 16
# Whose changes make everything forgotten.
PARSER = f"{os.path.dirname(__file__)}/files.py"


def place(state_dir: str) -> str:
    """The file that remembers."""
    return f"{state_dir}/{NAME}"


def read(state_dir: str) -> Table:
    """What is remembered: by suffix and text.

    Only from a file that is ours alone: the state directory itself is checked later.
    """
    try:
        fd = os.open(place(state_dir), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        info = os.fstat(fd)
        if info.st_uid != os.getuid() or info.st_mode & 0o022:
            return {}
        identity, table = marshal.loads(os.read(fd, info.st_size))  # noqa: S302 - our own
    except (OSError, EOFError, ValueError, TypeError):
        return {}
    finally:
        os.close(fd)
    return table if identity == _identity() else {}


def key(path: str, text: str) -> tuple[str, str]:
    """What decides how a text is parsed: the end of its file's name, and every character."""
    return path.rpartition(".")[2], text


def dump(old: Table, layers: Iterable[Layer]) -> bytes:
    """The content of the file with what was parsed at this start; empty for nothing new."""
    fresh = {
        key(layer.file, layer.text): layer.parsed for layer in layers if _is_harmless(layer)
    }  # fmt: skip
    if not fresh:
        return b""
    table = list({**old, **fresh}.items())[-MOST:]
    try:
        return marshal.dumps((_identity(), dict(table)))
    except ValueError:
        # Something that only TOML has, such as a date; it is no valid policy either.
        return b""


def _is_harmless(layer: Layer) -> bool:
    """Whether a text may be kept a second time. Values of variables may be secrets."""
    data: Mapping[str, object] | None = layer.parsed
    if data is None or "env" in data or len(layer.text) > LONGEST:
        return False
    own = data.get("profiles")
    tables = own.values() if isinstance(own, dict) else ()
    return not any(isinstance(table, dict) and "set-env" in table for table in tables)


def _identity() -> tuple[int, ...]:
    """Which parser it was."""
    info = os.stat(PARSER)
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns
