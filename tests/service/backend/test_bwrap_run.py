"""Commands in sandboxes of the bwrap backend: what they find, how they end, what is measured."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.service.problems import Problem
from agent_sandbox.service.values import Network

from .lab import gone, living

if TYPE_CHECKING:
    from .conftest import Bench
    from .lab import Lab

pytestmark = pytest.mark.kernel


def test_a_command_finds_itself_in_its_workspace(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        said = await lab.sh(box, "pwd; echo $HOME; id -un; id -u; umask; mkdir d")
        there = await lab.sh(box, "pwd", cwd="/workspace/d")
        process, ended = await lab.run(box, "sh", "-c", "echo out; echo err >&2; exit 7")
        return said.split(), there, process.out, process.err, ended.code, ended.signal

    said, there, out, err, code, name = bench.play(scene)
    assert said == ["/workspace", "/home/agent", "agent", "1000", "0022"]
    assert there == "/workspace/d\n"
    assert (out, err, code, name) == ("out\n", "err\n", 7, "")


def test_files_outlive_commands(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        await lab.sh(box, "echo one > f; echo two > ~/f; echo three > /tmp/f")
        return await lab.sh(box, "cat f ~/f /tmp/f; stat -c %u f")

    assert bench.play(scene) == "one\ntwo\nthree\n1000\n"


def test_the_environment_is_minimal_and_never_the_servers(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        plain = await lab.sh(box, "env")
        more = await lab.sh(box, "/usr/bin/env", env={"MINE": "a=b c", "PATH": "/bin"})
        return plain, more, os.environ["SERVER_SECRET"]

    plain, more, control = bench.play(scene)
    assert control == "hidden"
    names = {line.partition("=")[0] for line in plain.splitlines()}
    assert names - {"_", "SHLVL", "OLDPWD"} == {
        "PATH", "HOME", "LANG", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_RUNTIME_DIR",
        "IN_AGENT_SANDBOX", "PWD",
    }  # fmt: skip
    assert "MINE=a=b c\n" in more
    assert "PATH=/bin\n" in more


def test_what_cannot_be_executed_says_so(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        await lab.sh(box, "echo x > plain; printf '#!/bin/sh\\necho ran' > good; chmod +x good")
        found = []
        for word in ("nosuch", "./plain", "/etc", "./good"):
            process, ended = await lab.run(box, word)
            found.append((ended.code, ended.started, process.out + process.err))
        _, ended = await lab.run(box, "true", cwd="/workspace/nowhere")
        return found, ended.started, ended.error

    found, started, error = bench.play(scene)
    assert found == [
        [127, False, "nosuch: command not found\n"],
        [126, False, "./plain: cannot execute\n"],
        [126, False, "/etc: cannot execute\n"],
        [0, True, "ran\n"],
    ]
    assert not started
    assert "working directory" in error


def test_words_of_bwrap_from_the_command_are_the_commands(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        process, ended = await lab.run(
            box, "sh", "-c", "echo 'bwrap: what' >&2; echo x >&2; exit 2"
        )
        return process.err, ended.code, ended.started

    assert bench.play(scene) == ["bwrap: what\nx\n", 2, True]


def test_cannot_pass_for_a_command_that_was_never_executed(bench: Bench) -> None:
    """bwrap's own words, and its exit code. The control: one that is not there."""

    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        words = "bwrap: execvp sh: No such file or directory"
        process, ended = await lab.run(box, "sh", "-c", f"echo '{words}' >&2; exit 1")
        _, control = await lab.run(box, "nosuch")
        return process.err, ended.code, ended.started, ended.error, control.code, control.started

    words = "bwrap: execvp sh: No such file or directory\n"
    assert bench.play(scene) == [words, 1, True, "", 127, False]


def test_a_signal_reaches_the_command_itself(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        trap = "trap 'echo caught; exit 5' USR1; echo up; while :; do sleep 0.01; done"
        process = await lab.start(box, "sh", "-c", trap)
        await process.until("up")
        await process.running.signal(signal.SIGUSR1)
        caught = await process.end()
        other = await lab.start(box, "sh", "-c", "echo up; exec sleep 100")
        await other.until("up")
        await other.running.signal(signal.SIGTERM)
        ended = await other.end()
        return process.out, caught.code, ended.code, ended.signal

    assert bench.play(scene) == ["up\ncaught\n", 5, 143, "SIGTERM"]


def test_kill_ends_all(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        script = "trap '' TERM INT HUP; setsid sleep 91.1 & sleep 91.1 & echo up; wait"
        process = await lab.start(box, "sh", "-c", script)
        await process.until("up")
        for _ in range(1000):
            # The shell has forked them; they may not have become what they will be.
            if before := len(living("91.1")):
                break
            await asyncio.sleep(0.01)
        await process.running.kill()
        ended = await process.end()
        return before > 0, ended.code, ended.signal, await gone("91.1")

    assert bench.play(scene) == [True, 137, "SIGKILL", True]


def test_a_background_child_with_open_pipes_does_not_delay_the_end(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        before = time.monotonic()
        script = "sleep 92.2 & setsid sh -c 'sleep 92.2; echo late' & echo now"
        process, ended = await lab.run(box, "sh", "-c", script)
        return process.out, ended.code, time.monotonic() - before, await gone("92.2")

    out, code, seconds, ended = bench.play(scene)
    assert (out, code, ended) == ("now\n", 0, True)
    assert seconds < 10


def test_input_is_streamed_and_waits_for_the_reader(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        # Reads nothing before it is told to.
        script = "while [ ! -e /tmp/go ]; do sleep 0.01; done; wc -c"
        process = await lab.start(box, "sh", "-c", script, input=True)
        writing = asyncio.ensure_future(process.running.write(bytes(10_000_000)))
        done, _ = await asyncio.wait([writing], timeout=0.3)
        waited = not done
        await lab.write(box, "/tmp/go", b"")
        await writing
        await process.running.close_input()
        ended = await process.end()
        broken = False
        try:
            await process.running.write(b"more")
        except BrokenPipeError:
            broken = True
        return waited, process.out.strip(), ended.code, broken

    assert bench.play(scene) == [True, "10000000", 0, True]


def test_a_writer_is_woken_when_the_command_ends_or_stops_reading(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        found = []
        for script in ("echo up; sleep 0.2", "exec 0<&-; echo up; sleep 5"):
            process = await lab.start(box, "sh", "-c", script, input=True)
            await process.until("up")
            try:
                await asyncio.wait_for(process.running.write(bytes(10_000_000)), 30)
            except BrokenPipeError:
                found.append("broken")
            await process.running.kill()
            await process.end()
        return found

    assert bench.play(scene) == ["broken", "broken"]


def test_without_input_the_end_is_read_at_once(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        return await lab.sh(box, "wc -c")

    assert bench.play(scene).strip() == "0"


def test_much_output_does_not_grow_the_process(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        await lab.run(box, "true")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        process = await lab.start(box, "head", "-c", "100000000", "/dev/zero", keeps=False)
        ended = await process.end()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        return ended.code, sum(process.pieces), len(process.pieces), grown

    code, total, count, grown = bench.play(scene)
    assert (code, total) == (0, 100_000_000)
    # As it comes, and no more than a few pieces at a time.
    assert total / count > 4_000
    assert grown < 20_000


def test_processor_time_and_memory_are_measured(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        code = "import time\nx = bytearray(80 << 20)\nend = time.process_time() + 0.4\n"
        code += "while time.process_time() < end: pass"
        _, busy = await lab.run(box, "sh", "-c", f"python3 -c '{code}'; true")
        _, idle = await lab.run(box, "true")
        return busy.cpu_ms, busy.max_rss_kb, idle.cpu_ms, idle.max_rss_kb

    cpu, rss, idle_cpu, idle_rss = bench.play(scene)
    assert 400 <= cpu < 2000
    assert rss > 80 << 10
    assert idle_cpu < 300
    assert idle_rss < 40 << 10


def test_a_start_that_nobody_waits_for_is_ended(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        task = asyncio.ensure_future(lab.start(box, "sleep", "93.3"))
        await asyncio.sleep(0.001)
        task.cancel()
        results = await asyncio.gather(task, return_exceptions=True)
        await lab.backend.delete(box)
        return isinstance(results[0], asyncio.CancelledError), await gone("93.3")

    assert bench.play(scene) == [True, True]


def test_bad_words_are_refused(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox()
        found = []
        for argv, fields in (
            ((), {}), (("",), {}), (("a\0b",), {}), (("true",), {"env": {"A=B": "c"}}),
            (("true",), {"env": {"A": "b\0c"}}), (("true",), {"cwd": "/a\0b"}),
        ):  # fmt: skip
            try:
                await lab.start(box, *argv, **fields)
            except Problem as problem:
                found.append(problem.code)
        return found

    assert bench.play(scene) == ["INVALID"] * 6


def test_a_network_that_cannot_be_read_is_refused(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        found = []
        for network in (
            Network(mode="on"), Network(mode="allow", allow=("http://x/y z",)),
            Network(mode="learn"),
        ):  # fmt: skip
            try:
                await lab.sandbox("sbx-bad", network=network)
            except Problem as problem:
                found.append((problem.code, problem.field))
        return found, os.listdir(f"{lab.data}/sandboxes")

    found, left = bench.play(scene)
    assert found == [["UNSUPPORTED", "network"], ["INVALID", "network"], ["UNSUPPORTED", "network"]]
    assert left == []


def test_the_first_sandbox_of_a_name_is_the_only_one(bench: Bench) -> None:
    async def scene(lab: Lab) -> object:
        box = await lab.sandbox("sbx-one")
        await lab.write(box, "/workspace/f", b"mine")
        try:
            await lab.sandbox("sbx-one")
        except Problem as problem:
            return problem.code, (await lab.read(box, "/workspace/f")).decode()
        return None

    assert bench.play(scene) == ["CONFLICT", "mine"]
