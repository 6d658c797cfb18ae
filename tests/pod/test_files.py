"""Files of a sandbox in a pod, by the agent; the steps themselves are tested with `tree`."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.pod import files as pod_files
from agent_sandbox.service.problems import Problem

from .ground import Pod, play, sh

pytestmark = pytest.mark.kernel


async def body(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def content(files: Any, path: str, offset: int = 0) -> bytes:
    _, pieces = await files.read(path, offset)
    return b"".join([piece async for piece in pieces])


async def refused(asked: Any) -> str:
    with pytest.raises(Problem) as caught:
        await asked
    return caught.value.code


def test_a_file_is_the_same_for_command_and_service(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        files = link.files()
        data = os.urandom(1_000_000)
        made = await files.write("/workspace/a/b", body(data[:7], data[7:]), limit=1 << 20)
        assert (made.size, made.kind, made.mode) == (len(data), "file", 0o644)
        assert (await sh(link, "stat -c %s a/b; echo more >> a/b")) == f"{len(data)}\n"
        assert await content(files, "/workspace/a/b", 10) == data[10:] + b"more\n"
        found, more = await files.list("/workspace", depth=2, most=10)
        assert ([one.path for one in found], more) == (["/workspace/a", "/workspace/a/b"], False)
        assert await files.list("/workspace", depth=2, most=1) == ([found[0]], True)
        await files.make("/home/agent/new")
        assert (await sh(link, "ls /home/agent")) == "new\n"
        assert await refused(files.delete("/workspace/a", recursive=False)) == "CONFLICT"
        await files.delete("/workspace/a", recursive=True)
        assert await refused(files.entry("/workspace/a")) == "NOT_FOUND"
        # Nothing half-written, nothing half-removed.
        assert set(os.listdir(pod.data)) == {"workspace", "home", "tmp"}

    play(scene())


def test_a_tree_comes_back_as_it_went(pod: Pod) -> None:
    async def scene() -> None:
        files = (await pod.claimed()).files()
        with io.BytesIO() as file:
            with tarfile.open(fileobj=file, mode="w:gz") as tar:
                for number in range(200):
                    info = tarfile.TarInfo(f"d{number % 7}/f{number}")
                    info.size = number * 100
                    tar.addfile(info, io.BytesIO(bytes(info.size)))
            data = file.getvalue()
        assert await files.unpack("/workspace/t", body(data), limit=1 << 24) == 200
        got = b"".join([piece async for piece in await files.pack("/workspace/t")])
        with tarfile.open(fileobj=io.BytesIO(got)) as tar:
            sizes = sorted(one.size for one in tar.getmembers() if one.isfile())
        assert sizes == [number * 100 for number in range(200)]
        assert await refused(files.unpack("/workspace/t", body(data), limit=1000)) == "TOO_LARGE"

    play(scene())


def test_cannot_lead_the_service_out_by_a_link(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        files = link.files()
        await sh(link, "ln -s /etc/passwd out; ln -s / root; ln -s ../.. up; echo in > f")
        for path in ("/workspace/out", "/workspace/root/etc/passwd", "/workspace/up/etc/passwd"):
            assert await refused(content(files, path)) in ("NOT_FOUND", "FORBIDDEN")
        assert await refused(files.entry("/etc/passwd")) == "FORBIDDEN"
        # The control: a link that stays inside.
        await sh(link, "ln -s /workspace/f good")
        assert await content(files, "/workspace/good") == b"in\n"

    play(scene())


def test_too_large_a_file_leaves_nothing(pod: Pod) -> None:
    async def scene() -> None:
        files = (await pod.claimed()).files()
        big = files.write("/workspace/big", body(bytes(300_000)), limit=1000)
        assert await refused(big) == "TOO_LARGE"
        assert await refused(files.entry("/workspace/big")) == "NOT_FOUND"

    play(scene())


def test_cannot_fill_the_node_by_the_last_words_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet's file for them can be written by all, and is in no volume."""
    place = tmp_path / "place"
    place.mkdir()
    before = pod_files.usage(str(place), 1 << 30)
    words = tmp_path / "termination-log"
    words.write_bytes(bytes(1 << 20))
    monkeypatch.setattr(pod_files, "LAST_WORDS", str(words))
    assert pod_files.usage(str(place), 1 << 30) >= before + (1 << 20)
