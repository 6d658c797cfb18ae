"""A YAML text as a tree in which every value knows its file and line.

Owns the parsing: anchors, merge keys, Compose's tags `!reset` and `!override`, duplicate keys, and
bounds on size. Scalars stay text: Compose and its predecessor read `yes` differently, so each
rule decides what a text means. Needs ruamel.yaml, which is optional: it is loaded here alone.
"""

from __future__ import annotations

from ..errors import HostError, PolicyError
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

MAX_BYTES = 1 << 20
# Anchors make a small text into a large tree ("billion laughs"): what counts is the tree.
MAX_NODES = 200_000
MAX_DEPTH = 64
# The parser takes a second for a few thousand open brackets, and hours for a million.
MAX_OPEN = 1000
NULLS = frozenset({"", "~", "null", "Null", "NULL"})
TRUE = frozenset({"true", "yes", "on", "y", "t", "1"})
RESET, OVERRIDE = "!reset", "!override"
PACKAGE = "agent-sandbox[compose]"


class Place(Record):
    """Where a value stands. Relative paths in it start at `base`."""

    file: str
    line: int
    base: str
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Node(Record):
    """One value: a text, a mapping or a list; none of the three is null."""

    place: Place
    text: str | None = None
    fields: dict[str, Node] | None = None
    items: tuple[Node, ...] | None = None
    tag: str = ""
    # Variables in the text that had no value here, so the text is not what will run.
    unset: tuple[str, ...] = ()
    # Variables that the text is made of, whether they had a value or not.
    used: tuple[str, ...] = ()

    @property
    def is_null(self) -> bool:
        """Whether there is no value at all."""
        return self.text is None and self.fields is None and self.items is None

    def get(self, *path: str) -> Node | None:
        """The value below these keys; None where one is missing or null."""
        found: Node | None = self
        for key in path:
            found = (found.fields or {}).get(key) if found is not None else None
        return None if found is None or found.is_null else found

    def string(self, *path: str) -> str:
        """The text below these keys, or nothing."""
        found = self.get(*path)
        return found.text or "" if found is not None else ""

    def truth(self, *path: str) -> bool:
        """Whether Compose or its predecessor would take the value below these keys for true."""
        return self.string(*path).strip().lower() in TRUE

    def listed(self, *path: str) -> tuple[Node, ...]:
        """The list below these keys; a single text counts as a list of one."""
        found = self.get(*path)
        if found is None or found.fields is not None:
            return ()
        return found.items if found.items is not None else (found,)

    def mapped(self, *path: str) -> dict[str, Node]:
        """The mapping below these keys."""
        found = self.get(*path)
        return found.fields or {} if found is not None else {}


def library() -> ModuleType:
    """ruamel.yaml, or an error that says how to get it."""
    try:
        import ruamel.yaml
    except ImportError:
        raise HostError(
            "reading compose files needs ruamel.yaml, which is not installed",
            hint=f"pip install '{PACKAGE}'; in a checkout: "
            "pip --python .venv/bin/python install ruamel.yaml",
            code="compose-library",
        ) from None
    return ruamel.yaml


def parse(text: str, file: str, base: str) -> Node:
    """The one document in `text`."""
    yaml = library()
    if len(text) > MAX_BYTES:
        raise broken(file, 1, f"larger than {MAX_BYTES >> 20} MiB")
    is_open = 0
    for char in text:
        if char in "[{":
            is_open += 1
        elif char in "]}":
            is_open = max(0, is_open - 1)
        if is_open > MAX_OPEN:
            raise broken(file, 1, "too deep")
    try:
        parser = yaml.YAML(typ="rt", pure=True)
        # YAML lets an anchor be set anew; a warning would go past our own errors.
        parser.composer.warn_double_anchors = False
        root = parser.compose(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise broken(file, mark.line + 1 if mark else 1, str(problem)) from None
    except (RecursionError, ValueError) as error:
        raise broken(file, 1, f"cannot be parsed: {type(error).__name__}") from None
    if root is None:
        return Node(place=Place(file=file, line=1, base=base))
    return _Reader(file, base).node(root, ())


def broken(file: str, line: int, problem: str) -> PolicyError:
    """The error for a file that Compose would refuse, or that cannot be judged."""
    return PolicyError(f"{file}:{line}: {problem}", code="compose-broken")


# ruff: noqa: ANN401 - ruamel's nodes have no common type
class _Reader:
    """Turns parsed nodes into ours, within bounds."""

    def __init__(self, file: str, base: str) -> None:
        self.file = file
        self.base = base
        self.count = 0

    def node(self, parsed: Any, above: tuple[int, ...]) -> Node:
        line = parsed.start_mark.line + 1
        self.count += 1
        if id(parsed) in above:
            raise broken(self.file, line, "an alias inside of its own anchor")
        if self.count > MAX_NODES or len(above) > MAX_DEPTH:
            raise broken(self.file, line, "too many values, or too deep")
        column = parsed.start_mark.column
        place = Place(file=self.file, line=line, base=self.base, column=column)
        tag = str(parsed.tag or "")
        tag = tag if tag in (RESET, OVERRIDE) else ""
        inside = (*above, id(parsed))
        if isinstance(parsed.value, str):
            null = parsed.value in NULLS and not parsed.style
            return Node(place=place, text=None if null else parsed.value, tag=tag)
        if parsed.id == "sequence":
            items = tuple(self.node(item, inside) for item in parsed.value)
            return Node(place=place, items=items, tag=tag)
        return Node(place=place, fields=self.fields(parsed, inside), tag=tag)

    def fields(self, parsed: Any, above: tuple[int, ...]) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key, value in parsed.value:
            line = key.start_mark.line + 1
            if not isinstance(key.value, str):
                raise broken(self.file, line, "a key that is not a text")
            if key.value == "<<":
                for name, node in self.merge(value, above).items():
                    merged.setdefault(name, node)
                continue
            if key.value in own:
                # Compose refuses it, its predecessor takes the last one: two readings of one file.
                raise broken(self.file, line, f"the key {key.value!r} stands there twice")
            node = self.node(value, above)
            # A value may start below its key; what people look for is the key.
            if node.place.line != line and value.anchor is None:
                node = node.replace(place=node.place.replace(line=line))
            own[key.value] = node
        return {**{k: v for k, v in merged.items() if k not in own}, **own}

    def merge(self, value: Any, above: tuple[int, ...]) -> dict[str, Node]:
        """What `<<: *one` or `<<: [*one, *two]` brings; the first wins."""
        sources = [value] if value.id == "mapping" else value.value
        if not isinstance(sources, list) or any(s.id != "mapping" for s in sources):
            raise broken(self.file, value.start_mark.line + 1, "<< takes mappings only")
        found: dict[str, Node] = {}
        for source in sources:
            for name, node in (self.node(source, above).fields or {}).items():
                found.setdefault(name, node)
        return found
