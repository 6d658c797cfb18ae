"""Sandboxes as containers of a Docker engine: one container each, made from a pinned image.

No process of a sandbox outlives the service: it holds the input of each container's first process,
and a container whose input has ended ends (see `docker_scripts.KEEP`). The files are in volumes and
stay. A container that has ended is started again when it is next used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import stat

from ..problems import Problem
from ..values import Resources
from . import docker_requests as requests
from . import docker_scripts as scripts
from .docker_disk import Disk
from .docker_engine import Engine, Refusal, segment, unavailable
from .docker_exec import Execution, container_state, end_container
from .docker_files import DockerFiles
from .docker_shelf import Shelf, remove_volume
from .docker_stream import BadStream, Frames
from .interface import OnThisMachine, Support

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from ...proxy.docker import wire
    from ..values import Sandbox
    from .docker_requests import Pair
    from .interface import Files, Running, Sink, Start

READY_SECONDS = 30.0
AT_ONCE = 8
INSTANCE = re.compile(r"[0-9a-f]{16}")
INSTANCE_FILE = "docker-instance"


def instance_id(data: str) -> str:
    """Which service this is: several may share an engine, each with its own data directory."""
    path = os.path.join(data, INSTANCE_FILE)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with contextlib.suppress(FileExistsError):
        fd = os.open(path, flags, 0o600)
        with open(fd, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(8))
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, encoding="ascii", errors="replace") as file:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        found = file.read(64).strip() if regular else ""
    if not INSTANCE.fullmatch(found):
        raise Problem("INTERNAL", f"{INSTANCE_FILE} in the data directory is damaged")
    return found


class DockerBackend(OnThisMachine):
    """See `interface.Backend`."""

    name = "docker"

    def __init__(self, socket: str, *, instance: str, required: str = "") -> None:
        self._engine = Engine(socket)
        self._instance = instance
        self._required = required
        self._shelf = Shelf(self._engine, instance)
        self._disk = Disk(self._engine)
        # Connections to the input of each container's first process.
        self._held: dict[str, wire.Line] = {}
        self._pairs: dict[str, Pair] = {}
        self._running: dict[str, set[Execution]] = {}
        self._reviving: dict[str, asyncio.Lock] = {}
        # By the image's pin: what it declares never changes.
        self._declared: dict[str, tuple[str, ...]] = {}
        # The volumes that were made for it.
        self._fixed: set[str] = set()
        self._first = asyncio.Lock()

    # --- what it can do

    async def probe(self) -> Support:
        """What this engine can do now."""
        try:
            await self._engine.hello()
            info = await self._engine.ask("GET", "/info")
        except Problem as error:
            return Support(ok=False, reason=error.message)
        except Refusal as error:
            return Support(ok=False, reason=error.message)
        return requests.support(
            info, self._engine.api, podman=self._engine.podman, required=self._required
        )

    async def resolve(self, image: str) -> str:
        """The id of an image that the engine has. It pulls nothing."""
        name = requests.reference(image)
        try:
            found = await self._engine.ask("GET", f"/images/{segment(name)}/json")
        except Refusal as error:
            if error.status != 404:
                raise unavailable(error.message) from error
            raise Problem(
                "INVALID", f"the engine does not have the image '{image}'",
                hint=f"docker pull {name}", field="image", rule="image.missing",
            ) from error  # fmt: skip
        pin = requests.pin(found, image)
        self._declared[pin] = requests.declared(found, image)
        return pin

    # --- life

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        """Make the container, start it, and hold on to it."""
        name = requests.container_name(self._instance, sandbox.id)
        runtime = await self._chosen(sandbox)
        declared = await self._volumes(sandbox.digest)
        pair = await self._shelf.take()
        try:
            body = requests.container(
                sandbox, instance=self._instance, pair=pair, runtime=runtime, declared=declared
            )
            async with self._filling(sandbox.digest, declared):
                await self._engine.ask("POST", "/containers/create", {"name": name}, body)
        except BaseException as error:
            await asyncio.shield(self._shelf.discard(pair))
            if isinstance(error, Refusal):
                raise _not_created(error) from error
            raise
        self._pairs[sandbox.id] = pair
        try:
            await self._hold(sandbox)
        except BaseException:
            await asyncio.shield(self.delete(sandbox))
            raise
        return {}

    @contextlib.asynccontextmanager
    async def _filling(self, pin: str, declared: tuple[str, ...]) -> AsyncIterator[None]:
        """Let one container alone be the first of an image: the engine fills volumes for it.

        A second one at the same moment would find them half full, and start so.
        """
        wanted = {*requests.fixed(self._instance, pin, declared).values()}
        if wanted <= self._fixed:
            yield
            return
        async with self._first:
            yield
            self._fixed |= wanted

    async def _volumes(self, pin: str) -> tuple[str, ...]:
        """Where an image wants volumes."""
        if pin not in self._declared and await self.resolve(pin) != pin:
            raise unavailable("it knows the image by another name")
        return self._declared[pin]

    async def _chosen(self, sandbox: Sandbox) -> str:
        if not (sandbox.runtime or self._required):
            return ""
        try:
            info = await self._engine.ask("GET", "/info")
        except Refusal as error:
            raise unavailable(error.message) from error
        known = requests.runtimes(info) if isinstance(info, dict) else ()
        return requests.choose_runtime(sandbox.runtime, self._required, known)

    async def _hold(self, sandbox: Sandbox) -> None:
        """Take the container's input, start it, and wait until it says that it is ready."""
        name = requests.container_name(self._instance, sandbox.id)
        path = f"/containers/{name}"
        query = {"stream": "1", "stdin": "1", "stdout": "1"}
        line = await self._engine.hijack(f"{path}/attach", query)
        try:
            await self._engine.ask("POST", f"{path}/start")
            async with asyncio.timeout(READY_SECONDS):
                ready = await _says_ready(line)
        except BaseException as error:
            line.close()
            if isinstance(error, Refusal):
                raise unavailable(error.message) from error
            if isinstance(error, TimeoutError):
                raise unavailable("a container does not start in time") from error
            raise
        if not ready:
            line.close()
            raise Problem(
                "UNSUPPORTED", f"a container of the image does not run: it needs {scripts.SHELL}",
                hint="use an image with a POSIX shell", field="image", rule="image.shell",
            )  # fmt: skip
        before = self._held.pop(sandbox.id, None)
        if before is not None:
            before.close()
        self._held[sandbox.id] = line

    async def alive(self, sandbox: Sandbox) -> str:
        """The name of the container, which runs: one that has ended is started again."""
        name = requests.container_name(self._instance, sandbox.id)
        async with self._reviving.setdefault(sandbox.id, asyncio.Lock()):
            state = await container_state(self._engine, name)
            if not state:
                raise Problem("WRONG_STATE", "the sandbox's container is gone")
            if state.get("Paused"):
                raise Problem("WRONG_STATE", "the sandbox is paused", hint="resume it")
            if not state.get("Running") or sandbox.id not in self._held:
                # One that runs without our hand on its input would outlive us.
                await end_container(self._engine, name)
                await self._hold(sandbox)
        return name

    async def delete(self, sandbox: Sandbox) -> None:
        """Remove the container and its volumes."""
        name = requests.container_name(self._instance, sandbox.id)
        pair = self._pairs.pop(sandbox.id, None) or await self._pair(name)
        line = self._held.pop(sandbox.id, None)
        await remove_container(self._engine, name)
        if line is not None:
            line.close()
        if pair is not None:
            self._disk.forget(pair.names)
            await self._shelf.discard(pair)
        self._reviving.pop(sandbox.id, None)

    async def _pair(self, name: str) -> Pair | None:
        try:
            return requests.pair(await self._engine.ask("GET", f"/containers/{name}/json"))
        except Refusal:
            return None

    async def pause(self, sandbox: Sandbox) -> None:
        """Freeze its processes."""
        name = await self.alive(sandbox)
        try:
            await self._engine.ask("POST", f"/containers/{name}/pause")
        except Refusal as error:
            raise Problem("WRONG_STATE", f"the engine cannot pause it: {error.message}") from error

    async def resume(self, sandbox: Sandbox) -> None:
        """Thaw them."""
        name = requests.container_name(self._instance, sandbox.id)
        state = await container_state(self._engine, name)
        if not state.get("Paused"):
            # It has ended while it was paused; it starts when it is used.
            return
        try:
            await self._engine.ask("POST", f"/containers/{name}/unpause")
        except Refusal as error:
            raise Problem("WRONG_STATE", f"the engine cannot resume it: {error.message}") from error

    # --- use

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> Running:
        """Start a command."""
        live = self._running.setdefault(sandbox.id, set())
        name = requests.container_name(self._instance, sandbox.id)
        for again in (False, True):
            execution = Execution(
                self._engine, name, start, sink, one_shot=sandbox.one_shot,
                alone=lambda: len(self._running.get(sandbox.id, ())) <= 1,
                over=lambda one: self._forget(sandbox.id, one),
            )  # fmt: skip
            live.add(execution)
            try:
                if again or sandbox.id not in self._held:
                    await self.alive(sandbox)
                await execution.launch(sandbox)
            except Refusal as error:
                self._forget(sandbox.id, execution)
                if again or error.status not in (409, 500):
                    raise _not_started(error) from error
            except BaseException:
                # Nobody will ever wait for it.
                await asyncio.shield(execution.kill())
                self._forget(sandbox.id, execution)
                raise
            else:
                return execution
        raise AssertionError("unreachable")

    def _forget(self, sandbox: str, execution: Execution) -> None:
        live = self._running.get(sandbox, set())
        live.discard(execution)
        if not live:
            self._running.pop(sandbox, None)

    def files(self, sandbox: Sandbox) -> Files:
        """Its files."""
        return DockerFiles(self._engine, lambda: self.alive(sandbox))

    async def usage(self, sandbox: Sandbox) -> Resources:
        """What it uses now."""
        name = requests.container_name(self._instance, sandbox.id)
        pair = self._pairs.get(sandbox.id) or await self._pair(name)
        disk = await self._disk.usage(pair.names) if pair is not None else None
        try:
            query = {"stream": "0", "one-shot": "1"}
            stats = await self._engine.ask("GET", f"/containers/{name}/stats", query)
        except Refusal:
            stats = None
        return Resources(memory=requests.memory(stats), pids=requests.pids(stats), disk=disk)

    # --- start and end of the service

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        """Remove our containers and volumes that no sandbox has; end what runs in the others."""
        mine = {"label": [f"{requests.INSTANCE}={self._instance}"]}
        query = {"all": "1", "filters": json.dumps(mine)}
        try:
            listed = await self._engine.ask("GET", "/containers/json", query)
        except Refusal as error:
            raise unavailable(error.message) from error
        gate = asyncio.Semaphore(AT_ONCE)
        found = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        kept = await asyncio.gather(*(self._settle(one, known, gate) for one in found))
        await self._sweep_volumes(mine)
        return frozenset(one for one in kept if one)

    async def _settle(
        self, container: Mapping[str, object], known: Mapping[str, Sandbox], gate: asyncio.Semaphore
    ) -> str:
        number, sandbox = str(container["Id"]), requests.label(container, requests.SANDBOX)
        pair = requests.pair(container)
        async with gate:
            if sandbox in known and pair is not None:
                self._pairs[sandbox] = pair
                if sandbox not in self._held and container.get("State") != "exited":
                    await end_container(self._engine, number)
                return sandbox
            await remove_container(self._engine, number)
            return ""

    async def _sweep_volumes(self, mine: Mapping[str, list[str]]) -> None:
        """Volumes of ours that no container has: a service was killed at the wrong moment."""
        query = {"filters": json.dumps({**mine, "dangling": ["true"]})}
        try:
            found = await self._engine.ask("GET", "/volumes", query)
        except Refusal as error:
            raise unavailable(error.message) from error
        listed = found.get("Volumes") if isinstance(found, dict) else None
        ready = self._shelf.ready
        for one in listed or []:
            if isinstance(one, dict) and one.get("Name") not in ready:
                await remove_volume(self._engine, str(one.get("Name")))

    async def close(self) -> None:
        """Let go of all containers: they end, their volumes stay."""
        live = [one for running in self._running.values() for one in running]
        await asyncio.gather(*(one.kill() for one in live), return_exceptions=True)
        for line in self._held.values():
            line.close()
        self._held.clear()
        with contextlib.suppress(Problem):
            await self._shelf.clear()
            # Those that a sandbox still has are left: the engine refuses.
            for name in self._fixed:
                await remove_volume(self._engine, name)


async def _says_ready(line: wire.Line) -> bool:
    frames = Frames()
    said = b""
    try:
        while (data := await line.receive()) and len(said) < 4096:
            said += b"".join(piece for _, piece in frames.feed(data))
            if said.strip() == scripts.READY.encode():
                return True
    except (OSError, BadStream):
        return False
    return False


async def remove_container(engine: Engine, name: str) -> None:
    """Remove a container with all that runs in it. What is gone is no error."""
    for wait in (0.05, 0.2, 1.0, 0.0):
        try:
            await engine.ask("DELETE", f"/containers/{name}", {"force": "1", "v": "1"})
        except Refusal as error:
            if error.status == 404:
                return
            if not wait:
                raise unavailable(f"it does not remove a container: {error.message}") from error
            # 409: another removal is under way.
            await asyncio.sleep(wait)
        else:
            return


def _not_created(error: Refusal) -> Problem:
    if error.status == 409:
        return Problem("CONFLICT", "the sandbox has a container already")
    if error.status == 404:
        return Problem(
            "INVALID", "the pinned image is gone from the engine", field="image",
            rule="image.missing",
        )  # fmt: skip
    return unavailable(error.message)


def _not_started(error: Refusal) -> Problem:
    if error.status in (404, 409):
        return Problem("WRONG_STATE", f"the sandbox cannot run a command: {error.message[:200]}")
    return unavailable(error.message)
