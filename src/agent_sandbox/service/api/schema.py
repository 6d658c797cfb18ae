"""A small table language for values: each kind reads a value or refuses it, and describes itself.

The OpenAPI document is made of the same objects that check requests, so the two cannot differ.
What no table names is refused, with the name of the field.
"""

from __future__ import annotations

import math
import re

from ..problems import Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

MOST_TEXT = 128 * 1024
MOST_TOLD = 1 << 20
# Beyond, a reader with doubles sees another number than we do.
MOST_NUMBER = 2**53 - 1
JSON_NAMES = {dict: "an object", list: "a list", str: "text", bool: "true or false",
              int: "a number", float: "a number", type(None): "null"}  # fmt: skip


def invalid(where: str, message: str, hint: str = "") -> Problem:
    """A value that does not fit its table."""
    named = f"{where}: {message}" if where else message
    return Problem("INVALID", named, hint=hint, rule="request.schema", field=where)


def below(where: str, name: str) -> str:
    """The path of a member."""
    return f"{where}.{name}" if where else name


class Kind:
    """One kind of value. `name` makes it a component of the OpenAPI document."""

    def __init__(self, *, name: str = "", help: str = "", null: bool = False) -> None:
        self.name = name
        self.help = help
        # Answers only: a request leaves a field out.
        self.null = null

    def read(self, value: object, where: str) -> Any:  # noqa: ANN401 - whatever the kind makes
        """The value as the service uses it, or a Problem."""
        raise NotImplementedError

    def shape(self) -> dict[str, Any]:
        """As JSON Schema, without name and help."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """As JSON Schema (2020-12); a named kind by reference."""
        if self.name:
            return {"$ref": f"#/components/schemas/{self.name}"}
        return self.full()

    def full(self) -> dict[str, Any]:
        """As JSON Schema, in place."""
        shape = self.shape()
        if self.null:
            shape = {**shape, "type": [shape["type"], "null"]}
        return {**shape, "description": self.help} if self.help else shape

    def kinds(self) -> list[Kind]:
        """What it is made of."""
        return []


def wrong(value: object, wanted: str, where: str) -> Problem:
    """Another kind of value than the table has."""
    got = JSON_NAMES.get(type(value), "something else")
    hint = "leave the field out instead" if value is None else ""
    return invalid(where, f"must be {wanted}, not {got}", hint)


class Text(Kind):
    """A string. Without `nul`, no NUL: neither the kernel nor a path can carry one."""

    def __init__(
        self, *, least: int = 0, most: int = MOST_TEXT, pattern: str = "", says: str = "",
        choices: Sequence[str] = (), format: str = "", nul: bool = False, **more: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(**more)
        self.least, self.most, self.choices, self.format = least, most, tuple(choices), format
        self.pattern = pattern or ("" if nul or choices else "[^\\x00]*")
        self.says = says or ("must not contain NUL" if not pattern else f"must match {pattern}")
        self.matches = re.compile(self.pattern).fullmatch if self.pattern else None

    def read(self, value: object, where: str) -> str:
        """The text itself."""
        if type(value) is not str:
            raise wrong(value, "text", where)
        if self.choices and value not in self.choices:
            raise invalid(where, f"must be one of {', '.join(self.choices)}")
        if not self.least <= len(value) <= self.most:
            raise invalid(where, f"must have {self.least} to {self.most} characters")
        if self.matches and not self.matches(value):
            raise invalid(where, self.says)
        return value

    def shape(self) -> dict[str, Any]:
        """Bounds in characters, as both count them."""
        if self.choices:
            return {"type": "string", "enum": list(self.choices)}
        found: dict[str, Any] = {"type": "string"}
        # Beyond, the bound of the body holds, or for an answer the limits of the agent.
        if self.most <= MOST_TOLD:
            found["maxLength"] = self.most
        if self.least:
            found["minLength"] = self.least
        if self.pattern:
            found["pattern"] = f"^(?:{self.pattern})$"
        if self.format:
            found["format"] = self.format
        return found


class Number(Kind):
    """A finite number; `whole` ones may be written 3 and 3.0, as JSON Schema has it."""

    def __init__(
        self, *, least: float | None = None, most: float = MOST_NUMBER, above: float | None = None,
        whole: bool = False, **more: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(**more)
        self.least, self.most, self.above, self.whole = least, most, above, whole

    def read(self, value: object, where: str) -> Any:  # noqa: ANN401 - int or float
        """A float, or an int for a whole one."""
        if type(value) is not int and type(value) is not float:
            raise wrong(value, "a whole number" if self.whole else "a number", where)
        # 1e999 is JSON, and infinity in here.
        if type(value) is float and not math.isfinite(value):
            raise invalid(where, "must be a finite number")
        if self.whole and value != int(value):
            raise invalid(where, "must be a whole number")
        if self.least is not None and value < self.least:
            raise invalid(where, f"must be at least {self.least:g}")
        if self.above is not None and value <= self.above:
            raise invalid(where, f"must be more than {self.above:g}")
        if value > self.most:
            raise invalid(where, f"must be at most {self.most:g}")
        return int(value) if self.whole else float(value)

    def shape(self) -> dict[str, Any]:
        """With the bounds that there are."""
        bounds = {"minimum": self.least, "exclusiveMinimum": self.above, "maximum": self.most}
        kept = {name: bound for name, bound in bounds.items() if bound is not None}
        return {"type": "integer" if self.whole else "number", **kept}


def whole(least: int | None = 0, most: int = MOST_NUMBER, **more: Any) -> Number:  # noqa: ANN401
    """A whole number."""
    return Number(least=least, most=most, whole=True, **more)


class Flag(Kind):
    """True or false."""

    def read(self, value: object, where: str) -> bool:
        """Nothing else is a flag: not 0, not "no"."""
        if type(value) is not bool:
            raise wrong(value, "true or false", where)
        return value

    def shape(self) -> dict[str, Any]:
        """A boolean."""
        return {"type": "boolean"}


class Items(Kind):
    """A list of one kind."""

    def __init__(self, of: Kind, *, least: int = 0, most: int = 1024, **more: Any) -> None:  # noqa: ANN401
        super().__init__(**more)
        self.of, self.least, self.most = of, least, most

    def read(self, value: object, where: str) -> list[Any]:
        """Each item by its kind."""
        if type(value) is not list:
            raise wrong(value, "a list", where)
        if not self.least <= len(value) <= self.most:
            raise invalid(where, f"must have {self.least} to {self.most} items")
        return [self.of.read(item, f"{where}[{place}]") for place, item in enumerate(value)]

    def shape(self) -> dict[str, Any]:
        """An array."""
        found = {"type": "array", "items": self.of.describe(), "maxItems": self.most}
        return {**found, "minItems": self.least} if self.least else found

    def kinds(self) -> list[Kind]:
        """The kind of its items."""
        return [self.of]


class Map(Kind):
    """An object with names of the client's choosing, and one kind of value."""

    def __init__(
        self, of: Kind, *, keys: str, longest: int = 256, most: int = 256, says: str = "",
        **more: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(**more)
        self.of, self.keys, self.longest, self.most = of, keys, longest, most
        self.says = says or f"names must match {keys}"
        self.matches = re.compile(keys).fullmatch

    def read(self, value: object, where: str) -> dict[str, Any]:
        """Each member by its kind."""
        if type(value) is not dict:
            raise wrong(value, "an object", where)
        if len(value) > self.most:
            raise invalid(where, f"must have at most {self.most} members")
        for name in value:
            if len(name) > self.longest or not self.matches(name):
                raise invalid(where, self.says)
        return {name: self.of.read(item, below(where, name)) for name, item in value.items()}

    def shape(self) -> dict[str, Any]:
        """An object with patterns."""
        return {
            "type": "object", "additionalProperties": self.of.describe(),
            "maxProperties": self.most,
            "propertyNames": {"pattern": f"^(?:{self.keys})$", "maxLength": self.longest},
        }  # fmt: skip

    def kinds(self) -> list[Kind]:
        """The kind of its values."""
        return [self.of]


class Shape(Kind):
    """An object with known names. `needed`: those that must be there."""

    def __init__(
        self, fields: Mapping[str, Kind], *, needed: Sequence[str] = (),
        apart: Sequence[tuple[str, str]] = (), one_of: Sequence[str] = (),
        together: Sequence[tuple[str, str]] = (),
        example: Mapping[str, object] | None = None, **more: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(**more)
        self.fields, self.needed, self.example = dict(fields), tuple(needed), example
        # Pairs that exclude each other, names of which exactly one must stand, and pairs of which
        # neither means anything without the other.
        self.apart, self.one_of, self.together = tuple(apart), tuple(one_of), tuple(together)

    def read(self, value: object, where: str) -> dict[str, Any]:
        """Each member by its kind; a name that the table does not have is refused."""
        if type(value) is not dict:
            raise wrong(value, "an object", where)
        for name in value:
            if name not in self.fields:
                raise self._unknown(name, where)
        for name in self.needed:
            if name not in value:
                raise invalid(below(where, name), "is missing")
        for one, other in self.apart:
            if one in value and other in value:
                raise invalid(below(where, other), f"cannot stand beside {one}")
        for one, other in self.together:
            if (one in value) != (other in value):
                lacking, there = (other, one) if one in value else (one, other)
                raise invalid(below(where, lacking), f"is missing beside {there}")
        if self.one_of and sum(name in value for name in self.one_of) != 1:
            given = [name for name in self.one_of if name in value]
            names = " or ".join(self.one_of)
            at = below(where, given[-1] if given else self.one_of[0])
            raise invalid(at, f"exactly one of {names} must be given")
        return {k: self.fields[k].read(item, below(where, k)) for k, item in value.items()}

    def _unknown(self, name: str, where: str) -> Problem:
        shown = name if name.isprintable() and len(name) <= 80 else repr(name[:80])
        known = ", ".join(sorted(self.fields))
        return invalid(
            below(where, shown), "is not a field of this request", f"fields are: {known}"
        )

    def shape(self) -> dict[str, Any]:
        """An object that is closed, as the reader has it."""
        found: dict[str, Any] = {
            "type": "object", "additionalProperties": False,
            "properties": {name: kind.describe() for name, kind in self.fields.items()},
        }  # fmt: skip
        if self.needed:
            found["required"] = list(self.needed)
        rules: list[dict[str, Any]] = [{"not": {"required": list(p)}} for p in self.apart]
        if self.one_of:
            rules.append({"oneOf": [{"required": [name]} for name in self.one_of]})
        if rules:
            found["allOf"] = rules
        if self.together:
            pairs = (*self.together, *(pair[::-1] for pair in self.together))
            found["dependentRequired"] = {one: [other] for one, other in pairs}
        if self.example is not None:
            found["examples"] = [dict(self.example)]
        return found

    def kinds(self) -> list[Kind]:
        """The kinds of its members."""
        return list(self.fields.values())


class Either(Kind):
    """One of several kinds, told apart by the JSON type."""

    def __init__(self, choices: Mapping[type, Kind], *, wanted: str, **more: Any) -> None:  # noqa: ANN401
        super().__init__(**more)
        self.choices, self.wanted = dict(choices), wanted

    def read(self, value: object, where: str) -> Any:  # noqa: ANN401 - whatever the choice makes
        """By the kind for its type."""
        kind = self.choices.get(type(value))
        if kind is None:
            raise wrong(value, self.wanted, where)
        return kind.read(value, where)

    def shape(self) -> dict[str, Any]:
        """Any of them; int and float are one type in JSON."""
        different = list(dict.fromkeys(self.choices.values()))
        return {"anyOf": [kind.describe() for kind in different]}

    def kinds(self) -> list[Kind]:
        """All of them."""
        return list(self.choices.values())


class Anything(Kind):
    """Any JSON; for answers."""

    def read(self, value: object, where: str) -> Any:  # noqa: ANN401, ARG002 - any JSON
        """As it is."""
        return value

    def shape(self) -> dict[str, Any]:
        """No bounds."""
        return {}
