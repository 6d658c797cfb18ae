"""Tar streams: read in any pieces, judged, written anew."""

from __future__ import annotations

import gzip
import io
import tarfile
from typing import Any

import pytest

from agent_sandbox.service.backend import docker_tar as tars
from agent_sandbox.service.backend.docker_tar import Member
from agent_sandbox.service.problems import Problem

LONG = "d/" * 60 + "ä" * 60
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]


def archive(*members: tuple[str, bytes, bytes, str], kind: int = tarfile.PAX_FORMAT) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=kind) as tar:
        for name, type_, content, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.size, info.linkname, info.mtime = type_, len(content), target, 5
            tar.addfile(info, io.BytesIO(content))
    return held.getvalue()


def read(data: bytes, step: int = 1000) -> list[tuple[Member, bytes]]:
    reader = tars.Reader()
    found: list[tuple[Member, bytes]] = []
    for at in range(0, len(data), step):
        for event in reader.feed(data[at : at + step]):
            if isinstance(event, Member):
                found.append((event, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + event)
    reader.finish()
    return found


@pytest.mark.parametrize("step", [1, 511, 513, 100_000])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_archive_is_read_however_it_is_cut(kind: int, step: int) -> None:
    data = archive(
        ("a", tarfile.REGTYPE, b"x" * 700, ""), ("empty", tarfile.REGTYPE, b"", ""),
        ("dir", tarfile.DIRTYPE, b"", ""), ("l", tarfile.SYMTYPE, b"", "a"),
        ("h", tarfile.LNKTYPE, b"", "a"), ("f", tarfile.FIFOTYPE, b"", ""), kind=kind,
    )  # fmt: skip
    found = [(m.name, m.kind, m.target, content) for m, content in read(data, step)]
    assert found == [
        ("a", "file", "", b"x" * 700), ("empty", "file", "", b""), ("dir", "directory", "", b""),
        ("l", "symlink", "a", b""), ("h", "hardlink", "a", b""), ("f", "other", "", b""),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS[1:])
def test_long_names_are_read(kind: int) -> None:
    ((member, content), (link, _)) = read(
        archive((LONG, tarfile.REGTYPE, b"1", ""), ("l", tarfile.SYMTYPE, b"", LONG), kind=kind)
    )
    assert (member.name, content, link.target) == (LONG, b"1", LONG)


def test_what_is_written_is_read_by_others() -> None:
    member = Member(name=LONG, kind="file", size=3, mode=0o640, modified=7.9)
    data = tars.header(member, 1000) + b"abc" + tars.padding(3) + tars.END
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        (info,) = tar.getmembers()
    assert (info.name, info.uid, info.gid, info.mode, info.mtime) == (LONG, 1000, 1000, 0o640, 7)


BROKEN = [
    archive(("a", tarfile.REGTYPE, b"x" * 700, ""))[:800],
    archive(("a", tarfile.REGTYPE, b"x", ""))[:300],
    b"\x01" * 512,
    b"GET / HTTP/1.1\r\n" + bytes(600),
]


@pytest.mark.parametrize("data", BROKEN)
def test_a_damaged_archive_is_refused(data: bytes) -> None:
    with pytest.raises(Problem) as caught:
        read(data)
    assert caught.value.code == "INVALID"


def extra(records: bytes, type_: bytes = b"x") -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = type_, len(records)
    rest = archive(("a", tarfile.REGTYPE, b"abc", ""), kind=tarfile.USTAR_FORMAT)
    return info.tobuf(tarfile.USTAR_FORMAT) + records + bytes(-len(records) % 512) + rest


@pytest.mark.parametrize(
    "records",
    [b"5 a=b\n", b"999 a=b\n", b"x a=b\n", b"6 a=bX", b"0 a\n", b"14 size=99x99\n",
     b"22 GNU.sparse.major=1\n", b"12 size=-99\n", b"24 size=9999999999999999\n" * 3000],
)  # fmt: skip
def test_pax_records_that_make_no_sense_are_refused(records: bytes) -> None:
    with pytest.raises(Problem):
        read(extra(records))


def test_a_size_in_a_pax_record_counts() -> None:
    ((member, content),) = read(extra(b"9 size=2\n"))[:1]
    assert (member.size, content) == (2, b"ab")


def test_content_behind_a_link_is_refused() -> None:
    info = tarfile.TarInfo("l")
    info.type, info.linkname, info.size = tarfile.SYMTYPE, "x", 512
    with pytest.raises(Problem, match="content behind"):
        read(info.tobuf() + bytes(2048))


def test_gzip_is_undone_and_a_bomb_comes_in_small_pieces() -> None:
    unzip = tars.Gunzip()
    data = gzip.compress(bytes(50 << 20))
    total = 0
    for piece in unzip.feed(data):
        assert len(piece) <= 1 << 18
        total += len(piece)
    assert total == 50 << 20
    assert unzip.finish() == b""


@pytest.mark.parametrize("step", [1, 2, 1000])
def test_gzip_or_not_is_seen_from_the_first_bytes(step: int) -> None:
    plain = archive(("a", tarfile.REGTYPE, b"x", ""))
    for data in (plain, gzip.compress(plain)):
        unzip = tars.Gunzip()
        pieces = [p for at in range(0, len(data), step) for p in unzip.feed(data[at : at + step])]
        assert b"".join(pieces) == plain


def unzip(data: bytes) -> bytes:
    held = tars.Gunzip()
    return b"".join(held.feed(data)) + held.finish()


@pytest.mark.parametrize(
    "data", [gzip.compress(b"x" * 1000, mtime=0)[:-9], b"\x1f\x8bnonsense" * 9]
)
def test_damaged_gzip_is_refused(data: bytes) -> None:
    with pytest.raises(Problem):
        unzip(data)


# --- judging


def admit(*members: dict[str, Any]) -> list[tuple[str, str]]:
    judge = tars.Judge()
    given = [Member(**{"kind": "file", **fields}) for fields in members]
    return [(one.name, one.kind) for member in given for one in judge.admit(member)]


REFUSED: list[list[dict[str, Any]]] = [
    [{"name": "/etc/passwd"}],
    [{"name": "../x"}],
    [{"name": "a/../../x"}],
    [{"name": "a/.."}],
    [{"name": "a\0b"}],
    [{"name": "x" * 256}],
    [{"name": "a/" * 129 + "b"}],
    [{"name": "."}],
    [{"name": "dev", "kind": "other"}],
    [{"name": "l", "kind": "symlink", "target": ""}],
    [{"name": "l", "kind": "symlink", "target": "../x"}],
    [{"name": "a/l", "kind": "symlink", "target": "../../x"}],
    [{"name": "h", "kind": "hardlink", "target": "/etc/passwd"}],
    [{"name": "h", "kind": "hardlink", "target": "not-in-the-archive"}],
    # Through a link that the archive has brought along.
    [{"name": "l", "kind": "symlink", "target": "/etc"}, {"name": "l/passwd"}],
    [{"name": "l", "kind": "symlink", "target": "/etc"}, {"name": "l/a/b"}],
    [{"name": "l", "kind": "symlink", "target": "/etc"}, {"name": "h", "kind": "hardlink",
                                                          "target": "l/passwd"}],
    [{"name": "l", "kind": "symlink", "target": "/etc"}, {"name": "h", "kind": "hardlink",
                                                          "target": "l"}],
]  # fmt: skip


@pytest.mark.parametrize("members", REFUSED)
def test_cannot_lead_an_archive_out(members: list[dict[str, Any]]) -> None:
    with pytest.raises(Problem) as caught:
        admit(*members)
    assert caught.value.code == "INVALID"
    # Control: all but the last are fine.
    admit(*members[:-1])


def test_directories_on_the_way_are_named_once() -> None:
    assert admit({"name": "a/b/c"}, {"name": "./a/b/d"}, {"name": "a", "kind": "directory"}) == [
        ("a", "directory"), ("a/b", "directory"), ("a/b/c", "file"), ("a/b/d", "file"),
        ("a", "directory"),
    ]  # fmt: skip


def test_links_that_stay_and_absolute_ones_are_kept_as_they_are() -> None:
    members = [{"name": "a/l", "kind": "symlink", "target": "../b"},
               {"name": "p", "kind": "symlink", "target": "/usr/bin/python3"}]  # fmt: skip
    assert admit(*members) == [("a", "directory"), ("a/l", "symlink"), ("p", "symlink")]


def test_the_root_itself_is_left_as_it_is() -> None:
    assert admit({"name": "./", "kind": "directory"}, {"name": "", "kind": "directory"}) == []


def test_set_user_id_bits_are_dropped() -> None:
    (member,) = tars.Judge().admit(Member(name="a", kind="file", mode=0o6755))
    assert member.mode == 0o755


RELATIVE = [
    ("work/", "directory", "", None),
    ("work/a", "file", "", "a"),
    ("work/a/b", "directory", "", "a/b"),
    ("work/x", "other", "", None),
    ("work/../x", "file", "", None),
    ("work/h", "hardlink", "work/a", "h"),
    ("work/h", "hardlink", "work", None),
]


@pytest.mark.parametrize(("name", "kind", "target", "wanted"), RELATIVE)
def test_names_of_a_tree_begin_in_the_tree(
    name: str, kind: str, target: str, wanted: str | None
) -> None:
    found = tars.relative(Member(name=name, kind=kind, target=target))
    assert (None if found is None else found.name) == wanted
    if found is not None and kind == "hardlink":
        assert found.target == "a"
