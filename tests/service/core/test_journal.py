"""Journals: replay is exact, memory is flat, nobody waits for a reader."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_sandbox.service.core.journal import BEAT, BLOCK, Frame, Journal
from agent_sandbox.service.problems import Problem

from .lab import go, refused

LARGE = 100 << 20


async def whole(journal: Journal, offset: int = 0) -> list[Frame]:
    return [frame async for frame in journal.follow(offset)]


def filled(path: Path, sizes: list[int], *, limit: int = LARGE) -> Journal:
    """A journal of frames of these sizes, with streams in turn. Needs a loop."""
    journal = Journal(str(path), limit=limit)
    for number, size in enumerate(sizes):
        journal.append(1 + number % 2, bytes([65 + number % 26]) * size)
    return journal


SIZES = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([BLOCK - 5, BLOCK, BLOCK + 1, 3 * BLOCK])),
    max_size=12,
)


@settings(deadline=None)  # files, on a machine that others use
@given(sizes=SIZES, ended=st.booleans(), stored=st.booleans())
def test_replay_from_every_offset_equals_the_whole(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], ended: bool, stored: bool
) -> None:
    async def check() -> None:
        path = tmp_path_factory.mktemp("journal") / "x"
        journal = filled(path, sizes)
        written = b"".join(bytes([65 + i % 26]) * n for i, n in enumerate(sizes))
        if ended or stored:
            journal.close()
        if stored:
            journal = Journal.stored(str(path))
        journal.ended = True
        frames = await whole(journal)
        assert b"".join(frame.data for frame in frames) == written
        for number, frame in enumerate(frames):
            assert await whole(journal, frame.offset) == frames[number + 1 :]
        assert await whole(journal, journal.end) == []
        journal.close()

    go(check())


def test_an_offset_inside_a_frame_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [3, BLOCK, 4, 2 * BLOCK, 5])
        journal.close()
        for one in (journal, Journal.stored(str(tmp_path / "x"))):
            good = {0, *(frame.offset for frame in await whole(one))}
            near = {at + step for at in good for step in (-1, 0, 1, 7) if 0 <= at + step < one.end}
            for offset in near:
                if offset in good:
                    await one.check(offset)
                else:
                    await refused(one.check(offset), "INVALID")
                    await refused(whole(one, offset), "INVALID")
            await refused(one.check(-1), "INVALID")
            # The last second of a killed service may be missing.
            assert await whole(one, one.end + 1000) == []

    go(check())


def test_a_follower_sees_frames_as_they_come_and_then_the_end(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=LARGE)
        seen: list[bytes] = []

        async def follow() -> None:
            async for frame in journal.follow():
                seen.append(frame.data)  # noqa: PERF401 - looked at while it grows

        task = asyncio.create_task(follow())
        for number in range(3):
            journal.append(1, str(number).encode())
            while len(seen) <= number:  # noqa: ASYNC110
                await asyncio.sleep(0)
        journal.close()
        await task
        assert seen == [b"0", b"1", b"2"]

    go(check())


def test_silence_gives_a_beat_and_a_cancelled_wait_loses_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=LARGE)
        follower = journal.follow(beat=0.01)
        assert (await anext(follower)).stream == BEAT
        waiting = asyncio.ensure_future(anext(journal.follow()))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert journal._waiting == []
        journal.append(1, b"x")
        assert (await anext(follower)).data == b"x"
        journal.close()
        with pytest.raises(StopAsyncIteration):
            await anext(follower)

    go(check())


def test_a_silent_command_touches_no_file(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=LARGE)
        journal.close()
        assert await whole(journal) == []

    go(check())
    assert list(tmp_path.iterdir()) == []


def test_little_output_is_in_memory_until_the_end_and_in_the_file_after(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [10])
        assert not (tmp_path / "x").exists()
        journal.close()
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
        assert [f.data for f in await whole(Journal.stored(str(tmp_path / "x")))] == [b"A" * 10]

    go(check())


def test_output_older_than_a_second_outlives_a_killed_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_sandbox.service.core.journal._FLUSH_AFTER", 0.01)

    async def check() -> None:
        filled(tmp_path / "x", [10])
        while not (tmp_path / "x").exists():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        # Never closed.
        assert [f.data for f in await whole(Journal.stored(str(tmp_path / "x")))] == [b"A" * 10]

    go(check())


def test_what_is_beyond_the_limit_is_dropped_and_told(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=10)
        journal.append(1, b"x" * 8)
        told = [journal.truncated]
        journal.append(2, b"y" * 8)
        journal.append(1, b"z" * 8)
        journal.close()
        assert [*told, journal.truncated] == [False, True]
        assert journal.bytes == {1: 16, 2: 8}
        collected = await journal.collect(100)
        assert (collected.stdout, collected.stderr, collected.cut) == (b"x" * 8, b"yy", False)

    go(check())


def test_exactly_the_limit_is_not_truncated(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [5, 5], limit=10)
        journal.close()
        assert not journal.truncated

    go(check())


def test_readers_of_what_is_dropped_go_on_with_what_follows(tmp_path: Path) -> None:
    """One that has read all, one that has not begun, and one with frames read ahead."""

    async def check() -> None:
        journal = filled(tmp_path / "x", [10, BLOCK, 10])
        level, fresh, ahead = journal.follow(), journal.follow(), journal.follow(beat=0.01)
        for _ in range(3):
            await anext(level)
        await anext(ahead)
        waiting = asyncio.ensure_future(anext(level))
        await asyncio.sleep(0)
        old = journal.end
        journal.restart()
        assert (journal.begins, journal.end, journal.size) == (old, old, 0)
        assert (tmp_path / "x").stat().st_size == 0
        assert (await anext(ahead)).stream == BEAT
        journal.append(1, b"new")
        frames = [await waiting, await anext(ahead), await anext(fresh)]
        assert {(frame.offset, frame.data) for frame in frames} == {(old + 8, b"new")}
        journal.close()
        # In the file it is alone, and the offset says where it was.
        later = Journal.stored(str(tmp_path / "x"), old)
        assert await whole(later) == await whole(later, old) == frames[:1]
        assert await whole(later, old + 8) == []
        await refused(later.check(old + 1), "INVALID")

    go(check())


def test_collecting_goes_on_where_it_stopped(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [30, 30, 30])
        first = await journal.collect(70)
        assert (first.stdout, first.stderr, first.cut) == (b"A" * 30 + b"C" * 10, b"B" * 30, True)
        rest = await journal.collect(1000, first.next)
        assert (rest.stdout, rest.stderr, rest.cut) == (b"C" * 30, b"", False)
        assert await journal.collect(1000, rest.next) == rest.replace(stdout=b"")
        journal.close()

    go(check())


def test_a_full_disk_is_told_as_truncation_and_hangs_nobody(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "missing" / "x", [10])
        journal.append(1, b"x" * 2 * BLOCK)
        journal.append(1, b"y")
        journal.close()
        assert journal.truncated
        assert await whole(journal) == []

    go(check())


def test_a_torn_frame_at_the_end_is_no_frame(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [10, 20])
        journal.close()
        with open(tmp_path / "x", "ab") as file:  # noqa: ASYNC230
            file.write(b"\x01\x00\x00\x00\x09cut")
        stored = Journal.stored(str(tmp_path / "x"))
        assert [len(f.data) for f in await whole(stored)] == [10, 20]
        assert len((await stored.collect(1000)).stdout) == 10

    go(check())


def test_cannot_be_led_to_another_file_by_a_planted_link(tmp_path: Path) -> None:
    async def check() -> None:
        (tmp_path / "secret").write_bytes(b"\x01\x00\x00\x00\x06secret")
        os.symlink(tmp_path / "secret", tmp_path / "x")
        # The control: without O_NOFOLLOW the file would be read.
        assert (tmp_path / "x").read_bytes().endswith(b"secret")
        journal = filled(tmp_path / "x", [10])
        journal.close()
        assert journal.truncated
        with pytest.raises(OSError, match="symbolic"):
            await whole(Journal.stored(str(tmp_path / "x")))
        assert (tmp_path / "secret").read_bytes() == b"\x01\x00\x00\x00\x06secret"

    go(check())


def test_forgetting_under_a_reader_ends_it(tmp_path: Path) -> None:
    async def check() -> None:
        journal = filled(tmp_path / "x", [BLOCK] * 8)
        journal.close()
        stored = Journal.stored(str(tmp_path / "x"))
        follower = stored.follow()
        await anext(follower)
        stored.remove()
        assert len([frame async for frame in follower]) < 8

    go(check())


def test_a_slow_follower_does_not_slow_the_writer(tmp_path: Path) -> None:
    """The writer never waits: `append` is no coroutine. What a reader leaves is in the file."""

    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=LARGE)
        slow = journal.follow()
        journal.append(1, b"a")
        assert (await anext(slow)).data == b"a"
        for _ in range(200):
            journal.append(1, b"b" * BLOCK)
        assert len(journal._tail) <= BLOCK + 5
        journal.close()
        assert len([frame async for frame in slow]) == 200

    go(check())


def resident() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_megabytes_need_no_memory(tmp_path: Path) -> None:
    async def check() -> None:
        journal = Journal(str(tmp_path / "x"), limit=LARGE)
        before = peak = resident()
        read = 0

        async def follow() -> None:
            nonlocal read
            async for frame in journal.follow():
                read += len(frame.data)

        quick = asyncio.create_task(follow())
        chunk = b"x" * BLOCK
        for number in range(LARGE // BLOCK):
            journal.append(1, chunk)
            if number % 16 == 0:
                await asyncio.sleep(0)
                peak = max(peak, resident())
        journal.close()
        await quick
        late = [len(frame.data) async for frame in journal.follow()]
        assert read == sum(late) == LARGE
        assert max(peak, resident()) - before < 16 << 20

    go(check())


def test_problems_of_offsets_name_the_header() -> None:
    async def check() -> Problem:
        return await refused(Journal("/nowhere", limit=1).check(-5), "INVALID")

    assert go(check()).field == "Last-Event-ID"
