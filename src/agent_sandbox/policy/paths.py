"""Lexical rules for paths and globs: no file system, only strings.

A pattern is written relative to the project, absolute, or with `~`. `*`, `?` and `[…]` match within
one component and match leading dots too; `**` as a whole component matches any depth.
"""

from __future__ import annotations

from ..errors import PolicyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Matcher = Callable[[str], bool]
    # "*" any run, "?" any one, ("c",) that character, ("=" or "!", "az", …) a class.
    Token = str | tuple[str, ...]

GLOB_CHARACTERS = "*?["
# What does not stand for itself in a glob.
SPECIAL = GLOB_CHARACTERS + "\\"
# Deeper than PATH_MAX allows: such a path can only be an attack or an accident.
MAX_COMPONENTS = 2048


def normalise(path: str) -> str:
    """An absolute path without `.`, `..`, doubled or trailing slashes, resolved lexically."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part and part != ".":
            parts.append(part)
    return "/" + "/".join(parts)


def expand(pattern: str, *, base: str, home: str, where: str) -> str:
    """The absolute form of a pattern; `where` names its origin in errors.

    Only what was written is a pattern: brackets in the project's own path match themselves.
    """
    if not pattern:
        raise PolicyError(f"cannot use an empty path in {where}", code="empty-path")
    if "\0" in pattern or "\n" in pattern:
        raise PolicyError(
            f"cannot use path {pattern!r} in {where}: control character", code="bad-path"
        )
    if is_glob(pattern):
        base, home = escape(base), escape(home)
    if pattern == "~" or pattern.startswith("~/"):
        pattern = home + pattern[1:]
    elif not pattern.startswith("/"):
        pattern = base + "/" + pattern
    if pattern.count("/") > MAX_COMPONENTS:
        raise PolicyError(f"cannot use a path this deep in {where}", code="bad-path")
    return normalise(pattern)


def is_glob(pattern: str) -> bool:
    """Whether the pattern needs expansion."""
    return any(c in pattern for c in GLOB_CHARACTERS)


def escape(path: str) -> str:
    """A pattern that matches exactly `path`."""
    return "".join(f"[{c}]" if c in SPECIAL else c for c in path)


def unescape(component: str) -> str | None:
    """The one name that a component matches; None when it matches several."""
    name, i = "", 0
    while i < len(component):
        char = component[i]
        if char in SPECIAL:
            char = component[i + 1 : i + 2]
            if char not in SPECIAL or component[i : i + 3] != f"[{char}]":
                return None
            i += 2
        name += char
        i += 1
    return name


def within(path: str, root: str) -> bool:
    """Whether `path` is `root` or below it."""
    return root in (path, "/") or path.startswith(root + "/")


def below(path: str, root: str) -> bool:
    """Whether `path` is strictly below `root`."""
    return path != root and within(path, root)


def depth(path: str) -> int:
    """How many components an absolute path has."""
    return 0 if path == "/" else path.count("/")


def parent(path: str) -> str:
    """The directory that holds `path`."""
    return path.rpartition("/")[0] or "/"


def parents(path: str) -> list[str]:
    """Every proper ancestor of `path`, nearest first, `/` last."""
    found = []
    while path != "/":
        path = parent(path)
        found.append(path)
    return found


def split_glob(pattern: str) -> tuple[str, list[str]]:
    """The literal directory that a glob starts from, and its remaining components: at least one.

    `[[]id]` is a name, not a directory to look into.
    """
    parts = pattern.strip("/").split("/")
    fixed: list[str] = []
    for part in parts[:-1]:
        name = unescape(part)
        if name is None:
            break
        fixed.append(name)
    return "/" + "/".join(fixed), parts[len(fixed) :]


def compile_component(component: str, where: str) -> Matcher:
    """A matcher for one component; the common shapes avoid the general algorithm."""
    if not is_glob(component) and "\\" not in component:
        return component.__eq__
    if component == "*":
        return lambda _name: True
    if component.count("*") == 1 and not any(c in component for c in "?[\\"):
        head, _, tail = component.partition("*")
        size = len(head) + len(tail)
        return lambda name: len(name) >= size and name.startswith(head) and name.endswith(tail)
    tokens = _tokens(component, where)
    return lambda name: _match(tokens, name)


def _tokens(component: str, where: str) -> list[Token]:
    tokens: list[Token] = []
    i = 0
    while i < len(component):
        char = component[i]
        if char in "*?":
            tokens.append(char)
        elif char == "[":
            shape, i = _char_class(component, i, where)
            tokens.append(shape)
        elif char == "\\" and i + 1 < len(component):
            i += 1
            tokens.append((component[i],))
        else:
            tokens.append((char,))
        i += 1
    return tokens


def _char_class(component: str, start: int, where: str) -> tuple[tuple[str, ...], int]:
    """Parse `[…]` at `start`; returns the class token and the index of its `]`."""
    i = start + 1
    negated = i < len(component) and component[i] in "!^"
    i += negated
    items: list[str] = []
    first = True
    while i < len(component) and (component[i] != "]" or first):
        first = False
        if i + 2 < len(component) and component[i + 1] == "-" and component[i + 2] != "]":
            items.append(component[i] + component[i + 2])
            i += 3
        else:
            items.append(component[i] * 2)
            i += 1
    if i >= len(component):
        raise PolicyError(
            f"cannot use glob {component!r} in {where}: unclosed '['",
            hint="close the bracket, or write it as '[[]' to match it literally",
            code="bad-glob",
        )
    return ("!" if negated else "=", *items), i


def _match_one(shape: Token, char: str) -> bool:
    if shape == "?":
        return True
    if len(shape) == 1:
        return char in shape
    return any(r[0] <= char <= r[1] for r in shape[1:]) == (shape[0] == "=")


def _match(tokens: list[Token], name: str) -> bool:
    """Greedy match with one backtrack point: linear for one star, never exponential."""
    t = n = 0
    star, resume = -1, 0
    while n < len(name):
        if t < len(tokens) and tokens[t] == "*":
            star, resume = t, n
            t += 1
        elif t < len(tokens) and _match_one(tokens[t], name[n]):
            t += 1
            n += 1
        elif star >= 0:
            resume += 1
            t, n = star + 1, resume
        else:
            return False
    return all(shape == "*" for shape in tokens[t:])
