"""Finds and reads policy files: TOML, JSON, and JSON with comments."""

from __future__ import annotations

import os
import stat

from ..errors import PolicyError, reason
from ..policy import paths
from ..policy.model import GLOBAL, PROJECT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..policy.model import Layer

SUFFIXES = (".toml", ".json", ".jsonc")
PROJECT_STEM = ".agent-sandbox"
MAX_BYTES = 1 << 20
# More than any key of ours has.
MAX_KEY_PARTS = 64


def global_stem(env: Mapping[str, str], home: str) -> str:
    """Where the user's own file lies, without its suffix."""
    base = env.get("XDG_CONFIG_HOME", "")
    if not base.startswith("/"):
        base = f"{home}/.config"
    return f"{base}/agent-sandbox/config"


def find(stem: str) -> str | None:
    """The one policy file at a place; two are an error, since one of them would be ignored."""
    found = [stem + suffix for suffix in SUFFIXES if _is_there(stem + suffix)]
    if len(found) > 1:
        raise PolicyError(
            f"cannot choose between '{found[0]}' and '{found[1]}': both exist",
            hint="remove one of them",
            code="two-configs",
        )
    if found and not os.path.isfile(found[0]):
        # A dangling link would otherwise take the user's own rules away without a word.
        raise PolicyError(
            f"cannot read '{found[0]}': not a regular file",
            hint="remove it, or put the policy file there",
            code="config-unreadable",
        )
    return found[0] if found else None


def _is_there(path: str) -> bool:
    """Whether somebody has put something there: a socket is a running sandbox's placeholder."""
    try:
        return not stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def read_layers(
    env: Mapping[str, str], home: str, project: str, explicit: str | None, state_dir: str = ""
) -> list[Layer]:
    """The global layer and the project's, as far as they exist. `-c FILE` replaces the latter."""
    layers = []
    stem = global_stem(env, home)
    if env.get("XDG_CONFIG_HOME"):
        _check_apart(stem, project)
    path = find(stem)
    if path is not None:
        layers.append(read(path, GLOBAL, state_dir))
    if explicit is not None:
        if not os.path.isfile(explicit):
            raise PolicyError(f"cannot read '{explicit}': no such file", code="config-missing")
        layers.append(read(explicit, PROJECT, state_dir))
    else:
        path = find(f"{project}/{PROJECT_STEM}")
        if path is not None:
            layers.append(read(path, PROJECT, state_dir))
    return layers


def _check_apart(stem: str, project: str) -> None:
    """Refuse a directory for the user's own file that a run without the variable could fill."""
    if paths.within(os.path.realpath(os.path.dirname(stem)), project):
        raise PolicyError(
            "cannot use XDG_CONFIG_HOME for your own policy file: it leads into the project, where "
            "a command may have written one",
            hint="unset XDG_CONFIG_HOME, or let it name a directory outside of the project",
            code="config-in-project",
        )


def read_text(path: str) -> str:
    """The text of a policy file."""
    try:
        with open(path, "rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(
            f"cannot read '{path}': {reason(error)}", code="config-unreadable"
        ) from error
    if len(raw) > MAX_BYTES:
        raise PolicyError(f"cannot read '{path}': larger than 1 MiB", code="config-unreadable")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PolicyError(
            f"cannot parse '{path}': not UTF-8 at byte {error.start}", code="bad-syntax"
        ) from error


def read(path: str, rank: int, state_dir: str = "") -> Layer:
    """Read and decode one file; parse it unless the state directory knows what it says."""
    # Only here: most starts read none.
    from ..policy.decode import decode
    from . import parses

    text = read_text(path)
    known = parses.read(state_dir) if state_dir else {}
    if (key := parses.key(path, text)) in known:
        return decode(known[key], rank=rank, file=path).replace(text=text)
    data = parse(text, path)
    return decode(data, rank=rank, file=path).replace(text=text, parsed=data)


def parse(text: str, path: str) -> object:
    """Parse by suffix. The parsers are imported here because most starts need neither."""
    try:
        if path.endswith((".json", ".jsonc")):
            import json

            return json.loads(strip_comments(text), object_pairs_hook=_no_duplicates)
        import tomllib

        check_keys(text)
        return tomllib.loads(text)
    except RecursionError:
        message = "nested too deeply"
    except ValueError as error:
        message = str(error)
    raise PolicyError(f"cannot parse '{path}': {message}", code="bad-syntax")


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands there twice")
        found[key] = value
    return found


def check_keys(text: str) -> None:
    """Refuse a TOML key of many parts, which tomllib pays for with the square of their number.

    200 kB of `a.a.a…` in a cloned project would take all memory before anything is judged.
    """
    if text.count(".") < MAX_KEY_PARTS:
        return
    i = dots = 0
    while i < len(text):
        char = text[i]
        if char in "\"'":
            i = _string_end(text, i)
            continue
        if char == "#":
            i = text.find("\n", i)
            if i < 0:
                return
        if char == ".":
            dots += 1
        elif char in "#\n=,{}[]":
            dots = 0
        if dots >= MAX_KEY_PARTS:
            raise ValueError(f"a key has more than {MAX_KEY_PARTS} parts")
        i += 1


def _string_end(text: str, start: int) -> int:
    """Where a TOML string that starts here is over; a broken one is left to the parser."""
    quote = text[start]
    fence = quote * 3 if text.startswith(quote * 3, start) else quote
    stop = "" if len(fence) == 3 else "\n"
    i = start + len(fence)
    while i < len(text) and text[i] != stop and not text.startswith(fence, i):
        i += 2 if quote == '"' and text[i] == "\\" else 1
    i += len(fence)
    # Up to two quotes may stand right before the closing three.
    more = text[i : i + 2] if len(fence) == 3 else ""
    return i + len(more) - len(more.lstrip(quote))


def strip_comments(text: str) -> str:
    """JSON with comments and trailing commas becomes JSON; positions of lines are kept."""
    out: list[str] = []
    i, size = 0, len(text)
    # Where a comma stands that may be a trailing one, and the character that counted last.
    comma, last = -1, ""
    while i < size:
        char = text[i]
        if char == '"':
            end = i + 1
            while end < size and text[end] != '"':
                end += 2 if text[end] == "\\" else 1
            out.append(text[i : end + 1])
            comma, last, i = -1, char, end + 1
        elif text.startswith("//", i):
            end = text.find("\n", i)
            i = size if end < 0 else end
        elif text.startswith("/*", i):
            end = text.find("*/", i + 2)
            if end < 0:
                raise ValueError("comment is not closed")
            # A comment separates, or `1/**/2` would be twelve.
            out.append("\n" * text.count("\n", i, end) or " ")
            i = end + 2
        else:
            if char in "]}" and comma >= 0:
                out[comma] = ""
            if char == "," and last not in ("", "[", "{", ",", ":"):
                comma = len(out)
            elif not char.isspace():
                comma = -1
            last = last if char.isspace() else char
            out.append(char)
            i += 1
    return "".join(out)
