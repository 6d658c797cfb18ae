"""Changes to a YAML text that leave every other byte as it is.

A round trip through a dumper moves comments that stand between two entries, and there is always
such a comment between two services. So the text itself is edited: the parser's events say where
each entry starts and ends, and an edit cuts out or puts in whole lines. After each edit the text is
parsed anew.
"""

from __future__ import annotations

from ..errors import InternalBug, PolicyError
from .nodes import Node, library, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

# Words that YAML reads as something else than a text.
SPECIAL = frozenset("true false yes no on off y n null ~".split())
INDENT = 2
# Marks a number or a switch that we write ourselves: no quotes.
PLAIN = "plain"


class Part:
    """One node of the text: a scalar, an alias, a mapping or a sequence, with its offsets."""

    def __init__(self, event: Any) -> None:  # noqa: ANN401 - ruamel's events have no common type
        self.start: int = event.start_mark.index
        self.line: int = event.start_mark.line
        self.column: int = event.start_mark.column
        self.end: int = event.end_mark.index
        self.anchor: str = str(getattr(event, "anchor", None) or "")
        self.alias = False
        self.flow = bool(getattr(event, "flow_style", False))
        self.pairs: list[tuple[Part, Part]] | None = None
        self.items: list[Part] | None = None
        # What an alias stands for; itself for everything else.
        self.target: Part = self

    def get(self, key: str, text: str) -> Part | None:
        """The value of an own key."""
        return next((v for k, v in self.pairs or () if k.word(text) == key), None)

    def word(self, text: str) -> str:
        """A key as it is meant; keys here have no escapes."""
        return text[self.start : self.end].strip().strip("\"'")

    def last(self, text: str) -> int:
        """The offset behind the last character that belongs to this node; no comments."""
        if self.pairs is not None and not self.flow and self.pairs:
            return self.pairs[-1][1].last(text)
        if self.items is not None and not self.flow and self.items:
            return self.items[-1].last(text)
        kept = text[self.start : self.end].rstrip()
        # A missing value is said to stand where the next thing starts, which may be lines below.
        return self.start + len(kept) if kept else len(text[: self.start].rstrip())

    def missing(self, text: str) -> bool:
        """Whether there is no value at all behind a key."""
        return self.pairs is None and self.items is None and not text[self.start : self.end].strip()


class _Builder:
    """Parts from events."""

    def __init__(self, text: str) -> None:
        yaml = library()
        self.yaml = yaml
        self.events: Iterator[Any] = iter(yaml.YAML(typ="rt", pure=True).parse(text))
        self.anchors: dict[str, Part] = {}

    def root(self) -> Part | None:
        for event in self.events:
            if isinstance(event, self.yaml.events.DocumentStartEvent):
                return self.part(next(self.events))
        return None

    def part(self, event: Any) -> Part:  # noqa: ANN401
        made, kinds = Part(event), self.yaml.events
        if isinstance(event, kinds.AliasEvent):
            made.alias = True
            made.target = self.anchors[made.anchor]
            return made
        if made.anchor in self.anchors:
            raise PolicyError(
                f"line {made.line + 1}: the anchor {made.anchor} is set twice",
                hint="rename one of them", code="compose-broken",
            )  # fmt: skip
        if made.anchor:
            self.anchors[made.anchor] = made
        if isinstance(event, kinds.MappingStartEvent):
            made.pairs = []
            while not isinstance(event := next(self.events), kinds.MappingEndEvent):
                key = self.part(event)
                made.pairs.append((key, self.part(next(self.events))))
            made.end = event.end_mark.index
        elif isinstance(event, kinds.SequenceStartEvent):
            made.items = []
            while not isinstance(event := next(self.events), kinds.SequenceEndEvent):
                made.items.append(self.part(event))
            made.end = event.end_mark.index
        return made


def scalar(text: str) -> str:
    """A text as YAML that every reader takes for that text."""
    plain = (
        text
        and text.isascii()
        and (text[0].isalpha() or text[0] == "/")
        and text.lower() not in SPECIAL
    )
    if plain and all(c.isalnum() or c in "-_./" for c in text):
        return text
    import json

    return json.dumps(text, ensure_ascii=False)


def block(node: Node, indent: int) -> list[str]:
    """A tree as lines of block style."""
    pad = " " * indent
    lines: list[str] = []
    if node.fields is not None:
        for key, value in node.fields.items():
            lines += [f"{pad}{scalar(key)}:{_inline(value)}", *_nested(value, indent + INDENT)]
    for item in node.items or ():
        rest = _nested(item, indent + INDENT)
        if rest:
            rest[0] = f"{pad}- {rest[0].strip()}"
            lines += rest
        else:
            lines.append(f"{pad}-{_inline(item)}")
    return lines


def _inline(node: Node) -> str:
    if node.text is not None:
        return " " + (node.text if node.tag == PLAIN else scalar(node.text))
    if node.fields == {}:
        return " {}"
    return " []" if node.items == () else ""


def _nested(node: Node, indent: int) -> list[str]:
    return block(node, indent) if node.fields or node.items else []


def _entry(part: Part, index: int) -> Part:
    """What an entry of a container starts with: its key, or the item itself."""
    return part.pairs[index][0] if part.pairs is not None else (part.items or [])[index]


class Document:
    """A text under edit."""

    def __init__(self, text: str) -> None:
        self.text = text if text.endswith("\n") else text + "\n"
        self.root = Part.__new__(Part)
        self._parse()

    def _parse(self) -> None:
        root = _Builder(self.text).root()
        if root is None:
            raise InternalBug("a compose file without content was to be edited")
        self.root = root

    def _splice(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]
        self._parse()

    # --- looking

    def find(self, path: tuple[str, ...]) -> Part | None:
        """The part below these own keys; an alias stays an alias."""
        part: Part | None = self.root
        for key in path:
            part = part.target.get(key, self.text) if part is not None else None
        return part

    def _walk(
        self, part: Part, path: tuple[str, ...]
    ) -> Iterator[tuple[Part, int, tuple[str, ...]]]:
        """Every entry: its container, its index there, and the keys that lead to it."""
        for index, (key, value) in enumerate(part.pairs or ()):
            inner = (*path, key.word(self.text))
            yield part, index, inner
            yield from self._walk(value, inner)
        for index, item in enumerate(part.items or ()):
            yield part, index, path
            yield from self._walk(item, path)

    # --- removing

    def remove(self, line: int, column: int, wanted: Callable[[tuple[str, ...]], bool]) -> bool:
        """Take out every entry whose value stands at this place, aliases to it included."""
        # From the end of the text, so that the offsets of those before stay true.
        starts = [_entry(part, index).start for part, index in self._at(line, column, wanted)]
        for start in sorted(starts, reverse=True):
            for part, index, _ in self._walk(self.root, ()):
                if _entry(part, index).start == start:
                    self._cut(part, index)
                    break
        return bool(starts)

    def replace(self, line: int, column: int, new: Callable[[str], str]) -> bool:
        """Write another text where this one stands; aliases to it follow by themselves."""
        for part, index in self._at(line, column, bool):
            value = part.pairs[index][1] if part.pairs is not None else _entry(part, index)
            if not value.alias and value.pairs is None and value.items is None:
                old = parse(self.text[value.start : value.end], "", "/").text or ""
                self._splice(value.start, value.last(self.text), scalar(new(old)))
                return True
        return False

    def _at(
        self, line: int, column: int, wanted: Callable[[tuple[str, ...]], bool]
    ) -> Iterator[tuple[Part, int]]:
        for part, index, path in self._walk(self.root, ()):
            if not wanted(path):
                continue
            entry = _entry(part, index)
            value = part.pairs[index][1] if part.pairs is not None else entry
            aim = value.target
            # A value that starts below its key goes by the line of the key.
            by_key = part.pairs is not None and value.line != entry.line and entry.line + 1 == line
            if by_key or (aim.line + 1 == line and aim.column == column):
                yield part, index

    def _cut(self, part: Part, index: int) -> None:
        entries: list[tuple[int, int]] = [
            (k.start, v.last(self.text)) for k, v in part.pairs or ()
        ] or [(i.start, i.last(self.text)) for i in part.items or ()]
        if len(entries) == 1:
            self._empty(part)
            return
        start, end = entries[index]
        if part.flow:
            if index + 1 < len(entries):
                end = entries[index + 1][0]
            else:
                start = entries[index - 1][1]
            self._splice(start, end, "")
            return
        if part.items is not None:
            start = self.text.rfind("-", 0, start)
        first = self.text.rfind("\n", 0, start) + 1
        if self.text[first:start].strip():
            # The first entry of a mapping in a list: its dash stays, the next entry follows it.
            self._splice(start, entries[index + 1][0], "")
            return
        self._splice(first, self._line_end(end), "")

    def _line_end(self, offset: int) -> int:
        at = self.text.find("\n", offset)
        return len(self.text) if at < 0 else at + 1

    def _empty(self, part: Part) -> None:
        """The last entry goes: the whole container, or its content where an alias needs it."""
        for above, index, path in self._walk(self.root, ()):
            held = above.pairs[index][1] if above.pairs is not None else (above.items or [])[index]
            if held is not part:
                continue
            if part.anchor or above.pairs is None or len(path) < 3:
                empty = "[]" if part.items is not None else "{}"
                anchor = f"&{part.anchor} " if part.anchor else ""
                self._replace_value(above, index, f" {anchor}{empty}")
            else:
                self._cut(above, index)
            return
        raise InternalBug("an entry of a compose file has no container")

    def _replace_value(self, above: Part, index: int, new: str) -> None:
        if above.pairs is not None:
            key, value = above.pairs[index]
            start = self.text.index(":", key.end) + 1
            end = start if value.missing(self.text) else value.last(self.text)
            self._splice(start, end, new)
        else:
            item = (above.items or [])[index]
            self._splice(item.start, item.last(self.text), new.strip())

    # --- putting in

    def set(self, path: tuple[str, ...], node: Node) -> None:
        """Write a value at a path; missing mappings on the way are made."""
        *parents, key = path
        above = self.find(tuple(parents))
        if above is None:
            place = node.place
            self.set(tuple(parents), Node(place=place, fields={key: node}))
            return
        if above.pairs is not None:
            for index, (own, _) in enumerate(above.pairs):
                if own.word(self.text) == key:
                    self._replace_value(above, index, self._value(node, own.column))
                    return
        self._insert(above, tuple(parents), lambda pad: block(
            Node(place=node.place, fields={key: node}), pad))  # fmt: skip

    def expand(self, anchor: str) -> None:
        """Write a copy wherever an alias stands, so that the original can be changed alone."""
        while (hit := self._alias(anchor)) is not None:
            above, index, path = hit
            node = parse(self.text, "", "/").get(*path)
            if above.pairs is not None and path[-1] != "<<" and node is not None:
                self._replace_value(above, index, self._value(node, above.pairs[index][0].column))
                continue
            alias = above.pairs[index][1] if above.pairs is not None else (above.items or [])[index]
            copy = self.text[alias.target.start : alias.target.end].rstrip()
            copy = copy.partition(f"&{anchor}")[2]
            self._splice(alias.start, alias.end, _flow(copy.strip("\n"), outer=True))

    def _alias(self, anchor: str) -> tuple[Part, int, tuple[str, ...]] | None:
        for above, index, path in self._walk(self.root, ()):
            held = above.pairs[index][1] if above.pairs is not None else (above.items or [])[index]
            if held.alias and held.anchor == anchor:
                return above, index, path
        return None

    def append(self, path: tuple[str, ...], node: Node) -> None:
        """Add an item to a list; a missing list is made."""
        found = self.find(path)
        if found is None:
            self.set(path, Node(place=node.place, items=(node,)))
        else:
            self._insert(found, path, lambda pad: block(Node(place=node.place, items=(node,)), pad))

    def _value(self, node: Node, column: int) -> str:
        nested = _nested(node, column + INDENT)
        return _inline(node) if not nested else "\n" + "\n".join(nested)

    def _insert(self, part: Part, path: tuple[str, ...], lines: Callable[[int], list[str]]) -> None:
        """Add an entry behind the last one of a container."""
        entries = [v for _, v in part.pairs or ()] or list(part.items or ())
        if part.alias:
            raise InternalBug(f"an alias at {'.'.join(path)} was to be changed in place")
        if not entries:
            above = self.find(path[:-1])
            if above is None or above.pairs is None:
                raise InternalBug(f"nothing holds {'.'.join(path)}")
            index = [k.word(self.text) for k, _ in above.pairs].index(path[-1])
            anchor = f" &{part.anchor}" if part.anchor else ""
            new = "\n".join(lines(above.pairs[index][0].column + INDENT))
            self._replace_value(above, index, f"{anchor}\n{new}")
            return
        if part.flow:
            new = ", " + _flow("\n".join(lines(0)))
            self._splice(entries[-1].last(self.text), entries[-1].last(self.text), new)
            return
        if part.items is not None:
            dash = self.text.rfind("-", 0, entries[0].start)
            pad = dash - (self.text.rfind("\n", 0, dash) + 1)
        else:
            pad = (part.pairs or [])[0][0].column
        at = self._line_end(part.last(self.text))
        # Services stand apart, everything else does not.
        gap = "\n" if path == ("services",) else ""
        self._splice(at, at, gap + "\n".join(lines(pad)) + "\n")


def _flow(text: str, *, outer: bool = False) -> str:
    """Lines of block style as flow style, by way of JSON; without the outer brackets or with."""
    import json

    def plain(node: Node) -> object:
        if node.fields is not None:
            return {k: plain(v) for k, v in node.fields.items()}
        if node.items is not None:
            return [plain(item) for item in node.items]
        return node.text

    made = json.dumps(plain(parse(text, "", "/")), ensure_ascii=False)
    return made if outer else made[1:-1]
