"""An agent as in a pod, without a cluster: its own pid 1, a read-only root, a uid of its own.

Copied to nowhere: tests run it in their own process, and the agent as another user.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.pod import bundle, terms
from agent_sandbox.service.backend import pod_env, pod_identity
from agent_sandbox.service.backend.interface import Ended, Running, Start
from agent_sandbox.service.backend.pod_link import Claim, PodLink
from conftest import IS_ROOT, As, make_readable

T = TypeVar("T")
SECONDS = 60.0
FIRST_UID = 2_000_000


class Pod:
    """A started agent, and the means to reach it."""

    def __init__(
        self, identity: As, base: Path, built: Path, pem: bytes, *, unclaimed: int = 600,
        before: tuple[str, ...] = (), plain_root: bool = False, etc: str = "/etc",
        image: Mapping[str, str] | None = None, volume: Path | None = None,
    ) -> None:  # fmt: skip
        self.data = base
        self.owner = identity
        self.identity = pod_identity.contexts(pem)
        self.port = _free_port()
        # Each pod has a uid of its own, as in a cluster; without root only ours can be had.
        self.uid = random.randint(FIRST_UID, FIRST_UID * 2) if identity.uid == 0 else identity.uid
        self.base = base
        self.env = {**(image or {}), **pod_env.env(self.identity.ca, unclaimed, port=self.port)}
        self.etc = etc
        # As an image's VOLUME: on the machine's disk, and open to everybody.
        self.volume = volume
        for part in ("", "workspace", "home", "home/agent", "tmp"):
            place = base / part
            place.mkdir(exist_ok=True)
            place.chmod(0o755)
            if IS_ROOT:
                os.chown(place, self.uid, self.uid)
        self.built = built
        self._known = ""
        argv = [*before, *self._container(identity, plain_root), *pod_env.COMMAND]
        self.process = identity.popen(
            argv, cwd="/", env={**dict.fromkeys(identity.environ()), **self.env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _container(self, identity: As, plain_root: bool) -> list[str]:
        options = ["bwrap", "--unshare-pid", "--as-pid-1", "--die-with-parent", "--proc", "/proc"]
        options += ["--dev", "/dev", "--ro-bind", "/sys", "/sys", "--ro-bind", "/usr", "/usr"]
        options += ["--ro-bind", self.etc, "/etc"]
        for name in ("bin", "sbin", "lib", "lib64"):
            options += ["--symlink", f"usr/{name}", f"/{name}"]
        for name in ("/opt", "/home"):
            options += ["--perms", "0755", "--dir", name]
        options += ["--ro-bind", str(self.built), terms.ROOT, "--bind", str(self.data), terms.PLACE]
        if not plain_root:
            for path, part in pod_env.MOUNTS.items():
                options += ["--bind", f"{self.data}/{part}", path]
        if self.volume is not None:
            options += ["--bind", str(self.volume), "/volume"]
        options += ["--remount-ro", "/"]
        if identity.uid == 0:
            uid = str(self.uid)
            options += ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups"]
            options += ["--inh-caps=-all", "--bounding-set=-all"]
        return options

    def fingerprint(self) -> str:
        """The agent's line, as the engine's log would have it."""
        if self._known:
            return self._known
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], SECONDS)
        line = self.process.stdout.readline() if ready else ""
        found = pod_env.fingerprint(line)
        assert found, (line, self.process.stderr.read() if self.process.stderr else "")
        self._known = found
        return found

    @property
    def init(self) -> int:
        """The agent's process, as this machine numbers it."""
        for pid in _below(self.process.pid):
            if Path(f"/proc/{pid}/comm").read_text() == "loader\n":
                return pid
        raise AssertionError("there is no agent")

    def enter(self, *argv: str) -> list[str]:
        """A program in the pod, as its user, started by the engine: confined by nothing of ours."""
        uid = str(self.uid)
        enter = ["nsenter", "-t", str(self.init), "-p", "-m", "--"]
        drop = ["setpriv", "--reuid", uid, "--regid", uid, "--clear-groups", "--inh-caps=-all"]
        return [*enter, *drop, *argv]

    def popen(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        return self.owner.popen(self.enter(*argv), cwd="/", **options)

    def run(self, *argv: str) -> str:
        return self.owner.run(self.enter(*argv), cwd="/").stdout

    def number(self, pid: int) -> str:
        """A process by its number in the pod."""
        text = Path(f"/proc/{pid}/status").read_text()
        return text.partition("NSpid:")[2].split("\n")[0].split()[-1]

    def supervisors(self) -> list[int]:
        """What serves a command or a request."""
        text = Path(f"/proc/{self.init}/task/{self.init}/children").read_text()
        return [int(pid) for pid in text.split()]

    async def dial(self) -> socket.socket:
        sock = socket.socket()
        sock.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        except BaseException:
            sock.close()
            raise
        return sock

    def link(self, fingerprint: str = "", **options: Any) -> PodLink:
        made = PodLink(self.dial, fingerprint or self.fingerprint(), self.identity, **options)
        _links.append(made)
        return made

    async def claimed(self, **fields: Any) -> PodLink:
        """A link to a claimed pod."""
        link = self.link()
        await link.claim(Claim(**{"sandbox": "sbx-1", "lease_seconds": 600.0, **fields}))
        return link

    def ended(self, seconds: float = SECONDS) -> int:
        """How the agent has ended."""
        return self.process.wait(seconds)

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


class Process:
    """A started command and what it has said so far."""

    def __init__(self) -> None:
        self.said: dict[int, bytes] = {1: b"", 2: b""}
        self.heard = asyncio.Event()
        self.running: Running

    def sink(self, number: int, data: bytes) -> None:
        self.said[number] += data
        self.heard.set()

    async def until(self, words: str) -> str:
        """Wait until it has said something; all that it has said."""
        while words.encode() not in self.said[1] + self.said[2]:
            self.heard.clear()
            await asyncio.wait_for(self.heard.wait(), SECONDS)
        return self.out

    async def end(self) -> Ended:
        return await asyncio.wait_for(self.running.wait(), SECONDS)

    @property
    def out(self) -> str:
        return self.said[1].decode("utf-8", "replace")

    @property
    def err(self) -> str:
        return self.said[2].decode("utf-8", "replace")


_count = itertools.count(1)
_links: list[PodLink] = []


async def idle(link: PodLink) -> None:
    """Until no process of a command is counted. `play` has a bound.

    The agent learns of an end a moment after the service: until then it counts what its supervisor
    is about to build for the next command.
    """
    while (await link.usage()).pids:  # noqa: ASYNC110 - what is awaited is another's doing
        await asyncio.sleep(0.01)


def play(scene: Coroutine[Any, Any, T], seconds: float = 110) -> T:
    """Run a scene to its end, and close what it has opened."""

    async def body() -> T:
        try:
            return await asyncio.wait_for(scene, seconds)
        finally:
            while _links:
                await _links.pop().close()
            await asyncio.sleep(0)

    return asyncio.run(body())


async def start(link: PodLink, *argv: str, **fields: Any) -> Process:
    """Start a command."""
    process = Process()
    process.running = await link.start(
        Start(execution=f"exc-{next(_count)}", argv=argv, **fields), process.sink
    )
    return process


async def run(link: PodLink, *argv: str, **fields: Any) -> tuple[Process, Ended]:
    """Run a command to its end."""
    process = await start(link, *argv, **fields)
    return process, await process.end()


async def sh(link: PodLink, script: str, **fields: Any) -> str:
    """What a script inside says on both streams."""
    process, _ = await run(link, "sh", "-c", script, **fields)
    return process.out + process.err


def build(shared: Path) -> Path:
    """The bundle, once for a session, where every identity can read it."""
    built = shared / "bundle"
    if not built.exists():
        fresh = shared / f"bundle-{os.getpid()}"
        os.umask(0o022)
        bundle.make(str(fresh))
        make_readable(fresh)
        fresh.rename(built)
    return built


def living(word: str) -> list[int]:
    """Processes of this machine that have a word among their arguments."""
    pids = [int(pid) for pid in os.listdir("/proc") if pid.isdigit()]
    return [pid for pid in pids if word.encode() in _cmdline(pid).split(b"\0")]


async def alive(word: str, count: int) -> None:
    """Wait until there are so many of them."""
    deadline = time.monotonic() + SECONDS
    while len(living(word)) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def gone(word: str) -> bool:
    """Whether such processes end soon."""
    deadline = time.monotonic() + SECONDS
    while living(word):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _below(pid: int) -> list[int]:
    found = [pid]
    for one in found:
        try:
            text = Path(f"/proc/{one}/task/{one}/children").read_text()
        except OSError:
            continue
        found += map(int, text.split())
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def directory(identity: As) -> Path:
    """A place for a pod's files, outside of /tmp, which a sandbox replaces."""
    parent = Path("/srv") if IS_ROOT else Path.home()
    path = Path(tempfile.mkdtemp(prefix="agsbx-pod-", dir=parent))
    path.chmod(0o755)
    return path


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
