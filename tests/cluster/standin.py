"""A stand-in for what a cluster with kubernetes-sigs/agent-sandbox has beside its API server.

It does what their controllers do with the objects that we make (read from their sources): pools
have so many Sandboxes, a claim adopts a ready one or gets one of its own name, a Sandbox has a pod,
what has expired goes. And what Kubernetes does: pods run, and what has lost its owner is removed.
It is led by events, and its client is the one under test, with an administrator's rights.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
from functools import partial
from typing import TYPE_CHECKING, Any

from agent_sandbox.service.backend import kube_claim_objects as resources
from agent_sandbox.service.backend.kube_api import MERGE_PATCH, Follower
from agent_sandbox.service.backend.kube_http import Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from agent_sandbox.service.backend.kube_api import Api

CLAIMS, TEMPLATES, POOLS = "sandboxclaims", "sandboxtemplates", "sandboxwarmpools"
SANDBOXES, PODS = "sandboxes", "pods"
# Labels that a claim may give a pod, unless the controller's operator says otherwise.
ALLOWED = "sandbox.users.io"
IP = "10.9.0.1"


def now() -> str:
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def owner(one: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": one["apiVersion"], "kind": one["kind"], "controller": True,
            "name": one["metadata"]["name"], "uid": one["metadata"]["uid"],
        }
    ]  # fmt: skip


def controller(one: dict[str, Any]) -> str:
    """The uid of what an object belongs to."""
    owners = one["metadata"].get("ownerReferences", ())
    return next((o["uid"] for o in owners if o.get("controller")), "")


class StandIn:
    """All controllers in one."""

    def __init__(self, api: Api, served: resources.Served) -> None:
        self.api = api
        self.served = served
        self.beta = served.extensions == resources.BETA
        # Switches for tests.
        self.runs = True
        self.adopts = True
        self._seen: dict[str, dict[str, dict[str, Any]]] = {}
        self._work = asyncio.Event()
        self._followers = [
            Follower(
                api, self.path(kind), (), replace=partial(self._all, kind),
                change=partial(self._change, kind),
            )
            for kind in (CLAIMS, TEMPLATES, POOLS, SANDBOXES, PODS)
        ]  # fmt: skip

    def path(self, plural: str, name: str = "") -> str:
        if plural == PODS:
            return self.api.path(PODS, name)
        return self.served.path(self.api.namespace, plural, name)

    def _all(self, kind: str, found: list[Any]) -> None:
        self._seen[kind] = {one["metadata"]["name"]: one for one in found}
        self._work.set()

    def _change(self, kind: str, event: Any) -> None:
        name = event.object["metadata"]["name"]
        if event.kind == "DELETED":
            self._seen[kind].pop(name, None)
        else:
            self._seen[kind][name] = event.object
        self._work.set()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """What there is of a kind, without what is about to go."""
        found = self._seen.get(kind, {}).values()
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[StandIn]:
        """Follow and act."""
        for follower in self._followers:
            await follower.start()
        task = asyncio.get_running_loop().create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait((task,))
            for follower in self._followers:
                await follower.stop()
            if not task.cancelled() and (error := task.exception()):
                raise error

    async def _run(self) -> None:
        while True:
            # Expiry is a matter of time, not of an event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._work.wait()
            self._work.clear()
            try:
                for step in (
                    self._expire,
                    self._pool,
                    self._bind,
                    self._pods,
                    self._status,
                    self._gc,
                ):
                    await step()
            except Refusal as error:
                # Somebody was faster; the event that tells of it is on its way.
                if error.status not in (404, 409):
                    raise

    async def _make(self, plural: str, document: dict[str, Any]) -> None:
        made: Any = await self.api.create(self.path(plural), document)
        self._seen[plural][made["metadata"]["name"]] = made

    async def _merge(self, plural: str, one: dict[str, Any], change: object, sub: str = "") -> None:
        path = self.path(plural, one["metadata"]["name"]) + sub
        made: Any = await self.api.patch(path, change, kind=MERGE_PATCH)
        self._seen[plural][made["metadata"]["name"]] = made

    async def _remove(self, plural: str, one: dict[str, Any]) -> None:
        uid = one["metadata"]["uid"]
        await self.api.delete(self.path(plural, one["metadata"]["name"]), uid=uid, grace=0)
        self._seen[plural].pop(one["metadata"]["name"], None)

    async def _expire(self) -> None:
        for claim in self.of(CLAIMS):
            end = claim["spec"].get("lifecycle", {}).get("shutdownTime", "9")
            if end <= now() and claim["spec"]["lifecycle"]["shutdownPolicy"] == "Delete":
                await self._remove(CLAIMS, claim)

    async def _pool(self) -> None:
        for pool in self.of(POOLS):
            uid = pool["metadata"]["uid"]
            waiting = [one for one in self.of(SANDBOXES) if controller(one) == uid]
            source = self._seen[TEMPLATES].get(pool["spec"]["sandboxTemplateRef"]["name"])
            missing = pool["spec"]["replicas"] - len(waiting)
            for number in range(missing if source else 0):
                name = f"{pool['metadata']['name']}-{len(waiting) + number}{uid[:4]}"
                while name in self._seen[SANDBOXES]:
                    name += "x"
                await self._make(SANDBOXES, self._sandbox(name, source, pool))
            for one in waiting[: max(0, -missing)]:
                await self._remove(SANDBOXES, one)
            status = {"replicas": len(waiting), "readyReplicas": len([*filter(_ready, waiting)])}
            if pool.get("status") != status:
                await self._merge(POOLS, pool, {"status": status}, "/status")

    def _sandbox(self, name: str, source: Any, above: dict[str, Any]) -> dict[str, Any]:
        return {
            "apiVersion": f"{resources.CORE}/{self.served.core}", "kind": "Sandbox",
            "metadata": {"name": name, "ownerReferences": owner(above)},
            "spec": {"podTemplate": source["spec"]["podTemplate"], "service": False},
        }  # fmt: skip

    async def _bind(self) -> None:
        for claim in self.of(CLAIMS):
            if resources.sandbox_of(claim):
                continue
            more = claim["spec"].get("additionalPodMetadata", {})
            if any(not k.startswith(ALLOWED) for k in more.get("labels", {})):
                await self._say(claim, "False", "InvalidMetadata", "label domain is not allowed")
                continue
            pool = self._seen[POOLS].get(resources.source_of(claim))
            source = self._seen[TEMPLATES].get(
                pool["spec"]["sandboxTemplateRef"]["name"] if pool and self.beta
                else resources.source_of(claim)
            )  # fmt: skip
            if source is None or (self.beta and pool is None):
                reason = "WarmPoolNotFound" if self.beta else "TemplateNotFound"
                await self._say(claim, "False", reason, "not found")
                continue
            if self.adopts:
                await self._adopt(claim, pool, source, more)

    async def _adopt(self, claim: Any, pool: Any, source: Any, more: Any) -> None:
        named = pool is not None and (self.beta or claim["spec"]["warmpool"] != "none")
        uid = pool["metadata"]["uid"] if named else "-"
        ready = [one for one in self.of(SANDBOXES) if controller(one) == uid and _ready(one)]
        notes = {
            **source["spec"]["podTemplate"].get("metadata", {}).get("annotations", {}),
            **more.get("annotations", {}),
        }
        changed = {"podTemplate": {"metadata": {"annotations": notes}}}
        if ready:
            name = ready[0]["metadata"]["name"]
            about = {"ownerReferences": owner(claim), "annotations": {resources.POD_NAME: name}}
            await self._merge(SANDBOXES, ready[0], {"metadata": about, "spec": changed})
        elif claim["metadata"]["name"] in self._seen[SANDBOXES]:
            name = claim["metadata"]["name"]
        else:
            name = claim["metadata"]["name"]
            await self._make(SANDBOXES, self._sandbox(name, source, claim))
            await self._merge(SANDBOXES, self._seen[SANDBOXES][name], {"spec": changed})
        await self._merge(CLAIMS, claim, {"status": {"sandbox": {"name": name}}}, "/status")

    async def _say(self, claim: Any, status: str, reason: str, message: str) -> None:
        if resources.ready(claim) != (status, reason, message):
            said = {"type": "Ready", "status": status, "reason": reason, "message": message,
                    "lastTransitionTime": now()}  # fmt: skip
            await self._merge(CLAIMS, claim, {"status": {"conditions": [said]}}, "/status")

    async def _pods(self) -> None:
        for sandbox in self.of(SANDBOXES):
            name, wanted = sandbox["metadata"]["name"], sandbox["spec"]["podTemplate"]
            pod = self._seen[PODS].get(name)
            if pod is None:
                about = {
                    **wanted.get("metadata", {}),
                    "name": name,
                    "ownerReferences": owner(sandbox),
                }
                await self._make(PODS, {
                    "apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": wanted["spec"],
                })  # fmt: skip
                continue
            notes = wanted.get("metadata", {}).get("annotations", {})
            if not notes.items() <= pod["metadata"].get("annotations", {}).items():
                await self._merge(PODS, pod, {"metadata": {"annotations": notes}})
            if self.runs and pod["status"]["phase"] == "Pending":
                state = {"running": {"startedAt": now()}}
                await self._merge(PODS, pod, {"status": {
                    "phase": "Running", "podIP": IP,
                    "containerStatuses": [{
                        "name": "agent", "image": "x", "imageID": "", "ready": True,
                        "restartCount": 0, "state": state,
                    }],
                }}, "/status")  # fmt: skip

    async def _status(self) -> None:
        for sandbox in self.of(SANDBOXES):
            pod = self._seen[PODS].get(sandbox["metadata"]["name"])
            if pod and pod["status"]["phase"] == "Running" and not _ready(sandbox):
                said = {"type": "Ready", "status": "True", "reason": "DependenciesReady",
                        "message": "it runs", "lastTransitionTime": now()}  # fmt: skip
                status = {"conditions": [said], "podIPs": [IP]}
                await self._merge(SANDBOXES, sandbox, {"status": status}, "/status")
        for claim in self.of(CLAIMS):
            held = self._seen[SANDBOXES].get(resources.sandbox_of(claim))
            if held is not None and _ready(held):
                await self._say(claim, "True", "DependenciesReady", "it runs")

    async def _gc(self) -> None:
        there = {
            one["metadata"]["uid"]
            for kind in (CLAIMS, POOLS, SANDBOXES) for one in self._seen[kind].values()
        }  # fmt: skip
        for kind in (SANDBOXES, PODS):
            for one in self.of(kind):
                if controller(one) and controller(one) not in there:
                    await self._remove(kind, one)


def _ready(one: dict[str, Any]) -> bool:
    return resources.ready(one)[0] == "True"
