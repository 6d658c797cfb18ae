"""Record: a frozen, keyword-only value class that costs nothing at start-up.

`dataclasses` imports `inspect` (about 25 ms) and every agent command would pay for it, so the
launch path uses this base instead. Type checkers see frozen keyword-only
dataclasses. Annotations are read as names only and never evaluated.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ClassVar, Self, dataclass_transform
else:

    def dataclass_transform(**_: object) -> object:
        """Do nothing: only type checkers look at it."""
        return lambda cls: cls


@dataclass_transform(frozen_default=True, kw_only_default=True)
class RecordType(type):
    """Turns annotations into fields and defaults."""

    if TYPE_CHECKING:
        __fields__: tuple[str, ...]
        __defaults__: dict[str, Any]

    def __new__(
        mcls, name: str, bases: tuple[RecordType, ...], namespace: dict[str, Any]
    ) -> RecordType:
        """Make the class. Dozens are made at every start."""
        fields: tuple[str, ...] = tuple(namespace.get("__annotations__", ()))
        defaults = {k: namespace.pop(k) for k in fields if k in namespace}
        for base in bases:
            if base.__fields__:
                fields = base.__fields__ + fields
                defaults = {**base.__defaults__, **defaults}
        namespace["__fields__"] = fields
        namespace["__names__"] = frozenset(fields)
        namespace["__defaults__"] = defaults
        return super().__new__(mcls, name, bases, namespace)


class Record(metaclass=RecordType):
    """Base of every value that travels through the pipeline."""

    if TYPE_CHECKING:
        __fields__: ClassVar[tuple[str, ...]]
        __defaults__: ClassVar[dict[str, Any]]
    else:

        def __init__(self, **values: object) -> None:
            # Hundreds are made at every start: three calls in C instead of one per field.
            held = self.__dict__
            held.update(self.__defaults__)
            held.update(values)
            if held.keys() != self.__names__:
                wrong = sorted(held.keys() ^ self.__names__)
                raise TypeError(f"{type(self).__name__}: unknown or missing fields: {wrong}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def _values(self) -> tuple[object, ...]:
        return tuple(getattr(self, field) for field in self.__fields__)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self).__name__, *self._values()))

    def __repr__(self) -> str:
        shown = ", ".join(f"{f}={getattr(self, f)!r}" for f in self.__fields__)
        return f"{type(self).__name__}({shown})"

    def replace(self, **changes: Any) -> Self:  # noqa: ANN401 - checked by __init__
        """A copy with some fields changed."""
        values: dict[str, Any] = {f: getattr(self, f) for f in self.__fields__}
        values.update(changes)
        return type(self)(**values)
