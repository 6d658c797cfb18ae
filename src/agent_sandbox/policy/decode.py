"""Strict decoding: plain data from a file or a flag becomes a Layer, or an error with the key.

Unknown keys, wrong types and malformed values are errors. Nothing is guessed and nothing ignored.
"""

from __future__ import annotations

from ..errors import PolicyError
from . import settings
from .environment import OURS
from .model import GLOBAL, Layer, Setting, Source

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
MAX_AMOUNT = 1e18
# Longer than any run; the kernel's timers end at 292 years.
MAX_SECONDS = 100 * 365 * 86400.0
TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def decode(data: object, *, rank: int, file: str) -> Layer:
    """Decode a parsed policy file."""
    if not isinstance(data, dict):
        raise PolicyError(f"cannot use '{file}': the top level must be a table", code="bad-config")
    values: dict[str, Setting] = {}
    for name, value in data.items():
        if name in settings.SECTIONS:
            if not isinstance(value, dict):
                raise bad(name, file, "must be a table", value)
            for inner, inner_value in value.items():
                _put(values, f"{name}.{inner}", inner_value, rank, file)
        elif name in settings.WORD_OR_TABLE and isinstance(value, dict) and value:
            # `docker = "filtered"`, or a table in which that is called `access`.
            for inner, inner_value in value.items():
                plain = inner == settings.WORD_OR_TABLE[name]
                key = name if plain else f"{name}.{inner}"
                _put(values, key, inner_value, rank, file)
        elif "." in name:
            # `"filesystem.ro" = …` is one odd name, not a table and a key.
            raise _unknown(name, file)
        else:
            _put(values, name, value, rank, file)
    return Layer(rank=rank, values=values, file=file)


def _put(values: dict[str, Setting], key: str, value: object, rank: int, file: str) -> None:
    row = settings.BY_KEY.get(key)
    if row is None:
        raise _unknown(key, file)
    if key in settings.USER_ONLY and rank != GLOBAL:
        # Trust does not help: what it names would be read, or run, outside.
        raise PolicyError(
            f"cannot use '{file}': {key} belongs in your own policy file",
            hint="move it to ~/.config/agent-sandbox/config.toml",
            code="user-only-key",
        )
    source = Source(layer=rank, where=f"{file}: {key}")
    values[key] = Setting(value=decode_value(row, value, f"{file}: {key}"), source=source)


def _unknown(key: str, file: str) -> PolicyError:
    return PolicyError(
        f"cannot use '{file}': unknown key '{key}'",
        hint="known keys: " + ", ".join(settings.BY_KEY),
        code="unknown-key",
    )


def is_text(text: str) -> bool:
    """Whether a string can be handed to the kernel: no NUL, no lone surrogate of JSON."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def decode_value(row: settings.Row, value: object, where: str) -> object:
    """Check and normalise one value by its row."""
    return DECODERS[row.kind](row, value, where)


def bad(key: str, where: str, expectation: str, value: object) -> PolicyError:
    """The one form of a value error."""
    return PolicyError(
        f"cannot use {key} in {where}: {expectation}, not {_shown(value)}", code="bad-value"
    )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (RecursionError, ValueError):
        # Dotted keys nest deeper than repr goes; a long hexadecimal number has no decimal form.
        return "something that is too long to show"
    return text if len(text) <= 60 else text[:57] + "…"


def _choice(row: settings.Row, value: object, where: str) -> object:
    if row.boolean and isinstance(value, bool):
        value = "on" if value else "off"
    if row.boolean and isinstance(value, str):
        value = settings.BOOLEAN_WORDS.get(value.lower(), value)
    if value not in row.choices:
        raise bad(row.key, where, "must be " + " or ".join(row.choices), value)
    return value


def _name(row: settings.Row, value: object, where: str) -> object:
    if not isinstance(value, str) or not value or not _is_word(value):
        raise bad(row.key, where, "must be a name of letters, digits, '-' and '_'", value)
    return value


def _is_word(text: str) -> bool:
    return all(c.isalnum() or c in "-_." for c in text)


def _strings(row: settings.Row, value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise bad(row.key, where, "must be a list of strings", value)
    for item in value:
        if not isinstance(item, str) or not item or not is_text(item):
            raise bad(row.key, where, "must be a list of non-empty strings", item)
    return tuple(value)


def _presets(row: settings.Row, value: object, where: str) -> object:
    from .presets import check_name

    names = _strings(row, value, where)
    for name in names:
        check_name(name, where)
    return names


def _names(row: settings.Row, value: object, where: str) -> object:
    names = _strings(row, value, where)
    for name in names:
        check_variable(row.key, name, where)
    return names


def check_variable(key: str, name: str, where: str) -> None:
    """Refuse what cannot be the name of an environment variable, and those that are ours."""
    if name in OURS:
        raise PolicyError(
            f"cannot use {key} in {where}: {name} is set by agent-sandbox", code="reserved-variable"
        )
    if not name or "=" in name or not is_text(name):
        raise bad(key, where, "must be names of environment variables", name)


def _table(row: settings.Row, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise bad(row.key, where, "must be a table of strings", value)
    for name, item in value.items():
        check_variable(row.key, str(name), where)
        if not isinstance(item, str) or not is_text(item):
            raise bad(f"{row.key}.{name}", where, "must be a string", item)
    return dict(value)


def _number(text: str) -> tuple[str, str]:
    """Split '4G' into its digits and its unit."""
    end = 0
    while end < len(text) and text[end] in "0123456789.":
        end += 1
    return text[:end], text[end:].strip().lower()


def _quantity(value: object, units: Mapping[str, float]) -> float | None:
    """A positive amount in base units, or None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        amount = float(value) if abs(value) < MAX_AMOUNT else 0.0
    elif isinstance(value, str):
        digits, unit = _number(value.strip())
        factor = units.get(unit)
        if factor is None or not digits or digits.count(".") > 1 or digits == ".":
            return None
        amount = float(digits) * factor
    else:
        return None
    # NaN fails the first comparison, infinity the second.
    return amount if amount > 0 and amount < MAX_AMOUNT else None


def _is_lifted(row: settings.Row, value: object) -> bool:
    """Whether a limit that has a default is taken away. Those of containers cannot be."""
    return row.default is not None and value == "none" and not row.key.startswith("docker.")


def _size(row: settings.Row, value: object, where: str) -> object:
    if _is_lifted(row, value):
        return settings.NO_LIMIT
    plain = value
    if isinstance(value, str):
        plain = value.strip().lower().removesuffix("ib").removesuffix("b")
    amount = _quantity(plain, SIZE_UNITS)
    if amount is None or amount < 1:
        raise bad(row.key, where, "must be a size such as 512M or 4G", value)
    return int(amount)


def _count(row: settings.Row, value: object, where: str) -> object:
    if _is_lifted(row, value):
        return settings.NO_LIMIT
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 22:
        raise bad(row.key, where, "must be a whole number above zero", value)
    return value


def _duration(row: settings.Row, value: object, where: str) -> object:
    amount = _quantity(value, TIME_UNITS)
    if amount is None or amount > MAX_SECONDS:
        raise bad(row.key, where, "must be a time such as 90, 10m or 2h", value)
    return amount


def _paths(row: settings.Row, value: object, where: str) -> object:
    return _strings(row, value, where)


def _hosts(row: settings.Row, value: object, where: str) -> object:
    texts = _strings(row, value, where)
    if texts:
        from .endpoints import parse

        for text in texts:
            parse(text, where, deny=row.key == "deny")
    return texts


def _ports(row: settings.Row, value: object, where: str) -> object:
    texts = _strings(row, value, where)
    if texts:
        from .endpoints import parse_publish

        for text in texts:
            parse_publish(text, where)
    return texts


def _images(row: settings.Row, value: object, where: str) -> object:
    texts = _strings(row, value, where)
    for text in texts:
        if not text.isascii() or not text.isprintable() or " " in text:
            raise bad(row.key, where, "must be names such as python:3.* or ghcr.io/me/*", text)
    return texts


def _file(row: settings.Row, value: object, where: str) -> object:
    if not isinstance(value, str) or not value.startswith(("/", "~/")) or not is_text(value):
        raise bad(row.key, where, "must be a path that begins with / or ~/", value)
    return value


def _secrets(_: settings.Row, value: object, where: str) -> object:
    from .credentials import decode as entries

    return entries(value, where)


def _budgets(_: settings.Row, value: object, where: str) -> object:
    from .budgets import decode as entries

    return entries(value, where)


def _profiles(_: settings.Row, value: object, where: str) -> object:
    from .profiles.decode import decode as entries

    return entries(value, where)


def _git_keys(row: settings.Row, value: object, where: str) -> object:
    from .gitauth import check_keys

    texts = _strings(row, value, where)
    check_keys(texts, where)
    return texts


def _git_hosts(row: settings.Row, value: object, where: str) -> object:
    from .gitauth import check_hosts

    texts = _strings(row, value, where)
    check_hosts(texts, where)
    return texts


def _commands(row: settings.Row, value: object, where: str) -> object:
    from .commands import decode as rules

    return rules(value, row.key, where)


DECODERS: dict[str, Callable[[settings.Row, object, str], object]] = {
    settings.CHOICE: _choice,
    settings.NAME: _name,
    settings.PATHS: _paths,
    settings.HOSTS: _hosts,
    settings.PORTS: _ports,
    settings.IMAGES: _images,
    settings.PRESETS: _presets,
    settings.NAMES: _names,
    settings.TABLE: _table,
    settings.SIZE: _size,
    settings.COUNT: _count,
    settings.DURATION: _duration,
    settings.FILE: _file,
    settings.SECRETS: _secrets,
    settings.BUDGETS: _budgets,
    settings.COMMANDS: _commands,
    settings.GIT_KEYS: _git_keys,
    settings.GIT_HOSTS: _git_hosts,
    settings.PROFILES: _profiles,
}
