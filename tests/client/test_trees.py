"""Trees out of a sandbox are not trusted: nothing is written, or made reachable, outside."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agent_sandbox.client import BadAnswer
from agent_sandbox.client.trees import Pieces, Replacement, pack, stays_inside, unpack


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=kind, linkname=target)


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> io.BytesIO:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    held.seek(0)
    return held


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "in", tmp_path / "out"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "sub" / ("long-" * 40)).write_bytes(os.urandom(300_000))
    (source / "sub" / "ü\n").write_text("x")
    (source / "sub" / "up").symlink_to("../run.sh")
    os.mkfifo(source / "pipe")
    data = b"".join(pack(str(source)))
    # Neither the parts in which it comes nor their ends mean anything.
    parts = iter([data[at : at + 777] for at in range(0, len(data), 777)])
    found = unpack(Pieces(lambda: next(parts, b"")), str(target))
    assert found.skipped == ()
    kept = sorted(p.relative_to(source) for p in source.rglob("*") if p.name != "pipe")
    assert sorted(p.relative_to(target) for p in target.rglob("*")) == kept
    for path in kept:
        old, new = source / path, target / path
        assert old.is_symlink() == new.is_symlink()
        if old.is_file():
            assert old.read_bytes() == new.read_bytes()
    assert (target / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (target / "sub" / "up").readlink() == Path("../run.sh")


def test_one_file_is_a_tree_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    unpack(Pieces(iter([b"".join(pack(str(tmp_path / "a"))), b""]).__next__), str(tmp_path / "o"))
    assert (tmp_path / "o" / "a").read_text() == "x"


def test_a_file_that_shrinks_while_it_is_packed_does_not_break_the_rest(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a" * 600_000)
    (tmp_path / "b").write_text("b")
    parts = pack(str(tmp_path))
    data = next(parts) + next(parts)
    (tmp_path / "a").write_bytes(b"")
    data += b"".join(parts)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == ["a", "b"]


Plant = Callable[[Path], tuple[tarfile.TarInfo, bytes] | list[tuple[tarfile.TarInfo, bytes]]]
# Each tries to write `planted` into a directory beside the target.
ATTACKS: dict[str, Plant] = {
    "absolute": lambda out: member(f"{out}/planted", b"x"),
    "parent": lambda out: member(f"../{out.name}/planted", b"x"),
    "parent within": lambda out: member(f"a/../../{out.name}/planted", b"x"),
    "through a link": lambda out: [link("l", str(out)), member("l/planted", b"x")],
    "through a relative link": lambda out: [link("l", f"../{out.name}"), member("l/planted", b"x")],
    "a link over a directory": lambda out: [
        member("d", type=tarfile.DIRTYPE, mode=0o755), link("d", str(out)),
        member("d/planted", b"x"),
    ],
    "through two links": lambda out: [
        link("a", "."), link("b", f"a/../{out.name}"), member("b/planted", b"x"),
    ],
    "into a linked file": lambda out: [
        link("planted", f"{out}/planted"), member("planted", b"x"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_cannot_write_outside(tmp_path: Path, attack: str) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    target.mkdir()
    out.mkdir()
    made = ATTACKS[attack](out)
    members = made if isinstance(made, list) else [made]
    try:
        unpack(archive(*members), str(target))
    except BadAnswer:
        pass
    assert list(out.iterdir()) == []


def test_the_attacks_work_without_protection(tmp_path: Path) -> None:
    """A control: the plain extraction of the standard library writes outside."""
    worked = set()
    for number, (name, plant) in enumerate(ATTACKS.items()):
        target, out = tmp_path / f"target{number}", tmp_path / f"out{number}"
        target.mkdir()
        out.mkdir()
        made = plant(out)
        with tarfile.open(fileobj=archive(*(made if isinstance(made, list) else [made]))) as tar:
            # Later Pythons look before they write, unless they are told not to.
            tar.extraction_filter = lambda found, _: found
            try:
                tar.extractall(target)
            except OSError:
                continue
        if (out / "planted").exists():
            worked.add(name)
    assert worked >= {"absolute", "parent", "through a link", "through a relative link"}


def test_cannot_write_through_a_link_that_is_there_already(tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "out"
    target.mkdir()
    out.mkdir()
    (out / "file").write_text("ours")
    (target / "file").symlink_to(out / "file")
    (target / "dir").symlink_to(out)
    unpack(archive(member("file", b"theirs")), str(target))
    assert (out / "file").read_text() == "ours"
    assert (target / "file").read_text() == "theirs"
    with pytest.raises(BadAnswer):
        unpack(archive(member("dir/planted", b"x")), str(target))
    assert not (out / "planted").exists()


@pytest.mark.parametrize(
    ("target", "names", "inside"),
    [
        ("x", ["l"], True),
        ("./x/y", ["l"], True),
        ("../x", ["d", "l"], True),
        ("../../x", ["d", "e", "l"], True),
        ("..", ["d", "l"], True),
        ("..", ["l"], False),
        ("../x", ["l"], False),
        ("../../x", ["d", "l"], False),
        ("/etc/passwd", ["l"], False),
        ("x/../../y", ["l"], False),
        # From where a link leads, ".." goes elsewhere than the text says.
        ("d/..", ["l"], False),
    ],
)
def test_a_link_is_kept_only_where_it_cannot_lead_out(
    target: str, names: list[str], inside: bool
) -> None:
    assert stays_inside(target, names) is inside


def test_links_devices_and_bits_are_left_behind_and_told(tmp_path: Path) -> None:
    found = unpack(
        archive(
            link("out", "/etc/passwd"),
            link("hard", "/etc/passwd", tarfile.LNKTYPE),
            member("disk", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
            member("pipe", type=tarfile.FIFOTYPE),
            member("suid", b"x", mode=0o6777, uid=12345, gid=12345),
        ),
        str(tmp_path),
    )
    assert (found.entries, found.skipped) == (1, ("out", "hard", "disk", "pipe"))
    made = (tmp_path / "suid").stat()
    assert stat.S_IMODE(made.st_mode) == 0o755
    assert made.st_uid == os.geteuid()
    assert [p.name for p in tmp_path.iterdir()] == ["suid"]


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadAnswer, match="cannot be read"):
        unpack(io.BytesIO(b"<html>" * 200), str(tmp_path))


def test_a_file_takes_its_name_when_all_of_it_is_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    half = Replacement(str(path))
    half.write(b"half")
    half.__exit__(KeyError, KeyError(), None)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with Replacement(str(path)) as file:
        file.write(b"new")
    assert path.read_text() == "new"
