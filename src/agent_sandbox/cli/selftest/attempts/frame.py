"""The frame of the attempts: makes each in a process of its own, and prints what it got.

    python -I -S -c 'from attempts.frame import main; …' FACTS NAME…

FACTS is a JSON object with what an attacker would know. The line that an attempt prints is the
evidence that it was really made. Whether it was a success is decided outside, by what has become of
the host; only what the host cannot know is an answer of the kind `Got`. Every target belongs to the
throw-away world, or is merely opened and closed again.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re  # noqa: TID253 - a program of its own
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Attempt = Callable[[], str]

# How long one attempt may take.
SECONDS = 8
# Kinds of answers. BROKEN: the attempt failed for a reason of its own, and proves nothing.
ANSWER, GOT, ASK, BROKEN = "answer", "got", "ask", "broken"
LONGEST = 500
# System calls without a wrapper everywhere: numbers on x86_64 and on aarch64.
CALLS = {
    "keyctl": (250, 219), "ioctl": (16, 29), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "fsopen": (430, 430),
    "pidfd_getfd": (438, 438),
}  # fmt: skip

libc = ctypes.CDLL(None, use_errno=True)
facts: dict[str, str] = {}
ATTEMPTS: dict[str, Attempt] = {}


class Got(str):
    """An answer that is itself the escape: nothing outside could show it, or not whose it was."""

    __slots__ = ()


def attempt(function: Attempt) -> Attempt:
    """Put a function into the table of attempts, by its name."""
    ATTEMPTS[function.__name__] = function
    return function


def say(name: str, kind: str, text: str) -> None:
    """One line of evidence, written at once: the next thing may be our death."""
    line = f"{facts['tag']} {json.dumps([name, kind, text[:LONGEST]])}\n"
    os.write(1, line.encode())


def main() -> None:
    """Make every attempt that is named, one after the other."""
    from . import files, processes  # noqa: F401 - they fill the table

    facts.update(json.loads(sys.argv[1]))
    for name in sys.argv[2:]:
        _isolated(name)


def _isolated(name: str) -> None:
    """Make an attempt in a child: the kernel may kill it, and it may hang."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            text = ATTEMPTS[name]()
            say(name, GOT if isinstance(text, Got) else ANSWER, text)
        except OSError as error:
            say(name, ANSWER, word(error))
        except BaseException as error:  # noqa: BLE001 - our own fault must not look like a defence
            say(name, BROKEN, f"{type(error).__name__}: {error}")
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        kind = BROKEN if number == signal.SIGALRM else ANSWER
        say(name, kind, f"killed by {signal.Signals(number).name}")


def word(error: OSError) -> str:
    """The kernel's name for an error."""
    return errno.errorcode.get(error.errno or 0, str(error))


def each(*tries: tuple[str, Callable[[], object]]) -> str:
    """Try several ways; what each of them got, in a line."""
    said = []
    for name, way in tries:
        try:
            result = way()
        except OSError as error:
            result = word(error)
        said.append(f"{name}: {'done' if result is None else result}")
    return "; ".join(said)


def refused(said: str, *errors: str) -> str:
    """The answer of `each` when every way met one of these errors; else those that did not."""
    others = [part for part in said.split("; ") if part.rpartition(": ")[2] not in errors]
    return Got("; ".join(others)) if others else said


def checked(result: int) -> int:
    """The result of a call of the C library; its errors are OSError."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def syscall(name: str, *arguments: object) -> int:
    """A system call by its name in CALLS."""
    number = CALLS[name][os.uname().machine == "aarch64"]
    return checked(libc.syscall(ctypes.c_long(number), *arguments))


def write(path: str, text: str = "", mode: int = 0o644) -> None:
    """Write a file, with the directories above it."""
    if os.path.dirname(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text or facts["tag"])
    os.chmod(path, mode)


def append(path: str) -> None:
    """Add a word to a file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(facts["tag"])


def read(path: str) -> str:
    """The secrets in a file, or that there are none."""
    with open(path, encoding="utf-8", errors="replace") as file:
        return secrets(file.read())


def secrets(text: str) -> str:
    """What of a text is a secret: it is known how they begin, not how they go on."""
    found = re.findall(re.escape(facts["tag"]) + "-[0-9a-f]{16,}", text)
    return " ".join(dict.fromkeys(found)) or "nothing secret"
