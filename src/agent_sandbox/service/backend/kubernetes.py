"""Sandboxes as pods of a Kubernetes cluster, each with an agent of ours as its one process.

Placement, bounds and the detection of losses are the cluster's. What is here: a pod for a sandbox
(`kube_source`), a line to its agent (`kube_links`), and the end of both. Nothing but the store and
the cluster knows a sandbox: any replica can go on where another one ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time

from ...errors import SandboxError
from ..problems import Problem
from ..values import OFF
from . import kube_claims, kube_pods, pod_identity
from .interface import Support
from .kube_api import Api
from .kube_cache import Cache
from .kube_credentials import Credentials, find
from .kube_exec import Bridges
from .kube_files import KubeFiles
from .kube_http import Http, Refusal, unavailable
from .kube_images import Table, choose
from .kube_links import Links
from .kube_loss import Losses
from .kube_objects import SANDBOX
from .kube_objects import pod as read_pod
from .kube_owner import surroundings
from .kube_pool import Pool
from .kube_seal import KEY_BYTES, Seal
from .kube_settings import ENFORCED
from .kube_source import Order, Wanted
from .pod_link import Claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from ..state import State
    from ..values import Resources, Sandbox
    from .interface import Ended, Files, Lost, Running, Sink, Start, Warm
    from .kube_objects import Pod
    from .kube_pods import Shape, Surroundings
    from .kube_settings import KubeSettings
    from .kube_source import Source
    from .pod_link import PodLink

log = logging.getLogger(__name__)
INSTALLATION, IDENTITY, SEAL = "kubernetes-installation", "pod-identity", "pod-seal"
# The agent's lease ends a little after the sandbox: who is alive removes it with a line in the
# audit, and only when nobody is, the agent has to.
LEASE_GRACE = 20.0
# How long an agent may take to end its commands before its pod is removed.
STOP_SECONDS = 2.0
# How often a pod whose agent does not take a claim is replaced by another one.
MOST_TRIES = 3
# With several replicas: a pod that nobody knows yet may be one that another is just making.
YOUNG_SECONDS = 120.0


class KubernetesBackend:
    """See `interface.Backend`."""

    name = "kubernetes"
    reconcile_seconds = 30.0
    shared = True

    def __init__(
        self, settings: KubeSettings, environ: Mapping[str, str], *, store: State,
        required_runtime: str = "", clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        # What can be wrong in words is found before anything is made.
        self._access = find(settings, environ)
        self._settings = settings
        self._images = Table(settings.images)
        self._images.read()
        self._clock = clock
        self._shared = store.shared
        self._required = required_runtime
        self.installation = store.keep(INSTALLATION, lambda: secrets.token_hex(8).encode()).decode()
        self._identity = pod_identity.contexts(store.keep(IDENTITY, pod_identity.make))
        self._seal = Seal(store.keep(SEAL, lambda: secrets.token_bytes(KEY_BYTES)))
        self.api = Api(
            Http(self._access, Credentials(self._access, environ)), self._access.namespace
        )
        self.cache = Cache(self.api, self.installation)
        self._bridges = Bridges(self.api)
        self.links = Links(
            self.api, self.cache, self._bridges, self._identity, transport=settings.transport,
            seconds=settings.start_seconds,
        )  # fmt: skip
        self._losses = Losses(
            self.api, self.cache, self.links, quiet_seconds=settings.quiet_seconds,
            mine=self._is_missed, lost=self._lost,
        )  # fmt: skip
        self.links.quiet = self._losses.quiet
        self._tell: Lost = lambda _sandbox, _reason: None
        self._around: Surroundings | None = None
        self._source: Source | None = None
        self._opening = asyncio.Lock()
        # Ids that are being made here.
        self._making: set[str] = set()
        # Whose a pod is by its agent's own word, by uid.
        self._proven: dict[str, str] = {}
        # The ends of commands, by sandbox.
        self._running: dict[str, set[asyncio.Future[Ended]]] = {}
        # Whether pods here have been seen to have an inner layer; None: none was seen.
        self._inner: bool | None = None
        self._closing: set[asyncio.Task[None]] = set()

    # --- what it can do

    async def probe(self) -> Support:
        """What can be done now. The first one connects."""
        reason = ""
        try:
            await self._open()
        except Refusal as error:
            reason = f"{error.reason or error.status}: {error.message}"
        except SandboxError as error:
            reason = error.message
        if not reason and not self.cache.current:
            reason = "the cluster's API server does not answer"
        public = self._settings.network_policy == ENFORCED
        runtimes = (self._required,) if self._required else self._settings.runtimes
        return Support(
            ok=not reason, reason=reason, images=True, pause=True,
            enforced={
                "memory": "cgroup", "cpus": "cgroup", "pids": "rlimit" if self._own_uid else "",
                "disk": "kubelet+server",
            },
            networks=("off", "public") if public else ("off",), runtimes=runtimes,
            inner=self._inner is not False,
        )  # fmt: skip

    @property
    def _own_uid(self) -> bool:
        return self._source is None or self._source.own_uid

    async def _open(self) -> None:
        """Connect once; what fails is tried again by the next probe."""
        if self._source is not None:
            return
        async with self._opening:
            await self._connect()

    async def _connect(self) -> None:
        if self._source is None:
            around = self._around = await surroundings(
                self.api, self._settings, installation=self.installation,
                authority=self._identity.ca, secret=self._seal.secret,
            )  # fmt: skip
            source = await self._choose(around)
            await self.cache.start()
            await source.open()
            self._losses.start()
            self._source = source

    async def _choose(self, around: Surroundings) -> Source:
        """Claims where the cluster has a controller for them; otherwise pods of our own."""
        served = await kube_claims.discover(self.api, self._settings.claims)
        if served is not None:
            return kube_claims.Claims(
                self.api, self.cache, self.links, around, served, seal=self._seal
            )
        return Pool(self.api, self.cache, self.links, around, self._manifest, seal=self._seal)

    async def resolve(self, image: str) -> str:
        """The pinned name of an image."""
        try:
            return choose(image, self._images.read()).pin
        except Problem:
            raise
        except SandboxError as error:
            raise unavailable(error.message) from error

    # --- shapes

    def _ready(self) -> tuple[Surroundings, Source]:
        if self._around is None or self._source is None:
            raise unavailable("it has not been reached yet")
        return self._around, self._source

    def shape(self, sandbox: Sandbox) -> Shape:
        """What its pod looks like; a refusal of what a pod cannot keep."""
        around, _ = self._ready()
        kube_pods.check_network(sandbox.network, self._settings)
        chosen = choose(sandbox.digest, self._images.read())
        baked = chosen.agent or not self._settings.agent_image
        return kube_pods.shape_of(
            chosen.pin, agent=baked or chosen.pin == self._settings.agent_image,
            runtime=sandbox.runtime, network=sandbox.network.mode, resources=sandbox.resources,
            around=around,
        )  # fmt: skip

    def _manifest(self, shape: Shape) -> dict[str, Any]:
        around, _ = self._ready()
        uid = kube_pods.choose_uid(self._settings, secrets.randbelow)
        return kube_pods.manifest(shape, around, uid=uid)

    async def prepare(self, wanted: tuple[Warm, ...]) -> None:
        """Keep pods of these shapes warm."""
        _, source = self._ready()
        found: dict[Shape, Wanted] = {}
        for one in wanted:
            sandbox = one.sandbox
            if not sandbox.digest:
                sandbox = sandbox.replace(digest=await self.resolve(sandbox.image))
            shape = self.shape(sandbox)
            held = found.get(shape, Wanted(count=0))
            found[shape] = Wanted(
                count=held.count + one.count, templates=(*held.templates, one.template)
            )
        source.want(found)

    # --- life

    async def create(self, sandbox: Sandbox) -> Mapping[str, str]:
        """A pod, and its agent told whose it is."""
        shape = self.shape(sandbox)
        kube_pods.check_time(sandbox.expires - self._clock(), self._settings)
        _, source = self._ready()
        order = Order(
            sandbox=sandbox, shape=shape, ends=sandbox.expires + LEASE_GRACE,
            manifest=lambda: self._manifest(shape),
        )  # fmt: skip
        if sandbox.id in self._making or self.cache.of_sandbox(sandbox.id) is not None:
            # A warm pod has a name of its own, so the API server would not object.
            raise Problem("CONFLICT", "the sandbox has a pod already")
        self._making.add(sandbox.id)
        try:
            for number in range(1, MOST_TRIES + 1):
                pod = await source.take(order.replace(number=number))
                try:
                    return await self._claim(pod, sandbox)
                except BaseException as error:
                    await asyncio.shield(self._discard(pod))
                    if number == MOST_TRIES or not _again(error):
                        raise
            raise AssertionError("unreachable")
        finally:
            self._making.discard(sandbox.id)

    async def _claim(self, pod: Pod, sandbox: Sandbox) -> Mapping[str, str]:
        link = await self.links.open(pod)
        kept = await link.claim(Claim(
            sandbox=sandbox.id, lease_seconds=self._lease(sandbox),
            # Where pods share a uid, the processes of others would count.
            pids=sandbox.resources.pids if self._own_uid else None, disk=sandbox.resources.disk,
            network=sandbox.network.mode, inner=sandbox.inner,
        ))  # fmt: skip
        if sandbox.inner != OFF:
            self._inner = kept.get("filesystem") == kube_pods.BEHIND
        kube_pods.check(kept, sandbox)
        self.links.guard(pod.uid, kept)
        self._proven[pod.uid] = sandbox.id
        now = self.cache.pods.get(pod.uid)
        if now is None or now.over:
            raise unavailable("its pod was lost while it was made")
        return kept

    def _lease(self, sandbox: Sandbox) -> float:
        return max(1.0, sandbox.expires - self._clock() + LEASE_GRACE)

    async def _discard(self, pod: Pod) -> None:
        """Remove a pod that could not be made a sandbox."""
        _, source = self._ready()
        self.cache.leaving.add(pod.uid)
        self._let_go(pod.uid)
        with contextlib.suppress(Problem, Refusal):
            await source.remove(pod)

    async def renewed(self, sandbox: Sandbox) -> None:
        """Tell the agent, if the pod may live that long."""
        _, source = self._ready()
        pod = self._pod(sandbox)
        hard = pod.made + self._settings.hard_seconds
        if sandbox.expires > hard:
            raise Problem(
                "LIMIT_EXCEEDED", f"its pod ends within {max(0, hard - self._clock()):.0f} s",
                hint="the limit is KUBERNETES_HARD_SECONDS; make another sandbox",
                rule="kubernetes.hard_seconds", field="timeout",
            )  # fmt: skip
        link = await self._link(sandbox)
        await source.extend(pod, sandbox.expires + LEASE_GRACE)
        await link.renew(self._lease(sandbox))

    async def delete(self, sandbox: Sandbox) -> None:
        """End its commands, and remove its pod."""
        _, source = self._ready()
        pod = self.cache.of_sandbox(sandbox.id) or await self._find(sandbox.id)
        if pod is None:
            return
        # What follows is our own doing, and no loss.
        self.cache.leaving.add(pod.uid)
        link = self.links.get(pod.uid)
        stopping = asyncio.ensure_future(_stop(link, self._running.pop(sandbox.id, set())))
        try:
            await source.remove(pod)
        except BaseException:
            if not self._gone(pod.uid):
                self.cache.leaving.discard(pod.uid)
            raise
        finally:
            await asyncio.shield(stopping)
            self._let_go(pod.uid)

    async def _find(self, sandbox: str) -> Pod | None:
        """One that the cache does not know yet: another replica has just made it."""
        try:
            found, _ = await self.api.list(
                self.api.path("pods"), (("labelSelector", f"{SANDBOX}={sandbox}"),)
            )
        except Refusal as error:
            raise unavailable(error.message) from error
        return next(filter(self.cache.trusts, map(read_pod, found)), None)

    def _gone(self, uid: str) -> bool:
        pod = self.cache.pods.get(uid)
        return pod is None or pod.over

    def _let_go(self, uid: str) -> None:
        """Close the line to a pod, without waiting for it."""
        self._proven.pop(uid, None)
        link = self.links.drop(uid)
        if link is not None:
            self._spawn(link.close())

    def _spawn(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = asyncio.get_running_loop().create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _is_missed(self, pod: Pod) -> bool:
        """Whether its end is news. One that is still being made is its maker's to replace."""
        return pod.uid not in self.cache.leaving and pod.sandbox not in self._making

    def _lost(self, pod: Pod, why: str) -> None:
        """A pod is gone, and not by us."""
        self._running.pop(pod.sandbox, None)
        self._proven.pop(pod.uid, None)
        link = self.links.drop(pod.uid)
        if link is not None:
            link.lost(why)
            self._spawn(link.close())
        self._tell(pod.sandbox, why)

    def attend(self, lost: Lost) -> None:
        """Whom to tell."""
        self._tell = lost

    # --- use

    def _pod(self, sandbox: Sandbox) -> Pod:
        pod = self.cache.of_sandbox(sandbox.id)
        if pod is None or pod.over:
            raise Problem("WRONG_STATE", "the sandbox's pod is gone", rule="kubernetes.pod")
        return pod

    async def _link(self, sandbox: Sandbox) -> PodLink:
        """The line to its agent; after a restart it is made when it is first needed."""
        pod = self._pod(sandbox)
        link = self.links.get(pod.uid)
        if link is not None and self._proven.get(pod.uid) == sandbox.id:
            return link
        if not self.cache.trusts(pod):
            raise Problem("WRONG_STATE", "the sandbox's pod is not ours", rule="kubernetes.pod")
        link = await self.links.open(pod)
        # The cluster's word is a label, which others may write. The agent's own is a claim.
        said = await link.hello()
        if said.sandbox != sandbox.id:
            raise Problem(
                "WRONG_STATE", "the sandbox's pod does not know it", rule="kubernetes.pod"
            )
        self.links.guard(pod.uid, said.guarantees)
        self._proven[pod.uid] = sandbox.id
        return link

    async def start(self, sandbox: Sandbox, start: Start, sink: Sink) -> Running:
        """Start a command."""
        link = await self._link(sandbox)
        running = await link.start(start.replace(env={**sandbox.env, **start.env}), sink)
        live = self._running.setdefault(sandbox.id, set())
        end = asyncio.ensure_future(running.wait())
        live.add(end)
        end.add_done_callback(live.discard)
        return running

    async def pause(self, sandbox: Sandbox) -> None:
        """Stop its processes."""
        await (await self._link(sandbox)).pause()

    async def resume(self, sandbox: Sandbox) -> None:
        """Let them go on."""
        await (await self._link(sandbox)).resume()

    def files(self, sandbox: Sandbox) -> Files:
        """Its files."""
        return KubeFiles(lambda: self._link(sandbox))

    async def usage(self, sandbox: Sandbox) -> Resources:
        """What it uses now."""
        disk = sandbox.resources.disk
        return await (await self._link(sandbox)).usage(None if disk is None else 2 * disk)

    # --- order

    async def reconcile(self, known: Mapping[str, Sandbox]) -> frozenset[str]:
        """Remove pods of sandboxes that nobody knows; those of known ones that are there."""
        _, source = self._ready()
        if not self.cache.current:
            # What is not seen is not gone.
            raise unavailable("its API server does not answer")
        kept: set[str] = set()
        leaving: list[Pod] = []
        before = self._clock() - (YOUNG_SECONDS if self._shared else 0.0)
        for pod in tuple(self.cache.pods.values()):
            if not pod.sandbox or pod.sandbox in self._making:
                continue
            if pod.sandbox in known and not pod.over:
                kept.add(pod.sandbox)
            elif not pod.deleting and self._is_left(pod, known, before):
                leaving.append(pod)
        for pod in leaving:
            self.cache.leaving.add(pod.uid)
            self._let_go(pod.uid)
        gone = await asyncio.gather(*map(source.remove, leaving), return_exceptions=True)
        for pod, error in zip(leaving, gone, strict=True):
            if isinstance(error, BaseException):
                log.warning("pod %s of no sandbox stays for now: %s", pod.name, error)
        await source.sweep(frozenset(known) | self._making, before=before)
        self.cache.leaving &= set(self.cache.pods)
        return frozenset(kept)

    def _is_left(self, pod: Pod, known: Mapping[str, Sandbox], before: float) -> bool:
        """Whether nobody will miss a pod. Other replicas may have some that we do not know yet."""
        if pod.sandbox in known:
            return True
        return max(pod.claimed, pod.made) <= before

    def gauges(self) -> Mapping[str, float]:
        """Pods by state, and those of the pool."""
        pods = self.cache.pods.values()
        found: dict[str, float] = {
            "pods": len(pods),
            "pods_claimed": sum(bool(pod.sandbox) and not pod.over for pod in pods),
            "watching": float(self.cache.current),
        }
        return {**found, **(self._source.gauges() if self._source is not None else {})}

    async def close(self) -> None:
        """Let go of everything: agents end their commands, pods stay for their leases."""
        await self._losses.stop()
        if self._source is not None:
            await self._source.close()
        await self.links.close()
        await self._bridges.close()
        if self._closing:
            await asyncio.wait(tuple(self._closing))
        await self.cache.stop()
        await self.api.http.close()


async def _stop(link: PodLink | None, running: set[asyncio.Future[Ended]]) -> None:
    """End all commands, and hear how they ended: what is cut off before would be lost."""
    if link is None:
        return
    with contextlib.suppress(Problem, OSError, TimeoutError):
        async with asyncio.timeout(STOP_SECONDS):
            await link.stop()
            if running:
                await asyncio.wait(tuple(running))


def _again(error: BaseException) -> bool:
    """Whether another pod may do better."""
    return isinstance(error, OSError | TimeoutError) or (
        isinstance(error, Problem) and error.code == "BACKEND_UNAVAILABLE"
    )
