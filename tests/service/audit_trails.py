"""Audit trails for tests: made, copied and changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from agent_sandbox.service.audit import Audit, AuditTrail, places, verify
from agent_sandbox.service.audit.postgres import PgAudit
from agent_sandbox.service.store_address import Database
from agent_sandbox.service.values import EXEC, Agent

AGENT = Agent(
    name="worker", key="sbx_ab12cd34", scopes=frozenset({EXEC}), uid=1000, address="127.0.0.1"
)


class Clock:
    """Half a second later with each look."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def write(audit: AuditTrail, number: int) -> int:
    """A line like those of the service."""
    return audit.write(
        AGENT, "exec.start", target=f"exc-{number}", request={"cmd": ["echo", str(number)]},
        limits={"timeout": 60.0}, request_id=f"req_{number:016x}",
    )  # fmt: skip


def make(directory: Path, lines: int = 12, rotate_bytes: int = 2000) -> Path:
    """A trail of several files."""
    audit = Audit(str(directory), rotate_bytes=rotate_bytes, clock=Clock())
    for number in range(lines):
        write(audit, number)
    audit.close()
    return directory


def copy(trail: Path, to: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(trail, to))


def logs(trail: Path) -> list[Path]:
    """The files with lines, in order."""
    return [trail / places.name_of(number) for number in places.numbers(str(trail))]


def findings(trail: Path, expected: tuple[int, str] | None = None) -> list[str]:
    """What `verify` says."""
    return [str(finding) for finding in verify.verify(str(trail), expected)]


def split(path: Path) -> list[bytes]:
    """The lines of a file, with their ends."""
    return path.read_bytes().splitlines(keepends=True)


class Desk:
    """A trail of either kind: in files, or in a database."""

    def __init__(self, directory: Path, database: Database | None) -> None:
        self.directory = directory
        self.database = database
        self._open: list[AuditTrail] = []

    def open(self, **options: Any) -> AuditTrail:
        """A writer, as another process may have one at the same time."""
        made: AuditTrail
        if self.database is None:
            made = Audit(str(self.directory), **options)
        else:
            made = PgAudit(self.database, **options)
        self._open.append(made)
        return made

    def make(self, lines: int = 12, rotate_bytes: int = 2000) -> AuditTrail:
        """A trail of several files."""
        audit = self.open(rotate_bytes=rotate_bytes, clock=Clock())
        for number in range(lines):
            write(audit, number)
        return audit

    def files(self) -> dict[str, list[bytes]]:
        """The lines with their ends, by file."""
        trail = self._any().snapshot()
        return {
            places.name_of(number): [line for _, line in trail.lines(number)]
            for number in trail.sizes
        }

    def raw(self) -> list[bytes]:
        return [line for lines in self.files().values() for line in lines]

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.raw()]

    def findings(self, expected: tuple[int, str] | None = None) -> list[str]:
        """What `verify` says."""
        return [str(finding) for finding in verify.verify(self._any(), expected)]

    def _any(self) -> AuditTrail:
        return self._open[0] if self._open else self.open()

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
