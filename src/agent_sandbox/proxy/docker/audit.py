"""The audit log: one line of JSON per decision, for the owner of the sandbox alone.

No bodies, no variables, no headers. A query's values may hold build arguments and secrets, so only
its names are written.
"""

from __future__ import annotations

import json
import os
import time
from urllib.parse import unquote_plus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Beyond this size a log is put aside, once, when a run starts.
MAX_SIZE = 16 << 20
MAX_PATH = 1000
MAX_ENTRIES = 1000


def bare(target: str) -> str:
    """A target with the values of its query left out. Pure."""
    path, mark, query = target.partition("?")
    names = (part.partition("=")[0] for part in query.split("&")) if mark else ()
    shown = path + (mark + "&".join(unquote_plus(name)[:MAX_PATH] for name in names))
    return shown[:MAX_PATH]


class Audit:
    """A log, and the sums of one run."""

    def __init__(self, path: str, run: str) -> None:
        self._run = run
        self._fd = _open(path) if path else -1
        # (rule, allowed) → how often.
        self._counts: dict[tuple[str, bool], int] = {}
        self._mutations: dict[str, int] = {}
        self._broken = ""

    def note(
        self, *, method: str, target: str, normalised: str, rule: str, allowed: bool, status: int,
        mutations: Sequence[str] = (), would: bool = False,
    ) -> None:  # fmt: skip
        """Write down one decision. `would`: it was let through only because of the mode warn."""
        key = (rule, allowed)
        if key in self._counts or len(self._counts) < MAX_ENTRIES:
            self._counts[key] = self._counts.get(key, 0) + 1
        for mutation in mutations:
            if mutation in self._mutations or len(self._mutations) < MAX_ENTRIES:
                self._mutations[mutation] = self._mutations.get(mutation, 0) + 1
        verdict = "would-refuse" if would else "allow" if allowed else "refuse"
        self._write({
            "time": round(time.time(), 3), "run": self._run, "rule": rule, "method": method[:64],
            "raw": bare(target), "path": bare(normalised), "verdict": verdict, "status": status,
            "mutations": list(mutations),
        })  # fmt: skip

    def _write(self, entry: dict[str, object]) -> None:
        if self._fd < 0:
            return
        line = json.dumps(entry, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"
        try:
            # One call: with O_APPEND lines of several runs do not mix.
            os.write(self._fd, line)
        except OSError as error:
            self._broken = error.strerror or "unknown error"

    def report(self) -> dict[str, object]:
        """The sums, for the run's report."""
        counted = sorted(self._counts.items(), key=lambda item: (item[0][1], -item[1], item[0][0]))
        report: dict[str, object] = {
            "requests": sum(self._counts.values()),
            "rules": [
                {"rule": rule, "allowed": allowed, "count": count}
                for (rule, allowed), count in counted
            ],
            "mutations": dict(sorted(self._mutations.items())),
        }
        if self._broken:
            report["audit"] = f"the audit log is incomplete: {self._broken}"
        return report

    def close(self) -> None:
        """No more lines."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open(path: str) -> int:
    """The log, made for the owner alone; a large one is put aside. "-": standard output."""
    if path == "-":
        return os.dup(1)
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if os.lstat(path).st_size > MAX_SIZE:
            os.replace(path, f"{path}.1")
    except FileNotFoundError:
        pass
    return os.open(path, flags, 0o600)
