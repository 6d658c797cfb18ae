"""The agent is not trusted: whatever it says, the service is neither hurt nor misled."""

from __future__ import annotations

import asyncio
import io
import tarfile
import tracemalloc
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import pytest

from agent_sandbox.pod import frames, terms
from agent_sandbox.service.backend import pod_link, pod_running
from agent_sandbox.service.backend.interface import Ended, Start
from agent_sandbox.service.backend.pod_link import Claim
from agent_sandbox.service.problems import Problem

from .liar import Answer, Talk

UNAVAILABLE = "BACKEND_UNAVAILABLE"
ENTRY = {"path": "/workspace/a", "kind": "file", "size": 1, "mode": 0o644, "modified": 1.5,
         "target": ""}  # fmt: skip
END = {"code": 0, "signal": "", "exceeded": "", "cpu_ms": 1, "max_rss_kb": 1, "error": "",
       "started": True}  # fmt: skip


def says(*data: bytes) -> Answer:
    async def answer(talk: Talk) -> None:
        await talk.say(*data)

    return answer


def document(value: object, kind: bytes = frames.ANSWER) -> Answer:
    return says(frames.text(kind, value))


def start(name: str = "exc-1") -> Start:
    return Start(execution=name, argv=("true",))


async def refused(asked: Awaitable[object]) -> str:
    with pytest.raises(Problem) as caught:
        await asked
    return caught.value.code


async def body(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


HELLO = {"version": terms.VERSION, "sandbox": "", "inner": "", "guarantees": {}}


@pytest.mark.parametrize(
    "answer",
    [
        {**HELLO, "version": 2}, {**HELLO, "inner": "none"}, {**HELLO, "more": 1}, {},
        {**HELLO, "guarantees": {"filesystem": "perfect"}}, {**HELLO, "sandbox": "x" * 300},
        {**HELLO, "guarantees": {"unknown": "pod"}}, {**HELLO, "guarantees": {"filesystem": 1}},
    ],
)  # fmt: skip
def test_a_hello_that_makes_no_sense_is_refused(lie: Any, answer: object) -> None:
    async def scene(link: Any) -> str:
        return await refused(link.hello())

    assert lie(scene, {"hello": document(answer)})[0] == UNAVAILABLE

    async def control(link: Any) -> int:
        return int((await link.hello()).version)

    assert lie(control, {"hello": document(HELLO)})[0] == terms.VERSION


@pytest.mark.parametrize(
    "data",
    [
        b"A\xff\xff\xff\xff", b"?", frames.frame(frames.OUT, b"x"), b"A\x00\x00\x00\x01{",
        frames.frame(frames.ANSWER, b"[" * 60_000), frames.frame(frames.REFUSAL, b"{}"),
    ],
)  # fmt: skip
def test_a_message_out_of_place_or_too_large_ends_the_connection(lie: Any, data: bytes) -> None:
    async def scene(link: Any) -> str:
        return await refused(link.hello())

    assert lie(scene, {"hello": says(data)})[0] == UNAVAILABLE


def test_a_frame_that_never_ends_is_not_held(lie: Any) -> None:
    """The head alone says that it is too large."""

    async def answer(talk: Talk) -> None:
        await talk.say(frames.ANSWER + (1 << 31).to_bytes(4, "big"))
        while True:
            await talk.say(bytes(1 << 20))

    async def scene(link: Any) -> tuple[str, int]:
        tracemalloc.start()
        try:
            return await refused(link.hello()), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    code, most = lie(scene, {"hello": answer})[0]
    assert code == UNAVAILABLE
    assert most < 64 << 20


@pytest.mark.parametrize(
    "name",
    [
        "/workspace/../etc/passwd", "/etc/passwd", "/workspace", "/workspace/", "/workspace//a",
        "/workspace/./a", "../a", "/workspacex/a", "/workspace/a\0b",
    ],
)  # fmt: skip
def test_a_listed_name_that_leads_out_is_refused(lie: Any, name: str) -> None:
    async def scene(link: Any) -> object:
        try:
            found, _ = await link.files().list("/workspace", depth=1, most=10)
        except Problem as error:
            return error.code
        return [entry.path for entry in found]

    def answers(path: str) -> dict[str, Answer]:
        return {"files.list": says(
            frames.text(frames.LISTED, {"entries": [{**ENTRY, "path": path}]}),
            frames.text(frames.ANSWER, {"more": False}),
        )}  # fmt: skip

    assert lie(scene, answers(name))[0] == UNAVAILABLE
    assert lie(scene, answers("/workspace/a"))[0] == ["/workspace/a"]


def test_a_list_without_end_is_cut_off(lie: Any) -> None:
    async def answer(talk: Talk) -> None:
        n = 0
        while True:
            some = [{**ENTRY, "path": f"/workspace/{n + k}"} for k in range(frames.PER_LIST)]
            await talk.say(frames.text(frames.LISTED, {"entries": some}))
            n += frames.PER_LIST

    async def empty(talk: Talk) -> None:
        while True:
            await talk.say(frames.text(frames.LISTED, {"entries": []}))

    async def scene(link: Any) -> str:
        return await refused(link.files().list("/workspace", depth=1, most=1000))

    assert lie(scene, {"files.list": answer})[0] == UNAVAILABLE
    assert lie(scene, {"files.list": empty})[0] == UNAVAILABLE


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "device"}, {"size": -1}, {"size": 1 << 64}, {"mode": 1 << 20}, {"modified": "x"},
        {"target": "x" * 5000}, {"size": "1"}, {"modified": True},
    ],
)  # fmt: skip
def test_an_entry_that_makes_no_sense_is_refused(lie: Any, change: dict[str, object]) -> None:
    async def scene(link: Any) -> str:
        return await refused(link.files().entry("/workspace/a"))

    assert lie(scene, {"files.entry": document({**ENTRY, **change})})[0] == UNAVAILABLE


def test_an_entry_is_called_what_was_asked_for(lie: Any) -> None:
    async def scene(link: Any) -> str:
        return str((await link.files().entry("/workspace/a")).path)

    answer = document({**ENTRY, "path": "/etc/shadow"})
    assert lie(scene, {"files.entry": answer})[0] == "/workspace/a"


def archive(*members: tarfile.TarInfo) -> bytes:
    with io.BytesIO() as file:
        with tarfile.open(fileobj=file, mode="w") as tar:
            for member in members:
                tar.addfile(member, io.BytesIO(bytes(member.size)))
        return file.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0, **fields: Any) -> Any:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def packing(data: bytes, *, whole: bool = True) -> dict[str, Answer]:
    pieces = [frames.frame(frames.DATA, data[n : n + 4096]) for n in range(0, len(data), 4096)]
    end = [frames.frame(frames.DONE)] if whole else []
    return {"files.pack": says(frames.text(frames.ANSWER, {}), *pieces, *end)}


async def packed(link: Any) -> object:
    try:
        return b"".join([piece async for piece in await link.files().pack("/workspace")])
    except Problem as error:
        return error.code


@pytest.mark.parametrize(
    "entry",
    [
        member("../out"), member("/etc/passwd"), member("a/../../b"), member(""),
        member("device", tarfile.CHRTYPE), member("fifo", tarfile.FIFOTYPE),
        member("hard", tarfile.LNKTYPE, linkname="../../etc/passwd"),
    ],
)  # fmt: skip
def test_an_archive_with_names_that_lead_out_is_refused(lie: Any, entry: Any) -> None:
    assert lie(packed, packing(archive(entry)))[0] == UNAVAILABLE


def test_an_archive_is_written_anew(lie: Any) -> None:
    entry = member("a/b", size=1000, mode=0o6755, uid=0, gid=0, uname="root")
    found = lie(packed, packing(archive(entry)))[0]
    with tarfile.open(fileobj=io.BytesIO(found)) as tar:
        (got,) = tar.getmembers()
    assert (got.name, got.size, got.mode, got.uname) == ("a/b", 1000, 0o755, "")
    assert got.uid != 0


def test_an_archive_or_file_that_breaks_off_is_an_error(lie: Any) -> None:
    data = archive(member("a", size=9000))
    assert lie(packed, packing(data[:4096]))[0] == UNAVAILABLE

    async def answer(talk: Talk) -> None:
        await talk.say(frames.text(frames.ANSWER, ENTRY), frames.frame(frames.DATA, b"half"))
        raise ConnectionError

    async def scene(link: Any) -> str:
        _, pieces = await link.files().read("/workspace/a")
        return await refused(_all(pieces))

    assert lie(scene, {"files.read": answer})[0] == UNAVAILABLE


async def _all(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(
    ("code", "expected"),
    [("NOT_FOUND", "NOT_FOUND"), ("UNAUTHENTICATED", UNAVAILABLE), ("nonsense", UNAVAILABLE)],
)
def test_an_agent_refuses_only_what_it_may(lie: Any, code: str, expected: str) -> None:
    answer = document({"code": code, "message": "no\x1b[31m\n" * 500}, frames.REFUSAL)

    async def scene(link: Any) -> Problem:
        with pytest.raises(Problem) as caught:
            await link.files().entry("/workspace/a")
        return caught.value

    found = lie(scene, {"files.entry": answer})[0]
    assert found.code == expected
    assert found.message.isprintable()
    assert len(found.message) < 2000


# --- commands


def executing(*data: bytes, then: Answer | None = None) -> dict[str, Answer]:
    async def answer(talk: Talk) -> None:
        await talk.say(frames.text(frames.ANSWER, {}), *data)
        if then is not None:
            await then(talk)

    return {"exec": answer, "fate": document({"state": "unheard"})}


async def end_of(link: Any) -> Ended:
    running = await link.start(start(), lambda _, __: None)
    return await running.wait()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "change",
    [
        {"code": 256}, {"code": -1}, {"code": "0"}, {"signal": "\x1b"}, {"signal": "x" * 99},
        {"signal": "SIG\n\x1b[2J"}, {"exceeded": "patience"},
        {"cpu_ms": -1}, {"started": 1}, {"more": 1},
    ],
)  # fmt: skip
def test_an_end_that_makes_no_sense_is_a_loss(lie: Any, change: dict[str, object]) -> None:
    ended = lie(end_of, executing(frames.text(frames.ENDED, {**END, **change})))[0]
    assert (ended.lost, ended.code) == (True, 255)
    assert not lie(end_of, executing(frames.text(frames.ENDED, END)))[0].lost


def test_the_words_of_an_end_can_be_kept_and_shown(lie: Any) -> None:
    """Half a character cannot be stored, and a terminal would do what others say."""
    words = {"error": "a\ud800\x1b[2Jb", "signal": "SIGRTMIN+1"}
    ended = lie(end_of, executing(frames.text(frames.ENDED, {**END, **words})))[0]
    assert (ended.error, ended.signal) == ("a\ufffd\ufffd[2Jb", "SIGRTMIN+1")


def test_a_connection_that_breaks_is_a_loss_with_a_reason(lie: Any) -> None:
    async def hang_up(_: Talk) -> None:
        raise ConnectionError

    ended = lie(end_of, executing(then=hang_up))[0]
    assert ended.lost
    assert ended.error


def test_room_for_input_is_never_more_than_the_window(lie: Any) -> None:
    taken = 0

    async def swallow(talk: Talk) -> None:
        nonlocal taken
        while True:
            _, data = await talk.next()
            taken += len(data)

    async def scene(link: Any) -> bool:
        running = await link.start(start().replace(input=True), lambda _, __: None)
        writing = asyncio.ensure_future(running.write(bytes(4 << 20)))
        await asyncio.wait([writing], timeout=1)
        done = writing.done()
        writing.cancel()
        link.lost("over")
        return bool(done)

    lots = frames.number(frames.ROOM, 0xFFFFFFFF)
    assert lie(scene, executing(lots, then=swallow))[0] is False
    assert taken <= 2 * terms.WINDOW


def test_silence_is_told_and_a_loss_ends_everything_at_once(
    lie: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_running, "QUIET", 0.2)
    quiet: list[float] = []

    async def silent(talk: Talk) -> None:
        await talk.next()

    async def scene(link: Any) -> Ended:
        running = await link.start(start(), lambda _, __: None)
        while not quiet:  # noqa: ASYNC110 - a callback fills it
            await asyncio.sleep(0.02)
        waiting = asyncio.ensure_future(running.wait())
        link.lost("the node is not ready")
        ended = await asyncio.wait_for(waiting, 1)
        assert await refused(link.usage()) == UNAVAILABLE
        assert await refused(link.start(start("exc-2"), lambda _, __: None)) == UNAVAILABLE
        with pytest.raises(BrokenPipeError):
            await running.write(b"x")
        await running.kill()
        return ended  # type: ignore[no-any-return]

    found = lie(scene, executing(then=silent), on_quiet=lambda: quiet.append(1.0))[0]
    assert (found.lost, found.code, found.error) == (True, 255, "the node is not ready")


def test_an_agent_that_speaks_is_not_asked_about(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_running, "QUIET", 0.4)
    quiet: list[float] = []

    async def alive(talk: Talk) -> None:
        for _ in range(20):
            await talk.say(frames.frame(frames.ALIVE))
            await asyncio.sleep(0.05)
        await talk.say(frames.text(frames.ENDED, END))

    found = lie(end_of, executing(then=alive), on_quiet=lambda: quiet.append(1.0))[0]
    assert (found.code, quiet) == (0, [])


def test_a_start_is_repeated_only_if_the_agent_has_never_heard_of_it(lie: Any) -> None:
    async def hang_up(_: Talk) -> None:
        raise ConnectionError

    async def scene(link: Any) -> str:
        return await refused(link.start(start(), lambda _, __: None))

    for state, times in (("unknown", 2), ("running", 1), ("told", 1)):
        answers = {"exec": hang_up, "fate": document({"state": state})}
        code, liar = lie(scene, answers)
        assert code == UNAVAILABLE
        assert liar.asked.count("exec") == times


def test_a_command_whose_supervisor_was_killed_was_killed(lie: Any) -> None:
    async def hang_up(_: Talk) -> None:
        raise ConnectionError

    answers = executing(then=hang_up)
    answers["fate"] = document({"state": "killed", "exceeded": "memory"})
    ended = lie(end_of, answers)[0]
    assert (ended.code, ended.signal, ended.exceeded, ended.lost) == (
        137,
        "SIGKILL",
        "memory",
        False,
    )


def test_an_agent_that_never_answers_is_given_up(lie: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_link, "ANSWER_SECONDS", 0.3)

    async def silent(talk: Talk) -> None:
        await talk.next()

    async def scene(link: Any) -> str:
        return await refused(link.claim(Claim(sandbox="s", lease_seconds=1.0)))

    assert lie(scene, {"claim": silent})[0] == UNAVAILABLE


def test_connections_in_reserve_are_used_and_replaced(lie: Any) -> None:
    async def scene(link: Any) -> None:
        await link.hello()
        for n in range(5):
            running = await link.start(start(f"exc-{n}"), lambda _, __: None)
            await running.wait()
            await asyncio.sleep(0.1)

    answers = {**executing(frames.text(frames.ENDED, END)), "hello": document(HELLO)}
    _, liar = lie(scene, answers)
    # One for each command, and the one that is left.
    assert liar.connections <= 7


@pytest.mark.parametrize(
    "change", [{"env": {"a=b": "x"}}, {"argv": ()}, {"argv": ("a\0",)}, {"cwd": "\0"}]
)
def test_what_no_kernel_takes_is_not_sent(lie: Any, change: dict[str, Any]) -> None:
    async def scene(link: Any) -> str:
        return await refused(link.start(start().replace(**change), lambda _, __: None))

    code, liar = lie(scene, {})
    assert (code, liar.asked) == ("INVALID", [])
