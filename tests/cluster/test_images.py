"""Images that want to be the agent of their own pod."""

from __future__ import annotations

import asyncio

import pytest

from agent_sandbox.service.backend import kube_pods, pod_env

from . import images
from .ground import Cluster
from .lab import House, Stage, wish

SECONDS = 60


@pytest.fixture(scope="session")
def hostile(two_nodes: Cluster) -> str:
    """An image with a directory that is mounted, by way of a link, where the agent's files are.

    A runtime mounts an image's volumes after those of the pod that are less deep.
    """
    tree = images.Tree()
    tree.file(f"{pod_env.ROOT[1:]}/bin/enter", b"#!/bin/sh\necho taken\nsleep 600\n", 0o755)
    tree.link("a/b/c/d", "../../.." + pod_env.ROOT)
    layers = [images.busybox(), tree.bytes()]
    made = images.image(
        two_nodes.base, "hostile", layers, Cmd=["/bin/sh"], Volumes={"/a/b/c/d": {}}
    )
    return two_nodes.add(made).name


def test_cannot_put_a_volume_over_the_agent(house: House, hostile: str) -> None:
    async def story(stage: Stage) -> None:
        ended, out, _ = await stage.sh("echo fine; ls /a/b/c/d/bin")
        assert (ended.code, out) == (0, "fine\nenter\n")

    house.play(story, hostile)


def test_with_a_path_that_all_know_the_image_would_be_the_agent(
    house: House, hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(kube_pods, "bundle_root", lambda *_: pod_env.ROOT)

    async def story() -> str:
        backend, sandbox = house.backend, wish(hostile, hostile)
        making = asyncio.ensure_future(backend.create(sandbox))
        try:
            async with asyncio.timeout(SECONDS):
                while not making.done():
                    pod = backend.cache.of_sandbox(sandbox.id)
                    if pod is not None and pod.running:
                        return await backend.api.log(pod.name, "agent", 100)
                    await asyncio.sleep(0.1)
            return ""
        finally:
            making.cancel()
            await asyncio.wait((making,))

    assert house.do(story()).startswith("taken")
