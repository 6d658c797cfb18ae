"""The library as programs use it: each test runs a small program on the host as the identity."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from kernel.conftest import World, eventually, running

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.kernel

HEAD = """
import asyncio, json, os, signal, subprocess, sys, threading, time
from agent_sandbox import *
def show(value): print(json.dumps(value), flush=True)
"""


# How long a command sleeps that must not survive: a number of this worker alone.
MARK = f"7{os.getpid()}"


def program(
    world: World, body: str, *args: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program that uses the library, in the project."""
    return world.python(HEAD + textwrap.dedent(body.replace("MARK", MARK)), *args, **options)


def result(world: World, body: str, *args: str, **options: Any) -> Any:
    """What such a program shows."""
    done = program(world, body, *args, **options)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def test_can_run_and_capture(world: World) -> None:
    """Output, exit code, argv and duration come back; nothing is printed."""
    got = result(
        world,
        """
        r = Sandbox(Policy(project=".")).run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture=True)
        show([r.stdout, r.stderr, r.out.decode(), r.code, r.ok, r.signal, r.timed_out, list(r.argv)[0], r.duration > 0])
        """,
    )
    assert got == ["out\n", "err\n", "out\n", 3, False, None, False, "sh", True]


def test_can_give_input(world: World) -> None:
    """Text or bytes, also more than a pipe holds, to a command that answers as much."""
    got = result(
        world,
        """
        s = Sandbox()
        big = b"x" * 3_000_000
        show([s.run(["cat"], input="héllo", capture=True).stdout, s.run(["cat"], input=big, capture=True).out == big,
              s.run(["cat"], capture=True).stdout])
        """,
    )
    assert got == ["héllo", True, ""]


def test_streams_are_inherited_without_capture(world: World) -> None:
    """The command's output goes where the program's goes."""
    done = program(world, 'r = Sandbox().run(["echo", "direct"]); assert r.out == b""')
    assert done.stdout == "direct\n"


def test_a_policy_is_enforced(world: World) -> None:
    """network, write, read, exclude, env and keep_env are what they say."""
    world.write("hidden", "s")
    world.write("~/data/f", "s")
    world.write("~/ro/f", "s")
    got = result(
        world,
        """
        p = Policy(project=".", network="off", write=["~/data"], read=["~/ro"], exclude=["hidden"],
                   env={"A": "1", "LANG": None}, keep_env=["KEPT"])
        r = Sandbox(p).run(["sh", "-c", '''
            grep -c : /proc/net/dev; cat hidden || echo closed; echo x > ~/data/f; cat ~/ro/f; echo x > ~/ro/f || echo fixed
            echo $A ${LANG-none} $KEPT ${OTHER-none}'''], capture=True)
        show(r.stdout.split())
        """,
        env={"KEPT": "k", "OTHER": "o"},
    )
    assert got == ["1", "closed", "sfixed", "1", "none", "k", "none"]
    assert world.path("~/data/f").read_text() == "x\n"
    assert world.path("~/ro/f").read_text() == "s"


def test_can_choose_directory_and_variables_per_run(world: World) -> None:
    """cwd and env of one run do not touch the next."""
    world.mkdir("sub")
    got = result(
        world,
        """
        s = Sandbox(Policy(env={"A": "1"}))
        one = s.run(["sh", "-c", "pwd; echo ${A-none} ${B-none}"], cwd="sub", env={"B": "2", "A": None}, capture=True)
        two = s.run(["sh", "-c", "pwd; echo ${A-none} ${B-none}"], capture=True)
        show([one.stdout.split(), two.stdout.split()])
        """,
    )
    assert got == [[f"{world.project}/sub", "none", "2"], [str(world.project), "1", "none"]]


def test_a_timeout_is_a_result(world: World) -> None:
    """124, timed_out, what was written so far, and nobody left."""
    got = result(
        world,
        """
        r = Sandbox().run(["sh", "-c", "trap 'echo term; exit 0' TERM; echo begun; sleep MARK & wait"], capture=True, timeout=0.5)
        q = Sandbox(Policy(timeout=0.3)).run(["sleep", "MARK"])
        show([r.code, r.timed_out, r.stdout, r.duration < 9, q.code])
        """,
    )
    assert got == [124, True, "begun\nterm\n", True, 124]
    assert running("sleep", MARK) == []


def test_check_raises_with_the_result(world: World) -> None:
    """CommandFailed carries the Result; success returns it."""
    got = result(
        world,
        """
        s = Sandbox()
        s.run(["true"], check=True)
        try: s.run(["sh", "-c", "echo why; exit 5"], capture=True, check=True)
        except CommandFailed as e: show([e.result.code, e.result.stdout, e.code, isinstance(e, SandboxError)])
        """,
    )
    assert got == [5, "why\n", "command-failed", True]


def test_errors_are_exceptions(world: World) -> None:
    """With message, hint and a stable code; nothing prints and nothing exits."""
    got = result(
        world,
        """
        cases = [
            lambda: Sandbox(Policy(network="sometimes")),
            lambda: Sandbox(Policy(write="oops")),
            lambda: Sandbox(Policy(project="absent")).run(["true"]),
            lambda: Sandbox(Policy(docker=True)).run(["true"]),
            lambda: Sandbox(Policy(presets=["@nope"])).run(["true"]),
            lambda: Sandbox().run(["agsbx-no-such"]),
            lambda: Sandbox().run("true"),
            lambda: Sandbox().run([]),
            lambda: Sandbox().run(["a\\0b"]),
            lambda: Sandbox(Policy(exclude=["."])).run(["true"]),
            lambda: Sandbox(Policy(config="absent.toml")).run(["true"]),
        ]
        found = []
        for case in cases:
            try: case(); found.append("no error")
            except SandboxError as e: found.append([type(e).__name__, bool(e.message), isinstance(e.hint, str), e.code])
        show(found)
        """,
        env={"DOCKER_HOST": "unix:///nowhere"},
    )
    assert [item[3] for item in got] == [
        "bad-value", "bad-value", "bad-cwd", "docker-socket-missing", "unknown-preset", "command-not-found",
        "bad-value", "no-command", "bad-value", "cwd-excluded", "config-missing",
    ]  # fmt: skip
    assert all(item[1] and item[2] for item in got)
    assert got[5][0] == "CommandError"


def test_can_stream_a_running_command(world: World) -> None:
    """popen: lines as they come, input while it runs, the code at the end."""
    got = result(
        world,
        """
        with Sandbox().popen(["sh", "-c", "echo one; read x; echo got $x; exit 4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as p:
            lines = p.lines()
            first = next(lines).decode()
            running = p.poll()
            p.stdin.write(b"two\\n"); p.stdin.flush()
            rest = [l.decode() for l in lines]
            show([first, running, rest, p.wait(), p.poll()])
        """,
    )
    assert got == ["one\n", None, ["got two\n"], 4, 4]
    assert world.workspaces() == []


def test_can_signal_and_kill_a_running_command(world: World) -> None:
    """terminate runs the handler, kill ends all, leaving the block cleans up."""
    got = result(
        world,
        """
        s = Sandbox()
        p = s.popen(["sh", "-c", "trap 'exit 9' TERM; echo r; while :; do sleep 0.05; done"], stdout=subprocess.PIPE)
        p.stdout.readline(); p.terminate(); one = p.wait(10); p.close()
        q = s.popen(["sh", "-c", "trap '' TERM; echo r; sleep MARK & sleep MARK"], stdout=subprocess.PIPE)
        q.stdout.readline(); q.terminate(); q.kill(); two = q.wait(10); q.close()
        with s.popen(["sh", "-c", "echo r; sleep MARK"], stdout=subprocess.PIPE) as r: r.stdout.readline()
        try: s.popen(["sleep", "MARK"]).wait(0.2)
        except subprocess.TimeoutExpired: late = True
        show([one, two, late])
        """,
    )
    assert got == [9, 137, True]
    assert running("sleep", MARK) == []
    world.sh("true")
    assert world.workspaces() == []


def test_can_wrap_a_command_for_another_spawner(world: World) -> None:
    """argv, fds and env are all that subprocess needs; cwd and variables are kept, nothing leaks."""
    world.mkdir("sub")
    world.write("~/secret", "s")
    got = result(
        world,
        """
        leak = os.open(os.path.expanduser("~"), os.O_RDONLY); os.set_inheritable(leak, True)
        with Sandbox(Policy(env={"A": "1"})).wrap(["sh", "-c", f"pwd; echo $A; cat ~/secret /proc/self/fd/{leak}/secret; ls /proc/self/fd | wc -l; exit 6"], cwd="sub") as w:
            done = subprocess.run(w.argv, pass_fds=(*w.fds, leak), env=w.env, capture_output=True, text=True)
        w.close()
        show([done.stdout.split(), done.returncode])
        """,
    )
    assert got == [[f"{world.project}/sub", "1", "4"], 6]
    assert world.workspaces() == []


def test_a_wrapped_command_dies_with_its_starter(world: World) -> None:
    """die-with-parent holds there, too."""
    done = program(
        world,
        """
        w = Sandbox().wrap(["sh", "-c", "echo r; sleep MARK"])
        p = subprocess.Popen(w.argv, pass_fds=w.fds, env=w.env, stdout=subprocess.PIPE)
        p.stdout.readline()
        os.kill(os.getpid(), 9)
        """,
    )
    assert done.returncode == -9
    assert eventually(lambda: not running("sleep", MARK))


def test_can_run_asynchronously(world: World) -> None:
    """arun and several at once; the loop goes on meanwhile."""
    got = result(
        world,
        """
        async def main():
            s = Sandbox()
            ticks = 0
            async def tick():
                nonlocal ticks
                while True: await asyncio.sleep(0.01); ticks += 1
            t = asyncio.create_task(tick())
            began = time.monotonic()
            rs = await asyncio.gather(*(s.arun(["sh", "-c", f"sleep 0.3; echo {n}"], capture=True) for n in range(4)))
            took = time.monotonic() - began
            t.cancel()
            show([[r.stdout for r in rs], ticks > 5, took < 1.1])
        asyncio.run(main())
        """,
    )
    assert got == [["0\n", "1\n", "2\n", "3\n"], True, True]


def test_cancelling_kills(world: World) -> None:
    """A cancelled arun leaves neither process nor workspace, and raises CancelledError soon."""
    got = result(
        world,
        """
        async def main():
            s = Sandbox()
            task = asyncio.create_task(s.arun(["sh", "-c", "trap '' TERM; sleep MARK"]))
            await asyncio.sleep(0.4)
            began = time.monotonic()
            task.cancel()
            try: await task
            except asyncio.CancelledError: show(["cancelled", time.monotonic() - began < 3])
            try: await asyncio.wait_for(s.arun(["sleep", "MARK"]), 0.3)
            except TimeoutError: pass
        asyncio.run(main())
        """,
    )
    assert got == ["cancelled", True]
    assert running("sleep", MARK) == []
    assert world.workspaces() == []


def test_can_talk_to_a_command_asynchronously(world: World) -> None:
    """apopen: asyncio streams in both directions."""
    got = result(
        world,
        """
        async def main():
            async with await Sandbox().apopen(["sh", "-c", "read x; echo got $x; echo e >&2; exit 3"]) as p:
                p.stdin.write(b"hello\\n"); await p.stdin.drain()
                out = await p.stdout.readline(); err = await p.stderr.readline()
                show([out.decode(), err.decode(), await p.wait()])
        asyncio.run(main())
        """,
    )
    assert got == ["got hello\n", "e\n", 3]
    assert world.workspaces() == []


def test_leaving_an_asynchronous_block_kills(world: World) -> None:
    """As with the synchronous one."""
    program(
        world,
        """
        async def main():
            async with await Sandbox().apopen(["sh", "-c", "echo r; sleep MARK"]) as p:
                await p.stdout.readline()
        asyncio.run(main())
        """,
    )
    assert running("sleep", MARK) == []
    assert world.workspaces() == []


def test_threads_can_share_a_sandbox(world: World) -> None:
    """Eight threads, three runs each, one Sandbox: every output is its own."""
    got = result(
        world,
        """
        s = Sandbox()
        found = []
        def work(n):
            for i in range(3):
                r = s.run(["sh", "-c", f"echo {n}-{i} > /tmp/f; sleep 0.02; cat /tmp/f"], capture=True)
                found.append(r.stdout == f"{n}-{i}\\n" and r.ok)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        show([len(found), all(found)])
        """,
    )
    assert got == [24, True]
    assert world.workspaces() == []


def test_a_command_outlives_the_thread_that_started_it(world: World) -> None:
    """die-with-parent follows a thread: ours must not be the caller's."""
    got = result(
        world,
        """
        s, box = Sandbox(), []
        def go(): box.append(s.popen(["sh", "-c", "sleep 0.5; exit 8"]))
        t = threading.Thread(target=go); t.start(); t.join()
        time.sleep(0.1)
        show(box[0].wait(10))
        """,
    )
    assert got == 8


def test_the_program_keeps_its_own_powers(world: World) -> None:
    """Neither Landlock nor no_new_privs nor descriptors of ours stay with the program."""
    got = result(
        world,
        """
        s = Sandbox()
        s.run(["true"])
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(5): s.run(["true"])
        status = open("/proc/self/status").read()
        show([sorted(os.listdir("/proc/self/fd")) == before, "NoNewPrivs:\\t0" in status, signal.getsignal(2) is signal.default_int_handler])
        """,
    )
    assert got == [True, True, True]


def test_a_command_has_no_controlling_terminal_of_the_program(world: World) -> None:
    """It runs in a session of its own: the program's Ctrl-C stays the program's."""
    got = result(
        world,
        """
        r = Sandbox().run(["sh", "-c", "cut -d' ' -f6 /proc/self/stat; true < /dev/tty || echo none"], capture=True)
        show(r.stdout.split())
        """,
    )
    assert got[-1] == "none"


def test_policy_files_are_read_only_when_asked(world: World) -> None:
    """config=False ignores files, True reads them as the command line does, a path names one."""
    world.write("f", "s")
    world.project_config('[filesystem]\nexclude = ["f"]\n')
    given = world.write("~/given.toml", '[filesystem]\nro = ["f"]\n')
    got = result(
        world,
        """
        def code(config, script): return Sandbox(Policy(config=config)).run(["sh", "-c", script], capture=True).code
        show([code(False, "cat f"), code(True, "cat f") != 0, code(sys.argv[1], "cat f"), code(sys.argv[1], "echo x > f") != 0])
        """,
        str(given),
    )
    assert got == [0, True, 0, True]


def test_notices_are_values(world: World) -> None:
    """What the command line prints as a notice is in Result.notices."""
    got = result(world, 'show(list(Sandbox(Policy(read=["~/absent"])).run(["true"]).notices))')
    assert len(got) == 1
    assert "~/absent" in got[0]


def test_plan_starts_nothing(world: World) -> None:
    """plan() tells what would be, and leaves no trace."""
    got = result(
        world,
        """
        made = Sandbox(Policy(network="off")).plan(["touch", "x"]).plan
        show([made.network, made.cwd])
        """,
    )
    assert got == [False, str(world.project)]
    assert os.listdir(world.project) == []
    assert not world.state.exists()


def test_a_killed_program_leaves_no_process(world: World) -> None:
    """kill -9 of the program: its sandboxes die, the next start sweeps their workspaces."""
    done = program(
        world,
        """
        p = Sandbox().popen(["sh", "-c", "echo r; setsid sleep MARK & sleep MARK"], stdout=subprocess.PIPE)
        p.stdout.readline()
        os.kill(os.getpid(), 9)
        """,
    )
    assert done.returncode == -9
    assert eventually(lambda: not running("sleep", MARK))
    world.sh("true")
    assert world.workspaces() == []


@pytest.mark.parametrize(
    "call",
    [
        'box.run(["true"], env={"X": "a\\0--bind\\0/\\0/tmp/host"})',
        'box.run(["true"], cwd="sub\\0--bind\\0/\\0/tmp/host")',
        'Sandbox(Policy(env={"X": "a\\0b"})).run(["true"])',
        'Sandbox(environ={"LANG": "C\\0--bind\\0/\\0/tmp/host", "PATH": "/usr/bin"}).run(["true"])',
    ],
)
def test_cannot_inject_options_with_a_nul(world: World, call: str) -> None:
    """bwrap's arguments are separated by NULs; JSON can carry one into a value."""
    code = (
        "from agent_sandbox import *\nbox = Sandbox(Policy())\n"
        f"try:\n    {call}\nexcept SandboxError as error:\n    print('refused', error.code)\n"
    )
    assert world.python(code).stdout.startswith("refused")


KILL_KEEPER = """
from agent_sandbox.sandbox import starting
def keepers():
    with open(f"/proc/{starting._server._child}/task/{starting._server._child}/children") as file:
        return [int(word) for word in file.read().split()]
def kill_keeper():
    while not keepers(): time.sleep(0.005)
    for pid in keepers(): os.kill(pid, signal.SIGKILL)
def runs(pid):
    try: return open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0") == [b"sleep", b"MARK", b""]
    except OSError: return False
def kill_keeper_of_command():
    # Not earlier: a start whose keeper is killed fails.
    while not any(runs(pid) for pid in os.listdir("/proc") if pid.isdigit()): time.sleep(0.01)
    kill_keeper()
"""
# What the program does while its sandbox runs.
WAITS = {
    "run": """
        threading.Thread(target=kill_keeper_of_command).start()
        r = box.run(["sleep", "MARK"], timeout=20)
        show([r.exceeded, r.code])
    """,
    "wait": """
        with box.popen(["sleep", "MARK"]) as process:
            kill_keeper()
            code = process.wait(20)
        show([process.exceeded, code])
    """,
    "read": """
        with box.popen(["sleep", "MARK"], stdout=subprocess.PIPE) as process:
            threading.Timer(20, process.kill).start()
            kill_keeper()
            process.stdout.read()
            show([process.exceeded, process.wait()])
            os._exit(0)
    """,
    "arun": """
        threading.Thread(target=kill_keeper_of_command).start()
        r = asyncio.run(box.arun(["sleep", "MARK"], timeout=20))
        show([r.exceeded, r.code])
    """,
    "apopen": """
        async def main():
            async with await box.apopen(["sleep", "MARK"]) as process:
                kill_keeper()
                await asyncio.wait_for(process.stdout.read(), 20)
                show([await process.wait(), process.exceeded][::-1])
        asyncio.run(main())
    """,
}


@pytest.mark.parametrize("way", WAITS)
def test_a_sandbox_ends_with_what_holds_its_mounts(world: World, way: str) -> None:
    """Whatever the program waits for; as on the command line."""
    done = program(world, KILL_KEEPER + "box = Sandbox()\n" + textwrap.dedent(WAITS[way]))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["keeper", 137]
    assert done.stderr == ""
    assert running("sleep", MARK) == []
    assert world.workspaces() == []


def test_a_sandbox_would_live_on_without_what_holds_its_mounts(world: World) -> None:
    """The control: nobody watches."""
    body = """
        Process._tend = lambda *_: None
        with Sandbox().popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            kill_keeper()
            while keepers(): time.sleep(0.005)
            process.stdin.write(b"alive")
            process.stdin.close()
            show([process.stdout.read().decode(), process.wait(20), process.exceeded])
    """
    assert result(world, KILL_KEEPER + textwrap.dedent(body)) == ["alive", 0, ""]
