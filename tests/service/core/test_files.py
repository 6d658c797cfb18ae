"""Files of a sandbox: below its two places, bounded, counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent_sandbox.service.core.files import normal
from agent_sandbox.service.core.wishes import Wish
from agent_sandbox.service.limits import Limits
from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Resources

from .lab import ALICE, go, lab, refused


async def data(size: int) -> AsyncIterator[bytes]:
    for _ in range(size // 100):
        yield b"x" * 100
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("a", "/workspace/a"),
        ("", "/workspace"),
        ("./a//b/.", "/workspace/a/b"),
        ("/workspace", "/workspace"),
        ("/home/agent/.x", "/home/agent/.x"),
        ("//workspace///a", "/workspace/a"),
        ("...", "/workspace/..."),
    ],
)
def test_paths_have_one_spelling(path: str, clean: str) -> None:
    assert normal(path) == clean


@pytest.mark.parametrize(
    "path",
    ["..", "../x", "/workspace/../etc", "/etc/passwd", "/", "/workspacex", "/home", "a\0b",
     "/home/agentx", "a/..", "x" * 5000],
)  # fmt: skip
def test_cannot_leave_by_a_path(path: str) -> None:
    with pytest.raises(Problem) as caught:
        normal(path)
    assert (caught.value.code, caught.value.field) == ("INVALID", "path")


def test_files_go_in_and_come_out(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish())).id
            files = world.service.files(ALICE, box)
            assert (await files.write("a", data(300))).size == 300
            entry, parts = await files.read("a")
            assert (entry.path, b"".join([p async for p in parts])) == (
                "/workspace/a", b"x" * 300,
            )  # fmt: skip
            found, more = await files.list("", depth=1, most=10)
            assert ([e.path for e in found], more) == (["/workspace/a"], False)
            await files.delete("a", recursive=False)
            await refused(files.read("a"), "NOT_FOUND")

    go(check())


def test_an_upload_beyond_the_limit_is_too_large(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d", limits=Limits(max_upload_bytes=1000)) as world:
            box = (await world.service.create(ALICE, Wish())).id
            files = world.service.files(ALICE, box)
            await files.write("a", data(1000))
            await refused(files.write("a", data(1100)), "TOO_LARGE")
            await refused(files.unpack("", data(1100)), "TOO_LARGE")

    go(check())


def test_uploads_at_the_same_time_share_what_is_left_of_the_disk(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            box = (await world.service.create(ALICE, Wish(resources=Resources(disk=1000)))).id
            files = world.service.files(ALICE, box)
            answers = await asyncio.gather(
                *(files.write(f"f{number}", data(300)) for number in range(10)),
                return_exceptions=True,
            )
            codes = {a.code for a in answers if isinstance(a, Problem)}
            assert codes == {"DISK_FULL"}
            used = await world.service.usage(ALICE, box)
            assert used.disk is not None
            assert used.disk <= 1000
            # Nothing is counted that is not there: the rest can be filled.
            await files.write("last", data(1000 - used.disk))
            await refused(files.write("more", data(100)), "DISK_FULL")

    go(check())


def test_where_the_kernel_keeps_the_disk_nothing_is_counted(tmp_path: Path) -> None:
    async def check() -> None:
        async with lab(tmp_path / "d") as world:
            made = await world.service.create(ALICE, Wish(resources=Resources(disk=1000)))
            live = world.service._context.live[made.id]
            live.sandbox = made.replace(enforced={"disk": "quota"})
            await world.service.files(ALICE, made.id).write("a", data(2000))
            assert "usage" not in [verb for verb, _ in world.backend.calls]

    go(check())
