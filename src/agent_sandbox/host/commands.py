"""Finds the programs that command rules name, and reads the user's scripts for them."""

from __future__ import annotations

import os
import stat

from ..errors import PolicyError, reason
from ..policy import paths
from ..policy.commands import PRESETS, SHELL, STARTER, Place, Program, Programs
from .locate import MAX_LINKS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..policy.model import Match, Setting
    from .locate import Locator

MAX_SCRIPT = 16 << 20
# Where git keeps the programs that it calls itself, from the directory above its own.
GIT_DIRECTORIES = ("lib/git-core", "libexec/git-core")


def find(
    rules: Mapping[str, Setting], path: str, *, cwd: str, home: str, locator: Locator
) -> Programs:
    """Every program that a rule names, as it is on PATH."""
    named = []
    for name, setting in rules.items():
        where = f"commands.{name} ({setting.source})"
        if not path:
            raise _missing(name, where, "PATH is empty")
        places = tuple(_places(name, path, cwd))
        if not places:
            raise _missing(name, where, "command not found in PATH")
        script, text = None, ""
        if isinstance(setting.value, str) and setting.value not in PRESETS:
            wanted = paths.expand(setting.value, base=cwd, home=home, where=where)
            script, text = _script(wanted, where, locator)
        own = tuple(_own(places)) if setting.value == "@git" else ()
        named.append(Program(name=name, places=places, own=own, script=script, text=text))
    return Programs(
        named=tuple(named),
        shell=_way(SHELL) or Place(covered=(), file=SHELL),
        starter=_way(STARTER) or Place(covered=(), file=STARTER),
    )


def _missing(name: str, where: str, why: str) -> PolicyError:
    return PolicyError(
        f"cannot block or wrap '{name}' for {where}: {why}",
        hint="check the spelling, or take the rule out",
        code="command-rule-missing",
    )


def _places(name: str, path: str, cwd: str) -> Iterator[Place]:
    seen = set()
    for part in path.split(":"):
        directory = os.path.realpath(part if part.startswith("/") else f"{cwd}/{part}")
        if part and directory not in seen:
            seen.add(directory)
            found = _way(f"{directory}/{name}")
            if found is not None:
                yield found


def _way(path: str) -> Place | None:
    """Follow the links of a program; None when there is no program at the end.

    A link or file of another name is left alone: it may be a program of many names.
    """
    name = path.rpartition("/")[2]
    covered = []
    for _ in range(MAX_LINKS):
        here = f"{os.path.realpath(paths.parent(path))}/{path.rpartition('/')[2]}"
        try:
            mode = os.lstat(here).st_mode
            text = os.readlink(here) if stat.S_ISLNK(mode) else ""
        except OSError:
            return None
        if here.rpartition("/")[2] == name:
            covered.append(here)
        if not text:
            runs = stat.S_ISREG(mode) and mode & 0o111
            return Place(covered=tuple(covered), file=here) if runs else None
        path = text if text.startswith("/") else f"{paths.parent(here)}/{text}"
    return None


def _own(places: tuple[Place, ...]) -> Iterator[Place]:
    """Git in git's own directory, which comes first on PATH for what git starts."""
    for place in places:
        above = paths.parent(paths.parent(place.file))
        for directory in GIT_DIRECTORIES:
            found = _way(f"{above.rstrip('/')}/{directory}/git")
            if found is not None:
                yield found


def _script(path: str, where: str, locator: Locator) -> tuple[Match, str]:
    """The user's script: its text now, so that nobody inside decides what it will be."""

    def refuse(why: str) -> PolicyError:
        hint = "name a file, with an absolute path, '~/…', or from the working directory"
        return PolicyError(f"cannot use '{path}' for {where}: {why}", hint=hint, code="bad-script")

    match = locator.find(path)
    if match is None:
        raise refuse("no such script")
    if match.kind != "file":
        raise refuse("not a regular file")
    try:
        fd = os.open(match.real, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise refuse(reason(error)) from error
    with open(fd, "rb") as file:
        # A sandbox may swap a directory on the way for a link after the path was looked up.
        if os.readlink(f"/proc/self/fd/{fd}") != match.real:
            raise refuse("it changed while it was read")
        data = file.read(MAX_SCRIPT + 1)
    if len(data) > MAX_SCRIPT:
        raise refuse("larger than 16 MiB")
    return match, data.decode("utf-8", "surrogateescape")
