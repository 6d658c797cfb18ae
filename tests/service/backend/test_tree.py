"""Files of a sandbox from outside, whatever the command inside has made of them."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.service.backend import tree, tree_open
from agent_sandbox.service.problems import Problem

from .lab import archive, got, pieces, put

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from .conftest import Bench
    from .lab import Lab


class Place:
    """A sandbox's directory and what a client can do with it, without a sandbox."""

    def __init__(self, base: Path) -> None:
        self.outside = base / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        self.root = base / "sbx-1"
        tree.make_place(str(self.root))
        self.work = self.root / "workspace"
        self._executor = ThreadPoolExecutor(2)
        self.files = tree.Tree(str(self.root), self._executor)

    def do(self, step: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(step)

    def refused(self, step: Coroutine[Any, Any, Any]) -> str:
        with pytest.raises(Problem) as caught:
            asyncio.run(step)
        return caught.value.code

    def read(self, path: str, offset: int = 0) -> bytes:
        async def body() -> bytes:
            _, data = await self.files.read(path, offset)
            return b"".join([piece async for piece in data])

        return self.do(body())  # type: ignore[no-any-return]

    def write(self, path: str, data: bytes = b"new", **fields: Any) -> Any:
        return self.do(self.files.write(path, pieces(data), **{"limit": 1000, **fields}))

    def untouched(self) -> bool:
        return (
            os.listdir(self.outside) == ["secret"]
            and (self.outside / "secret").read_text() == "secret"
        )

    def tidy(self) -> bool:
        """Whether nothing half made is left beside the parts."""
        return sorted(os.listdir(self.root)) == ["home", "tmp", "workspace"]


@pytest.fixture(params=["openat2", "walk"])
def place(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr(tree_open, "_has_openat2", request.param == "openat2")
    return Place(tmp_path)


@pytest.fixture
def descriptors() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    # Threads of an executor have none; a loop's are closed with it.
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.usefixtures("descriptors")
def test_a_file_comes_back_as_it_was_written(place: Place) -> None:
    entry = place.write("/workspace/a/b/f", b"hello", mode=0o4755)
    assert (entry.kind, entry.size, entry.mode) == ("file", 5, 0o755)
    assert place.read("/workspace/a/b/f") == b"hello"
    assert place.read("/workspace/a/b/f", 3) == b"lo"
    assert (place.work / "a/b/f").read_text() == "hello"
    place.write("/workspace/a/b/f", b"other")
    assert place.read("/workspace/a/b/f") == b"other"
    assert place.tidy()


def test_more_than_the_limit_leaves_what_was_there(place: Place) -> None:
    place.write("/workspace/f", b"old")
    step = place.files.write("/workspace/f", pieces(b"x" * 600, b"x" * 600), limit=1000)
    assert place.refused(step) == "TOO_LARGE"
    assert place.read("/workspace/f") == b"old"
    assert place.tidy()


@pytest.mark.parametrize(
    "path",
    ["", "workspace/f", "/etc/passwd", "/workspace/../x", "/workspace//f", "/workspace/./f",
     "/workspace/f/", "/workspacex/f", "/workspace/a\0b", "/workspace/" + "x" * 5000, "/home/f",
     "/"],
)  # fmt: skip
def test_paths_that_are_not_plain_are_refused(place: Place, path: str) -> None:
    assert place.refused(place.files.entry(path)) in ("INVALID", "FORBIDDEN")
    assert place.refused(place.files.write(path, pieces(b"x"), limit=10)) in (
        "INVALID",
        "FORBIDDEN",
    )
    assert place.tidy()


@pytest.mark.parametrize("link", ["{outside}", "../../outside", "/../../outside", "/{outside}"])
@pytest.mark.usefixtures("descriptors")
def test_cannot_leave_by_a_link(place: Place, link: str) -> None:
    target = link.format(outside=place.outside)
    (place.work / "l").symlink_to(target)
    # A control: who follows it from outside is led out. The third is one for a root of its own.
    if target.startswith(str(place.outside)):
        assert (place.work / "l" / "secret").read_text() == "secret"
    files = place.files
    for step in (
        files.read("/workspace/l/secret"), files.entry("/workspace/l/secret"),
        files.list("/workspace/l", depth=1, most=10), files.pack("/workspace/l"),
        files.delete("/workspace/l/secret", recursive=True),
        files.write("/workspace/l/new", pieces(b"x"), limit=10), files.make("/workspace/l/new"),
        files.unpack("/workspace/l", pieces(b""), limit=10),
    ):  # fmt: skip
        assert place.refused(step) in ("NOT_FOUND", "FORBIDDEN", "CONFLICT")
    assert place.untouched()
    entry = place.do(files.entry("/workspace/l"))
    assert (entry.kind, entry.target) == ("symlink", target)
    # The link itself may be replaced and removed.
    place.write("/workspace/l", b"mine")
    assert place.read("/workspace/l") == b"mine"
    assert place.untouched()


def test_links_that_stay_inside_are_followed(place: Place) -> None:
    place.write("/workspace/d/f", b"x")
    for name, target in (("rel", "d"), ("abs", "/workspace/d"), ("up", "../workspace/d")):
        (place.work / name).symlink_to(target)
        assert place.read(f"/workspace/{name}/f") == b"x"
    (place.root / "home/agent/work").symlink_to("/workspace")
    assert place.read("/home/agent/work/d/f") == b"x"


@pytest.mark.parametrize("target", ["/", "..", "/home", "../home"])
def test_cannot_reach_what_is_beside_the_parts(place: Place, target: str) -> None:
    # A link made there would be what the next sandbox mounts.
    (place.work / "up").symlink_to(target)
    files = place.files
    for step in (
        files.list("/workspace/up", depth=1, most=10),
        files.write("/workspace/up/x", pieces(b"x"), limit=10),
        files.make("/workspace/up/x"), files.delete("/workspace/up/agent", recursive=True),
        files.delete("/workspace/up/tmp", recursive=True), files.pack("/workspace/up"),
        files.unpack("/workspace/up", pieces(b""), limit=10),
    ):  # fmt: skip
        assert place.refused(step) in ("NOT_FOUND", "FORBIDDEN")
    assert place.tidy()


def test_links_in_a_circle_end(place: Place) -> None:
    (place.work / "a").symlink_to("b")
    (place.work / "b").symlink_to("a")
    assert place.refused(place.files.read("/workspace/a")) == "INVALID"
    assert place.refused(place.files.read("/workspace/a/f")) == "INVALID"


def test_cannot_open_what_is_no_file(place: Place) -> None:
    os.mkfifo(place.work / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(place.work / "sock"))
        place.write("/workspace/d/f")
        (place.work / "to-fifo").symlink_to("fifo")
        for name, code in (
            ("fifo", "INVALID"), ("sock", "INVALID"), ("d", "CONFLICT"), ("to-fifo", "INVALID"),
        ):  # fmt: skip
            # A FIFO that nobody writes to would hold whoever opens it.
            assert place.refused(place.files.read(f"/workspace/{name}")) == code
        kinds = {e.path[11:]: e.kind for e in place.do(
            place.files.list("/workspace", depth=1, most=10))[0]}  # fmt: skip
    assert kinds == {"fifo": "other", "sock": "other", "d": "directory", "to-fifo": "symlink"}
    packed = place.do(_packed(place))
    assert b"fifo" in packed
    assert b"sock" not in packed
    place.write("/workspace/fifo", b"a file now")
    assert place.read("/workspace/fifo") == b"a file now"


async def _packed(place: Place) -> bytes:
    return b"".join([piece async for piece in await place.files.pack("/workspace")])


@pytest.mark.usefixtures("descriptors")
def test_a_list_is_sorted_and_bounded(place: Place) -> None:
    for name in ("b/2", "b/1", "a", "c/d/e"):
        place.write(f"/workspace/{name}")
    listed, more = place.do(place.files.list("/workspace", depth=2, most=100))
    assert [e.path[11:] for e in listed] == ["a", "b", "b/1", "b/2", "c", "c/d"]
    assert not more
    listed, more = place.do(place.files.list("/workspace", depth=9, most=3))
    assert len(listed) == 3
    assert more
    assert place.refused(place.files.list("/workspace/a", depth=1, most=9)) == "CONFLICT"
    assert place.refused(place.files.list("/workspace/x", depth=1, most=9)) == "NOT_FOUND"


def test_deletes_what_is_named(place: Place) -> None:
    place.write("/workspace/d/e/f")
    (place.work / "d" / "out").symlink_to(place.outside)
    (place.work / "d" / "e").chmod(0o000)
    files = place.files
    assert place.refused(files.delete("/workspace/d", recursive=False)) == "CONFLICT"
    place.do(files.delete("/workspace/d", recursive=True))
    assert os.listdir(place.work) == []
    assert place.untouched()
    assert place.refused(files.delete("/workspace/d", recursive=True)) == "NOT_FOUND"
    for part in ("/workspace", "/home/agent", "/tmp"):
        assert place.refused(files.delete(part, recursive=True)) == "FORBIDDEN"
    assert place.tidy()


def test_a_directory_is_made_with_its_parents(place: Place) -> None:
    assert place.do(place.files.make("/workspace/a/b")).kind == "directory"
    assert place.do(place.files.make("/workspace/a/b")).kind == "directory"
    place.write("/workspace/f")
    assert place.refused(place.files.make("/workspace/f")) == "CONFLICT"
    assert place.refused(place.files.make("/workspace/f/x")) == "CONFLICT"
    assert place.refused(place.files.write("/workspace/a", pieces(b"x"), limit=9)) == "CONFLICT"
    assert place.tidy()


def test_a_sandbox_that_is_gone_has_no_files(place: Place) -> None:
    tree.remove_place(str(place.root))
    assert place.refused(place.files.entry("/workspace/f")) == "NOT_FOUND"
    assert place.refused(place.files.write("/workspace/f", pieces(b"x"), limit=9)) == "NOT_FOUND"


def test_what_was_begun_is_not_left(place: Place) -> None:
    async def broken() -> Any:
        yield b"x"
        raise ConnectionError

    with pytest.raises(ConnectionError):
        place.do(place.files.write("/workspace/f", broken(), limit=100))
    assert place.tidy()
    assert os.listdir(place.work) == []


@pytest.mark.kernel
@pytest.mark.parametrize("how", ["openat2", "walk"])
def test_cannot_be_led_out_while_directories_are_swapped(bench: Bench, how: str) -> None:
    async def scene(lab: Lab) -> object:
        from agent_sandbox.service.backend import tree_open

        tree_open._has_openat2 = HOW == "openat2"
        outside = f"{lab.data}/outside"
        os.mkdir(outside)
        put(f"{outside}/secret", "secret")
        box = await lab.sandbox()
        # Inside, nothing is at the end of that link; outside, a careless writer is led there.
        swap = (
            "import ctypes, os\nos.mkdir('d')\nopen('d/secret', 'w').write('own')\n"
            f"os.symlink({outside!r}, 'l')\nprint('up', flush=True)\n"
            # RENAME_EXCHANGE: there is no moment without a directory or a link.
            "swap = ctypes.CDLL(None).renameat2\nwhile swap(-100, b'd', -100, b'l', 2) == 0: pass"
        )
        inside = await lab.start(box, "python3", "-c", swap)
        await inside.until("up")
        files = lab.backend.files(box)
        place = f"{lab.data}/sandboxes/{box.id}/workspace/d"
        fooled, read, wrote = 0, set(), 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (fooled < 5 or wrote < 300):
            # The control: the same path, opened as it is.
            os.close(os.open(f"{place}/naive", os.O_CREAT | os.O_WRONLY, 0o600))
            if "naive" in os.listdir(outside):
                os.unlink(f"{outside}/naive")
                fooled += 1
            for step in (
                lab.write(box, "/workspace/d/ours", b"x"), lab.read(box, "/workspace/d/secret"),
                files.make("/workspace/d/e"), files.delete("/workspace/d/e", recursive=True),
                files.list("/workspace/d", depth=2, most=10),
                files.unpack("/workspace/d", pieces(archive()), limit=1 << 20),
                files.delete("/workspace/d/secret", recursive=True),
            ):  # fmt: skip
                try:
                    found = await step
                    wrote += 1
                    read |= {found.decode()} if isinstance(found, bytes) else set()
                except Problem:
                    continue
        await inside.running.kill()
        await inside.end()
        return fooled, wrote, sorted(read), sorted(os.listdir(outside)), got(f"{outside}/secret")

    fooled, wrote, read, left, secret = bench.play(scene, timeout=300, HOW=how)
    assert fooled >= 5
    assert wrote >= 300
    assert set(read) <= {"own", "x"}
    assert left == ["secret"]
    assert secret == "secret"


# Filled in for a scene.
HOW = ""
