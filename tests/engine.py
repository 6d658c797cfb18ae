"""A dockerd of our own, away from any other, and images made of what this machine has.

`engine()` starts Debian's dockerd with its own data-root, exec-root, pidfile and socket. Nothing
can be pulled, so `Engine.image()` imports a busybox with the files that a test adds.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conftest import IS_ROOT, must_work

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

BUSYBOX = "/bin/busybox"
START_SECONDS = 90.0


class Engine:
    """A running dockerd and its command line."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.socket = base / "docker.sock"
        self.url = f"unix://{self.socket}"

    @property
    def env(self) -> dict[str, str]:
        """A clean environment in which docker and docker-compose use this engine."""
        return {
            "DOCKER_HOST": self.url,
            "HOME": str(self.base / "home"),
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
        }

    def run(self, *words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
        """`docker WORDS…`; an error raises unless `check=False`."""
        check = options.pop("check", True)
        done = subprocess.run(
            ["docker", *map(str, words)], check=False,
            **{"capture_output": True, "text": True, "timeout": 120, "env": self.env, **options},
        )  # fmt: skip
        if check and done.returncode:
            raise AssertionError(f"docker {words}: {done.stderr}")
        return done

    def image(
        self, name: str, *, programs: Sequence[str] = (), files: Mapping[str, str] | None = None,
        entrypoint: str = "",
    ) -> str:  # fmt: skip
        """Import an image: busybox with all its names, programs with their libraries, files."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            _fill(tar, programs, files or {})
        change = ["--change", f'ENTRYPOINT ["{entrypoint}"]'] if entrypoint else []
        done = subprocess.run(
            ["docker", "import", *change, "-", name], input=archive.getvalue(), capture_output=True,
            env=self.env, check=False, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return name


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name.lstrip("/"))
    info.size, info.mode = len(content), mode
    tar.addfile(info, io.BytesIO(content))


def _fill(tar: tarfile.TarFile, programs: Sequence[str], files: Mapping[str, str]) -> None:
    wanted = {"etc/passwd": "root:x:0:0::/root:/bin/sh\n", "etc/group": "root:x:0:\n", **files}
    libraries = {path for program in programs for path in _libraries(program)}
    # A directory that no entry names would get mode 0600 from the engine.
    needed = {"bin", "tmp", "run", "var", "etc", "root", "proc", "sys", "dev", "home"}
    for path in (*wanted, *programs, *libraries):
        needed |= {str(parent) for parent in Path(path.lstrip("/")).parents} - {"."}
    for directory in sorted(needed):
        info = tarfile.TarInfo(directory)
        info.type, info.mode = tarfile.DIRTYPE, 0o1777 if directory == "tmp" else 0o755
        tar.addfile(info)
    link = tarfile.TarInfo("var/run")
    link.type, link.linkname = tarfile.SYMTYPE, "/run"
    tar.addfile(link)
    _add(tar, "bin/busybox", Path(BUSYBOX).read_bytes())
    listed = subprocess.run([BUSYBOX, "--list"], capture_output=True, text=True, check=True)
    for name in listed.stdout.split():
        link = tarfile.TarInfo(f"bin/{name}")
        link.type, link.linkname = tarfile.SYMTYPE, "/bin/busybox"
        if name != "busybox":
            tar.addfile(link)
    for name, text in wanted.items():
        _add(tar, name, text.encode(), 0o755 if text.startswith("#!") else 0o644)
    for path in {*programs, *libraries}:
        _add(tar, path, Path(path).read_bytes())


def _libraries(program: str) -> set[str]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return {word for word in done.stdout.split() if word.startswith("/")}


@contextlib.contextmanager
def engine(*flags: str) -> Iterator[Engine]:
    """A dockerd without a default bridge that leaves the host's packet filter alone."""
    must_work(IS_ROOT, "dockerd needs root")
    for program in ("dockerd", "docker", BUSYBOX):
        must_work(shutil.which(program), f"needs {program}")
    # Short: a socket's path has at most 107 bytes.
    base = Path(tempfile.mkdtemp(prefix="agsbx-dockerd-", dir="/srv"))
    base.chmod(0o755)
    (base / "home").mkdir()
    made = Engine(base)
    command: list[str | Path] = [
        "dockerd", "--data-root", base / "data", "--exec-root", base / "exec", "--pidfile",
        base / "pid", "-H", made.url, "--iptables=false", "--ip6tables=false", "--bridge=none",
        "--storage-driver=vfs", "--default-address-pool",
        # Engines of other tests would choose the same networks at the same moment.
        f"base=10.{secrets.randbelow(200) + 20}.0.0/16,size=24", *flags,
    ]  # fmt: skip
    with (base / "log").open("wb") as log:
        daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        up = _answers(made, daemon)
        must_work(up, f"dockerd does not start: {(base / 'log').read_text()[-2000:]}")
        yield made
    finally:
        _end(made, daemon)


def _answers(made: Engine, daemon: subprocess.Popen[bytes]) -> bool:
    until = time.monotonic() + START_SECONDS
    while daemon.poll() is None and time.monotonic() < until:
        if made.run("version", check=False).returncode == 0:
            return True
        time.sleep(0.1)
    return False


def _end(made: Engine, daemon: subprocess.Popen[bytes]) -> None:
    if daemon.poll() is None:
        running = made.run("ps", "-aq", check=False).stdout.split()
        if running:
            made.run("rm", "-f", "-v", *running, check=False)
    daemon.terminate()
    try:
        daemon.wait(20)
    except subprocess.TimeoutExpired:
        pass
    with contextlib.suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()
    # The directory is no mount point itself, but containers have left some below it.
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split()[1]
        if place.startswith(f"{made.base}/"):
            subprocess.run(["umount", "-l", place], capture_output=True, check=False)
    shutil.rmtree(made.base, ignore_errors=True)
