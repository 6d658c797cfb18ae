"""When a sandbox's pod is gone: decided from what the cluster says, and told once.

A pod that has ended, or that the cluster has begun to remove, is lost. A node that is not ready
may still run its pods (its kubelet alone is dead): those are asked, and only silence is a loss.
"""

from __future__ import annotations

import asyncio
import logging
import time

from ..problems import Problem
from . import kube_objects as objects
from .kube_http import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from .kube_api import Api
    from .kube_cache import Cache
    from .kube_links import Links
    from .kube_objects import Node, Pod

log = logging.getLogger(__name__)
# How long an agent may take to answer a question that costs it nothing.
ANSWER_SECONDS = 3.0
# Between questions to an agent whose node is not ready, and to the API server about a quiet one.
AGAIN_SECONDS = 2.0


def verdict(pod: Pod | None) -> str:
    """Why a claimed pod is lost, as far as it says itself; "": it is not."""
    if pod is None:
        return "its pod was removed"
    why = f": {pod.reason}" if pod.reason else ""
    if pod.phase in ("Failed", "Succeeded"):
        return f"its pod has ended{why}"
    if pod.deleting:
        return f"its pod is being removed{why}"
    return ""


def node_verdict(node: Node | None) -> str:
    """What is wrong with a node; "": nothing. It is not named: agents need not know names."""
    if node is None:
        return "its node was removed"
    return "" if node.ready else f"its node does not answer ({node.reason or 'not ready'})"


class Losses:
    """Watches over claimed pods. Only the loop may use it."""

    def __init__(
        self, api: Api, cache: Cache, links: Links, *, quiet_seconds: float,
        mine: Callable[[Pod], bool], lost: Callable[[Pod, str], None],
    ) -> None:  # fmt: skip
        """`mine`: not one that we remove, or still make. `lost` is told once for each pod."""
        self._api = api
        self._cache = cache
        self._links = links
        self._quiet_seconds = quiet_seconds
        self._mine = mine
        self._lost = lost
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()

    def start(self) -> None:
        """Listen to the cluster."""
        self._cache.on_pod(self._pod)
        self._cache.on_node(self._node)
        for node in tuple(self._cache.nodes.values()):
            self._node(node)

    async def stop(self) -> None:
        """End."""
        tasks = tuple(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _pod(self, now: Pod | None, before: Pod | None) -> None:
        one = now or before
        if one is None:
            return
        if one.sandbox and (why := verdict(now)):
            self.lose(before if before is not None and before.sandbox else one, why)
        if now is None:
            self._told.discard(one.uid)

    def lose(self, pod: Pod, why: str) -> None:
        """It is gone."""
        if pod.uid in self._told or not self._mine(pod):
            return
        self._told.add(pod.uid)
        log.warning("pod %s on node %s is lost: %s", pod.name, pod.node, why)
        self._lost(pod, why)

    def _node(self, node: Node) -> None:
        if node.ready:
            return
        for pod in tuple(self._cache.pods.values()):
            if pod.node == node.name and pod.sandbox and not pod.over:
                self._spawn(pod.uid, self._doubt(pod, node))

    def quiet(self, uid: str) -> None:
        """An agent has not said a word for too long: ask the cluster, then the agent."""
        pod = self._cache.pods.get(uid)
        if pod is not None and pod.sandbox:
            self._spawn(uid, self._silence(pod))

    def _spawn(self, uid: str, work: Coroutine[Any, Any, None]) -> None:
        if uid in self._tasks:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[uid] = task
        task.add_done_callback(lambda done: self._over(uid, done))

    def _over(self, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(uid, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("looking after pod %s", uid, exc_info=error)

    def _done(self, pod: Pod) -> bool:
        """Whether there is nothing to look after any more."""
        now = self._cache.pods.get(pod.uid)
        return now is None or now.over or pod.uid in self._told

    def _conclude(self, pod: Pod, why: str) -> None:
        """Whoever asked has an answer. The watch may have had it earlier, and has told it then."""
        if not self._done(pod):
            self.lose(pod, why)

    async def _doubt(self, pod: Pod, node: Node) -> None:
        """Its node is not ready: as long as the agent answers, it is not lost."""
        now: Node | None = node
        gone = node.name not in self._cache.nodes
        while not self._done(pod):
            if not await self._answers(pod):
                self._conclude(pod, node_verdict(None if gone else now or node))
                return
            await asyncio.sleep(AGAIN_SECONDS)
            now = self._cache.nodes.get(node.name)
            if now is not None and now.ready:
                return

    async def _silence(self, pod: Pod) -> None:
        """Nothing is heard: the cluster decides, and if it does not in time, we do."""
        end = time.monotonic() + self._quiet_seconds
        while not self._done(pod):
            why = await self._ask(pod)
            if why:
                self._conclude(pod, why)
                return
            if await self._answers(pod):
                return
            if time.monotonic() >= end:
                self._conclude(pod, "its agent does not answer, though its node is well")
                return
            await asyncio.sleep(AGAIN_SECONDS)

    async def _ask(self, pod: Pod) -> str:
        """What the API server says now; "" also when it cannot be asked."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = objects.pod(await self._api.get(self._api.path("pods", pod.name)))
            if found.uid != pod.uid:
                return verdict(None)
            if why := verdict(found):
                return why
            return node_verdict(await self._fresh_node(pod)) if self._cache.sees_nodes else ""
        except Refusal as error:
            return verdict(None) if error.status == 404 else ""
        except (Problem, TimeoutError):
            return ""

    async def _fresh_node(self, pod: Pod) -> Node | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return objects.node(await self._api.get(f"/api/v1/nodes/{pod.node}"))
        except Refusal as error:
            if error.status == 404:
                return None
            raise

    async def _answers(self, pod: Pod) -> bool:
        """Whether the agent can be spoken to."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                link = await self._links.open(pod)
                await link.hello()
        except (Problem, OSError, TimeoutError):
            return False
        return True
