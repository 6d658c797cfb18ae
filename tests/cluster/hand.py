"""An API server without nodes: a test binds pods, says that they run, and removes them.

And agents that are not there: a link to one remembers who has claimed its pod, and refuses others,
as an agent does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any
from unittest import mock

from agent_sandbox.pod import terms
from agent_sandbox.service.backend import kube_settings, kubernetes
from agent_sandbox.service.backend.kube_api import DELETED, MERGE_PATCH, Api, Event, Follower
from agent_sandbox.service.backend.kube_http import Refusal
from agent_sandbox.service.backend.kube_links import Links
from agent_sandbox.service.backend.kube_objects import INSTALLATION, Pod, text
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from agent_sandbox.service.backend.pod_link import Claim, Hello
from agent_sandbox.service.problems import Problem

KEPT = {"network": "seccomp", "filesystem": "pod", "memory": "cgroup"}
NODE = "n1"


class Kept:
    """As much of a store as a backend needs; shared by replicas."""

    def __init__(self, *, shared: bool = True) -> None:
        self.shared = shared
        self._values: dict[str, bytes] = {}

    def keep(self, name: str, make: Callable[[], bytes]) -> bytes:
        return self._values.setdefault(name, make())


class Agents:
    """All agents of a cluster."""

    def __init__(self) -> None:
        # By uid of the pod.
        self.claimed: dict[str, Claim] = {}
        self.renewed: dict[str, float] = {}
        self.stopped: list[str] = []
        # Those that do not answer, and those that refuse a claim.
        self.silent: set[str] = set()
        self.broken: set[str] = set()
        self.kept: Mapping[str, str] = KEPT


class Line:
    """A link to an agent that is not there."""

    def __init__(self, agents: Agents, pod: Pod) -> None:
        self._agents = agents
        self._uid = pod.uid
        self.reason = ""

    def _check(self) -> None:
        if self._uid in self._agents.silent or self.reason:
            raise Problem("BACKEND_UNAVAILABLE", "no answer")

    async def hello(self) -> Hello:
        self._check()
        claim = self._agents.claimed.get(self._uid)
        sandbox = claim.sandbox if claim else ""
        return Hello(version=terms.VERSION, sandbox=sandbox, inner="", guarantees=KEPT)

    async def claim(self, claim: Claim) -> Mapping[str, str]:
        self._check()
        if self._uid in self._agents.broken:
            raise Problem("BACKEND_UNAVAILABLE", "it does not take a claim")
        held = self._agents.claimed.setdefault(self._uid, claim)
        if held.sandbox != claim.sandbox:
            raise AssertionError(f"two sandboxes have one pod: {held.sandbox} {claim.sandbox}")
        return self._agents.kept

    async def renew(self, seconds: float) -> None:
        self._check()
        self._agents.renewed[self._uid] = seconds

    async def stop(self) -> None:
        self._check()
        self._agents.stopped.append(self._uid)

    def lost(self, reason: str) -> None:
        self.reason = reason

    async def close(self) -> None:
        self.reason = self.reason or "closed"


class NoLinks(Links):
    """Links that lead nowhere."""

    agents = Agents()

    async def _open(self, pod: Pod) -> Any:
        await asyncio.sleep(0)
        line: Any = Line(self.agents, pod)
        await line.hello()
        self._links[pod.uid] = line
        return line


class Hand:
    """The scheduler and the kubelet, for as long as a test does not want to do it itself."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.works = True
        # Every pod that was ever made, by uid.
        self.made: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._next = 0

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[Hand]:
        follower = Follower(
            self.api, self.api.path("pods"), (), replace=self._all, change=self._seen
        )
        await follower.start()
        try:
            yield self
        finally:
            await follower.stop()
            if self._tasks:
                await asyncio.wait(tuple(self._tasks))
            found, _ = await self.api.list(self.api.path("pods"))
            for one in found:
                await self.remove(text(one, "metadata", "name"))

    def _all(self, found: list[object]) -> None:
        for one in found:
            self._act(one)

    def _seen(self, event: Event) -> None:
        if event.kind != DELETED:
            self._act(event.object)

    def _act(self, pod: Any) -> None:
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        if "deletionTimestamp" in pod["metadata"]:
            self._do(self.remove(name))
        elif uid not in self.made:
            self.made[uid] = name
            if self.works:
                self._do(self.run(name))

    def _do(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _quietly(self, work: Any) -> None:
        with contextlib.suppress(Refusal):
            await work

    async def run(self, name: str, node: str = NODE) -> None:
        """Bind a pod, and say that it runs."""
        binding = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": name},
            "target": {"kind": "Node", "name": node},
        }  # fmt: skip
        await self.api.create(f"{self.api.path('pods', name)}/binding", binding)
        self._next += 1
        address = f"127.1.{self._next >> 8}.{self._next & 255}"
        await self.status(name, phase="Running", podIP=address, containerStatuses=[container()])

    async def status(self, name: str, **status: Any) -> None:
        """Say something of a pod."""
        path = f"{self.api.path('pods', name)}/status"
        await self.api.patch(path, {"status": status}, kind=MERGE_PATCH)

    async def remove(self, name: str) -> None:
        """What a kubelet does when the processes have ended."""
        await self.api.delete(self.api.path("pods", name), grace=0)

    async def node(self, name: str, ready: str, reason: str = "KubeletReady") -> None:
        """A node, in some condition."""
        with contextlib.suppress(Refusal):
            await self.api.create("/api/v1/nodes", {"metadata": {"name": name}})
        status = {"conditions": [{"type": "Ready", "status": ready, "reason": reason}]}
        await self.api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, kind=MERGE_PATCH)

    async def pods(self, installation: str = "") -> list[Any]:
        """Those that are there and not about to go."""
        query = (("labelSelector", f"{INSTALLATION}={installation}"),) if installation else ()
        found, _ = await self.api.list(self.api.path("pods"), query)
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]  # type: ignore[index]


def container(**state: Any) -> dict[str, Any]:
    return {
        "name": "agent", "image": "x", "imageID": "x", "ready": not state, "restartCount": 0,
        "state": state or {"running": {}},
    }  # fmt: skip


@contextlib.asynccontextmanager
async def backend(
    kubeconfig: str, store: Any = None, *, agents: Agents | None = None, **environ: str
) -> AsyncIterator[KubernetesBackend]:
    """A backend before a real API server, without agents."""
    values = {"KUBECONFIG": kubeconfig, "KUBERNETES_START_SECONDS": "20", **environ}
    kept: Any = store or Kept()
    with mock.patch.object(kubernetes, "Links", NoLinks):
        made = KubernetesBackend(kube_settings.load(values), values, store=kept)
    made.links.agents = agents or Agents()  # type: ignore[attr-defined]
    try:
        support = await made.probe()
        assert support.ok, support.reason
        yield made
    finally:
        await made.prepare(())
        await made.close()
