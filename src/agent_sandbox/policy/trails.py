"""The way to a file: whoever can write a place on it decides what the file is. Pure.

The end of a way proves nothing. A link of the user's may lead through the project, and what is put
there later leads elsewhere. A plain directory counts as well: it can be replaced by a link.
"""

from __future__ import annotations

from bisect import bisect

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

# Where a path may begin or end in a line of a shell, in a list or in an option.
BREAKS = " \t\r\n\"'`;|&<>(){}[]=,:!#$*?"
QUOTES = "\"'"
# How many breaks the name of a file may have.
MOST_BREAKS = 16


class Way(Record):
    """A path, what it leads to, and every place that is passed on the way, the end included."""

    path: str
    real: str
    steps: tuple[str, ...]


def weak_spot(way: Way, can_write: Callable[[str], bool]) -> str:
    """The first place of a way that somebody can write; empty if there is none."""
    return next((step for step in way.steps if can_write(step)), "")


def sound(ways: Iterable[Way], can_write: Callable[[str], bool]) -> tuple[str, ...]:
    """What ways really lead to, without those that somebody decides about: for PATH."""
    found = (way.real for way in ways if not weak_spot(way, can_write))
    # A colon would make two of one.
    return tuple(dict.fromkeys(real for real in found if ":" not in real))


def mentioned(text: str, home: str, env: Mapping[str, str]) -> Iterator[str]:
    """Every path that a text may mean, as a shell would read it, and too many rather than too few.

    All are absolute, but for `~somebody/…`: that is given as it is written.
    """
    full = _expanded(text, home, env)
    bare = full.replace("\\", "")
    unquoted = "".join(char for char in bare if char not in QUOTES)
    for form in dict.fromkeys((full, bare, unquoted)):
        yield from _absolute(form)
        yield from _relative(form, home)


def _expanded(text: str, home: str, env: Mapping[str, str]) -> str:
    known = {**env, "HOME": home}
    # The longest first: $XDG_DATA_HOME is not $XDG followed by something.
    for name in sorted(known, key=len, reverse=True):
        text = text.replace(f"${{{name}}}", known[name]).replace(f"${name}", known[name])
    made = []
    for at, char in enumerate(text):
        is_home = char == "~" and _begins(text, at) and text[at + 1 : at + 2] in ("", "/", *BREAKS)
        made.append(home if is_home else char)
    return "".join(made)


def _begins(text: str, at: int) -> bool:
    """Whether a path may begin here: after a break, or in an option such as `-I/opt`."""
    if at == 0 or text[at - 1] in BREAKS:
        return True
    start = max(text.rfind(char, 0, at) for char in BREAKS) + 1
    return text[start] == "-" and "/" not in text[start:at]


def _absolute(text: str) -> Iterator[str]:
    ends = [at for at, char in enumerate(text) if char in BREAKS] + [len(text)]
    for start, char in enumerate(text):
        if char == "~" and _begins(text, start):
            yield text[start : ends[bisect(ends, start)]]
        if char == "/" and _begins(text, start):
            # A name may have blanks and the like: the way to the first break, to the second, …
            first = bisect(ends, start)
            yield from (text[start:end] for end in ends[first : first + MOST_BREAKS])


def _relative(text: str, home: str) -> Iterator[str]:
    """Helpers run in `/`; a line of a shell may go home first."""
    for char in BREAKS:
        text = text.replace(char, " ")
    for word in text.split(" "):
        if "/" in word and word[0] not in "/~":
            yield f"/{word}"
            yield f"{home}/{word}"
