"""Which image a name means: by the digest in it, or by the operator's table. Pure but for `Table`.

python = "registry.example/python@sha256:…"
[base]
image = "registry.example/base@sha256:…"
agent = true        # the agent is in it: no init container
"""

from __future__ import annotations

import os
import tomllib

from ...errors import UsageError, reason
from ...policy.docker import images
from ...policy.docker.values import Refused
from ...record import Record
from ..problems import Problem
from .kube_settings import pinned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_BYTES = 1 << 20


class Image(Record):
    """What a name means."""

    # name@sha256:…
    pin: str
    # Whether the agent is in it.
    agent: bool = False


def canonical(text: str) -> str:
    """One spelling of a name: with registry and tag."""
    try:
        name = images.parse(text)
    except Refused as error:
        raise Problem(
            "INVALID", f"{text[:80]!r} is not the name of an image", field="image", rule="request"
        ) from error
    return f"{name.domain}/{name.path}" + (f"@{name.digest}" if name.digest else f":{name.tag}")


def decode(source: str, document: Mapping[str, object]) -> dict[str, Image]:
    """The table of a document."""
    found: dict[str, Image] = {}
    for name, value in document.items():
        try:
            found[canonical(name)] = _entry({"image": value} if isinstance(value, str) else value)
        except (ValueError, Problem) as error:
            raise UsageError(
                f"cannot read the images in '{source}': '{name}': {error}",
                hint='a line is: "python:3.13" = "registry/python@sha256:…"', code="bad-kubernetes",
            ) from error  # fmt: skip
    return found


def _entry(value: object) -> Image:
    entry = value if isinstance(value, dict) else {}
    image, agent = entry.get("image"), entry.get("agent", False)
    if not isinstance(image, str) or not isinstance(agent, bool) or set(entry) - {"image", "agent"}:
        raise ValueError("it must be a text, or a table with image (a text) and agent (a boolean)")
    return Image(pin=pinned(image), agent=agent)


def choose(image: str, table: Mapping[str, Image]) -> Image:
    """The image of a name, or a refusal that says what helps."""
    name = canonical(image)
    if name in table:
        return table[name]
    if "@" in name:
        known = next((one for one in table.values() if one.pin == name), None)
        return known or _behind(name, table) or Image(pin=name)
    raise Problem(
        "INVALID", f"the image '{image}' is not pinned by its content",
        hint="name it with its digest (name@sha256:…), or ask the operator for a line in "
        "KUBERNETES_IMAGES", field="image", rule="image.digest",
    )  # fmt: skip


def _behind(name: str, table: Mapping[str, Image]) -> Image | None:
    """The image that a short name stands for, named with a digest; None: it is no short name.

    An allow-list of short names means what the table says of them. Without this, `base@sha256:…`
    would be on it as well, and be any image that some public registry has under that name.
    """
    place, _, digest = name.partition("@")
    short = [one for key, one in table.items() if _place(key) == place != _place(one.pin)]
    for one in short:
        if one.pin.endswith(f"@{digest}"):
            return one
    if short:
        raise Problem(
            "INVALID", "this name stands for another image here",
            hint="leave the digest out: the operator's table has it", field="image",
            rule="image.digest",
        )  # fmt: skip
    return None


def _place(name: str) -> str:
    """A canonical name without its tag or digest."""
    return name.partition("@")[0] if "@" in name else name.rpartition(":")[0]


class Table:
    """The operator's file, read again when it has changed: a ConfigMap is updated in place."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._table: dict[str, Image] = {}

    def read(self) -> Mapping[str, Image]:
        """The table now."""
        if not self._path:
            return {}
        try:
            with open(self._path, "rb") as file:
                status = os.fstat(file.fileno())
                mark = (status.st_ino, status.st_mtime_ns, status.st_size)
                if mark == self._seen:
                    return self._table
                if status.st_size > MOST_BYTES:
                    raise UsageError(f"'{self._path}' is too large", code="bad-kubernetes")
                document = tomllib.load(file)
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"cannot read the images in '{self._path}': {why}", hint="KUBERNETES_IMAGES",
                code="bad-kubernetes",
            ) from error  # fmt: skip
        self._table, self._seen = decode(self._path, document), mark
        return self._table
