"""Archives to and from a sandbox: nothing in them is believed."""

from __future__ import annotations

import asyncio
import gzip
import io
import os
import stat
import tarfile
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.service.backend import tree, tree_tar
from agent_sandbox.service.problems import Problem

from .lab import archive, pieces

if TYPE_CHECKING:
    from pathlib import Path

LIMIT = 1 << 20


class Place:
    """A sandbox's directory, and a directory outside that nothing may reach."""

    def __init__(self, base: Path) -> None:
        self.outside = base / "outside"
        self.outside.mkdir()
        (self.outside / "secret").write_text("secret")
        self.root = base / "sbx-1"
        tree.make_place(str(self.root))
        self.work = self.root / "workspace"
        self.files = tree.Tree(str(self.root), ThreadPoolExecutor(2))

    def unpack(self, data: bytes, *, limit: int = LIMIT, size: int = 700) -> int:
        parts = [data[at : at + size] for at in range(0, len(data), size)]
        return asyncio.run(self.files.unpack("/workspace", pieces(*parts), limit=limit))

    def refused(self, data: bytes, **fields: Any) -> str:
        with pytest.raises(Problem) as caught:
            self.unpack(data, **fields)
        assert sorted(os.listdir(self.root)) == ["home", "tmp", "workspace"]
        assert os.listdir(self.outside) == ["secret"]
        assert (self.outside / "secret").read_text() == "secret"
        assert (self.outside / "secret").stat().st_nlink == 1
        return caught.value.code


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def tar(
    *members: tarfile.TarInfo, data: dict[str, bytes] | None = None,
    format: int = tarfile.GNU_FORMAT,
) -> bytes:  # fmt: skip
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w", format=format) as made:
            for info in members:
                content = (data or {}).get(info.name, b"")
                info.size = len(content)
                made.addfile(info, io.BytesIO(content))
        return file.getvalue()


def member(
    name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


@pytest.mark.parametrize("size", [1, 511, 100_000])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_tree_comes_back_as_it_was(place: Place, size: int, pack: Any) -> None:
    data = archive(("a/b/f", b"hello" * 300), ("empty", b""), ("./c", b"x" * 512))
    assert place.unpack(pack(data), size=size) == 3
    assert (place.work / "a/b/f").read_bytes() == b"hello" * 300
    (place.work / "l").symlink_to("a")
    (place.work / "long" / ("n" * 200)).mkdir(parents=True)

    async def packed() -> bytes:
        return b"".join([piece async for piece in await place.files.pack("/workspace")])

    back = asyncio.run(packed())
    with tarfile.open(fileobj=io.BytesIO(back)) as made:
        names = {info.name: info for info in made.getmembers()}
        inner = made.extractfile("a/b/f")
        assert inner is not None
        assert inner.read() == b"hello" * 300
    assert names["l"].linkname == "a"
    assert names["a"].isdir()
    assert names["c"].size == 512
    assert "long/" + "n" * 200 in names
    (place.root.parent / "again").mkdir()
    other = Place(place.root.parent / "again")
    assert other.unpack(back) == len(names)
    assert (other.work / "l").readlink().name == "a"


@pytest.mark.parametrize(
    "name", ["/etc/x", "../x", "a/../../x", "a/..", "x" * 5000, "/".join("a" * 200)]
)
@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_that_lead_out_are_refused(place: Place, name: str, format: int) -> None:
    assert place.refused(tar(member(name), format=format)) == "INVALID"


def test_cannot_write_through_a_link_of_the_archive(place: Place) -> None:
    out = str(place.outside)
    data = tar(member("l", tarfile.SYMTYPE, out), member("l/x"), data={"l/x": b"x"})
    # A control: who makes entries in their order is led out.
    with tarfile.open(fileobj=io.BytesIO(data)) as made:
        control = place.root.parent / "control"
        # Newer versions ask this first.
        made.extraction_filter = lambda info, _path: info
        made.extractall(control)
    assert (place.outside / "x").exists()
    (place.outside / "x").unlink()
    # Ours makes links last: by then a directory has the name.
    assert place.refused(data) in ("CONFLICT", "INVALID", "FORBIDDEN")


def test_cannot_write_through_a_link_that_is_there(place: Place) -> None:
    (place.work / "l").symlink_to(place.outside)
    assert place.refused(archive(("l/x", b"x"))) in ("CONFLICT", "INVALID", "NOT_FOUND")
    # The name itself is replaced.
    (place.work / "f").symlink_to(place.outside / "secret")
    assert place.unpack(archive(("f", b"mine"))) == 1
    assert (place.work / "f").read_text() == "mine"
    assert (place.outside / "secret").read_text() == "secret"


def test_links_are_made_as_they_are_written(place: Place) -> None:
    place.unpack(tar(member("l", tarfile.SYMTYPE, "/etc/passwd"), member("d", tarfile.DIRTYPE)))
    assert str((place.work / "l").readlink()) == "/etc/passwd"
    # Followed from outside, it stays inside, where there is no such file.
    with pytest.raises(Problem) as caught:
        asyncio.run(place.files.read("/workspace/l"))
    assert caught.value.code == "NOT_FOUND"


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "../../../outside/secret", "l/secret", "nowhere"]
)
def test_cannot_give_a_file_outside_a_second_name(place: Place, target: str) -> None:
    (place.work / "l").symlink_to(place.outside)
    assert place.refused(tar(member("h", tarfile.LNKTYPE, target))) in (
        "INVALID", "CONFLICT", "NOT_FOUND",
    )  # fmt: skip
    assert not (place.work / "h").exists()


def test_cannot_give_a_link_a_second_name(place: Place) -> None:
    (place.work / "l").symlink_to(place.outside / "secret")
    assert place.refused(tar(member("h", tarfile.LNKTYPE, "l"))) == "INVALID"


def test_a_second_name_of_a_file_in_the_archive_is_made(place: Place) -> None:
    data = tar(member("f"), member("d/h", tarfile.LNKTYPE, "f"), data={"f": b"x"})
    assert place.unpack(data) == 2
    assert os.path.samefile(place.work / "f", place.work / "d/h")


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"Z"])
def test_devices_and_the_unknown_are_refused(place: Place, kind: bytes) -> None:
    assert place.refused(tar(member("n", kind))) == "INVALID"
    assert os.listdir(place.work) == []


def test_bits_that_give_rights_are_dropped(place: Place) -> None:
    place.unpack(tar(member("f", mode=0o6777), member("d", tarfile.DIRTYPE, mode=0o7755)))
    assert stat.S_IMODE((place.work / "f").stat().st_mode) == 0o777
    assert stat.S_IMODE((place.work / "d").stat().st_mode) & 0o6000 == 0
    assert (place.work / "f").stat().st_uid == os.getuid()


def test_a_closed_directory_is_closed_last(place: Place) -> None:
    data = tar(member("d", tarfile.DIRTYPE, mode=0o500), member("d/f"), data={"d/f": b"x"})
    assert place.unpack(data) == 2
    assert stat.S_IMODE((place.work / "d").stat().st_mode) == 0o500


def test_what_is_unpacked_counts_not_what_was_sent(place: Place) -> None:
    bomb = gzip.compress(archive(("big", bytes(50 << 20))))
    assert len(bomb) < LIMIT
    assert place.refused(bomb, size=1 << 16) == "TOO_LARGE"
    # Headers count, too.
    many = gzip.compress(archive(*((f"f{n}", b"") for n in range(3000))))
    assert place.refused(many) == "TOO_LARGE"


def test_the_number_of_entries_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_tar, "MAX_ENTRIES", 10)
    assert place.refused(archive(*((f"f{n}", b"") for n in range(11)))) == "TOO_LARGE"
    assert tree_tar.MAX_ENTRIES == 10


def test_a_declared_size_is_not_believed(place: Place) -> None:
    info = tarfile.TarInfo("f")
    info.size = 1 << 40
    assert place.refused(info.tobuf(tarfile.GNU_FORMAT) + bytes(5000)) == "TOO_LARGE"
    short = tarfile.TarInfo("f")
    short.size = 1000
    assert place.refused(short.tobuf() + b"x" * 512) == "INVALID"


@pytest.mark.parametrize(
    "pax",
    [{"GNU.sparse.major": "1", "GNU.sparse.name": "f"}, {"size": "-1"}, {"size": "99x"},
     {"path": "../x"}, {"path": "/x"}],
)  # fmt: skip
def test_tricks_of_extended_headers_are_refused(place: Place, pax: dict[str, str]) -> None:
    body = b"".join(_record(key, value) for key, value in pax.items())
    assert place.refused(_extended(body)) == "INVALID"


@pytest.mark.parametrize("body", [b"x", b"5 a=b\n", b"999 a=b\n", b"6 ab\n", b"0 a=b\n"])
def test_malformed_extended_headers_are_refused(place: Place, body: bytes) -> None:
    assert place.refused(_extended(body)) == "INVALID"


def test_a_huge_extended_header_is_not_read(place: Place) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 33
    assert place.refused(info.tobuf(tarfile.GNU_FORMAT) + bytes(100_000)) == "INVALID"


@pytest.mark.parametrize(
    "data",
    [b"x" * 2000, b"BZh9" + bytes(600), b"\xfd7zXZ\0" + bytes(600), b"\x1f\x8b" + b"x" * 600,
     gzip.compress(archive(), mtime=0)[:-20], archive(("f", b"x" * 1000))[:700], b"abc"],
)  # fmt: skip
def test_what_is_no_archive_is_refused(place: Place, data: bytes) -> None:
    assert place.refused(data) in ("INVALID", "UNSUPPORTED_MEDIA_TYPE")


def test_nothing_is_an_archive_of_nothing(place: Place) -> None:
    assert place.unpack(b"") == 0
    assert place.unpack(bytes(1024)) == 0


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest) + 1
    while len(str(length)) + len(rest) != length:
        length += 1
    return str(length).encode() + rest


def _extended(body: bytes) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(body)
    padded = body + bytes(-len(body) % 512)
    return info.tobuf(tarfile.USTAR_FORMAT) + padded + archive(("f", b"x"))
