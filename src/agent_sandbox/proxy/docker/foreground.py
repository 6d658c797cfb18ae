"""What a filter needs that stands by itself: an engine that answers, and a socket at a path."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat

from ...errors import HostError, reason
from .engine import Client, EngineError

ENGINE_SECONDS = 30.0
BACKLOG = 256
PROJECT_LABEL = "com.docker.compose.project"


class Place:
    """A listening socket at a path, which goes with it."""

    def __init__(self, path: str, *, mode: int, group: int = -1) -> None:
        self.path = path
        directory, _, self._name = path.rpartition("/")
        try:
            # Descriptors: a path may be longer than a socket's address.
            self._here = os.open(directory or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _failed(path, reason(error), "make the directory first") from error
        try:
            # Two that start at once must not take each other for dead.
            fcntl.flock(self._here, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._clear()
            self.listener = self._bound(mode, group)
            fcntl.flock(self._here, fcntl.LOCK_UN)
        except BlockingIOError as error:
            os.close(self._here)
            raise _failed(path, "another filter is just starting there", "try again") from error
        except OSError as error:
            os.close(self._here)
            raise _failed(path, reason(error), "look at the directory's permissions") from error
        except BaseException:
            os.close(self._here)
            raise

    def _clear(self) -> None:
        """Take away what a filter has left that was killed, and nothing else."""
        try:
            found = os.lstat(self._name, dir_fd=self._here)
        except FileNotFoundError:
            return
        hint = "name another path with --socket, or remove it"
        if not stat.S_ISSOCK(found.st_mode):
            raise _failed(self.path, "there is something else than a socket", hint)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(0)
            said = line.connect_ex(self._address())
        if said != errno.ECONNREFUSED:
            raise _failed(self.path, "somebody listens there already", hint)
        os.unlink(self._name, dir_fd=self._here)

    def _address(self) -> str:
        return f"/proc/self/fd/{self._here}/{self._name}"

    def _bound(self, mode: int, group: int) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._address())
            # Before `listen` nobody can connect, whatever the umask was.
            os.chown(self._name, -1, group, dir_fd=self._here, follow_symlinks=False)
            os.chmod(self._name, mode, dir_fd=self._here)
            self._made = os.lstat(self._name, dir_fd=self._here)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self) -> None:
        """Remove the socket, if it is still ours."""
        try:
            if os.path.samestat(os.lstat(self._name, dir_fd=self._here), self._made):
                os.unlink(self._name, dir_fd=self._here)
        except OSError:
            # Gone already, or on a disk that is.
            pass
        os.close(self._here)
        self.listener.close()


def _failed(path: str, why: str, hint: str) -> HostError:
    return HostError(f"cannot serve at '{path}': {why}", hint=hint, code="docker-serve")


def reach(engine: str) -> None:
    """Make sure that an engine answers, before anybody relies on it."""
    try:
        asyncio.run(_asked(engine, ""))
    except (EngineError, TimeoutError) as error:
        raise HostError(
            f"cannot use the container engine at '{engine}': {str(error) or 'it does not answer'}",
            hint="start it, name its socket with --engine, or ask for access to it",
            code="docker-serve",
        ) from error  # fmt: skip


def own_project(engine: str) -> str:
    """The label of the compose project whose container this runs in."""
    # The engine names a container's host after its id.
    name = socket.gethostname()
    try:
        found = asyncio.run(_asked(engine, name))
    except (EngineError, TimeoutError):
        found = {}
    config = found.get("Config")
    labels = config.get("Labels") if isinstance(config, dict) else None
    project = labels.get(PROJECT_LABEL) if isinstance(labels, dict) else None
    if not str(found.get("Id", "")).startswith(name) or not project:
        raise HostError(
            "cannot find the compose project that this belongs to",
            hint=f"--own-project is for a container of compose; else: --label {PROJECT_LABEL}=NAME",
            code="docker-serve",
        )
    return f"{PROJECT_LABEL}={project}"


async def _asked(engine: str, container: str) -> dict[str, object]:
    """The engine's version, or what it says about a container."""
    client = Client(engine)
    async with asyncio.timeout(ENGINE_SECONDS):
        await client.probe()
        if not container:
            return {}
        answer, found = await client.ask("GET", f"/v{client.api}/containers/{container}/json")
    return found if answer.status == 200 and isinstance(found, dict) else {}
