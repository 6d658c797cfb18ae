"""What is in the cluster now, as far as it is ours: pods of this installation, and nodes.

Followed, never polled. Whoever has to know at once subscribes; whoever waits for a pod waits here.
"""

from __future__ import annotations

import asyncio
import logging

from . import kube_objects as objects
from .kube_api import DELETED, Follower
from .kube_http import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .kube_api import Api, Event
    from .kube_objects import Node, Pod

    # A pod as it is now; None: it is gone. And as it was.
    Seen = Callable[[Pod | None, Pod | None], None]

log = logging.getLogger(__name__)
# The state of a pod that says it is a sandbox which another pod is: nobody takes or removes it.
FOREIGN = "foreign"


class Cache:
    """The view of one replica. Only the loop may use it."""

    def __init__(self, api: Api, installation: str) -> None:
        self._api = api
        # By uid: a name may be given again.
        self.pods: dict[str, Pod] = {}
        self.nodes: dict[str, Node] = {}
        self._by_sandbox: dict[str, str] = {}
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._pod_seen: list[Seen] = []
        self._node_seen: list[Callable[[Node], None]] = []
        # Whether we have made a pod; whoever makes them sets it.
        self.trusts: Callable[[Pod], bool] = lambda _pod: True
        # Uids of pods that we remove: their end is no loss.
        self.leaving: set[str] = set()
        # Nodes may be hidden from us: then pods alone tell.
        self.sees_nodes = False
        chosen = (("labelSelector", f"{objects.INSTALLATION}={installation}"),)
        self._pods = Follower(
            api, api.path("pods"), chosen, replace=self._all_pods, change=self._pod_event,
            failed=_told("pods"),
        )  # fmt: skip
        self._nodes = Follower(
            api, "/api/v1/nodes", (), replace=self._all_nodes, change=self._node_event,
            failed=_told("nodes"),
        )  # fmt: skip

    async def start(self) -> None:
        """Fill it; Refusal or Problem when pods cannot be seen."""
        await self._pods.start()
        try:
            await self._nodes.start()
            self.sees_nodes = True
        except Refusal as error:
            if error.status != 403:
                raise
            log.warning("nodes cannot be watched; their loss is seen by their pods: %s", error)

    async def stop(self) -> None:
        """End."""
        await self._pods.stop()
        await self._nodes.stop()

    @property
    def current(self) -> bool:
        """Whether it follows the cluster at the moment."""
        return self._pods.current.is_set()

    async def settled(self) -> None:
        """Wait until it does."""
        await self._pods.current.wait()

    def on_pod(self, seen: Seen) -> None:
        """Tell of every change of a pod."""
        self._pod_seen.append(seen)

    def on_node(self, seen: Callable[[Node], None]) -> None:
        """Tell of every node that is not as it was."""
        self._node_seen.append(seen)

    # --- questions

    def of_sandbox(self, sandbox: str) -> Pod | None:
        """The pod of a sandbox."""
        return self.pods.get(self._by_sandbox.get(sandbox, ""))

    def well(self, node: str) -> bool:
        """Whether nothing speaks against a node."""
        # One that we have not heard of is new: the removal of a node is told by an event.
        found = self.nodes.get(node)
        return found is None or found.ready

    def change(self, uid: str) -> asyncio.Future[None]:
        """Done when a pod changes, or is gone, from now on."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(uid, set()).add(waiter)
        waiter.add_done_callback(lambda _: self._unwait(uid, waiter))
        return waiter

    def _unwait(self, uid: str, waiter: asyncio.Future[None]) -> None:
        held = self._waiting.get(uid, set())
        held.discard(waiter)
        if not held:
            self._waiting.pop(uid, None)

    # --- changes

    def put(self, pod: Pod) -> None:
        """A pod as an answer had it: it may be newer than what was followed so far.

        Versions are opaque, but all servers write growing numbers; where they did not, the next
        event would set it right.
        """
        pod = self._cleared(pod)
        before = self.pods.get(pod.uid)
        if before is not None and _number(before.version) > _number(pod.version):
            return
        self.pods[pod.uid] = pod
        if before is not None and before.sandbox and before.sandbox != pod.sandbox:
            self._by_sandbox.pop(before.sandbox, None)
        if pod.sandbox:
            self._by_sandbox[pod.sandbox] = pod.uid
        self._tell(pod, before)

    def _cleared(self, pod: Pod) -> Pod:
        """A pod, without a sandbox that is another's: a label alone takes nothing from ours."""
        held = self.of_sandbox(pod.sandbox)
        if held is None or held.uid == pod.uid:
            return pod
        if self.trusts(held) and not self.trusts(pod):
            return pod.replace(sandbox="", state=FOREIGN)
        if self.trusts(pod) and not self.trusts(held):
            self.pods[held.uid] = held.replace(sandbox="", state=FOREIGN)
        return pod

    def drop(self, uid: str) -> None:
        """A pod that is gone."""
        before = self.pods.pop(uid, None)
        if before is None:
            return
        if self._by_sandbox.get(before.sandbox) == uid:
            del self._by_sandbox[before.sandbox]
        self._tell(None, before)

    def _tell(self, now: Pod | None, before: Pod | None) -> None:
        one = now or before
        assert one is not None  # noqa: S101 - by both callers
        for waiter in tuple(self._waiting.get(one.uid, ())):
            if not waiter.done():
                waiter.set_result(None)
        if now == before:
            return
        for seen in self._pod_seen:
            try:
                seen(now, before)
            except Exception:
                log.exception("a change of pod %s", one.name)

    def _all_pods(self, found: list[object]) -> None:
        pods = [objects.pod(one) for one in found]
        there = {pod.uid for pod in pods}
        for uid in tuple(self.pods):
            if uid not in there:
                self.drop(uid)
        for pod in pods:
            self.put(pod)

    def _pod_event(self, event: Event) -> None:
        pod = objects.pod(event.object)
        if event.kind == DELETED:
            # Its last words (why it ended) come with its removal.
            self.put(pod)
            self.drop(pod.uid)
        else:
            self.put(pod)

    def _all_nodes(self, found: list[object]) -> None:
        nodes = {node.name: node for node in map(objects.node, found)}
        for name in set(self.nodes) - set(nodes):
            self._node(self.nodes[name].replace(ready=False, reason="it was removed"), gone=True)
        for node in nodes.values():
            self._node(node)

    def _node_event(self, event: Event) -> None:
        node = objects.node(event.object)
        if event.kind == DELETED:
            self._node(node.replace(ready=False, reason="it was removed"), gone=True)
        else:
            self._node(node)

    def _node(self, node: Node, *, gone: bool = False) -> None:
        before = self.nodes.get(node.name)
        if gone:
            self.nodes.pop(node.name, None)
        else:
            self.nodes[node.name] = node
        if before == node:
            return
        for seen in self._node_seen:
            try:
                seen(node)
            except Exception:
                log.exception("a change of node %s", node.name)


def _number(version: str) -> int:
    return int(version) if version.isascii() and version.isdecimal() else 0


def _told(what: str) -> Callable[[Exception], None]:
    return lambda error: log.warning("%s of the cluster cannot be followed: %s", what, error)
