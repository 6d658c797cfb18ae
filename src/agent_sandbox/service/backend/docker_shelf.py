"""Volumes that are ready for a sandbox: empty, and owned by its user.

A new volume belongs to root, and a container without capabilities cannot change that. The engine
gives a volume the owner of the directory that it covers in the image, so the volumes are mounted
once over directories of an image of ours that holds nothing else. That container is never started.
"""

from __future__ import annotations

import asyncio
import io
import json
import secrets
import tarfile

from . import docker_requests as requests
from .docker_engine import Refusal, unavailable
from .docker_requests import UID, Pair

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .docker_engine import Engine

# One container makes this many pairs, in hardly more time than one.
BATCH = 8
IMAGE = "agent-sandbox-service/empty"


def empty_image() -> bytes:
    """A tar with as many empty directories as a batch needs. Pure."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for number in range(2 * BATCH):
            info = tarfile.TarInfo(str(number))
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, 0o755, UID, UID
            tar.addfile(info)
    return held.getvalue()


def imported(answer: bytes) -> str:
    """The id in the engine's answer to an import. Pure."""
    for line in answer.splitlines():
        status = json.loads(line).get("status", "")
        if status.startswith("sha256:"):
            return str(status)
    raise ValueError("the engine does not say what it has imported")


class Shelf:
    """Pairs of volumes, made in batches."""

    def __init__(self, engine: Engine, instance: str) -> None:
        self._engine = engine
        self._instance = instance
        self._image = ""
        self._ready: list[Pair] = []
        self._making = asyncio.Lock()

    @property
    def ready(self) -> tuple[str, ...]:
        """The names of volumes that wait for a sandbox."""
        return tuple(name for pair in self._ready for name in pair.names)

    async def take(self) -> Pair:
        """A pair that nobody has had."""
        while not self._ready:
            async with self._making:
                if not self._ready:
                    self._ready += await self._batch()
        return self._ready.pop()

    async def discard(self, pair: Pair) -> None:
        """Remove a pair with what is in it."""
        await asyncio.gather(*(remove_volume(self._engine, name) for name in pair.names))

    async def clear(self) -> None:
        """Remove what nobody has taken."""
        pairs, self._ready = self._ready, []
        for pair in pairs:
            await self.discard(pair)

    async def _batch(self) -> list[Pair]:
        names = [f"agent-sandbox-{self._instance}-{secrets.token_hex(8)}" for _ in range(2 * BATCH)]
        label = {requests.INSTANCE: self._instance}
        await asyncio.gather(
            *(
                self._engine.ask(
                    "POST", "/volumes/create",
                    document={"Name": name, "Driver": "local", "Labels": label},
                )
                for name in names
            )
        )  # fmt: skip
        await self._own(names)
        return [Pair(work=a, home=b) for a, b in zip(names[::2], names[1::2], strict=True)]

    async def _own(self, names: list[str]) -> None:
        """Let the engine give them their owner."""
        body = {
            "Image": await self._empty(),
            "Cmd": ["/"],
            "Labels": {requests.INSTANCE: self._instance},
            "HostConfig": {
                "NetworkMode": "none",
                "Mounts": [
                    requests.volume_mount(name, f"/{number}", copy=True)
                    for number, name in enumerate(names)
                ],
            },
        }
        try:
            found = await self._engine.ask("POST", "/containers/create", document=body)
        except Refusal:
            # Somebody has removed the image.
            self._image = ""
            body["Image"] = await self._empty()
            found = await self._engine.ask("POST", "/containers/create", document=body)
        number = str(found["Id"]) if isinstance(found, dict) else ""
        await self._engine.ask("DELETE", f"/containers/{number}", {"force": "1"})

    async def _empty(self) -> str:
        if not self._image:
            query = {"fromSrc": "-", "repo": IMAGE, "tag": str(BATCH)}
            answer = await self._engine.upload(
                "POST", "/images/create", query, _once(empty_image())
            )
            try:
                self._image = imported(answer)
            except (ValueError, AttributeError) as error:
                raise unavailable(error) from error
        return self._image


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def remove_volume(engine: Engine, name: str) -> None:
    """Remove a volume; one that is gone, or still held by a container, is left."""
    try:
        await engine.ask("DELETE", f"/volumes/{name}", {"force": "1"})
    except Refusal:
        return
