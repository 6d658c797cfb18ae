"""Host names and addresses in one canonical spelling, or not at all.

Pure. Everything that decides about a host decides on this text. What two programs might read
differently (octal numbers, escapes, letters that are mapped to others) has no canonical spelling.
"""

from __future__ import annotations

from .addresses import address

MAX_NAME = 253
MAX_LABEL = 63
LABEL = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")
DIGITS = frozenset("0123456789")
HEX = frozenset("0123456789abcdef")
# IDNA takes these for dots; nobody else does.
OTHER_DOTS = frozenset("\u3002\uff0e\uff61")


class BadName(ValueError):
    """A host that has no canonical spelling; the text says why."""


def canonical(host: str) -> str:
    """The name or address as it is compared: lower case, no last dot, ASCII; v6 compressed."""
    if not host:
        raise BadName("the host is empty")
    if len(host) > 4 * MAX_NAME:
        raise BadName("it is too long")
    # isprintable() is false for controls, NUL, lone surrogates and every blank but " ".
    if " " in host or not host.isprintable():
        raise BadName("it holds a blank or a control character")
    if "%" in host:
        raise BadName("'%' starts an escape or a zone id, and neither belongs in a host")
    if ":" in host:
        return _address(host)
    dotted = host.removesuffix(".")
    labels = [_label(label) for label in dotted.split(".")]
    if _is_number(labels[-1]):
        # Resolvers take 127.1, 0x7f.1, 0177.0.0.1 and 2130706433 for 127.0.0.1.
        return _address(host)
    name = ".".join(labels)
    if len(name) > MAX_NAME:
        raise BadName(f"it is longer than {MAX_NAME} characters")
    return name


def is_address(host: str) -> bool:
    """Whether a canonical host is an address."""
    return ":" in host or _is_number(host.rpartition(".")[2])


def _address(host: str) -> str:
    try:
        return str(address(host))
    except ValueError:
        raise BadName("it is neither a name nor a complete IP address") from None


def _is_number(label: str) -> bool:
    return DIGITS.issuperset(label) or (label.startswith("0x") and HEX.issuperset(label[2:]))


def _label(label: str) -> str:
    text = label.lower() if label.isascii() else _to_ascii(label)
    if not text:
        raise BadName("a part between two dots is empty")
    if len(text) > MAX_LABEL:
        raise BadName(f"a part is longer than {MAX_LABEL} characters")
    if not LABEL.issuperset(text):
        wrong = next(one for one in text if one not in LABEL)
        raise BadName(f"{wrong!r} does not belong in a host name")
    if text[0] == "-" or text[-1] == "-":
        raise BadName("a part begins or ends with '-'")
    return text


def _to_ascii(label: str) -> str:
    """One label in its xn-- form, if that form stands for exactly these letters.

    IDNA 2003 maps ß to ss and drops joiners, IDNA 2008 does not: two programs would reach
    two hosts.
    """
    from encodings.idna import ToASCII, ToUnicode

    if not OTHER_DOTS.isdisjoint(label):
        raise BadName("it holds a dot that is not '.'")
    lower = label.lower()
    try:
        found = ToASCII(lower).decode("ascii")
        back = ToUnicode(found)
    except (UnicodeError, IndexError):
        raise BadName("a part has no IDNA form") from None
    if back != lower or lower.isascii():  # the Kelvin sign's lower case is a plain k
        raise BadName("letters in it are not the same for every program; write its xn-- form")
    return found.lower()
