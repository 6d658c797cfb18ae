"""What every backend does, as pods of a real cluster: commands, their end, life and files."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from agent_sandbox.service.backend.interface import Files, Start, Terminal

from .lab import (
    BOUNDS,
    MIB,
    PATIENCE,
    House,
    Stage,
    bytes_of,
    content,
    joined,
    refused,
    tar,
)  # fmt: skip

# --- commands


def test_a_command_has_its_streams_directory_and_variables(house: House) -> None:
    async def story(stage: Stage) -> None:
        text = 'pwd; echo "$HOME $A $B"; echo wrong >&2; exit 7'
        ended, out, err = await stage.sh(text, env={"B": "2"})
        assert (ended.code, ended.started, ended.signal) == (7, True, "")
        assert (out, err) == ("/workspace\n/home/agent 1 2\n", "wrong\n")
        ended, out, _ = await stage.sh("pwd; touch x; touch ~/y /tmp/z; id -u", cwd="/home/agent")
        assert ended.code == 0
        where, uid = out.split()
        assert (where, int(uid) > 0) == ("/home/agent", True)

    house.play(story, env={"A": "1", "B": "1"})


def test_an_image_that_knows_nothing_of_us_serves_as_well(house: House) -> None:
    async def story(stage: Stage) -> None:
        ended, out, _ = await stage.sh("echo $0; busybox | head -n 1; ls /opt 2>/dev/null")
        assert ended.code == 0
        assert "BusyBox" in out
        await stage.files.write("/workspace/f", bytes_of(b"x"), limit=9)
        _, out, _ = await stage.sh("cat f")
        assert out == "x"

    house.play(story, "plain")


NOT_STARTED: list[tuple[tuple[str, ...], int, str]] = [
    (("no-such-program",), 127, "not found"),
    (("/bin/no-such-program",), 127, "not found"),
    (("/etc/passwd",), 126, "execut"),
    (("/etc",), 126, "execut"),
]


def test_a_command_that_cannot_start_says_why(house: House) -> None:
    async def story(stage: Stage) -> None:
        for argv, code, why in NOT_STARTED:
            running, said = await stage.start(*argv)
            ended = await running.wait()
            assert (ended.code, ended.started, joined(said, 1)) == (code, False, ""), (argv, ended)
            # As the bwrap backend has it, where a shell would say it.
            assert why in ended.error + joined(said, 2)
        # As the bwrap backend has it: this is found before there is a process.
        for cwd in ("/nowhere", "/etc/passwd"):
            assert await refused(stage.start("true", cwd=cwd)) == "INVALID"
        # Control: these codes can also be a command's own.
        for code in (126, 127):
            ended, _, _ = await stage.sh(f"exit {code}")
            assert (ended.code, ended.started, ended.error) == (code, True, "")

    house.play(story)


def test_arguments_arrive_as_they_are(house: House) -> None:
    words = ["", " ", "a b", "$HOME", "`id`", "*", "\n", "-n", "'\"", "ä", "\\", "!1"]

    async def story(stage: Stage) -> None:
        running, said = await stage.start("sh", "-c", 'for w; do echo "[$w]"; done', "x", *words)
        await running.wait()
        assert joined(said, 1) == "".join(f"[{word}]\n" for word in words)

    house.play(story)


def test_input_is_passed_on_and_ends(house: House) -> None:
    data = os.urandom(3 * MIB)

    async def story(stage: Stage) -> None:
        running, said = await stage.start("cat", input=True)
        await running.write(data[:MIB])
        await running.write(data[MIB:])
        await running.close_input()
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert ended.code == 0
        assert b"".join(piece for _, piece in said) == data
        with pytest.raises(BrokenPipeError):
            await running.write(b"x")
        # Without input there is none.
        _, out, _ = await stage.sh("cat; echo end")
        assert out == "end\n"

    house.play(story)


def test_a_terminal_has_a_size_that_can_change(house: House) -> None:
    async def story(stage: Stage) -> None:
        text = """until [ "$(stty size)" = "30 91" ]; do sleep 0.01; done
trap 'stty size; exit 4' WINCH; echo up; while :; do sleep 0.05; done"""
        running, said = await stage.start("sh", "-c", text, terminal=Terminal(rows=30, columns=91))
        await said.word("up")
        await running.resize(Terminal(rows=40, columns=92))
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert ended.code == 4
        assert "40 92" in joined(said, 1)
        # Ctrl-D is the end of the input.
        running, said = await stage.start("cat", terminal=Terminal())
        await running.write(b"hello\n")
        await said.word("hello")
        await running.close_input()
        assert (await asyncio.wait_for(running.wait(), PATIENCE)).code == 0

    house.play(story)


def test_a_signal_reaches_the_commands_own_handler(house: House) -> None:
    async def story(stage: Stage) -> None:
        text = "trap 'echo caught; exit 5' TERM; echo up; while :; do sleep 0.05; done"
        running, said = await stage.start("sh", "-c", text)
        await said.word("up")
        await running.signal(signal.SIGTERM)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert (ended.code, joined(said, 1)) == (5, "up\ncaught\n")
        running, said = await stage.start("sh", "-c", "echo up; exec sleep 1000")
        await said.word("up")
        await running.signal(signal.SIGINT)
        ended = await asyncio.wait_for(running.wait(), PATIENCE)
        assert (ended.code, ended.signal) == (130, "SIGINT")

    house.play(story)


def test_a_child_that_keeps_the_pipes_neither_delays_the_end_nor_outlives_it(house: House) -> None:
    async def story(stage: Stage) -> None:
        ended, out, _ = await stage.sh("sleep 1001 & (setsid sleep 1002 &); echo done")
        assert (ended.code, out) == (0, "done\n")
        assert stage.processes() == []

    house.play(story)


def test_a_kill_ends_all_of_an_execution_and_nothing_else(house: House) -> None:
    async def story(stage: Stage) -> None:
        # Its children leave the session, ignore signals, and have no environment left to tell.
        text = """trap '' TERM INT HUP
(setsid env -i sh -c "trap '' TERM; echo up; sleep 1001" &)
sleep 1002"""
        victim, heard = await stage.start("sh", "-c", text)
        other, said = await stage.start("sh", "-c", "(setsid sleep 1003 &); echo up; sleep 1004")
        await heard.word("up")
        await said.word("up")
        await victim.kill()
        ended = await asyncio.wait_for(victim.wait(), PATIENCE)
        assert (ended.code, ended.signal) == (137, "SIGKILL")
        running = " ".join(stage.processes())
        assert "1001" not in running
        assert "1002" not in running
        # Control: the other one is all there.
        assert "sleep 1003" in running
        assert "sleep 1004" in running
        await other.kill()
        assert (await asyncio.wait_for(other.wait(), PATIENCE)).code == 137
        assert stage.processes() == []

    house.play(story)


def test_memory_is_bounded_and_the_kill_is_told(house: House) -> None:
    async def story(stage: Stage) -> None:
        hog = "x=$(head -c {} /dev/zero | tr '\\0' a); echo ${{#x}}"
        ended, out, _ = await stage.sh(hog.format(400_000_000))
        assert (ended.code, ended.exceeded, out) == (137, "memory", "")
        # Control: less of it is fine, and a kill by hand is no limit.
        ended, out, _ = await stage.sh(hog.format(1_000_000))
        assert (ended.exceeded, out) == ("", "1000000\n")
        ended, _, _ = await stage.sh("kill -9 $$")
        assert (ended.code, ended.exceeded) == (137, "")

    house.play(story)


def test_processes_are_bounded(house: House) -> None:
    text = "for i in $(seq 40); do sleep 9 & done; echo all"

    async def few(stage: Stage) -> None:
        _, out, err = await stage.sh(text)
        assert "fork" in err
        assert out == ""

    async def many(stage: Stage) -> None:
        # Control: with the usual bound they fit.
        _, out, _ = await stage.sh(text)
        assert out == "all\n"

    house.play(few, resources=BOUNDS.replace(pids=24))
    house.play(many)


def test_one_file_is_never_larger_than_the_disk_limit(house: House) -> None:
    async def story(stage: Stage) -> None:
        _, out, _ = await stage.sh("dd if=/dev/zero of=big bs=1M count=40; wc -c <big")
        assert int(out) <= 16 * MIB

    house.play(story)


def test_output_of_many_megabytes_is_complete(house: House) -> None:
    async def story(stage: Stage) -> None:
        total = 0

        def sink(_: int, data: bytes) -> None:
            nonlocal total
            total += len(data)

        start = Start(
            execution="e", argv=("sh", "-c", "dd if=/dev/zero bs=1M count=40 2>/dev/null")
        )
        running = await stage.backend.start(stage.sandbox, start, sink)
        assert (await asyncio.wait_for(running.wait(), PATIENCE)).code == 0
        assert total == 40 * MIB

    house.play(story)


# --- life


def test_a_second_sandbox_of_the_same_id_is_an_error_and_changes_nothing(house: House) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("echo mine >f")
        assert await refused(stage.backend.create(stage.sandbox)) == "CONFLICT"
        _, out, _ = await stage.sh("cat f")
        assert out == "mine\n"

    house.play(story)


def test_a_paused_sandbox_stands_still_and_goes_on(house: House) -> None:
    async def story(stage: Stage) -> None:
        running, said = await stage.start("sh", "-c", "while :; do echo x; sleep 0.02; done")
        await said.word("x")
        await stage.backend.pause(stage.sandbox)
        # What was on its way arrives; then there is nothing.
        count = -1
        while count != len(said):
            count = len(said)
            await asyncio.sleep(0.5)
        await stage.backend.resume(stage.sandbox)
        await said.until(lambda: len(said) > count + 3)
        await running.kill()
        await running.wait()

    house.play(story)


def test_usage_is_what_is_used(house: House) -> None:
    async def story(stage: Stage) -> None:
        before = await stage.backend.usage(stage.sandbox)
        running, said = await stage.start(
            "sh", "-c", "dd if=/dev/zero of=f bs=1M count=3; chmod 000 f; echo up; sleep 1000"
        )
        await said.word("up")
        after = await stage.backend.usage(stage.sandbox)
        assert before.disk is not None
        assert after.disk is not None
        assert after.disk - before.disk >= 3 * MIB
        assert after.pids is not None
        assert after.pids > (before.pids or 0)
        assert 0 < (after.memory or 0) < 200 * MIB
        await running.kill()
        await running.wait()

    house.play(story)


def test_a_runtime_class_is_used(house: House) -> None:
    path = "/apis/node.k8s.io/v1/runtimeclasses"
    house.cluster.api("POST", path, {"metadata": {"name": "strict"}, "handler": "strict"})

    async def story(stage: Stage) -> None:
        assert stage.pod()["spec"]["runtimeClassName"] == "strict"
        assert (await stage.sh("true"))[0].code == 0

    try:
        house.play(story, runtime="strict")
    finally:
        house.cluster.api("DELETE", f"{path}/strict")


# --- files


def test_a_file_is_written_read_listed_and_removed(house: House) -> None:
    async def story(stage: Stage) -> None:
        files = stage.files
        path = "/workspace/a/b/ü x\n'.txt"
        entry = await files.write(path, bytes_of(b"hel", b"lo\0"), limit=100, mode=0o640)
        assert (entry.path, entry.kind, entry.size, entry.mode) == (path, "file", 6, 0o640)
        assert await files.entry(path) == entry
        found, pieces = await files.read(path, 2)
        assert (found.size, await content(pieces)) == (6, b"llo\0")
        _, out, _ = await stage.sh("[ -O a/b/* ] && stat -c %a a/b/*; ln -s b a/link; mkfifo a/p")
        assert out == "640\n"
        listed, more = await files.list("/workspace", depth=9, most=100)
        assert [(one.path, one.kind, one.target) for one in listed] == [
            ("/workspace/a", "directory", ""), ("/workspace/a/b", "directory", ""),
            (path, "file", ""), ("/workspace/a/link", "symlink", "b"),
            ("/workspace/a/p", "other", ""),
        ]  # fmt: skip
        assert not more
        listed, more = await files.list("/workspace", depth=1, most=100)
        assert ([one.path for one in listed], more) == (["/workspace/a"], False)
        listed, more = await files.list("/workspace", depth=9, most=2)
        assert (len(listed), more) == (2, True)
        # A link that stays inside is followed; the path is the one that was asked for.
        entry, pieces = await files.read(path.replace("/b/", "/link/"))
        assert (entry.path, await content(pieces)) == (path.replace("/b/", "/link/"), b"hello\0")
        assert (await files.entry("/workspace/a/link")).target == "b"
        assert await refused(files.delete("/workspace/a", recursive=False)) == "CONFLICT"
        await files.delete("/workspace/a/link", recursive=False)
        await files.delete("/workspace/a", recursive=True)
        assert await refused(files.entry("/workspace/a")) == "NOT_FOUND"
        assert await refused(files.delete("/workspace/a", recursive=True)) == "NOT_FOUND"
        made = await files.make("/home/agent/x/y")
        assert (made.path, made.kind) == ("/home/agent/x/y", "directory")
        assert await files.make("/home/agent/x/y") == made

    house.play(story)


def put(path: str, *pieces: bytes) -> Callable[[Files], Coroutine[Any, Any, Any]]:
    return lambda files: files.write(path, bytes_of(*pieces), limit=4)


REFUSED: list[tuple[str, Callable[[Files], Coroutine[Any, Any, Any]]]] = [
    ("NOT_FOUND", lambda files: files.read("/workspace/none")),
    ("CONFLICT", lambda files: files.read("/workspace/f/x")),
    ("NOT_FOUND", lambda files: files.read("/workspace/broken")),
    ("NOT_FOUND", lambda files: files.entry("/workspace/none")),
    ("NOT_FOUND", lambda files: files.list("/workspace/none", depth=1, most=1)),
    ("NOT_FOUND", lambda files: files.pack("/workspace/none")),
    ("CONFLICT", lambda files: files.read("/workspace")),
    ("CONFLICT", lambda files: files.read("/workspace/d")),
    ("INVALID", lambda files: files.read("/workspace/p")),
    ("CONFLICT", lambda files: files.make("/workspace/f")),
    ("CONFLICT", put("/workspace/d", b"")),
    ("CONFLICT", put("/workspace/f/x", b"")),
    ("TOO_LARGE", put("/workspace/n", b"12", b"345")),
    ("FORBIDDEN", put("/run/x", b"")),
    ("FORBIDDEN", lambda files: files.delete("/workspace", recursive=True)),
    ("FORBIDDEN", lambda files: files.read("/etc/passwd")),
    ("FORBIDDEN", lambda files: files.read("/workspacex")),
    ("INVALID", lambda files: files.read("/workspace/../etc/passwd")),
    ("INVALID", lambda files: files.read("workspace/f")),
    ("INVALID", lambda files: files.entry("/workspace/./f")),
    ("INVALID", lambda files: files.read("/workspace/a\0b")),
]


def test_files_that_cannot_be_what_is_asked_are_refused(house: House) -> None:
    async def story(stage: Stage) -> None:
        await stage.sh("mkdir d; mkfifo p; echo x >f; ln -s nowhere broken")
        found = [await refused(doing(stage.files)) for _, doing in REFUSED]
        assert found == [code for code, _ in REFUSED]
        assert await refused(stage.files.entry("/workspace/n")) == "NOT_FOUND"
        # Control.
        assert await refused(put("/workspace/n", b"1234")(stage.files)) == ""

    house.play(story)


def test_a_file_is_replaced_as_one_step(house: House) -> None:
    size = 2 * MIB

    async def story(stage: Stage) -> None:
        # Somebody looks all the time: there is always a whole file.
        look = "echo up; while :; do wc -c <f; [ -e stop ] && exit; done | uniq"
        await stage.files.write("/workspace/f", bytes_of(b"a" * size), limit=size)
        running, said = await stage.start("sh", "-c", look)
        await said.word("up")
        for letter in (b"b", b"c", b"d"):
            await stage.files.write("/workspace/f", bytes_of(letter * size), limit=size)
        await stage.sh("touch stop")
        await asyncio.wait_for(running.wait(), PATIENCE)
        assert joined(said, 1) == f"up\n{size}\n"
        listed, _ = await stage.files.list("/workspace", depth=1, most=9)
        assert [one.path for one in listed] == ["/workspace/f", "/workspace/stop"]

    house.play(story)


def test_an_upload_that_breaks_off_leaves_nothing(house: House) -> None:
    async def broken() -> object:
        yield b"half"
        raise ConnectionResetError

    async def story(stage: Stage) -> None:
        with pytest.raises(ConnectionResetError):
            await stage.files.write("/workspace/f", broken(), limit=100)  # type: ignore[arg-type]
        listed, _ = await stage.files.list("/workspace", depth=1, most=9)
        assert listed == []

    house.play(story)


def test_a_tree_goes_out_and_comes_back(house: House) -> None:
    async def story(stage: Stage) -> None:
        text = """mkdir -p t/d; echo one >t/d/1; ln t/d/1 t/d/2; ln -s d/1 t/l; ln -s /usr/bin/x t/a
chmod 750 t/d; chmod 700 t/d/1; mkfifo t/p; touch t/empty"""
        await stage.sh(text)
        packed = await content(await stage.files.pack("/workspace/t"))
        assert await stage.files.unpack("/workspace/n/t", bytes_of(packed), limit=MIB) == 6
        check = """cd n/t; cat d/1 d/2 l; readlink l; readlink a; stat -c '%a' d d/1; ls"""
        _, out, _ = await stage.sh(check)
        assert out == "one\none\none\nd/1\n/usr/bin/x\n750\n700\na\nd\nempty\nl\n"

    house.play(story)


def test_archives_that_are_too_large_or_broken_are_refused(house: House) -> None:
    async def story(stage: Stage) -> None:
        unpack = stage.files.unpack
        bomb = gzip.compress(tar(("zero", bytes(30 * MIB), "")))
        assert len(bomb) < MIB
        assert await refused(unpack("/workspace", bytes_of(bomb), limit=MIB)) == "TOO_LARGE"
        for wrong in (b"x" * 600, tar(("a", b"x" * 9000, ""))[:3000], tar(("../a", b"", ""))):
            assert await refused(unpack("/workspace", bytes_of(wrong), limit=MIB)) == "INVALID"
        # Control.
        assert await unpack("/workspace", bytes_of(tar(("fine", b"x", ""))), limit=MIB) == 1

    house.play(story)
