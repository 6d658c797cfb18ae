"""One data directory, the server process on it, and what must not be left of either."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

from chaos import processes
from conftest import As
from kernel.conftest import eventually
from service.conftest import ROOMY

READY = re.compile(r"serving on (http://\S+)")
START_SECONDS = 60.0
# The kernel takes as long as it needs to take dying processes apart; on a busy machine, seconds.
GONE_SECONDS = 15.0
STOP_SECONDS = 40.0
# What a data directory has at its top, and a sandbox at its own.
TOP = {
    "state.db", "state.db-wal", "state.db-shm", "lock", "service.sock", "audit", "executions",
    "sandboxes", "base",
}  # fmt: skip
SANDBOX = {"workspace", "home", "tmp"}


class Ground:
    """Starts and ends servers, one after the other, on one data directory."""

    def __init__(self, identity: As, base: Path) -> None:
        self.identity = identity
        self.base = base
        self.data = identity.directory(base / "data")
        # Of helpers, which do not know the data directory.
        self.marks = (str(base), f"{identity.source}/")
        self._log = base / "log"
        self._process: subprocess.Popen[str] | None = None
        self.url = ""
        self._begins = self._heard = 0
        self._kept: set[str] | None = None
        name = hashlib.sha256(os.fsencode(os.path.realpath(self.data))).hexdigest()[:12]
        self.group = f"serve-{name}"

    # --- the server

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self._process is not None
        return self._process

    def begin(self, *flags: str) -> None:
        """Start it, and do not wait."""
        assert self._process is None
        line = self.identity.command(
            "ctl", "serve", "--data", self.data, "--listen", "127.0.0.1:0", *flags
        )
        with self._log.open("ab") as log:
            self._begins = log.tell()
            self._process = self.identity.popen(
                line, env=dict(ROOMY), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def ready(self) -> None:
        """Wait until it serves."""
        assert eventually(self._is_ready, START_SECONDS), self.said()
        assert self.url, f"it did not start: {self.said()}"

    def _is_ready(self) -> bool:
        found = READY.search(self.said())
        self.url = found[1] if found else ""
        return bool(self.url) or self.process.poll() is not None

    def said(self) -> str:
        """What this process has said so far."""
        with self._log.open("rb") as log:
            log.seek(self._begins)
            return log.read().decode(errors="replace")

    def faults(self) -> list[str]:
        """What was called an error, or said without a form, since the last time."""
        with self._log.open("rb") as log:
            log.seek(self._heard)
            said = log.read().decode(errors="replace")
            self._heard = log.tell()
        found, loose = [], []
        for line in said.splitlines():
            try:
                told = json.loads(line)
            except ValueError:
                # A line for people; one of a killed process may be torn.
                loose.append(line)
                continue
            if told["level"] == "error":
                found.append(f"{told['event']}: {told.get('traceback', told)}")
        if any("Traceback" in line for line in loose):
            found.append("\n".join(loose))
        return found

    def kill(self) -> None:
        """SIGKILL, to the server alone."""
        self.process.kill()
        self.process.wait()
        self._process = None

    def stop(self) -> int:
        """SIGTERM, and how it ended."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(STOP_SECONDS)
        self._process = None
        return code

    def end(self) -> None:
        if self._process is not None:
            self.kill()
        for line in processes.marked(self.marks):
            os.kill(int(line.split()[0]), signal.SIGKILL)

    # --- clients

    def ctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`sandboxctl` as the service's own user."""
        return self.identity.run(self.identity.command("ctl", *words, "--data", self.data))

    def token(self, name: str, *flags: str) -> str:
        done = self.ctl("token", "new", name, *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def client(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    # --- what is left

    def survivors(self) -> list[str]:
        """Processes that outlive a killed server by more than the kernel needs. No restart."""
        gone = eventually(lambda: not processes.marked(self.marks), GONE_SECONDS)
        return [] if gone else [f"process {line}" for line in processes.marked(self.marks)]

    def orphans(self, admin: httpx.Client) -> list[str]:
        """What lies around of earlier servers once a new one serves."""
        sandboxes = {box["id"] for box in everything(admin, "/v1/sandboxes")}
        execs = {one["id"] for one in everything(admin, "/v1/execs")}
        # It removes old output in the background.
        journals = self.data / "executions"
        eventually(lambda: set(os.listdir(journals)) <= execs, 5)
        found = [f"output {name}" for name in set(os.listdir(journals)) - execs]
        places = set(os.listdir(self.data / "sandboxes"))
        found += [f"directory of no sandbox {name}" for name in places - sandboxes]
        found += [f"sandbox without a directory {name}" for name in sandboxes - places]
        for name in places & sandboxes:
            inside = set(os.listdir(self.data / "sandboxes" / name))
            found += [f"in {name}: {part}" for part in inside - SANDBOX]
        found += [f"in the data directory: {name}" for name in set(os.listdir(self.data)) - TOP]
        found += [f"mount {line}" for line in self._mounts()]
        found += [f"control group {path}" for path in self._dead_groups()]
        return found + [f"file {path}" for path in self._strays()]

    def _mounts(self) -> list[str]:
        table = Path("/proc/self/mountinfo").read_text(errors="replace")
        return [line for line in table.splitlines() if str(self.base) in line]

    def _dead_groups(self) -> list[str]:
        """Groups of this data directory, but for those of the server that runs now.

        A group that its server has not filled yet cannot be told: the newest is the living one's.
        """
        tops: dict[str, list[str]] = {}
        for directory, names, _ in os.walk("/sys/fs/cgroup"):
            for name in names:
                if self.group in name:
                    tops.setdefault(name, []).append(os.path.join(directory, name))
        if not tops:
            return []
        newest = max(tops, key=lambda name: max(os.stat(p).st_ctime_ns for p in tops[name]))
        return [path for name, paths in tops.items() if name != newest for path in paths]

    def _strays(self) -> list[str]:
        """Files outside of the sandboxes that were not there when it was first looked."""
        base = self.data / "base"
        found = {str(path) for path in base.rglob("*")}
        if self.identity.uid:
            # Here the owner tells: nobody else runs as this user.
            for place in map(Path, ("/tmp", "/var/tmp", "/dev/shm")):
                found |= {
                    str(path) for path in place.iterdir() if _owner(path) == self.identity.uid
                }
        if self._kept is None:
            self._kept = found
        return sorted(found - self._kept)

    def descriptors(self) -> int:
        """How many the server has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def zombies(self) -> list[str]:
        """Children that nobody waits for."""
        return [
            processes.shown(pid)
            for pid in processes.all_pids()
            if (found := processes.stat(pid)) is not None and found == ("Z", self.process.pid)
        ]


def _owner(path: Path) -> int:
    try:
        info = path.lstat()
    except OSError:
        return 0
    return 0 if stat.S_ISSOCK(info.st_mode) else info.st_uid


def everything(client: httpx.Client, path: str, **query: str) -> list[dict[str, Any]]:
    """All parts of a list."""
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        answer = client.get(path, params={"limit": "500", **query, **after})
        assert answer.status_code == 200, answer.text
        found += answer.json()["items"]
        if answer.json()["next"] is None:
            return found
        after = {"after": answer.json()["next"]}


def wait_for(condition: Any, seconds: float, what: str) -> None:
    """As `eventually`, or an error that says what did not come."""
    assert eventually(condition, seconds), what


def pause(seconds: float) -> None:
    """The moments of chaos are points in time, not events."""
    time.sleep(seconds)
