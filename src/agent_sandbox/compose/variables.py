"""`${NAME}` in compose files, and the files that give variables their values.

Unlike Compose, a variable without a value is no error here and no silent blank: its name is kept,
so that a rule can say that it could not judge.
"""

from __future__ import annotations

from ..errors import PolicyError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from .nodes import Node, Place

OPERATORS = (":-", ":?", ":+", "-", "?", "+")
MAX_NESTING = 16


class Filled:
    """A text with its variables replaced, and which of them there were."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.unset: list[str] = []
        self.used: list[str] = []


def is_name(text: str) -> bool:
    """Whether a text can be a variable's name."""
    return bool(text) and text.isascii() and text.replace("_", "a").isalnum() and text[0] > "9"


def fill(text: str, env: Mapping[str, str], place: Place | str, depth: int = 0) -> Filled:
    """Replace `$NAME`, `${NAME}` and `${NAME:-default}` with its relatives; `$$` is a dollar."""
    done = Filled()
    at = 0
    while (dollar := text.find("$", at)) >= 0:
        done.parts.append(text[at:dollar])
        rest = text[dollar + 1 :]
        if rest.startswith("$"):
            done.parts.append("$")
            at = dollar + 2
        elif rest.startswith("{"):
            end = _closing(text, dollar + 2, place)
            _braced(text[dollar + 2 : end], env, place, done, depth)
            at = end + 1
        else:
            length = 0
            while length < len(rest) and is_name(rest[: length + 1]):
                length += 1
            if not length:
                raise _bad(text, place)
            _plain(rest[:length], env, done)
            at = dollar + 1 + length
    done.parts.append(text[at:])
    return done


def _bad(text: str, place: Place | str) -> PolicyError:
    return PolicyError(
        f"{place}: a dollar sign that starts no variable: {text!r}",
        hint="write $$ for a dollar sign",
        code="compose-broken",
    )


def _closing(text: str, start: int, place: Place | str) -> int:
    """The brace that closes the one before `start`; defaults may hold braces of their own."""
    depth = 1
    at = start
    while at < len(text):
        if text.startswith("${", at):
            depth += 1
            at += 1
        elif text[at] == "}":
            depth -= 1
            if not depth:
                return at
        at += 1
    raise _bad(text, place)


def _plain(name: str, env: Mapping[str, str], done: Filled) -> None:
    done.used.append(name)
    if name not in env:
        done.unset.append(name)
    done.parts.append(env.get(name, ""))


def _braced(
    inner: str, env: Mapping[str, str], place: Place | str, done: Filled, depth: int
) -> None:
    length = 0
    while length < len(inner) and is_name(inner[: length + 1]):
        length += 1
    name, rest = inner[:length], inner[length:]
    operator = next((o for o in OPERATORS if rest.startswith(o)), "")
    if not name or (rest and not operator) or depth > MAX_NESTING:
        raise _bad("${" + inner + "}", place)
    if not operator:
        _plain(name, env, done)
        return
    done.used.append(name)
    has = bool(env.get(name)) if operator[0] == ":" else name in env
    if operator[-1] == "?":
        if not has:
            done.unset.append(name)
        done.parts.append(env.get(name, ""))
    elif has == (operator[-1] == "+"):
        other = fill(rest[len(operator) :], env, place, depth + 1)
        done.parts += other.parts
        done.unset += other.unset
        done.used += other.used
    elif operator[-1] == "-":
        done.parts.append(env[name])


def filled(node: Node, env: Mapping[str, str]) -> Node:
    """A tree with the variables in its values replaced. Keys have none, as in Compose."""
    if node.text is not None:
        if "$" not in node.text:
            return node
        done = fill(node.text, env, node.place)
        return node.replace(
            text="".join(done.parts), unset=tuple(done.unset), used=tuple(done.used)
        )
    if node.fields is not None:
        return node.replace(fields={k: filled(v, env) for k, v in node.fields.items()})
    if node.items is not None:
        return node.replace(items=tuple(filled(item, env) for item in node.items))
    return node


def assignments(text: str) -> dict[str, tuple[str, int]]:
    """The variables of an env file with their lines: `NAME=value`, quotes, comments, `export`.

    A value in quotes that does not end on its line goes on; single quotes keep everything.
    """
    found: dict[str, tuple[str, int]] = {}
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        line, first = lines[number].strip(), number + 1
        number += 1
        line = line.removeprefix("export ").lstrip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        name, value = name.strip(), value.strip()
        quote = value[:1] if value[:1] in ("'", '"') else ""
        if quote:
            while (end := value.find(quote, 1)) < 0 and number < len(lines):
                value += "\n" + lines[number]
                number += 1
            value = value[1:end] if end > 0 else value[1:]
        elif " #" in value:
            value = value.partition(" #")[0].rstrip()
        if name and equals:
            found[name] = (value, first)
    return found
