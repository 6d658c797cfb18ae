"""Commands in a pod: what the backend promises, with an inner layer and without."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import pytest

from agent_sandbox.pod import terms
from agent_sandbox.service.backend.interface import Terminal
from agent_sandbox.service.problems import Problem

from .ground import Pod, alive, gone, idle, living, play, run, sh, start

pytestmark = pytest.mark.kernel
# Signals 32 and 33 are glibc's own; make, for one, ignores them in all that it starts.
OF_THREADS = 0b11 << 31


def test_output_and_code_of_a_command_arrive(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, ended = await run(link, "sh", "-c", "echo out; echo err >&2; exit 7")
        assert (process.out, process.err) == ("out\n", "err\n")
        assert (ended.code, ended.signal, ended.started, ended.lost) == (7, "", True, False)
        assert ended.max_rss_kb > 0

    play(scene())


def test_cannot_pass_for_a_command_that_was_never_executed(pod: Pod, form: str) -> None:
    """With the words of bwrap; the control is a command that is really not there."""

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        words = "bwrap: execvp sh: No such file or directory"
        process, ended = await run(link, "sh", "-c", f"echo '{words}' >&2; exit 1")
        assert (ended.code, ended.started, process.err) == (1, True, f"{words}\n")
        for _ in range(2):
            process, ended = await run(link, "not-there")
            assert (ended.code, ended.started) == (127, False)

    play(scene())


def test_all_of_a_large_output_arrives_in_order(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, ended = await run(link, "seq", "1", "400000")
        assert ended.code == 0
        assert process.out.split() == [str(n) for n in range(1, 400_001)]

    play(scene())


def test_input_comes_back_and_its_end_ends_the_command(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process = await start(link, "cat", input=True)
        data = os.urandom(3 << 20)
        await process.running.write(data)
        await process.running.close_input()
        ended = await process.end()
        assert (ended.code, process.said[1]) == (0, data)
        with pytest.raises(BrokenPipeError):
            await process.running.write(b"x")

    play(scene())


def test_a_command_without_input_reads_the_end_at_once(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, ended = await run(link, "cat")
        assert (ended.code, process.out) == (0, "")

    play(scene())


def test_a_command_that_does_not_read_can_still_be_killed(pod: Pod, form: str) -> None:
    """Input waits at the service, not before the message that ends it."""

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process = await start(link, "sleep", "1000", input=True)
        writing = asyncio.ensure_future(process.running.write(bytes(8 << 20)))
        done, _ = await asyncio.wait([writing], timeout=0.5)
        assert not done
        await process.running.kill()
        ended = await process.end()
        assert (ended.code, ended.signal) == (137, "SIGKILL")
        with pytest.raises(BrokenPipeError):
            await writing

    play(scene())


def test_a_closed_input_is_told(pod: Pod) -> None:
    """Not with an inner layer: there bwrap has the other end open as well."""

    async def scene() -> None:
        link = await pod.claimed(inner="off")
        process = await start(link, "sh", "-c", "exec <&-; echo closed; sleep 1000", input=True)
        await process.until("closed")
        with pytest.raises(BrokenPipeError):
            # More than the window: it has to wait for what nobody will ever read.
            await process.running.write(bytes(1 << 20))
        await process.running.kill()
        await process.end()

    play(scene())


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [(("no-such-command",), 127, "command not found"), (("/etc/passwd",), 126, "cannot execute")],
)
def test_a_command_that_cannot_be_executed_never_ran(
    pod: Pod, form: str, argv: tuple[str, ...], code: int, words: str
) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, ended = await run(link, *argv)
        assert (ended.code, ended.started) == (code, False)
        assert words in ended.error
        assert words in process.err

    play(scene())


def test_a_directory_that_is_not_there_is_refused(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        with pytest.raises(Problem) as caught:
            await run(link, "true", cwd="/workspace/missing")
        assert (caught.value.code, caught.value.field) == ("INVALID", "cwd")
        assert (await sh(link, "mkdir here; cd here; pwd")) == "/workspace/here\n"
        process, _ = await run(link, "pwd", cwd="here")
        assert process.out == "/workspace/here\n"

    play(scene())


def test_a_command_has_its_variables_and_none_of_the_agents(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process, _ = await run(link, "env", env={"MINE": "a b", "PATH": "/usr/bin"})
        found = dict(line.split("=", 1) for line in process.out.splitlines())
        assert found["MINE"] == "a b"
        assert (found["HOME"], found["PWD"]) == ("/home/agent", "/workspace")
        assert found["PATH"] == "/usr/bin"
        assert not {terms.CA, terms.UNCLAIMED, terms.AT} & set(found)

    play(scene())


def test_a_signal_reaches_the_command_itself(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        script = "trap 'echo caught; exit 5' TERM; echo ready; while :; do sleep 0.05; done"
        process = await start(link, "sh", "-c", script)
        await process.until("ready")
        await process.running.signal(15)
        ended = await process.end()
        assert (ended.code, process.out) == (5, "ready\ncaught\n")

    play(scene())


def test_a_command_finds_signals_as_programs_expect_them(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        said = await sh(link, "grep -E '^Sig(Ign|Blk)' /proc/self/status; yes | head -n 1; umask")
        found = [int(line.split()[1], 16) for line in said.splitlines()[:2]]
        assert [mask & ~OF_THREADS for mask in found] == [0, 0]
        assert said.splitlines()[2:] == ["y", "0022"]

    play(scene())


def test_what_a_command_leaves_behind_ends_with_it(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        word = f"7{os.getpid()}1"
        script = f"(setsid sleep {word} &) ; setsid sh -c 'sleep {word} & sleep {word}' & echo on"
        began = time.monotonic()
        process, ended = await run(link, "sh", "-c", script)
        assert (ended.code, process.out) == (0, "on\n")
        assert time.monotonic() - began < 20
        assert gone(word)

    play(scene())


def test_a_terminal_is_one(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process = await start(
            link, "sh", "-c", "test -t 0 && stty size; echo $TERM; read x; stty size; exec cat",
            terminal=Terminal(rows=30, columns=100), input=True,
        )  # fmt: skip
        await process.until("xterm")
        assert process.out.split()[:2] == ["30", "100"]
        await process.running.resize(Terminal(rows=31, columns=101))
        await process.running.write(b"\n")
        await process.until("31 101")
        await process.running.write(b"typed\n")
        await process.until("typed\r\ntyped")
        # Ctrl-C ends `cat`, not what holds it.
        await process.running.write(b"\x03")
        ended = await process.end()
        assert (ended.code, ended.signal) == (130, "SIGINT")

    play(scene())


def test_the_end_of_the_input_of_a_terminal_is_control_d(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process = await start(link, "cat", terminal=Terminal(), input=True)
        await process.running.close_input()
        assert (await process.end()).code == 0

    play(scene())


def test_a_command_that_closes_its_terminal_is_not_hung_up(pod: Pod, form: str) -> None:
    """Many programs close their streams before they exit, and some open the terminal again."""

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        script = "exec <&- >&- 2>&-; sleep 0.3; exec >/dev/tty 2>&1; echo again; exit 6"
        process, ended = await run(link, "sh", "-c", script, terminal=Terminal())
        assert (ended.code, process.out) == (6, "again\r\n")

    play(scene())


def test_commands_run_beside_each_other(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        found = await asyncio.gather(*(run(link, "sh", "-c", f"echo {n}") for n in range(12)))
        assert sorted(int(process.out) for process, _ in found) == list(range(12))

    play(scene())


def test_a_broken_connection_ends_the_command(pod: Pod, form: str) -> None:
    """Nobody would ever see its end."""

    async def scene() -> None:
        link = await pod.claimed(inner=form)
        word = f"6{os.getpid()}2"
        process = await start(link, "sh", "-c", f"setsid sleep {word} & sleep {word}")
        await alive(word, 2)
        link.lost("the node has gone")
        ended = await process.end()
        assert (ended.lost, ended.error, ended.code) == (True, "the node has gone", 255)
        with pytest.raises(Problem):
            await link.hello()
        assert await asyncio.to_thread(gone, word)

    play(scene())


def test_stop_ends_all_commands_and_says_so(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        word = f"5{os.getpid()}3"
        processes = [await start(link, "sleep", word) for _ in range(3)]
        await link.stop()
        assert {(await one.end()).signal for one in processes} == {"SIGKILL"}
        assert not living(word)
        assert (await sh(link, "echo on")) == "on\n"

    play(scene())


def test_a_pause_stops_everything_and_a_resume_lets_it_go_on(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form)
        process = await start(link, "sh", "-c", "while :; do echo tick; sleep 0.01; done")
        await process.until("tick")
        await link.pause()
        # What was on its way arrives; after that, nothing.
        await asyncio.sleep(0.3)
        before = len(process.out)
        await asyncio.sleep(0.5)
        assert len(process.out) == before
        await link.resume()
        process.heard.clear()
        await asyncio.wait_for(process.heard.wait(), 20)
        await process.running.kill()
        assert (await process.end()).code == 137

    play(scene())


def test_an_agent_shows_that_it_lives_while_a_command_is_silent(pod: Pod) -> None:
    async def scene() -> None:
        link = await pod.claimed()
        process = await start(link, "sleep", "1000")
        heard = process.running._heard  # type: ignore[attr-defined]
        await asyncio.sleep(2 * terms.HEARTBEAT + 1)
        assert process.running._heard > heard  # type: ignore[attr-defined]
        await process.running.kill()
        await process.end()

    play(scene())


def test_a_pod_belongs_to_one_sandbox(pod: Pod) -> None:
    async def scene() -> None:
        link = pod.link()
        with pytest.raises(Problem) as caught:
            await run(link, "true")
        assert caught.value.code == "WRONG_STATE"
        await pod.claimed(sandbox="sbx-1")
        assert (await link.hello()).sandbox == "sbx-1"
        await pod.claimed(sandbox="sbx-1")
        with pytest.raises(Problem) as caught:
            await pod.claimed(sandbox="sbx-2")
        assert caught.value.code == "CONFLICT"

    play(scene())


def test_usage_counts_processes_and_files(pod: Pod, form: str) -> None:
    async def scene() -> None:
        link = await pod.claimed(inner=form, disk=1 << 30)
        process = await start(
            link, "sh", "-c", "head -c 2000000 /dev/zero > f; sleep 1000 & echo on; wait"
        )
        await process.until("on")
        used = await link.usage(1 << 30)
        assert used.pids == 2
        assert used.disk is not None
        assert 2_000_000 <= used.disk < 3_000_000
        await process.running.kill()
        await process.end()
        await idle(link)

    play(scene())


def test_a_lost_inner_layer_is_not_taken_for_one(pods: Any) -> None:
    """Without anything to mount on there is no inner layer, and whoever needs one is told."""

    async def scene() -> None:
        pod = pods(plain_root=True)
        link = pod.link()
        found = await link.hello()
        assert (found.inner, found.guarantees["filesystem"]) == ("", "pod")
        with pytest.raises(Problem) as caught:
            await pod.claimed(inner="required")
        assert (caught.value.code, caught.value.field) == ("UNSUPPORTED", "inner")
        await pod.claimed(inner="preferred")

    play(scene())
