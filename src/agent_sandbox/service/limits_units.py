"""Sizes, times and lists as people write them. Pure; `ValueError` has the words for a mistake."""

from __future__ import annotations

import math

from ..policy.docker.images import glob

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Kinds of limits.
SIZE, SECONDS, COUNT, NUMBER = "size", "seconds", "count", "number"
IMAGES, NETWORKS, NAME = "images", "networks", "name"

# As Docker and this package have it: K is 1024. "512Mi" of Kubernetes is the same.
SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
MODES = ("off", "allow", "public")
MOST_BYTES, MOST_SECONDS, MOST_COUNT, MOST_NUMBER = 1 << 60, 100 * 365 * 86400.0, 1 << 31, 4096.0
MOST_DIGITS = 20


def size(text: str) -> int:
    """Bytes of `512M`, `1.5G`, `512Mi`, `1048576`."""
    plain = text.strip().lower()
    for suffix in ("ib", "i", "b"):
        plain = plain.removesuffix(suffix)
    amount = _amount(plain, SIZES)
    if amount is None or not 1 <= amount <= MOST_BYTES:
        raise ValueError("it must be a size such as 512M or 2G")
    return int(amount)


def seconds(text: str) -> float:
    """Seconds of `90`, `10m`, `24h`, `30d`."""
    amount = _amount(text.strip().lower(), TIMES)
    if amount is None or not 0 < amount <= MOST_SECONDS:
        raise ValueError("it must be a time such as 90, 10m or 24h")
    return amount


def count(text: str) -> int:
    """A whole number above zero."""
    plain = text.strip()
    if not (plain.isascii() and plain.isdecimal()) or len(plain) > 10:
        raise ValueError("it must be a whole number above zero")
    if not 0 < int(plain) <= MOST_COUNT:
        raise ValueError("it must be a whole number above zero")
    return int(plain)


def number(text: str) -> float:
    """A number above zero, such as of processors."""
    amount = _amount(text.strip(), {"": 1.0})
    if amount is None or not 0 < amount <= MOST_NUMBER:
        raise ValueError("it must be a number above zero such as 0.5 or 2")
    return amount


def _amount(text: str, factors: Mapping[str, float]) -> float | None:
    end = 0
    while end < len(text) and text[end] in "0123456789.":
        end += 1
    factor = factors.get(text[end:].strip())
    digits = text[:end]
    if factor is None or len(digits) > MOST_DIGITS or digits.count(".") > 1:
        return None
    if not digits or digits == ".":
        return None
    amount = float(digits) * factor
    return amount if math.isfinite(amount) else None


def listed(text: str) -> tuple[str, ...]:
    """Words between commas or spaces."""
    return tuple(dict.fromkeys(text.replace(",", " ").split()))


def images(text: str) -> tuple[str, ...]:
    """Patterns of images."""
    found = listed(text)
    for pattern in found:
        if not pattern.isascii() or not pattern.isprintable() or len(pattern) > 255:
            raise ValueError("it must be names such as python:3.* or ghcr.io/me/*")
        glob(pattern, "")
    return found


def networks(text: str) -> tuple[str, ...]:
    """Modes of networks."""
    found = listed(text)
    if not found or set(found) - set(MODES):
        raise ValueError(f"it must be some of: {', '.join(MODES)}")
    return found


def name(text: str) -> str:
    """One word."""
    plain = text.strip()
    if not plain.isascii() or not plain.replace("-", "").replace("_", "").isalnum():
        raise ValueError("it must be one word such as runsc")
    return plain


READERS: dict[str, Callable[[str], object]] = {
    SIZE: size, SECONDS: seconds, COUNT: count, NUMBER: number,
    IMAGES: images, NETWORKS: networks, NAME: name,
}  # fmt: skip


def shown(kind: str, value: object) -> str:
    """A value for people; a size that is not whole in its unit stays in bytes."""
    if kind == SIZE and isinstance(value, int):
        for unit in "tgmk":
            if value % SIZES[unit] == 0:
                return f"{value // SIZES[unit]}{unit.upper()}"
        return f"{value} bytes"
    if isinstance(value, float):
        text = f"{value:g}" if value < 1e6 else f"{value:.0f}"
        return f"{text} s" if kind == SECONDS else text
    if isinstance(value, (tuple, list)):
        return ", ".join(map(str, value)) or "none"
    return str(value)
