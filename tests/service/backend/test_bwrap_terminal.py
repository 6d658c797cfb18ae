"""A terminal in a sandbox: controlling, resizable, with job control, and the command's alone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.service.backend.interface import Terminal

if TYPE_CHECKING:
    from .conftest import Bench
    from .lab import Lab

pytestmark = pytest.mark.kernel


def test_a_terminal_is_the_controlling_one(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        script = (
            "test -t 0 && test -t 1 && test -t 2 && echo all; echo direct > /dev/tty; stty size"
        )
        process, ended = await lab.run(
            box, "sh", "-c", f"{script}; echo $TERM", terminal=Terminal(rows=31, columns=97)
        )
        return process.out.split(), process.err, ended.code

    assert bench.play(scene) == [["all", "direct", "31", "97", "xterm-256color"], "", 0]


def test_a_new_size_is_told(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        script = "trap 'stty size; exit' WINCH; echo up; while :; do sleep 0.01; done"
        process = await lab.start(box, "sh", "-c", script, terminal=Terminal())
        await process.until("up")
        await process.running.resize(Terminal(rows=50, columns=132))
        ended = await process.end()
        return process.out.split(), ended.code

    assert bench.play(scene) == [["up", "50", "132"], 0]


def test_ctrl_c_reaches_the_command_and_not_what_holds_it(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        script = "trap 'echo caught; exit 3' INT; echo up; while :; do sleep 0.01; done"
        process = await lab.start(box, "sh", "-c", script, terminal=Terminal(), input=True)
        await process.until("up")
        await process.running.write(b"\x03")
        ended = await process.end()
        # Without a handler it ends as by a signal.
        other = await lab.start(box, "sh", "-c", "echo up; exec sleep 94.4", terminal=Terminal())
        await other.until("up")
        await other.running.write(b"\x03")
        return "caught" in process.out, ended.code, (await other.end()).code

    assert bench.play(scene) == [True, 3, 130]


def test_job_control_works(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        shell = await lab.start(box, "bash", "--norc", "-i", terminal=Terminal(), input=True)
        await shell.running.write(b"PS1=; stty -echo; echo rea''dy\n")
        await shell.until("ready")
        # The shell has the terminal until its child does: typed too early, Ctrl-Z is the shell's.
        await shell.running.write(b"sh -c 'echo r\"\"uns; exec sleep 95.5'\n")
        await shell.until("runs")
        await shell.running.write(b"\x1a")
        await shell.until("Stopped")
        await shell.running.write(b"jobs; kill %1; fg; echo al''ive; exit 4\n")
        await shell.until("alive")
        ended = await shell.end()
        return ended.code, "no job control" in shell.out

    assert bench.play(scene) == [4, False]


def test_the_end_of_input_is_ctrl_d(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        process = await lab.start(box, "cat", terminal=Terminal(), input=True)
        await process.running.write(b"line\n")
        await process.until("line\r\nline\r\n")
        await process.running.close_input()
        return (await process.end()).code

    assert bench.play(scene) == 0


def test_cannot_type_into_the_terminal(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        code = "import fcntl, termios\ntry: fcntl.ioctl(0, termios.TIOCSTI, b'x')\n"
        code += "except OSError as e: print('refused', e.errno)\nelse: print('typed')"
        process, _ = await lab.run(box, "python3", "-c", code, terminal=Terminal())
        return process.out

    assert "refused" in bench.play(scene)


def test_a_terminal_that_nobody_reads_from_inside_holds_the_writer(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        process = await lab.start(
            box, "sh", "-c", "stty raw -echo; echo up; sleep 96.6", terminal=Terminal()
        )
        await process.until("up")
        writing = asyncio.ensure_future(process.running.write(bytes(1_000_000)))
        done, _ = await asyncio.wait([writing], timeout=0.3)
        await process.running.kill()
        await process.end()
        results = await asyncio.gather(writing, return_exceptions=True)
        return len(done), type(results[0]).__name__

    assert bench.play(scene) == [0, "BrokenPipeError"]
