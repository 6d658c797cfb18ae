"""One machine of the test cluster: namespaces with a first process, and cgroups of its own.

Its mounts, devices and processes are in namespaces, so they go when the first process does. What
is left then, cgroups, has one name in every hierarchy.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

INIT = Path(__file__).with_name("init.py")
SECONDS = 60.0
# kubelet writes these for the whole machine, or refuses to start; it gets files of its own.
KERNEL = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
    "/proc/sys/kernel/keys/root_maxkeys": "1000000",
    "/proc/sys/kernel/keys/root_maxbytes": "25000000",
}


# Of v1, or else of v2: the file, its words for "goes on" and "stands", and where it says so. What
# one of them has stopped cannot be stopped by the other, so it is never both.
FREEZERS = (
    ("freezer.state", ("THAWED", "FROZEN"), "freezer.state", ("THAWED", "FROZEN")),
    ("cgroup.freeze", ("0", "1"), "cgroup.events", ("frozen 0", "frozen 1")),
)


def do(*argv: str | Path, check: bool = True) -> str:
    """Run a program; what it says."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=SECONDS)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr or done.stdout}")
    return done.stdout


def wait(what: str, holds: object, seconds: float = SECONDS, pause: float = 0.05) -> None:
    """Until something holds: there is no event for what another program does."""
    assert callable(holds)
    until = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)


class Groups:
    """The same cgroup in every hierarchy: those of v1, and that of v2, also beside them."""

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def hierarchies() -> list[Path]:
        """Where they are mounted."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        kinds = ("cgroup", "cgroup2")
        return [Path(words[1]) for words in map(str.split, lines) if words[2] in kinds]

    def paths(self) -> list[Path]:
        """Where this one is, in each."""
        return [top / self.name for top in self.hierarchies()]

    def freeze(self, *, frozen: bool) -> None:
        """Stop all that is below, or let it go on; returns when it is so."""
        for file, words, shown, told in FREEZERS:
            for path in self.paths():
                if (path / file).exists():
                    (path / file).write_text(words[frozen])
                    wait(f"{self.name}: {told[frozen]}", partial(_says, path / shown, told[frozen]))
                    return

    def make(self, pid: int) -> None:
        """Make them, with a process in a child of them: the others are of the pods."""
        for path in self.paths():
            for made in (path, path / "system"):
                made.mkdir(exist_ok=True)
                if (control := made.parent / "cgroup.subtree_control").exists():
                    there = (made.parent / "cgroup.controllers").read_text().split()
                    control.write_text(" ".join(f"+{name}" for name in there))
                for file in ("cpuset.cpus", "cpuset.mems"):
                    # Of v1, where a new group has none and takes no process.
                    above = made.parent / file
                    if above.exists() and not (made / file).read_text().strip():
                        (made / file).write_text(above.read_text())
            (path / "system" / "cgroup.procs").write_text(str(pid))

    def processes(self) -> set[int]:
        """All that are in it or below."""
        found: set[int] = set()
        for path in self.paths():
            for file in path.rglob("cgroup.procs"):
                with contextlib.suppress(OSError):
                    found |= {int(word) for word in file.read_text().split()}
        return found

    def remove(self) -> None:
        """Kill what is left in them and remove them; what is frozen dies when it thaws."""
        if not any(path.exists() for path in self.paths()):
            return
        with contextlib.suppress(OSError):
            self.freeze(frozen=False)
        wait(f"{self.name}: processes end", self._emptied)
        wait(f"{self.name}: cgroups go", self._removed)

    def _emptied(self) -> bool:
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left

    def _removed(self) -> bool:
        for path in self.paths():
            for folder, _, _ in os.walk(path, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
        return not any(path.exists() for path in self.paths())


def _says(file: Path, word: str) -> bool:
    return word in file.read_text()


class Machine:
    """Started by its maker; `end` takes everything of it away but its files."""

    def __init__(self, name: str, base: Path, group: str) -> None:
        self.name = name
        self.base = base
        self.groups = Groups(group)
        base.mkdir(exist_ok=True)
        with self.log("init").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--net", "--uts", "--ipc",
                 sys.executable, "-I", INIT],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,
            )  # fmt: skip
        assert self._process.stdout is not None
        self._answered()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        # As this namespace counts: the first process of the machine.
        self.pid = int(children.read_text())
        self.groups.make(self.pid)
        self.order("run", "ip", "link", "set", "lo", "up")

    def _answered(self) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if answer != "ok":
            raise RuntimeError(f"{self.name}: {answer or 'has ended'}")

    def order(self, verb: str, *words: str | Path) -> None:
        """Have the first process do something (init.py)."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *map(str, words)]) + "\n")
        self._process.stdin.flush()
        self._answered()

    def start(self, program: str, argv: Sequence[str | Path]) -> None:
        """Start a program that stays; its log has its name."""
        self.order("start", self.log(program), *argv)

    def log(self, program: str) -> Path:
        """Where a program writes."""
        return self.base / f"{program}.log"

    def inside(self, *argv: str | Path) -> list[str]:
        """A command line that runs in the machine's mounts and network."""
        enter = ("nsenter", "-t", str(self.pid), "--mount", "--net", "--pid", "--uts", "--ipc")
        return [*enter, *map(str, argv)]

    def ip(self, *words: str) -> str:
        """`ip` in the machine's network, with this namespace's pids."""
        return do("nsenter", "-t", str(self.pid), "--net", "ip", *words)

    @property
    def alive(self) -> bool:
        """Whether its first process runs."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """Stop every process of it where it is."""
        self.groups.freeze(frozen=True)

    def thaw(self) -> None:
        """Let them go on."""
        self.groups.freeze(frozen=False)

    def kill(self) -> None:
        """Kill it, as if its power had gone; returns when nothing of it runs."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            self.groups.freeze(frozen=False)
        self._process.wait(SECONDS)

    def end(self) -> None:
        """Kill it and take its cgroups away."""
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()
        self.groups.remove()


def names(prefix: str) -> Iterator[str]:
    """Cgroups that begin with a prefix, in any hierarchy."""
    yield from {path.name for top in Groups.hierarchies() for path in top.glob(f"{prefix}*")}
