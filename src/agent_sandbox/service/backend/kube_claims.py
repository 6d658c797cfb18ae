"""Pods from the controller of kubernetes-sigs/agent-sandbox: a source of pods like `kube_pool`.

Every sandbox is a SandboxClaim. Its controller takes a pod from the SandboxWarmPool of the same
shape, or makes one; we follow the claims, learn the pod's name from the Sandbox behind it, and
speak to the agent in it as to any other. To delete the claim is to delete all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ..problems import Problem
from . import kube_claim_objects as resources
from . import kube_objects as objects
from . import kube_pods as pods
from .kube_api import DELETED, MERGE_PATCH, Follower
from .kube_claim_objects import EXTENSIONS, SANDBOXES, Served
from .kube_http import Refusal, unavailable
from .kube_objects import SANDBOX, SEAL, text
from .kube_pool import not_made
from .kube_settings import OFF, ON

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from .kube_api import Api, Event
    from .kube_cache import Cache
    from .kube_links import Links
    from .kube_objects import Pod
    from .kube_pods import Shape, Surroundings
    from .kube_seal import Seal
    from .kube_source import Order, Wanted

CLAIMS, TEMPLATES, POOLS = "sandboxclaims", "sandboxtemplates", "sandboxwarmpools"
# A pod that the controller gives away may have ended in its pool.
MOST_TRIES = 3
# A name is not used again for this long, nor more names than this for one sandbox.
SPENT_SECONDS, MOST_NAMES = 300.0, 20
# A template that no claim and no pool of ours needs goes after this time.
IDLE_SECONDS = 600.0
TEND_SECONDS = 10.0
# How long to wait for word of a pod before looking for it.
LOOK_SECONDS = 2.0
NOT_FOUND, TAKEN = 404, 409
log = logging.getLogger(__name__)


async def discover(api: Api, setting: str) -> Served | None:
    """Which versions the cluster serves; None: pods have to be made without a controller.

    With `auto` a part that is missing means that claims are not used; with `on` it is an error.
    """
    if setting == OFF:
        return None
    versions: dict[str, str] = {}
    for group, needed in ((EXTENSIONS, resources.NEEDED), (resources.CORE, (SANDBOXES,))):
        try:
            version = resources.version_of(await api.get(f"/apis/{group}"))
            lacking = (
                resources.missing(await api.get(f"/apis/{group}/{version}"), needed)
                if version else needed
            )  # fmt: skip
        except Refusal as error:
            if error.status != NOT_FOUND:
                raise
            version, lacking = "", needed
        if lacking:
            if setting == ON:
                raise resources.absent(f"{', '.join(lacking)} of {group}")
            return None
        versions[group] = version
    return Served(extensions=versions[EXTENSIONS], core=versions[resources.CORE])


class Claims:
    """See `kube_source.Source`. Only the loop may use it."""

    def __init__(
        self, api: Api, cache: Cache, links: Links, around: Surroundings, served: Served, *,
        seal: Seal,
    ) -> None:  # fmt: skip
        # What the kernel counts by uid is not one pod's: those of a template share theirs.
        self.own_uid: bool = around.settings.user_namespaces
        self._api = api
        self._cache = cache
        self._links = links
        self._around = around
        self._served = served
        self._seal = seal
        cache.trusts = seal.fits
        self._wanted: dict[str, tuple[Shape, Wanted]] = {}
        self._dirty = False
        # Templates and pools that we have seen or made.
        self._made: set[str] = set()
        self._known: dict[str, object] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        # Names that had a claim which is gone, and since when: a Sandbox of that name may be left.
        self._spent: dict[str, float] = {}
        self._woken = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.hits: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self._follower = Follower(
            api, self._path(CLAIMS), resources.selector(around), replace=self._all,
            change=self._change,
            failed=lambda error: log.warning("SandboxClaims cannot be followed: %s", error),
        )  # fmt: skip

    def _path(self, plural: str, name: str = "") -> str:
        return self._served.path(self._around.namespace, plural, name)

    async def open(self) -> None:
        """See the claims that there are; Refusal when we may not."""
        await self._follower.start()
        self._cache.on_pod(self._seen)
        self._begin(self._loop())

    async def close(self) -> None:
        """Claims stay: their sandboxes are other replicas' from now on."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._follower.stop()

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._woken.wait()
            self._woken.clear()
            try:
                await self.tend()
            except Exception:
                log.exception("the pools go on after an error")

    # --- pods that wait

    def _seen(self, now: Pod | None, before: Pod | None) -> None:
        """Have a connection ready before somebody wants a pod of a pool."""
        one = now or before
        if now is not None and now.sandbox:
            self._wake(now.sandbox)
        if one is None or one.sandbox or one.shape not in self._hashes():
            return
        if now is None or now.over:
            self._woken.set()
            if (link := self._links.drop(one.uid)) is not None:
                self._begin(link.close())
        elif now.ready and not (before and before.ready):
            self._begin(self._link(now))

    def _hashes(self) -> set[str]:
        return {shape.hash for shape, _ in self._wanted.values()}

    async def _link(self, pod: Pod) -> None:
        try:
            await self._links.open(pod)
        except (Problem, Refusal, OSError) as error:
            log.warning("warm pod %s cannot be reached: %s", pod.name, error)

    # --- claims as they change

    def _all(self, found: list[object]) -> None:
        self._known = {text(one, "metadata", "name"): one for one in found}
        for event in self._waiting.values():
            event.set()

    def _change(self, event: Event) -> None:
        name = text(event.object, "metadata", "name")
        if event.kind == DELETED:
            self._known.pop(name, None)
        else:
            self._known[name] = event.object
        if name in self._waiting:
            self._waiting[name].set()

    def _wake(self, sandbox: str) -> None:
        """Whoever waits for this sandbox's pod looks again: a claim says nothing of a new one."""
        for name, event in self._waiting.items():
            if name == sandbox or name.startswith(f"{sandbox}-"):
                event.set()

    def _of(self, sandbox: str) -> Iterator[str]:
        for name, found in tuple(self._known.items()):
            if text(found, "metadata", "labels", SANDBOX) == sandbox:
                yield name

    # --- templates and pools

    async def _ensure(self, shape: Shape, replicas: int | None = None) -> str:
        """Template and pool of a shape are there; with a number, so many wait in it."""
        name, uid = resources.source(shape, self._around)
        if name in self._made and replicas is None:
            return name
        version, around = self._served.extensions, self._around
        body = resources.template(name, version, shape, around, uid=uid)
        await self._create(TEMPLATES, body)
        body = resources.pool(name, version, shape, around, replicas=replicas or 0)
        if not await self._create(POOLS, body) and replicas is not None:
            change = {"spec": {"replicas": replicas}}
            await self._api.patch(self._path(POOLS, name), change, kind=MERGE_PATCH)
        self._made.add(name)
        return name

    async def _create(self, plural: str, body: object) -> bool:
        """Make it; False: it was there."""
        try:
            await self._api.create(self._path(plural), body)
        except Refusal as error:
            if error.status != TAKEN:
                raise
            return False
        return True

    def want(self, wanted: Mapping[Shape, Wanted]) -> None:
        """How many pods of each shape wait, from now on."""
        self._wanted = {
            resources.source(shape, self._around)[0]: (shape, one)
            for shape, one in wanted.items() if one.count > 0
        }  # fmt: skip
        self._dirty = True
        self._woken.set()

    async def tend(self) -> None:
        """Tell the pools their number, and remove from them what has ended."""
        if self._dirty:
            self._dirty = False
            try:
                for shape, one in self._wanted.values():
                    await self._ensure(shape, one.count)
            except BaseException:
                self._dirty = True
                raise
        ours = self._hashes()
        for pod in tuple(self._cache.pods.values()):
            if not pod.sandbox and pod.over and not pod.deleting and pod.shape in ours:
                # Its pool, or the Sandbox that it belongs to, makes another.
                await self._api.delete(self._api.path("pods", pod.name), uid=pod.uid)

    # --- one sandbox

    async def take(self, order: Order) -> Pod:
        """A pod for a sandbox. Whatever fails, or is cancelled, leaves no claim."""
        limit = self._around.settings.start_seconds
        why = ["its SandboxClaim has no Sandbox yet"]
        try:
            async with asyncio.timeout(limit):
                for _ in range(MOST_TRIES):
                    pod = await self._try(self._name(order.sandbox.id), order, why)
                    if pod is not None:
                        return pod
        except TimeoutError as error:
            raise _slow(f"no pod runs after {limit:g} s: {why[0]}") from error
        except Refusal as error:
            raise not_made(error) from error
        raise _slow(f"the controller gave pods that had ended: {why[0]}")

    def _name(self, sandbox: str) -> str:
        """The name of a claim: one that no claim has had, as far as we know."""
        now = time.monotonic()
        self._spent = {name: at for name, at in self._spent.items() if now - at < SPENT_SECONDS}
        names = (sandbox, *(f"{sandbox}-{number}" for number in range(2, MOST_NAMES)))
        return next((name for name in names if name not in self._spent), names[-1])

    async def _try(self, name: str, order: Order, why: list[str]) -> Pod | None:
        """One claim; None: it got a pod that has ended."""
        source = await self._ensure(order.shape)
        body = resources.claim(
            name, self._served.extensions, self._around, source=source,
            warm=source in self._wanted, sandbox=order.sandbox.id, expires=order.ends,
        )  # fmt: skip
        if name in self._waiting:
            raise _taken(name)
        kept = False
        event = self._waiting[name] = asyncio.Event()
        try:
            if not await self._create(CLAIMS, body):
                kept = True
                raise _taken(name)
            pod = await self._claimed(name, source, order, event, why)
            kept = pod is not None
            return pod
        finally:
            del self._waiting[name]
            if not kept:
                # Also when we are cancelled: then in peace, beside whoever cancels. And when nobody
                # knows whether it was made: the name is this sandbox's.
                self._spent[name] = time.monotonic()
                await _finished(self._api.delete(self._path(CLAIMS, name)))

    async def _claimed(
        self, name: str, source: str, order: Order, event: asyncio.Event, why: list[str]
    ) -> Pod | None:
        """The pod of a claim that was made; None: it has ended."""
        sandbox = await self._bound(name, order, event, why)
        # A Sandbox that a claim has adopted from a pool has another name than the claim.
        counts = self.misses if sandbox == name else self.hits
        counts[source] = counts.get(source, 0) + 1
        return await self._running(sandbox, order, event, why)

    async def _bound(
        self, name: str, order: Order, event: asyncio.Event, why: list[str]
    ) -> str:  # fmt: skip
        """Wait for the Sandbox of a claim."""
        while True:
            event.clear()
            found = self._known.get(name)
            problem = resources.hopeless(found)
            if problem is not None:
                raise problem
            sandbox = resources.sandbox_of(found)
            if sandbox:
                return sandbox
            _, reason, message = resources.ready(found)
            if reason:
                why[0] = f"{reason}: {message}"
            if reason in resources.UNFOUNDED:
                self._made.discard(resources.source_of(found))
                await self._ensure(order.shape)
            await event.wait()

    async def _running(
        self, sandbox: str, order: Order, event: asyncio.Event, why: list[str]
    ) -> Pod | None:
        """Wait for the pod of a Sandbox, and make it this sandbox's; None: it has ended."""
        pod: Pod | None = None
        while pod is None:
            event.clear()
            pod = await self._own(sandbox, order)
            if pod is None:
                why[0] = f"the Sandbox '{sandbox}' has no pod yet"
                # We hear of a pod that is made for this sandbox (`_wake`), and of its claim. One
                # that takes the place of another in a pool may change neither.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await event.wait()
        return await self._up(pod, why)

    async def _up(self, pod: Pod, why: list[str]) -> Pod | None:
        """Wait until a pod runs; None: it has ended."""
        while True:
            # Before the look, so that nothing happens between the two.
            changed = self._cache.change(pod.uid)
            try:
                now = self._cache.pods.get(pod.uid)
                if now is None or now.over:
                    why[0] = (now.reason if now else "") or "its pod was removed"
                    return None
                if now.hopeless:
                    raise _slow(now.reason)
                if now.ready:
                    return now
                why[0] = now.reason or now.unplaced or f"its pod is {now.phase or 'not scheduled'}"
                await changed
            finally:
                changed.cancel()

    async def _own(self, sandbox: str, order: Order) -> Pod | None:
        """Write into a pod whose it is, as into a pod of our own making.

        The controller has made it, so only now is it sealed: its claim is ours, and from the claim
        alone we know its name. Whoever may just make pods, with any labels, gets no seal.
        """
        try:
            held = await self._api.get(self._path(SANDBOXES, sandbox))
            path = self._api.path("pods", resources.pod_of(held))
            seen = objects.pod(await self._api.get(path))
            if seen.shape != order.shape.hash or seen.sandbox not in ("", order.sandbox.id):
                raise _slow(f"the pod '{seen.name}' is not one for this sandbox")
            change = {
                "metadata": {
                    # As a precondition: the name may have been given again.
                    "uid": seen.uid, "labels": pods.claim_labels(order.sandbox),
                    "annotations": {
                        SANDBOX: order.sandbox.id, **pods.claim_notes(time.time()),
                        SEAL: self._seal.of(seen.uid),
                    },
                }
            }  # fmt: skip
            pod = objects.pod(await self._api.patch(path, change, kind=MERGE_PATCH))
        except Refusal as error:
            if error.status in (NOT_FOUND, TAKEN):
                return None
            raise
        self._cache.put(pod)
        return pod

    async def extend(self, pod: Pod, ends: float) -> None:
        """The controller lets it live until then."""
        for name in self._of(pod.sandbox):
            path = self._path(CLAIMS, name)
            try:
                await self._api.patch(path, resources.renewal(ends), kind=MERGE_PATCH)
            except Refusal as error:
                raise unavailable(error.message) from error

    async def remove(self, pod: Pod) -> None:
        """Remove a sandbox's claim, and with it Sandbox and pod.

        Not the pod itself: while there is a Sandbox, the controller would make another.
        """
        names = [*self._of(pod.sandbox)] if pod.sandbox else []
        try:
            for name in names:
                self._spent[name] = time.monotonic()
                await self._api.delete(self._path(CLAIMS, name))
            if not names:
                gone = not await self._api.delete(self._api.path("pods", pod.name), uid=pod.uid)
                if gone:
                    self._cache.drop(pod.uid)
        except Refusal as error:
            raise unavailable(error.message) from error

    async def sweep(self, known: frozenset[str], *, before: float) -> None:
        """Remove claims of sandboxes that nobody knows, and templates that nobody uses."""
        used: set[str] = set(self._wanted)
        for name, found in tuple(self._known.items()):
            sandbox = text(found, "metadata", "labels", SANDBOX)
            made = objects.moment(text(found, "metadata", "creationTimestamp"))
            if sandbox in known or made >= before:
                used.add(resources.source_of(found))
            else:
                await self._api.delete(self._path(CLAIMS, name))
        old = min(before, time.time() - IDLE_SECONDS)
        for plural in (POOLS, TEMPLATES):
            there, _ = await self._api.list(self._path(plural), resources.selector(self._around))
            for one in there:
                name = text(one, "metadata", "name")
                made = objects.moment(text(one, "metadata", "creationTimestamp"))
                if name not in used and made < old:
                    self._made.discard(name)
                    await self._api.delete(self._path(plural, name))

    def gauges(self) -> Mapping[str, float]:
        """How full the pools are, and how often they helped."""
        found: dict[str, float] = {}
        for source, (shape, wanted) in self._wanted.items():
            label = f'{{template="{"+".join(wanted.templates)}"}}'
            own = [p for p in self._cache.pods.values() if p.shape == shape.hash and not p.sandbox]
            found[f"pool_wanted{label}"] = wanted.count
            found[f"pool_ready{label}"] = sum(pod.ready for pod in own)
            found[f"pool_starting{label}"] = sum(not pod.ready and not pod.over for pod in own)
            found[f"pool_hits_total{label}"] = self.hits.get(source, 0)
            found[f"pool_misses_total{label}"] = self.misses.get(source, 0)
        return found


async def _finished(work: Coroutine[None, None, bool]) -> None:
    """Let it end though we are cancelled meanwhile."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise
    except (Refusal, Problem) as error:
        # The claim has an end of its own.
        log.warning("a SandboxClaim could not be removed: %s", error)


def _taken(name: str) -> Problem:
    return Problem("CONFLICT", f"there is a SandboxClaim '{name}' already")


def _slow(why: str) -> Problem:
    return Problem("BACKEND_UNAVAILABLE", why, retry_after=2.0)
