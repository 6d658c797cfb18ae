"""Pods of our own: made when they are wanted, or waiting in a warm pool; see `kube_source`.

Several replicas share the pool and need not know of each other. A warm pod is taken by a patch
that only one of them can win. Missing ones have names that all replicas count alike, so that the
API server refuses the second of two; and whoever sees too many removes the youngest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from ..problems import Problem
from . import kube_objects as objects
from . import kube_pods as pods
from .kube_api import MERGE_PATCH
from .kube_http import Refusal, unavailable
from .kube_objects import STATE, WARM
from .kube_patience import YOUNG_SECONDS, Patience

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet
    from typing import Any

    from .kube_api import Api
    from .kube_cache import Cache
    from .kube_links import Links
    from .kube_objects import Pod
    from .kube_pods import Shape, Surroundings
    from .kube_seal import Seal
    from .kube_source import Order, Wanted

log = logging.getLogger(__name__)
# How many warm pods are tried before one is made.
MOST_TRIES = 4
AT_ONCE = 8
TEND_SECONDS = 10.0
# A pod that comes up changes more often than this.
LOOK_SECONDS = 5.0
# Changes come in bursts.
DEBOUNCE = 0.02
# Warm pods of a shape that nobody here wants: perhaps another release's replica does, for now.
STRANGE_SECONDS = 60.0
# A warm pod is replaced before its agent ends by itself, at this part of its time.
OLD = 0.8
# The state of a warm pod that is about to be removed: nobody can take it any more.
RETIRED = "retired"


class Plan:
    """What is to be made and removed of one shape."""

    __slots__ = ("make", "remove")

    def __init__(self, make: tuple[str, ...], remove: tuple[Pod, ...]) -> None:
        self.make = make
        self.remove = remove


def plan(
    wanted: int, found: list[Pod], name: Callable[[int], str], now: float, old: float,
    *, refused: AbstractSet[int] = frozenset(),
) -> Plan:  # fmt: skip
    """Decide; pure. `found`: every pod of the shape that we have made, claimed ones too.

    `old`: an age in seconds. `refused`: numbers whose names somebody has.
    """
    warm = [pod for pod in found if pod.state == WARM and not pod.sandbox]
    ended = [pod for pod in warm if pod.over and not pod.deleting]
    there = sorted((pod for pod in warm if not pod.over), key=lambda pod: (pod.made, pod.name))
    # The oldest go first when they are too old, the youngest when they are too many: those that
    # are still coming up before those that can be used.
    stale = [pod for pod in there if pod.ready and now - pod.made > old]
    fresh = [pod for pod in there if pod not in stale]
    order = sorted(fresh, key=lambda pod: (not pod.ready, pod.made, pods.warm_number(pod.name)))
    surplus = order[wanted:]
    # A stale one stays until another one is ready: one at a time, so that the pool is never empty.
    enough = sum(pod.ready for pod in fresh) >= wanted
    leaving = stale if enough or not wanted else []
    missing = max(0, wanted - len(fresh))
    taken = {pods.warm_number(pod.name) for pod in found} | refused
    first = max(taken, default=-1) + 1
    make = tuple(name(first + i) for i in range(missing))
    return Plan(make, (*ended, *surplus, *leaving))


class Pool:
    """See `kube_source.Source`."""

    own_uid = True

    def __init__(
        self, api: Api, cache: Cache, links: Links, around: Surroundings,
        manifest: Callable[[Shape], dict[str, Any]], *, seal: Seal,
    ) -> None:  # fmt: skip
        self._api = api
        self._cache = cache
        self._links = links
        self._around = around
        self._manifest = manifest
        self._seal = seal
        cache.trusts = seal.fits
        self._wanted: dict[Shape, Wanted] = {}
        # Uids that this replica is taking at the moment.
        self._taking: set[str] = set()
        self._room = asyncio.Semaphore(AT_ONCE)
        self._patience = Patience()
        # Numbers of names that were taken, by shape.
        self._refused: dict[str, set[int]] = {}
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._lining: set[asyncio.Task[None]] = set()
        self.hits: dict[str, int] = {}
        self.misses: dict[str, int] = {}
        self._refill = 0.0

    # --- life

    async def open(self) -> None:
        """Begin to look after warm pods."""
        self._cache.on_pod(self._seen)
        self._task = asyncio.get_running_loop().create_task(self._loop())

    async def close(self) -> None:
        """Stop. Warm pods stay: another replica may use them, or they end by themselves."""
        tasks = [*self._lining, *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def want(self, wanted: Mapping[Shape, Wanted]) -> None:
        """What to keep warm."""
        self._wanted = {shape: one for shape, one in wanted.items() if one.count > 0}
        self._woken.set()
        for pod in tuple(self._cache.pods.values()):
            if pod.state == WARM and pod.ready:
                self._line_up(pod)

    def _seen(self, now: Pod | None, before: Pod | None) -> None:
        one = now or before
        if one is None or WARM not in {one.state, before.state if before is not None else ""}:
            return
        self._woken.set()
        if now is not None and now.ended and now.state == WARM and not (before and before.ended):
            self._judge(now)
        if now is not None and now.ready and now.state == WARM and not (before and before.ready):
            self._refill = max(0.0, time.time() - now.made)
            self._line_up(now)
        # Of one that another replica has taken, this one needs no connection.
        given = now is None or now.over or now.state != WARM
        if given and one.uid not in self._taking:
            self._unlink(one.uid)

    def _line_up(self, pod: Pod) -> None:
        """Have a connection ready before somebody wants the pod."""
        if pod.shape not in {shape.hash for shape in self._wanted}:
            return
        task = asyncio.get_running_loop().create_task(self._link(pod))
        self._lining.add(task)
        task.add_done_callback(self._lining.discard)

    async def _link(self, pod: Pod) -> None:
        try:
            await self._links.open(pod)
        except (Problem, Refusal, OSError) as error:
            log.warning("warm pod %s cannot be reached: %s", pod.name, error)

    def _unlink(self, uid: str) -> None:
        link = self._links.drop(uid)
        if link is not None:
            task = asyncio.get_running_loop().create_task(link.close())
            self._lining.add(task)
            task.add_done_callback(self._lining.discard)

    async def _loop(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TEND_SECONDS):
                    await self._woken.wait()
            await asyncio.sleep(DEBOUNCE)
            self._woken.clear()
            try:
                await self.tend()
            except Exception:
                log.exception("the warm pool goes on after an error")

    # --- to have enough

    async def tend(self) -> None:
        """Make what is missing, remove what is too much."""
        if not self._cache.current:
            return
        now, work = time.time(), []
        old = self._around.settings.warm_seconds * OLD
        by_shape: dict[str, list[Pod]] = {}
        for pod in self._cache.pods.values():
            # Made by nobody of us, by one who was interrupted, or in this very moment: it does not
            # count, or pods of strangers would stand for ours.
            if self._seal.fits(pod):
                by_shape.setdefault(pod.shape, []).append(pod)
            elif pod.state == WARM and now - pod.made > STRANGE_SECONDS:
                work.append(self._discard(pod))
        for shape, wanted in self._wanted.items():
            found = by_shape.pop(shape.hash, [])
            decided = plan(
                wanted.count, found, partial(pods.warm_name, self._around, shape), now, old,
                refused=self._refused.get(shape.hash, frozenset()),
            )  # fmt: skip
            if self._patience.is_over(shape.hash, time.monotonic()):
                work += [self._make(shape, name) for name in decided.make]
            work += [self._discard(pod) for pod in decided.remove if pod.uid not in self._taking]
        for found in by_shape.values():
            work += [
                self._discard(pod) for pod in found
                if pod.state == WARM and not pod.sandbox and not pod.deleting
                and now - pod.made > STRANGE_SECONDS
            ]  # fmt: skip
        # Marked, and not removed: whoever marked it was interrupted.
        work += [
            self._forsake(pod) for pod in self._cache.pods.values()
            if pod.state == RETIRED and not pod.deleting
        ]  # fmt: skip
        await asyncio.gather(*work)

    async def _make(self, shape: Shape, name: str) -> None:
        body = pods.named(self._manifest(shape), name, {STATE: WARM}, {})
        try:
            async with self._room:
                await self._create(body)
        except Refusal as error:
            if error.status == 409:
                # Another replica was faster, and its pod will be seen; or somebody just has that
                # name, and the next try takes another.
                self._refused.setdefault(shape.hash, set()).add(pods.warm_number(name))
                return
            self._put_off(shape, error)
        except Problem as error:
            self._put_off(shape, error)

    async def _create(self, body: dict[str, Any]) -> Pod:
        """Make a pod. Whoever gives up waits for the answer.

        A call that is cut off may yet come through, after a removal that found nothing.
        """
        task = asyncio.get_running_loop().create_task(self._sealed(body))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            with contextlib.suppress(Refusal, Problem):
                await self._forsake(await task)
            raise

    async def _sealed(self, body: dict[str, Any]) -> Pod:
        """Make a pod, and note that it was us. Without the note nobody takes it."""
        made = objects.pod(await self._api.create(self._api.path("pods"), body))
        self._cache.put(made)
        path = self._api.path("pods", made.name)
        try:
            sealed = objects.pod(
                await self._api.patch(path, self._seal.patch(made), kind=MERGE_PATCH)
            )
        except BaseException as error:
            await asyncio.shield(self._forsake(made))
            if isinstance(error, Refusal):
                raise unavailable(error.message) from error
            raise
        self._cache.put(sealed)
        return sealed

    def _put_off(self, shape: Shape, error: Exception) -> None:
        if self._patience.failed(shape.hash, time.monotonic()):
            log.warning("a warm pod cannot be made: %s", error)

    def _judge(self, pod: Pod) -> None:
        """A warm pod has ended by itself. One that did so at once would do it again."""
        if time.time() - pod.made >= YOUNG_SECONDS:
            self._patience.worked(pod.shape)
        elif self._patience.failed(pod.shape, time.monotonic()):
            log.warning("warm pod %s ended at once: %s", pod.name, pod.reason or pod.phase)

    async def _discard(self, pod: Pod) -> None:
        """Remove a warm pod, unless somebody takes it at this moment: then it is theirs."""
        mark = [
            {"op": "test", "path": "/metadata/uid", "value": pod.uid},
            {"op": "test", "path": f"/metadata/labels/{pods.pointer(STATE)}", "value": WARM},
            {"op": "replace", "path": f"/metadata/labels/{pods.pointer(STATE)}", "value": RETIRED},
        ]
        try:
            async with self._room:
                await self._api.patch(self._api.path("pods", pod.name), mark)
                await self._delete(pod)
        except (Refusal, Problem) as error:
            if not isinstance(error, Refusal) or error.status not in LOST_RACE:
                log.warning("warm pod %s cannot be removed: %s", pod.name, error)

    # --- to give one

    async def take(self, order: Order) -> Pod:
        """A warm pod, or one that is made now."""
        for pod in self._candidates(order.shape):
            self._taking.add(pod.uid)
            try:
                taken = await self._claim(pod, order)
            finally:
                self._taking.discard(pod.uid)
            if taken is not None:
                self._count(self.hits, order)
                self._patience.worked(order.shape.hash)
                return taken
        self._count(self.misses, order)
        return await self._made(order)

    def _candidates(self, shape: Shape) -> list[Pod]:
        """Those that can be taken, best first: with a connection, then the oldest."""
        found = [
            pod for pod in self._cache.pods.values()
            if pod.shape == shape.hash and pod.state == WARM and pod.ready
            and pod.uid not in self._taking and self._cache.well(pod.node)
            and self._seal.fits(pod)
        ]  # fmt: skip
        found.sort(key=lambda pod: (not self._links.has(pod.uid), pod.made))
        return found[:MOST_TRIES]

    async def _claim(self, pod: Pod, order: Order) -> Pod | None:
        """Take a warm pod; None: another one has it."""
        patch = pods.claim_patch(pod.uid, order.sandbox, time.time())
        try:
            answer = await self._api.patch(self._api.path("pods", pod.name), patch)
        except Refusal as error:
            if error.status not in LOST_RACE:
                raise unavailable(error.message) from error
            return None
        except (Problem, asyncio.CancelledError):
            # Nobody knows whether it is ours now; so nobody may have it.
            await asyncio.shield(self._forsake(pod))
            raise
        taken = objects.pod(answer)
        if not taken.ready:
            await asyncio.shield(self._forsake(taken))
            return None
        self._cache.put(taken)
        return taken

    async def _forsake(self, pod: Pod) -> None:
        self._cache.leaving.add(pod.uid)
        with contextlib.suppress(Refusal, Problem):
            await self._delete(pod)

    async def _made(self, order: Order) -> Pod:
        """A pod for one sandbox alone."""
        sandbox = order.sandbox
        name = pods.cold_name(self._around, sandbox.id, order.number)
        body = pods.named(
            order.manifest(), name, pods.claim_labels(sandbox),
            pods.claim_notes(time.time()),
        )  # fmt: skip
        try:
            made = await self._create(body)
        except Refusal as error:
            raise not_made(error) from error
        except (Problem, asyncio.CancelledError):
            # It may be there: the name tells, and nothing else has it.
            await asyncio.shield(self._unmake(name))
            raise
        try:
            return await self._up(made)
        except BaseException:
            await asyncio.shield(self._forsake(made))
            raise

    async def _unmake(self, name: str) -> None:
        with contextlib.suppress(Refusal, Problem):
            await self._api.delete(self._api.path("pods", name), grace=0)

    async def _up(self, pod: Pod) -> Pod:
        """Wait until it runs."""
        seconds = self._around.settings.start_seconds
        try:
            async with asyncio.timeout(seconds):
                while True:
                    changed = self._cache.change(pod.uid)
                    try:
                        now = self._cache.pods.get(pod.uid)
                        if now is None or now.over or now.hopeless:
                            raise _failed(now)
                        if now.ready:
                            return now
                        await asyncio.wait((changed,), timeout=LOOK_SECONDS)
                        if not changed.done():
                            await self._look(pod)
                    finally:
                        changed.cancel()
        except TimeoutError as error:
            now = self._cache.pods.get(pod.uid)
            why = now.unplaced or now.reason if now is not None else ""
            raise Problem(
                "BUSY" if now is not None and now.unplaced else "BACKEND_UNAVAILABLE",
                f"a pod does not run after {seconds:g} s" + (f": {why}" if why else ""),
                rule="kubernetes.start", retry_after=10.0,
            ) from error  # fmt: skip

    async def _look(self, pod: Pod) -> None:
        """Ask for a pod: the watch has been silent for long, and may be dead."""
        named = (("fieldSelector", f"metadata.name={pod.name}"),)
        with contextlib.suppress(Refusal, Problem):
            found, _ = await self._api.list(self._api.path("pods"), named)
            now = next((one for one in map(objects.pod, found) if one.uid == pod.uid), None)
            if now is None:
                self._cache.drop(pod.uid)
            else:
                self._cache.put(now)

    # --- to end one

    async def extend(self, pod: Pod, ends: float) -> None:
        """Nothing to do: the agent keeps the lease, and the pod's own end is the last."""

    async def remove(self, pod: Pod) -> None:
        """Remove a pod."""
        try:
            await self._delete(pod)
        except Refusal as error:
            raise unavailable(error.message) from error

    async def _delete(self, pod: Pod) -> None:
        if not await self._api.delete(self._api.path("pods", pod.name), uid=pod.uid):
            self._cache.drop(pod.uid)

    async def sweep(self, known: frozenset[str], *, before: float) -> None:
        """A pod is all that there is."""

    # --- numbers

    def _count(self, counts: dict[str, int], order: Order) -> None:
        if order.shape in self._wanted:
            counts[order.shape.hash] = counts.get(order.shape.hash, 0) + 1

    def gauges(self) -> Mapping[str, float]:
        """How full the pool is, and how often it helped."""
        found: dict[str, float] = {}
        for shape, wanted in self._wanted.items():
            label = f'{{template="{"+".join(wanted.templates)}"}}'
            own = [
                p for p in self._cache.pods.values() if p.shape == shape.hash and p.state == WARM
            ]
            found[f"pool_wanted{label}"] = wanted.count
            # One that runs before it has its seal cannot be taken yet.
            ready = sum(pod.ready and self._seal.fits(pod) for pod in own)
            found[f"pool_ready{label}"] = ready
            found[f"pool_starting{label}"] = sum(not pod.over for pod in own) - ready
            found[f"pool_hits_total{label}"] = self.hits.get(shape.hash, 0)
            found[f"pool_misses_total{label}"] = self.misses.get(shape.hash, 0)
        found["pool_refill_seconds"] = self._refill
        return found


# 404: gone; 409: changed in between, five times; 422: a test of the patch has failed.
LOST_RACE = frozenset({404, 409, 422})


def not_made(error: Refusal) -> Problem:
    """Why the API server does not take a pod."""
    if error.status == 409:
        return Problem("CONFLICT", "the sandbox has a pod already")
    if error.status == 403 and "exceeded quota" in error.message:
        return Problem(
            "BUSY", f"the namespace's quota is used up: {error.message}", retry_after=10.0,
            rule="kubernetes.quota",
        )  # fmt: skip
    if error.status in (400, 403, 422):
        return Problem(
            "BACKEND_UNAVAILABLE", f"the cluster does not take the pod: {error.message}",
            hint="see the service's Role, the namespace's policies and its ResourceQuota",
            rule="kubernetes.admission",
        )  # fmt: skip
    return unavailable(error.message)


def _failed(pod: Pod | None) -> Problem:
    why = "it was removed" if pod is None else pod.reason or "it ended"
    return Problem("BACKEND_UNAVAILABLE", f"a pod does not start: {why}", rule="kubernetes.start")
