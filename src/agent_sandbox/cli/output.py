"""How errors, notices and warnings look on stderr."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..errors import SandboxError

RED, YELLOW, PLAIN = "\033[31m", "\033[33m", "\033[0m"


def coloured() -> bool:
    """Colour only on a terminal, and never against the user's NO_COLOR."""
    return not os.environ.get("NO_COLOR") and sys.stderr.isatty()


def say(program: str, kind: str, message: str, colour: str = "") -> None:
    """One line: program, kind, message."""
    label = f"{colour}{kind}:{PLAIN}" if colour and coloured() else f"{kind}:"
    sys.stderr.write(f"{program}: {label} {printable(message)}\n")


def printable(text: str) -> str:
    """Text that cannot drive a terminal, whatever names are in it."""
    return "".join(c if c.isprintable() else "?" for c in text)


def error(program: str, problem: SandboxError) -> None:
    """An error and, below it, what to do about it."""
    say(program, "error", problem.message, RED)
    if problem.hint:
        sys.stderr.write(f"hint: {printable(problem.hint)}\n")


def notice(program: str, message: str) -> None:
    """Something the user should know that does not stop the run."""
    say(program, "notice", message, YELLOW)
