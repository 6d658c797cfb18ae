"""Stories of the backend before a real API server, without nodes: their beginnings and ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from agent_sandbox.service.backend.interface import Warm
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from service.backend_kubernetes import scene

from . import ground
from .hand import Hand, backend

SECONDS = 60
Story = Callable[[KubernetesBackend, Hand], Coroutine[Any, Any, None]]


def sandbox(number: int = 1, **changes: Any) -> Any:
    return scene.sandbox(number, **{"expires": time.time() + 600, **changes})


def play(server: ground.Cluster, story: Story, **options: Any) -> None:
    """A story with one backend, and a hand that makes pods run."""

    async def main() -> None:
        config = str(server.kubeconfig)
        async with (
            asyncio.timeout(SECONDS), backend(config, **options) as one,
            Hand(one.api).working() as hand,
        ):  # fmt: skip
            await story(one, hand)

    asyncio.run(main())


async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Ask again until it holds: what is awaited is another program's doing."""
    while not await holds():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def labels(pod: Any) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"]["labels"]
    return found


def warm(count: int, **changes: Any) -> tuple[Warm, ...]:
    wish = scene.sandbox(0, id="", owner="", **changes)
    return (Warm(template="t", sandbox=wish, count=count),)


async def waiting(one: KubernetesBackend, count: int) -> None:
    """Until so many warm pods are ready."""

    async def ready() -> bool:
        return one.gauges()['pool_ready{template="t"}'] == count

    await until(ready)


async def gone(one: KubernetesBackend, hand: Hand) -> None:
    async def none() -> bool:
        return await hand.pods(one.installation) == []

    await until(none)
