"""The lines to agents in pods: who an agent is, how it is reached, and one line for each pod.

Who it is, the API server says: an agent prints the fingerprint of its certificate as the first
line of its log, before any command of a sandbox can run. An address may lie; a pin does not.
"""

from __future__ import annotations

import asyncio
import socket
import time
from ipaddress import ip_address

from ..problems import Problem
from . import pod_env
from .kube_http import Refusal, unavailable, watch_over
from .kube_objects import CONTAINER
from .kube_pods import is_open_to_commands
from .kube_settings import AUTO, DIRECT, EXEC
from .pod_link import PodLink

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from .kube_api import Api
    from .kube_cache import Cache
    from .kube_exec import Bridges
    from .kube_objects import Pod
    from .pod_identity import Identity

DIAL_SECONDS = 3.0
# After an address did not answer and exec did, addresses are not tried for this long.
FIRST_AVOID, LONGEST_AVOID = 30.0, 3600.0
# Between looks for the agent's first line.
FIRST_LOOK, LONGEST_LOOK = 0.02, 0.5


class Links:
    """One line for each pod, by uid. Only the loop may use it."""

    def __init__(
        self, api: Api, cache: Cache, bridges: Bridges, identity: Identity, *,
        transport: str, seconds: float,
    ) -> None:  # fmt: skip
        """`seconds`: how long an agent may take to say who it is."""
        self._api = api
        self._cache = cache
        self._bridges = bridges
        self._identity = identity
        self._transport = transport
        self._seconds = seconds
        # With AUTO: until when addresses are not tried, and for how long the next time.
        self._avoid = 0.0
        self._pause = FIRST_AVOID
        # Gets the uid of a pod whose agent has said nothing for too long.
        self.quiet: Callable[[str], None] = lambda _uid: None
        self._links: dict[str, PodLink] = {}
        self._opening: dict[str, asyncio.Task[PodLink]] = {}
        # Pods that were reached by exec, and those that must not be.
        self._by_exec: set[str] = set()
        self._never_exec: set[str] = set()

    def has(self, uid: str) -> bool:
        """Whether a pod has a line already."""
        return uid in self._links

    def get(self, uid: str) -> PodLink | None:
        """The line to a pod, if there is one."""
        return self._links.get(uid)

    async def open(self, pod: Pod) -> PodLink:
        """The line to a pod; made by one, however many ask for it."""
        if (link := self._links.get(pod.uid)) is not None:
            return link
        task = self._opening.get(pod.uid)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open(pod))
            self._opening[pod.uid] = task
            task.add_done_callback(lambda _: self._opening.pop(pod.uid, None))
            task.add_done_callback(_seen)
        return await asyncio.shield(task)

    async def _open(self, pod: Pod) -> PodLink:
        pin = await self._fingerprint(pod)
        link = PodLink(
            lambda: self.dial(pod), pin, self._identity, on_quiet=lambda: self.quiet(pod.uid),
            # Through the API server a connection takes a process in the pod, and 300 ms.
            idle=2 if self._transport == EXEC or self._avoids else 1,
        )  # fmt: skip
        try:
            await link.hello()
        except BaseException:
            await link.close()
            raise
        self._links[pod.uid] = link
        return link

    def drop(self, uid: str) -> PodLink | None:
        """Forget the line to a pod; whoever asked closes it."""
        if (task := self._opening.pop(uid, None)) is not None:
            task.cancel()
        return self._links.pop(uid, None)

    def guard(self, uid: str, kept: Mapping[str, str]) -> None:
        """No exec into a pod whose network a command could get by it; refuse one that needs it."""
        if not is_open_to_commands(kept):
            return
        self._never_exec = self._never_exec & set(self._cache.pods) | {uid}
        if uid in self._by_exec:
            raise Problem(
                "UNSUPPORTED", "exec into a pod would give its commands a network here",
                hint="nodes with Landlock (Linux 5.13), the seccomp profile for bwrap, or pods "
                "whose address the service can reach", field="network", rule="kubernetes.exec",
            )  # fmt: skip

    async def close(self) -> None:
        """Close all. Agents end the commands whose connections are gone."""
        for task in tuple(self._opening.values()):
            task.cancel()
        links, self._links = tuple(self._links.values()), {}
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    # --- who it is

    async def _fingerprint(self, pod: Pod) -> str:
        pause, why = FIRST_LOOK, "its agent does not say who it is"
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    try:
                        said = await self._api.log(pod.name, CONTAINER, pod_env.LOG_BYTES)
                        if pin := pod_env.fingerprint(said):
                            return pin
                    except Refusal as error:
                        # 400: the container is not there yet; 5xx: its kubelet does not answer.
                        if error.status not in (400, 429) and error.status < 500:
                            raise unavailable(error.message) from error
                        why = error.message
                    now = self._cache.pods.get(pod.uid)
                    if now is None or now.over:
                        raise unavailable("a pod ended before its agent said who it is")
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_LOOK)
        except TimeoutError as error:
            raise unavailable(f"a pod cannot be used: {why}") from error

    # --- how it is reached

    async def dial(self, pod: Pod) -> socket.socket:
        """A connection to a pod's agent."""
        if self._transport == DIRECT or (self._transport == AUTO and not self._avoids):
            try:
                sock = await direct(pod.ip, pod_env.PORT)
            except (OSError, TimeoutError) as error:
                if self._transport == DIRECT:
                    raise ConnectionError(f"the pod's address does not answer: {error}") from error
            else:
                self._pause = FIRST_AVOID
                return sock
        if pod.uid in self._never_exec:
            raise ConnectionError("the pod's address does not answer, and exec would open it")
        command = pod_env.connect(pod_env.root_of(pod.entry))
        try:
            sock = await self._bridges.open(pod.name, CONTAINER, command)
        except (Refusal, Problem) as error:
            raise ConnectionError(f"neither the pod nor exec answers: {error}") from error
        self._by_exec = self._by_exec & set(self._cache.pods) | {pod.uid}
        if self._transport == AUTO and not self._avoids and self._cache.well(pod.node):
            # The node answers, its pod does not: so it will be with the others, for a while.
            self._avoid = time.monotonic() + self._pause
            self._pause = min(self._pause * 2, LONGEST_AVOID)
        return sock

    @property
    def _avoids(self) -> bool:
        return time.monotonic() < self._avoid


async def direct(address: str, port: int) -> socket.socket:
    """A TCP connection to a pod."""
    family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        watch_over(sock)
        async with asyncio.timeout(DIAL_SECONDS):
            await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock


def _seen(task: asyncio.Task[PodLink]) -> None:
    if not task.cancelled():
        task.exception()
