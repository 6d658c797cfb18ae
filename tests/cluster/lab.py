"""The kubernetes backend before a real cluster: one sandbox, and what tests do to it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agent_sandbox.pod import inner
from agent_sandbox.service.backend import kube_settings
from agent_sandbox.service.backend.interface import Ended, Running, Start, Warm
from agent_sandbox.service.backend.kubernetes import KubernetesBackend
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.store import Store
from agent_sandbox.service.values import RUNNING, Resources, Sandbox

from .ground import Cluster
from .machine import wait

T = TypeVar("T")
MIB = 1 << 20
PATIENCE = 120.0
BOUNDS = Resources(memory=128 * MIB, cpus=1.0, pids=64, disk=16 * MIB)
PODS = "/api/v1/namespaces/default/pods"
INSTALLATION = "agent-sandbox.dev/installation"
SANDBOX = "agent-sandbox.dev/sandbox"
# Programs of the bundle: the agent itself, its supervisors, and bwrap; and a starter that waits in
# a sandbox for the next command.
OURS = (b"/opt/agent-sandbox/", "\0".join(inner.starter()).encode())


class Said(list[tuple[int, bytes]]):
    """What a command has said so far; tells when there is more."""

    def __init__(self) -> None:
        self._grown = asyncio.Event()

    def add(self, stream: int, data: bytes) -> None:
        self.append((stream, data))
        self._grown.set()

    async def until(self, enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not enough():
                self._grown.clear()
                await self._grown.wait()

    async def word(self, word: str) -> None:
        """Wait until it has said this."""
        await self.until(lambda: word in joined(self, 1))


class Stage:
    """One sandbox, and what tests do to it."""

    def __init__(
        self, backend: KubernetesBackend, sandbox: Sandbox, cluster: Cluster, kept: dict[str, str]
    ) -> None:
        self.backend = backend
        self.sandbox = sandbox
        self.cluster = cluster
        # What the agent says that it keeps, and by what.
        self.kept = kept
        self.files = backend.files(sandbox)

    async def start(self, *argv: str, **fields: Any) -> tuple[Running, Said]:
        said = Said()
        start = Start(execution=f"exc-{secrets.token_hex(4)}", argv=argv, **fields)
        running = await self.backend.start(self.sandbox, start, said.add)
        return running, said

    async def sh(self, text: str, **fields: Any) -> tuple[Ended, str, str]:
        """Run a shell command to its end: how it ended, output and errors."""
        running, said = await self.start("sh", "-c", text, **fields)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        return ended, joined(said, 1), joined(said, 2)

    def pod(self) -> dict[str, Any]:
        """Its pod, by the cluster's own word."""
        (found,) = self.cluster.api("GET", f"{PODS}?labelSelector={SANDBOX}%3D{self.sandbox.id}")[
            "items"
        ]
        return dict(found)

    def processes(self) -> list[str]:
        """What commands are running, seen from the node; ours left out."""
        pod = self.pod()
        node = self.cluster.nodes[pod["spec"]["nodeName"]]
        found = []
        for path in node.groups.paths():
            for file in path.glob(f"kubepods/**/pod{pod['metadata']['uid']}/*/**/cgroup.procs"):
                found += file.read_text().split()
        lines = []
        for pid in sorted(set(found), key=int):
            with contextlib.suppress(OSError):
                lines.append(Path(f"/proc/{pid}/cmdline").read_bytes())
        return [
            line.replace(b"\0", b" ").decode().strip()
            for line in lines
            if line and not any(one in line for one in OURS) and b"sleep\x002147483647" not in line
        ]


def joined(said: list[tuple[int, bytes]], stream: int) -> str:
    return b"".join(data for number, data in said if number == stream).decode("utf-8", "replace")


async def bytes_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def content(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def tar(*entries: tuple[str, bytes, str]) -> bytes:
    """Files, or links where there is a target."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name, data, target in entries:
            info = tarfile.TarInfo(name)
            info.size, info.linkname = len(data), target
            info.type = tarfile.SYMTYPE if target else tarfile.REGTYPE
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


async def refused(doing: Coroutine[Any, Any, Any]) -> str:
    """The code of a refusal."""
    try:
        await doing
    except Problem as problem:
        return problem.code
    return ""


def settings(cluster: Cluster, base: Path, **more: str) -> dict[str, str]:
    """The environment of a service for this cluster."""
    table = base / "images.toml"
    table.write_text(
        f'plain = "{cluster.images["plain"].name}"\n'
        f'[base]\nimage = "{cluster.images["base"].name}"\nagent = true\n'
    )
    return {
        "KUBECONFIG": str(cluster.kubeconfig),
        "KUBERNETES_IMAGES": str(table),
        "KUBERNETES_AGENT_IMAGE": cluster.images["base"].name,
        # Two processors for all pods.
        "KUBERNETES_CPU_SHARE": "0.001",
        "KUBERNETES_MEMORY_SHARE": "0.1",
        "KUBERNETES_NODE_SECONDS": "2",
        **more,
    }


def wish(image: str, digest: str, **fields: Any) -> Sandbox:
    """A sandbox to be made."""
    base = {
        "id": f"sbx-{secrets.token_hex(4)}", "owner": "alice", "backend": "kubernetes",
        "state": RUNNING, "image": image, "digest": digest, "resources": BOUNDS,
        "expires": time.time() + 600,
    }  # fmt: skip
    return Sandbox(**{**base, **fields})


class House:
    """A backend with a loop of its own: stories are played in it one after another."""

    def __init__(self, cluster: Cluster, base: Path, warm: int = 0, **env: str) -> None:
        self.cluster = cluster
        self.environ = settings(cluster, base, **env)
        self.store = Store(str(base))
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.backend = self.do(self._open(warm))

    def do(self, work: Coroutine[Any, Any, T], seconds: float = 3 * PATIENCE) -> T:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    async def _open(self, warm: int) -> KubernetesBackend:
        backend = KubernetesBackend(
            kube_settings.load(self.environ), self.environ, store=self.store
        )
        support = await backend.probe()
        assert support.ok, support.reason
        await backend.reconcile({})
        if warm:
            digest = await backend.resolve("base")
            kind = wish("base", digest, id="", owner="", expires=0.0)
            await backend.prepare((Warm(template="default", sandbox=kind, count=warm),))
        return backend

    def play(
        self, story: Callable[[Stage], Coroutine[Any, Any, T]], image: str = "base", **fields: Any
    ) -> T:
        """Play a story in a new sandbox."""
        return self.do(self._played(story, image, fields))

    async def _played(
        self, story: Callable[[Stage], Coroutine[Any, Any, T]], image: str, fields: dict[str, Any]
    ) -> T:
        backend = self.backend
        sandbox = wish(image, await backend.resolve(image), **fields)
        kept = dict(await backend.create(sandbox))
        try:
            return await story(Stage(backend, sandbox, self.cluster, kept))
        finally:
            await backend.delete(sandbox)

    def close(self) -> None:
        """Close it; see that nothing is left when its owner goes."""
        installation = self.backend.installation
        try:
            self.do(self.backend.close())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
            self.loop.close()
            self.store.close()
        leave(self.cluster, installation)


def owned(cluster: Cluster, kind: str, installation: str) -> list[dict[str, Any]]:
    """Objects of one installation."""
    path = f"/api/v1/namespaces/default/{kind}?labelSelector={INSTALLATION}%3D{installation}"
    return list(cluster.api("GET", path)["items"])


def leave(cluster: Cluster, installation: str) -> None:
    """Remove all of an installation, and wait until it is gone."""
    selector = f"labelSelector={INSTALLATION}%3D{installation}"
    for kind in ("configmaps", "pods"):
        path = f"/api/v1/namespaces/default/{kind}?{selector}"
        cluster.api("DELETE", path, {"gracePeriodSeconds": 0, "propagationPolicy": "Background"})
    wait("pods go", lambda: not owned(cluster, "pods", installation))
