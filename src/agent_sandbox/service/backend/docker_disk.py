"""How much of the disk a sandbox's volumes take.

The engine keeps no bound on a volume, so the service looks and acts. Two ways, both from outside,
where nothing that a command does to its directories can hide a file:

- walk the volume's directory, where this process may (root, on the engine's machine; not in
  a container, which does not have that directory);
- else ask the engine (`system/df`). It walks all volumes that it has, so its answer is kept for a
  while that grows with the time that it took.
"""

from __future__ import annotations

import asyncio
import os
import time

from . import docker_requests as requests
from .docker_engine import Refusal
from .tree import disk_usage

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .docker_engine import Engine

# How long an answer holds, in durations of the question.
KEEP_FACTOR = 10
# CAP_DAC_OVERRIDE and CAP_FOWNER: a directory of any mode can be opened, and read.
SEES_ALL = 1 << 1 | 1 << 3


def sees_all() -> bool:
    """Whether no mode of a directory hides its files from us. Root alone does not say so."""
    with open("/proc/self/status", encoding="utf-8") as file:
        found = [line.split()[1] for line in file if line.startswith("CapEff:")]
    return bool(found) and int(found[0], 16) & SEES_ALL == SEES_ALL


class Disk:
    """Measures volumes."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: dict[str, str] = {}
        self._answer: object = None
        self._until = 0.0
        self._asking = asyncio.Lock()

    async def usage(self, names: tuple[str, ...]) -> int | None:
        """The bytes in some volumes together; None if nobody can say."""
        places = [await self._place(name) for name in names]
        if all(places):
            try:
                return sum(
                    await asyncio.gather(*(asyncio.to_thread(disk_usage, p) for p in places))
                )
            except OSError:
                # Gone meanwhile, or not ours to read.
                pass
        return requests.volume_size(await self._df(), names)

    async def _place(self, name: str) -> str:
        """Where a volume is on this machine; "" where it is not to be reached."""
        if name not in self._places:
            try:
                found = await self._engine.ask("GET", f"/volumes/{name}")
            except Refusal:
                return ""
            place = found.get("Mountpoint") if isinstance(found, dict) else None
            reachable = isinstance(place, str) and os.access(place, os.R_OK | os.X_OK)
            self._places[name] = str(place) if reachable and sees_all() else ""
        return self._places[name]

    def forget(self, names: tuple[str, ...]) -> None:
        """The volumes are gone."""
        for name in names:
            self._places.pop(name, None)

    async def _df(self) -> object:
        async with self._asking:
            if time.monotonic() > self._until:
                begun = time.monotonic()
                try:
                    self._answer = await self._engine.ask("GET", "/system/df", {"type": "volume"})
                except Refusal:
                    self._answer = None
                now = time.monotonic()
                self._until = now + KEEP_FACTOR * (now - begun)
            return self._answer
