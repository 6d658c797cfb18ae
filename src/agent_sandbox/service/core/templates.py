"""Named presets of a sandbox, from a TOML file that the operator writes.

[python]
description = "Python with the network off"
image = "python:3.13-slim"
env = { PYTHONUNBUFFERED = "1" }
timeout = 3600
warm = 3
inner = "required"
[python.resources]
memory = "1G"
[python.network]
mode = "allow"
allow = ["pypi.org"]
"""

from __future__ import annotations

import os
import tomllib

from ...errors import UsageError, reason
from ...record import Record
from .. import limits_units as units
from ..values import INNER, PREFERRED, Network, Resources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT = "default"
FILE = "templates.toml"
# Each costs memory while nobody uses it: more is a slip of the hand.
MOST_WARM = 10_000


class Template(Record):
    """A preset. "" and None: as the server has it. What a wish says wins over it."""

    name: str
    description: str = ""
    backend: str = ""
    image: str = ""
    runtime: str = ""
    env: Mapping[str, str] = {}
    timeout: float | None = None
    resources: Resources = Resources()
    network: Network | None = None
    # How many sandboxes to have ready, where the backend has a pool.
    warm: int = 0
    # Whether commands have to be behind bwrap, where the backend makes containers: one of INNER.
    inner: str = PREFERRED


def load(data: str, path: str | None = None) -> dict[str, Template]:
    """The templates of a file; without one, of the data directory. "default" always exists."""
    name = path or os.path.join(data, FILE)
    try:
        with open(name, "rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        if path is not None:
            raise _wrong(name, "there is no such file") from None
        document = {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _wrong(name, str(error)) from error
    except OSError as error:
        raise _wrong(name, reason(error)) from error
    return decode(name, document)


def decode(source: str, document: Mapping[str, object]) -> dict[str, Template]:
    """The templates of a document; pure."""
    found = {DEFAULT: Template(name=DEFAULT)}
    for name, table in document.items():
        if not isinstance(table, dict):
            raise _wrong(source, f"'{name}' is not a table")
        try:
            found[name] = Template(name=name).replace(**_fields(table, _FIELDS))
        except ValueError as error:
            raise _wrong(source, f"[{name}]: {error}") from error
    return found


def _size(value: object) -> int:
    return units.size(value) if isinstance(value, str) else _count(value)


def _fields(
    table: Mapping[str, object], known: Mapping[str, Callable[[object], object]]
) -> dict[str, object]:
    if unknown := sorted(set(table) - set(known)):
        raise ValueError(f"unknown key '{unknown[0]}'; known: {', '.join(known)}")
    fields: dict[str, object] = {}
    for name, value in table.items():
        try:
            fields[name] = known[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return fields


def _text(value: object) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{value!r} is not a text")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise ValueError(f"{value!r} is not a number above 0")
    return float(value)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} is not a whole number above 0")
    return value


def _pool(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_WARM:
        raise ValueError(f"{value!r} is not a whole number from 0 to {MOST_WARM}")
    return value


def _inner(value: object) -> str:
    if value not in INNER:
        raise ValueError(f"{value!r} is none of {', '.join(INNER)}")
    return str(value)


def _table(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a table")  # noqa: TRY004 - told as the file's mistake
    return value


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")  # noqa: TRY004
    return tuple(_text(item) for item in value)


def _env(value: object) -> dict[str, str]:
    found = {name: _text(text) for name, text in _table(value).items()}
    if wrong := [name for name in found if not name or "=" in name or "\0" in name]:
        raise ValueError(f"{wrong[0]!r} is not the name of a variable")
    return found


def _resources(value: object) -> Resources:
    readers = {"memory": _size, "cpus": _number, "cpu": _number, "pids": _count, "disk": _size}
    fields = _fields(_table(value), readers)
    # The API says `cpu`.
    if "cpu" in fields:
        fields["cpus"] = fields.pop("cpu")
    return Resources(**fields)  # type: ignore[arg-type]  # read by `readers`


def _network(value: object) -> Network:
    if isinstance(value, str):
        value = {"mode": value}
    network = Network(**_fields(_table(value), _NETWORK))  # type: ignore[arg-type]
    if network.mode not in units.MODES:
        raise ValueError(f"mode '{network.mode}' is none of {', '.join(units.MODES)}")
    return network


_NETWORK: dict[str, Callable[[object], object]] = {"mode": _text, "allow": _texts, "deny": _texts}
_FIELDS: dict[str, Callable[[object], object]] = {
    "description": _text, "backend": _text, "image": _text, "runtime": _text, "env": _env,
    "timeout": _number, "resources": _resources, "network": _network, "warm": _pool,
    "inner": _inner,
}  # fmt: skip


def _wrong(source: str, what: str) -> UsageError:
    return UsageError(
        f"cannot read the templates in '{source}': {what}",
        hint="each template is a table such as [python]",
        code="templates-invalid",
    )
