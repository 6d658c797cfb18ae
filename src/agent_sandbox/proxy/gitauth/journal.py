"""What was signed, handed in and refused: a line each in a log outside, and the run's report."""

from __future__ import annotations

import json
import os
import time

# Beyond this size a log is put aside, once, when a run starts.
MAX_SIZE = 16 << 20
# How many events a report lists, and how many refusals a log has. Signatures are always logged.
MAX_EVENTS = 1000
# How much of a run is signed or handed in: a line each is promised, and nobody needs so many.
MAX_GRANTS = 10_000
MAX_TEXT = 200

SIGNED, HANDED_IN, REFUSED = "signed", "handed-in", "refused"


def shown(text: str) -> str:
    """A text from inside, or from an agent, that may be shown on a terminal. Pure."""
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_TEXT])


class Journal:
    """A log, and the events of one run."""

    def __init__(self, path: str, run: str) -> None:
        self._run = run
        self._events: list[dict[str, object]] = []
        self._counts = dict.fromkeys((SIGNED, HANDED_IN, REFUSED), 0)
        self._broken = ""
        try:
            self._fd = _open(path)
        except OSError as error:
            self._fd, self._broken = -1, error.strerror or "unknown error"

    @property
    def is_whole(self) -> bool:
        """Whether everything so far is in the log."""
        return not self._broken

    def has_room(self) -> bool:
        """Whether one more signature or credential would be in the log, too."""
        granted = self._counts[SIGNED] + self._counts[HANDED_IN]
        return self.is_whole and granted < MAX_GRANTS

    def note(self, what: str, **details: str) -> None:
        """Write down one event."""
        self._counts[what] += 1
        event: dict[str, object] = {"time": round(time.time(), 3), "what": what}
        event |= {name: shown(text) for name, text in details.items() if text}
        if len(self._events) < MAX_EVENTS:
            self._events.append(event)
        if what != REFUSED or self._counts[REFUSED] <= MAX_EVENTS:
            self._write({**event, "run": self._run})

    def _write(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            # One call: with O_APPEND lines of several runs do not mix.
            if os.write(self._fd, line) != len(line):
                self._broken = "a line was cut off"
        except OSError as error:
            self._broken = error.strerror or "unknown error"

    def report(self) -> dict[str, object]:
        """Everything, for the run's report."""
        found: dict[str, object] = {"counts": self._counts, "events": self._events}
        if self._broken:
            found["log"] = f"the log of signatures is incomplete: {self._broken}"
        return found

    def close(self) -> None:
        """No more lines."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._broken = -1, "it is closed"


def _open(path: str) -> int:
    """The log, made for the owner alone; a large one is put aside."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    try:
        if os.lstat(path).st_size > MAX_SIZE:
            os.replace(path, f"{path}.1")
    except FileNotFoundError:
        pass
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)
