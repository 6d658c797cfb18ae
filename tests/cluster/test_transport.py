"""Agents whose pods' addresses cannot be reached: by way of the API server's exec."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_sandbox.service.backend import kube_links

from . import ground
from .lab import House, Stage, bytes_of, content

SIZE = 3 << 20


@pytest.fixture
def through(two_nodes: ground.Cluster, tmp_path: Path) -> Iterator[House]:
    """A backend that never uses an address."""
    house = House(two_nodes, tmp_path, KUBERNETES_TRANSPORT="exec")
    yield house
    house.close()


def test_commands_and_files_work_through_the_api_server(
    through: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_address: str, _port: int) -> None:
        raise AssertionError("an address was used")

    monkeypatch.setattr(kube_links, "direct", never)

    async def story(stage: Stage) -> None:
        ended, out, _ = await stage.sh("echo hello; exit 3")
        assert (ended.code, out) == (3, "hello\n")
        data = bytes(range(256)) * (SIZE // 256)
        await stage.files.write("/workspace/big", bytes_of(data), limit=SIZE)
        _, out, _ = await stage.sh("sha256sum < /workspace/big")
        assert out.split()[0] == hashlib.sha256(data).hexdigest()
        _, pieces = await stage.files.read("/workspace/big")
        assert await content(pieces) == data
        # Output that comes faster than it is taken, and input that is not.
        ended, out, _ = await stage.sh("head -c 1000000 /dev/zero | tr '\\0' x")
        assert (ended.code, len(out)) == (0, 1_000_000)
        running, said = await stage.start("cat", input=True)
        await running.write(b"there and back\n")
        await said.word("back")
        await running.close_input()
        assert (await running.wait()).code == 0

    through.play(story)


def test_a_kill_and_a_loss_come_through_too(through: House) -> None:
    async def story(stage: Stage) -> None:
        running, said = await stage.start("sh", "-c", "echo up; sleep 1000")
        await said.word("up")
        await running.kill()
        assert (await running.wait()).signal == "SIGKILL"
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        stage.backend.attend(lambda _, why: lost.set_result(why))
        running, said = await stage.start("sh", "-c", "echo up; sleep 1000")
        await said.word("up")
        pod = stage.pod()["metadata"]["name"]
        await asyncio.to_thread(stage.cluster.kubectl, "delete", "pod", pod, "--wait=false")
        assert "removed" in await asyncio.wait_for(lost, 30)
        assert (await running.wait()).lost

    through.play(story)


def test_an_address_that_does_not_answer_is_left_alone_for_a_while(
    two_nodes: ground.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    async def silent(_address: str, _port: int) -> None:
        nonlocal tries
        tries += 1
        raise TimeoutError

    monkeypatch.setattr(kube_links, "direct", silent)
    house = House(two_nodes, tmp_path)

    async def story(stage: Stage) -> None:
        for _ in range(3):
            assert (await stage.sh("true"))[0].code == 0

    try:
        house.play(story)
    finally:
        house.close()
    # Connections that were begun before the first one was known to fail.
    assert 1 <= tries <= 3
