"""`verify` finds every change to the audit trail that does not rewrite all of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.service.audit import Audit, lines, places

from .audit_trails import AGENT, Clock, copy, findings, logs, make, split, write

LINES = 12


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trail of several files that nobody has touched."""
    trail = make(tmp_path_factory.mktemp("whole") / "audit", LINES)
    assert len(logs(trail)) >= 3
    assert findings(trail) == []
    return trail


class Bench:
    """A copy that is put right again after each change."""

    def __init__(self, whole: Path, trail: Path) -> None:
        self.whole = whole
        self.trail = copy(whole, trail)

    def restore(self) -> None:
        shutil.rmtree(self.trail)
        copy(self.whole, self.trail)


@pytest.fixture(scope="module")
def bench(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(whole, tmp_path_factory.mktemp("bench") / "audit")


def test_a_new_trail_is_whole(tmp_path: Path) -> None:
    Audit(str(tmp_path / "audit")).close()
    assert findings(tmp_path / "audit") == []


# --- every byte


@pytest.mark.parametrize("flip", [0x01, 0x20, 0x80])
def test_cannot_change_a_single_byte(tmp_path: Path, flip: int) -> None:
    """Each byte of each file, the head too."""
    trail = make(tmp_path / "audit", lines=4, rotate_bytes=1000)
    assert len(logs(trail)) == 2
    unseen = []
    for path in [*logs(trail), trail / places.HEAD]:
        good = path.read_bytes()
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
            if not findings(trail):
                unseen.append((path.name, at))
        path.write_bytes(good)
    assert unseen == []
    assert findings(trail) == []


# --- any change


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, float, float, int]:
    kind = draw(st.sampled_from(sorted(CHANGES)))
    share = st.floats(0, 1, exclude_max=True)
    return kind, draw(share), draw(share), draw(st.integers(0, 255))


def pick(items: list[Path] | list[int], share: float) -> int:
    return int(share * len(items))


def change_byte(trail: Path, first: float, second: float, value: int) -> None:
    path = logs(trail)[pick(logs(trail), first)]
    data = bytearray(path.read_bytes())
    at = int(second * len(data))
    data[at] = value if data[at] != value else value ^ 1
    path.write_bytes(data)


def remove_byte(trail: Path, first: float, second: float, _: int) -> None:
    path = logs(trail)[pick(logs(trail), first)]
    data = path.read_bytes()
    at = int(second * len(data))
    path.write_bytes(data[:at] + data[at + 1 :])


def insert_byte(trail: Path, first: float, second: float, value: int) -> None:
    """Not behind the very end: what stands there without a newline is a line that was killed."""
    path = logs(trail)[pick(logs(trail), first)]
    data = path.read_bytes()
    at = int(second * len(data))
    path.write_bytes(data[:at] + bytes([value]) + data[at:])


def all_lines(trail: Path) -> list[tuple[Path, int]]:
    return [(path, at) for path in logs(trail) for at in range(len(split(path)))]


def _edit(path: Path, at: int, new: list[bytes]) -> bytes:
    found = split(path)
    old = found[at]
    found[at : at + 1] = new
    path.write_bytes(b"".join(found))
    return old


def remove_line(trail: Path, first: float, _second: float, _: int) -> None:
    path, at = all_lines(trail)[int(first * LINES)]
    _edit(path, at, [])


def swap_lines(trail: Path, first: float, second: float, _: int) -> None:
    one = int(first * LINES)
    other = (one + 1 + int(second * (LINES - 1))) % LINES
    (path, at), (path_2, at_2) = (all_lines(trail)[n] for n in (one, other))
    old = _edit(path, at, [split(path_2)[at_2]])
    _edit(path_2, at_2, [old])


def repeat_line(trail: Path, first: float, second: float, _: int) -> None:
    """A line that is good in itself, somewhere else."""
    path, at = all_lines(trail)[int(first * LINES)]
    path_2, at_2 = all_lines(trail)[int(second * LINES)]
    _edit(path, at, [split(path)[at], split(path_2)[at_2]])


def insert_forged_line(trail: Path, first: float, second: float, _: int) -> None:
    """A new line with the right hash of its own, and a prev and seq that fit at one side."""
    path, at = all_lines(trail)[int(first * LINES)]
    before = json.loads(split(path)[at])
    record = {**before, "seq": before["seq"] + 1, "prev": before["hash"], "reason": "forged"}
    del record["hash"]
    if before["seq"] == LINES:
        # At the very end this would be a good line of whoever may write: put it before.
        record = {**record, "seq": before["seq"], "prev": before["prev"]}
    _edit(path, at, [split(path)[at], lines.seal(record)[0]])


def change_and_seal(trail: Path, first: float, second: float, _: int) -> None:
    """A changed line with a hash that fits again; the next line knows better, or the head."""
    path, at = all_lines(trail)[int(first * LINES)]
    record = json.loads(split(path)[at])
    del record["hash"]
    record["action"] = "nothing.happened"
    _edit(path, at, [lines.seal(record)[0]])


def remove_file(trail: Path, first: float, _second: float, _: int) -> None:
    logs(trail)[pick(logs(trail), first)].unlink()


def cut_tail(trail: Path, first: float, second: float, _: int) -> None:
    """Any file, at any place before its end: the last one too."""
    path = logs(trail)[pick(logs(trail), first)]
    os.truncate(path, int(second * path.stat().st_size))


def cut_last_file(trail: Path, _first: float, second: float, _: int) -> None:
    cut_tail(trail, 0.999, second, 0)


def empty_line(trail: Path, first: float, second: float, _: int) -> None:
    path = logs(trail)[pick(logs(trail), first)]
    at = int(second * (len(split(path)) + 1))
    found = split(path)
    path.write_bytes(b"".join([*found[:at], b"\n", *found[at:]]))


def swap_files(trail: Path, first: float, second: float, _: int) -> None:
    found = logs(trail)
    one = pick(found, first)
    other = (one + 1 + int(second * (len(found) - 1))) % len(found)
    os.rename(found[one], trail / "aside")
    os.rename(found[other], found[one])
    os.rename(trail / "aside", found[other])


def remove_head(trail: Path, *_: float) -> None:
    (trail / places.HEAD).unlink()


def change_head(trail: Path, first: float, _second: float, value: int) -> None:
    path = trail / places.HEAD
    data = bytearray(path.read_bytes())
    at = int(first * len(data))
    data[at] = value if data[at] != value else value ^ 1
    path.write_bytes(data)


CHANGES = {
    one.__name__: one
    for one in (
        change_byte, remove_byte, insert_byte, remove_line, swap_lines, repeat_line,
        insert_forged_line, change_and_seal, remove_file, cut_tail, cut_last_file, empty_line,
        swap_files, remove_head, change_head,
    )
}  # fmt: skip


@settings(max_examples=1000, deadline=None)
@given(change=changes())
def test_cannot_change_the_trail_unseen(
    bench: Bench, change: tuple[str, float, float, int]
) -> None:
    kind, first, second, value = change
    before = {path.name: path.read_bytes() for path in bench.trail.iterdir()}
    CHANGES[kind](bench.trail, first, second, value)
    after = {path.name: path.read_bytes() for path in bench.trail.iterdir()}
    found = findings(bench.trail)
    bench.restore()
    assert before != after, "this change changed nothing"
    assert found, f"{kind} was not found"


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.99])
def test_cannot_change_the_trail_unseen_by_any_kind(bench: Bench, kind: str, share: float) -> None:
    """Each kind, whatever hypothesis has drawn."""
    CHANGES[kind](bench.trail, share, share, 65)
    found = findings(bench.trail)
    bench.restore()
    assert found
    # The control.
    assert findings(bench.trail) == []


def test_a_finding_says_where(bench: Bench) -> None:
    path = logs(bench.trail)[1]
    seq = json.loads(split(path)[0])["seq"]
    _edit(path, 0, [])
    found = findings(bench.trail)
    bench.restore()
    assert f"{path.name}:1: line {seq} is missing before it" in found


def test_what_is_cut_from_the_end_is_named(bench: Bench) -> None:
    path, at = all_lines(bench.trail)[-1]
    _edit(path, at, [])
    found = findings(bench.trail)
    bench.restore()
    assert f"line {LINES} is missing at the end" in found


def test_cannot_put_back_an_older_head(tmp_path: Path) -> None:
    """One line beyond the head is what a kill leaves; more is not."""
    trail = make(tmp_path / "audit", 3)
    old = (trail / places.HEAD).read_bytes()
    audit = Audit(str(trail))
    for number, expected in ((1, 0), (2, 1)):
        write(audit, number)
        new = (trail / places.HEAD).read_bytes()
        (trail / places.HEAD).write_bytes(old)
        assert len(findings(trail)) == expected
        (trail / places.HEAD).write_bytes(new)
        assert findings(trail) == []


# --- what only a head from elsewhere can find


def forge(trail: Path, keep: int) -> None:
    """What somebody with the right to write there can do: a new end with a head that fits."""
    path = logs(trail)[0]
    data = b"".join(split(path)[:keep])
    for other in logs(trail)[1:]:
        other.unlink()
    path.write_bytes(data)
    last = lines.parse(split(path)[-1][:-1])
    head = lines.Head(seq=last.seq, hash=last.hash, file=1, end=len(data))
    (trail / places.HEAD).write_bytes(head.encode())


def test_cannot_shorten_the_trail_against_a_head_kept_elsewhere(bench: Bench) -> None:
    audit = Audit(str(bench.trail))
    seq, digest = audit.head.split(":")
    audit.close()
    expected = (int(seq), digest)
    assert findings(bench.trail, expected) == []
    forge(bench.trail, 2)
    # The limit of a chain without a key: this is not found from inside.
    assert findings(bench.trail) == []
    assert findings(bench.trail, expected) == [
        f"line {LINES}, which was expected, is missing or pruned"
    ]
    # Other lines until the number fits.
    audit = Audit(str(bench.trail))
    for number in range(LINES):
        write(audit, number)
    audit.close()
    found = findings(bench.trail, expected)
    bench.restore()
    assert len(found) == 1
    assert "is not the line 12 that was expected" in found[0]


# --- repairs leave a trace


def restart(trail: Path) -> list[str]:
    """Start a writer and write; what `verify` says then."""
    audit = Audit(str(trail), clock=Clock())
    audit.write(AGENT, "after.restart")
    audit.close()
    return findings(trail)


@pytest.mark.parametrize("kind", CHANGES)
def test_a_restart_does_not_hide_a_change(bench: Bench, kind: str) -> None:
    """A service that starts on a damaged trail goes on, and the damage stays to be seen."""
    CHANGES[kind](bench.trail, 0.99, 0.4, 65)
    assert findings(bench.trail)
    found = restart(bench.trail)
    assert found
    last = json.loads(split(logs(bench.trail)[-1])[-1])
    bench.restore()
    assert last["action"] == "after.restart"


@pytest.mark.parametrize("name", ["log", "head"])
def test_a_file_that_is_removed_under_a_running_service_is_missed(
    tmp_path: Path, name: str
) -> None:
    trail = make(tmp_path / "audit", 5, rotate_bytes=10**6)
    audit = Audit(str(trail))
    (logs(trail)[-1] if name == "log" else trail / places.HEAD).unlink()
    assert write(audit, 1) == 7
    assert any("damage was met" in finding for finding in findings(trail))
    # Nothing of what comes later is lost.
    assert write(audit, 2) == 8
    assert json.loads(split(logs(trail)[-1])[-1])["seq"] == 8


def test_a_torn_line_is_no_damage_wherever_it_was_torn(whole: Path, tmp_path: Path) -> None:
    """A kill in the middle of a write, at each byte."""
    last = logs(whole)[-1]
    found = split(last)
    before = lines.parse(found[-2][:-1])
    end = sum(map(len, found[:-1]))
    head = lines.Head(
        seq=before.seq, hash=before.hash, file=places.number_of(last.name) or 0, end=end
    )
    for size in range(len(found[-1])):
        trail = copy(whole, tmp_path / str(size))
        (trail / places.HEAD).write_bytes(head.encode())
        os.truncate(trail / last.name, end + size)
        assert findings(trail) == []
        assert restart(trail) == []
        actions = [json.loads(line)["action"] for line in split(trail / last.name)]
        torn = ["audit.recovered"] if size else []
        assert actions[len(found) - 1 :] == [*torn, "after.restart"]
        shutil.rmtree(trail)


def test_a_kill_between_a_line_and_its_head_loses_nothing(whole: Path, tmp_path: Path) -> None:
    """Also where the line is the first of a new file."""
    trail = copy(whole, tmp_path / "audit")
    for keep in range(1, LINES):
        (path, at), (path_2, at_2) = all_lines(whole)[keep - 1], all_lines(whole)[keep]
        shutil.rmtree(trail)
        copy(whole, trail)
        for other in logs(trail):
            if other.name > path_2.name:
                other.unlink()
        (trail / path_2.name).write_bytes(b"".join(split(path_2)[: at_2 + 1]))
        line = lines.parse(split(path)[at][:-1])
        end = sum(map(len, split(path)[: at + 1]))
        number = places.number_of(path.name) or 0
        head = lines.Head(seq=line.seq, hash=line.hash, file=number, end=end)
        (trail / places.HEAD).write_bytes(head.encode())
        assert findings(trail) == []
        assert restart(trail) == []
        assert json.loads(split(logs(trail)[-1])[-1])["seq"] == keep + 2


def test_an_empty_new_file_is_used(whole: Path, tmp_path: Path) -> None:
    """A kill between making a file and its first line."""
    trail = copy(whole, tmp_path / "audit")
    number = places.numbers(str(trail))[-1] + 1
    os.close(os.open(trail / places.name_of(number), os.O_CREAT, 0o600))
    assert findings(trail) == []
    Audit(str(trail)).close()
    assert findings(trail) == []
    assert restart(trail) == []
    assert len(split(trail / places.name_of(number))) == 1


def test_garbage_does_not_fill_the_memory(tmp_path: Path) -> None:
    trail = make(tmp_path / "audit", 2)
    with open(logs(trail)[0], "ab") as file:
        file.write(b"garbage\n" * 10_000 + b"x" * (3 << 20))
    found = findings(trail)
    assert 0 < len(found) <= 101
