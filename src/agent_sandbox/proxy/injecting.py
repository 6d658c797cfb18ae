"""Puts values into requests: which header, for which host, in place of which placeholder. Pure."""

from __future__ import annotations

import binascii

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .http1 import Request

BASIC = "basic "


class Value(Record):
    """A secret as the proxy has it. Never shown: no text is made of it."""

    host: str
    port: int
    header: str
    format: str
    placeholder: str
    value: str
    # The listener inside that leads to the host; 0 if the host's TLS is opened instead.
    base_port: int = 0

    def __repr__(self) -> str:
        return f"Value(for {self.host}:{self.port})"


class Values:
    """All of them."""

    def __init__(self, values: Iterable[Value] = ()) -> None:
        self._all = tuple(values)
        self.opened = frozenset((v.host, v.port) for v in self._all if not v.base_port)
        self.bases = {v.base_port: (v.host, v.port) for v in self._all if v.base_port}

    def fill(self, request: Request, host: str, port: int) -> Request:
        """The request with the values of this host, and of no other."""
        mine = [v for v in self._all if (v.host, v.port) == (host, port)]
        fields = tuple((name, filled(name, text, mine)) for name, text in request.fields)
        return request.replace(fields=fields)


def filled(name: str, text: str, values: Sequence[Value]) -> str:
    """One field with every placeholder in it replaced."""
    for one in values:
        if name.lower() != one.header:
            continue
        found = _replaced(text, one)
        if found != text:
            text = one.format.replace("{}", one.value) if one.format else found
    return text


def _replaced(text: str, one: Value) -> str:
    """Also inside of `Basic`, as git and curl send a password."""
    if not text.lower().startswith(BASIC):
        return text.replace(one.placeholder, one.value)
    try:
        said = binascii.a2b_base64(text[len(BASIC) :].strip())
    except binascii.Error:
        return text
    changed = said.replace(one.placeholder.encode(), one.value.encode())
    if changed == said:
        return text
    return text[: len(BASIC)] + binascii.b2a_base64(changed, newline=False).decode("ascii")
