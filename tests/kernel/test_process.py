"""The command as a process: streams, exit codes, signals, orphans, descriptors, the marker."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import time

import pytest

from conftest import must_work
from kernel.conftest import World, end_group, eventually, running

pytestmark = pytest.mark.kernel

_sleeps = iter(range(10_000, 1_000_000))


@pytest.fixture
def mark() -> str:
    """A number of seconds that only one test of one worker sleeps for."""
    return f"{os.getpid()}{next(_sleeps)}"


def asleep(mark: str) -> list[int]:
    """Who sleeps for that long."""
    return running("sleep", mark)


def line(process: subprocess.Popen[str], seconds: float = 20) -> str:
    """The next line of output, or a failure."""
    assert process.stdout is not None
    # Byte by byte, past the stream's own buffer: what it had read ahead, select would not see.
    fd, read = process.stdout.fileno(), b""
    while not read.endswith(b"\n"):
        assert select.select([fd], [], [], seconds)[0], "no output"
        byte = os.read(fd, 1)
        if not byte:
            break
        read += byte
    return read.decode()


# --- streams and exit codes -----------------------------------------------------------------------


def test_streams_pass_untouched(world: World) -> None:
    """stdin, stdout and stderr are the command's own."""
    done = world.sh("cat; echo err >&2", input="in\n")
    assert (done.stdout, done.stderr) == ("in\n", "err\n")


def test_binary_and_large_streams_pass(world: World) -> None:
    """Several megabytes of every byte value, through pipes on both ends."""
    data = bytes(range(256)) * 16384
    process = world.start("cat", stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=False)
    out, _ = process.communicate(data, 60)  # type: ignore[arg-type]
    assert out == data
    assert process.returncode == 0


def test_a_closed_reader_ends_a_writer(world: World) -> None:
    """SIGPIPE has its default meaning inside: `yes | head` ends."""
    done = world.sh("yes | head -1; echo $?; (yes; echo $? >&2) | head -1 >/dev/null")
    assert done.stdout.splitlines() == ["y", "0"]
    assert done.stderr == "141\n"


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 1", 1), ("exit 42", 42), ("exit 125", 125), ("exit 255", 255),
     ("kill -TERM $$", 143), ("kill -KILL $$", 137), ("kill -SEGV $$", 139), ("kill -INT $$", 130)],
)  # fmt: skip
def test_exit_codes_are_the_commands_own(world: World, script: str, code: int) -> None:
    """128+n when signal n ended it; nothing of ours is printed."""
    done = world.sh(f"ulimit -c 0; {script}")
    assert (done.returncode, done.stderr) == (code, "")


def test_a_missing_command_is_127_and_a_closed_one_126(world: World) -> None:
    """The convention of shells, with a message of ours."""
    world.write("plain", "text")
    world.mkdir("directory")
    for args, code in (
        (("agsbx-no-such-command",), 127),
        (("./absent",), 127),
        (("./plain",), 126),
        (("./directory",), 126),
    ):
        done = world.sandbox(*args)
        assert done.returncode == code, (args, done.stderr)
        assert done.stderr.startswith("agent-sandbox: error: cannot run")


def test_a_command_that_only_the_sandbox_lacks_ends_as_in_a_shell(world: World) -> None:
    """Names in the private home are looked up inside: 127 when they are not there, run when they are."""
    tool = world.home / ".local" / "bin" / "agsbx-tool"
    assert world.sandbox(tool).returncode == 127
    world.sh(
        f"mkdir -p {tool.parent}; printf '#!/bin/sh\\necho inner\\n' > {tool}; chmod +x {tool}"
    )
    assert world.sandbox(tool).stdout == "inner\n"
    assert not tool.exists()


def test_usage_errors_are_125(world: World) -> None:
    """An unknown flag, a flag without its value, a directory that is not there."""
    for args in (("--nope", "true"), ("--ro",), ("-C", "absent", "true"), ("--dry-run=1", "true")):
        done = world.sandbox(*args)
        assert done.returncode == 125, args
        assert done.stderr.startswith("agent-sandbox: error:")


def test_arguments_are_literal(world: World) -> None:
    """No shell of ours looks at them; flags after the command are the command's."""
    words = [
        "a b",
        "$HOME",
        "$(id)",
        "`id`",
        "'\"\\",
        "*",
        "",
        "-h",
        "--network=off",
        "é\n",
        "--",
        "x=y",
    ]
    code = "import sys, json; print(json.dumps(sys.argv[1:]))"
    done = world.sandbox("/usr/bin/python3", "-c", code, *words)
    assert json.loads(done.stdout) == words


def test_a_command_with_an_equals_sign_is_a_command(world: World) -> None:
    """`env` inside must not take it for a variable."""
    world.write("a=b", "#!/bin/sh\necho ran $1\n", 0o755)
    assert world.sandbox("./a=b", "x").stdout == "ran x\n"
    assert world.sandbox(world.project / "a=b", "x").stdout == "ran x\n"


def test_the_end_of_options_is_respected(world: World) -> None:
    """`--` ends our flags; a command may begin with a dash."""
    world.write("-tool", "#!/bin/sh\necho ran\n", 0o755)
    env = {"PATH": f"{world.project}:/usr/bin:/bin"}
    assert world.sandbox("--", "-tool", env=env).stdout == "ran\n"


# --- signals --------------------------------------------------------------------------------------

TRAP = "trap 'echo got {name}; exit 9' {name}; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT", "USR1"])
def test_the_first_signal_reaches_the_commands_handler(world: World, name: str) -> None:
    """A signal sent to the supervisor runs the command's own trap, and its exit code counts."""
    process = world.start("sh", "-c", TRAP.format(name=name), stdout=subprocess.PIPE)
    try:
        assert line(process) == "ready\n"
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert line(process) == f"got {name}\n"
        assert process.wait(20) == 9
    finally:
        end_group(process)
    assert world.workspaces() == []


@pytest.mark.parametrize(("name", "code"), [("TERM", 143), ("INT", 130), ("HUP", 129)])
def test_a_signal_ends_a_command_without_handler(
    world: World, mark: str, name: str, code: int
) -> None:
    """128+n, at once, and nothing survives."""
    process = world.start("sleep", mark)
    try:
        assert eventually(lambda: asleep(mark))
        time.sleep(0.1)
        process.send_signal(getattr(signal, f"SIG{name}"))
        assert process.wait(10) == code
        assert asleep(mark) == []
    finally:
        end_group(process)


def test_a_second_signal_kills(world: World, mark: str) -> None:
    """A command that ignores the first is ended by the second, without the ten seconds."""
    script = f"trap '' TERM INT; echo ready; sleep {mark} & wait; wait; sleep {mark}"
    process = world.start("sh", "-c", script, stdout=subprocess.PIPE)
    try:
        assert line(process) == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 137
        assert asleep(mark) == []
    finally:
        end_group(process)
    assert world.workspaces() == []


@pytest.mark.slow
def test_a_command_that_ignores_the_signal_has_ten_seconds(world: World, mark: str) -> None:
    """Then it is killed."""
    process = world.start(
        "sh", "-c", f"trap '' TERM; echo ready; sleep {mark}", stdout=subprocess.PIPE
    )
    try:
        assert line(process) == "ready\n"
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 137
        assert 9 < time.monotonic() - started < 15
        assert asleep(mark) == []
    finally:
        end_group(process)


def test_timeout_from_coreutils_works(world: World, mark: str) -> None:
    """`timeout 1 agent-sandbox …` signals us and our group: the handler runs once, 124 comes back."""
    must_work(shutil.which("timeout"), "needs timeout")
    script = f"trap 'echo trapped; exit 0' TERM; sleep {mark} & wait"
    done = world.outside("timeout", "1", *world.argv("sh", "-c", script))
    # Its group is signalled as well, and the trap may see both.
    assert (set(done.stdout.split()), done.returncode) == ({"trapped"}, 124)
    assert asleep(mark) == []


def test_an_ignored_hangup_stays_ignored(world: World) -> None:
    """nohup: neither we nor the command die of SIGHUP."""
    script = "grep SigIgn /proc/self/status; echo ready; read x; echo done"
    process = world.runner.popen(
        ["sh", "-c", "trap '' HUP; exec \"$@\"", "-", *world.argv("sh", "-c", script)],
        cwd=world.project, env=world.env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        ignored = int(line(process).split()[1], 16)
        assert ignored & 1
        assert line(process) == "ready\n"
        process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        out, _ = process.communicate("\n", 20)
        assert out == "done\n"
    finally:
        end_group(process)


def test_signal_dispositions_inside_are_the_defaults(world: World) -> None:
    """Nothing that we ignore or block for ourselves is inherited."""
    done = world.sandbox("grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status")
    blocked, ignored = (int(word, 16) for word in done.stdout.split()[1::2])
    # glibc's posix_spawn leaves its two internal real-time signals, 32 and 33, ignored.
    assert (blocked, ignored & ~(0b11 << 31)) == (0, 0)


@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_during_the_start_is_no_crash(world: World, mark: str, name: str) -> None:
    """From the first directory made on: no traceback, no lost signal, nothing left."""
    number = getattr(signal, f"SIG{name}")
    for delay in (0, 0.01, 0.03, 0.05):
        shutil.rmtree(world.state, ignore_errors=True)
        process = world.start("sleep", mark, stderr=subprocess.PIPE)
        assert eventually(world.state.exists)
        time.sleep(delay)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
        assert "Traceback" not in err, err
        assert process.returncode in (-number, 128 + number), delay
        assert asleep(mark) == []
        assert world.sh("true").returncode == 0
        assert world.workspaces() == []


# --- orphans --------------------------------------------------------------------------------------


def test_nothing_survives_the_command(world: World, mark: str) -> None:
    """A daemonised grandchild dies with the sandbox."""
    script = f"setsid sleep {mark} >/dev/null 2>&1 & nohup sleep {mark} >/dev/null 2>&1 & sleep 0.1; exit 3"
    assert world.sh(script).returncode == 3
    assert asleep(mark) == []


@pytest.mark.parametrize("victim", ["supervisor", "bwrap", "init", "keeper"])
def test_nothing_survives_kill_9(world: World, mark: str, victim: str) -> None:
    """Of the supervisor, of bwrap, of the sandbox's pid 1, or of what holds its mounts."""
    process = world.start("sh", "-c", f"setsid sleep {mark} & sleep {mark}")
    try:
        assert eventually(lambda: len(asleep(mark)) == 2)
        (bwrap,) = (pid for pid in children(process.pid) if children(pid))
        (keeper,) = (pid for pid in children(process.pid) if pid != bwrap)
        (init,) = children(bwrap)
        pid = {"supervisor": process.pid, "bwrap": bwrap, "init": init, "keeper": keeper}[victim]
        os.kill(pid, signal.SIGKILL)
        assert eventually(lambda: not asleep(mark))
        assert process.wait(10) in (-9, 137)
        assert eventually(lambda: not os.path.exists(f"/proc/{keeper}"))
    finally:
        end_group(process)
    assert world.sh("true").returncode == 0
    assert world.workspaces() == []


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as file:
            found += [int(word) for word in file.read().split()]
    return found


def test_a_background_child_that_holds_a_pipe_does_not_hang_the_end(
    world: World, mark: str
) -> None:
    """It dies with the command, and so the reader of the pipe sees its end."""
    started = time.monotonic()
    done = world.sh(f"sleep {mark} & echo out; exit 5")
    assert (done.stdout, done.returncode) == ("out\n", 5)
    assert time.monotonic() - started < 15
    assert asleep(mark) == []


def test_cannot_signal_the_callers_process_group(world: World) -> None:
    """kill(0, 9) inside ends the sandbox only; in plain bwrap it ends the caller, too."""
    kill = ["/usr/bin/python3", "-c", "import os; os.kill(0, 9)"]

    def caller(argv: list[str]) -> subprocess.CompletedProcess[str]:
        return world.outside("sh", "-c", '"$@"; echo survived $?', "-", *argv)

    bare = ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--dev", "/dev", *kill]
    assert "survived" not in caller(bare).stdout
    if "scopes on" not in world.sandbox("--debug", "true").stderr:
        must_work(False, "needs Landlock with scopes (Linux 6.12)")
    assert caller(world.argv(*kill)).stdout == "survived 137\n"
    assert world.workspaces() == []


# --- inherited authority --------------------------------------------------------------------------


def test_cannot_use_inherited_descriptors(world: World) -> None:
    """A directory the caller left open is not there inside; plain bwrap, the control, hands it on."""
    world.write("~/outside", "secret")
    fd = os.open(world.home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        look = ["sh", "-c", f"cat /proc/self/fd/{fd}/outside; ls /proc/self/fd | wc -l"]
        options = {"pass_fds": [fd], "stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        bare = ["bwrap", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", *look]
        control = world.runner.popen(bare, stderr=subprocess.DEVNULL, **options)
        assert control.communicate(timeout=20)[0].startswith("secret")
        process = world.start(*look, stderr=subprocess.DEVNULL, **options)
        out = process.communicate(timeout=20)[0]
        # 0, 1, 2 and the directory that `ls` itself reads.
        assert out == "4\n"
    finally:
        os.close(fd)


def test_a_preloaded_library_does_not_run_on_the_host_side(world: World) -> None:
    """LD_PRELOAD for the command must not reach bwrap, which runs outside."""
    must_work(shutil.which("cc"), "needs a C compiler")
    source = world.write(
        "evil.c",
        "#include <stdio.h>\n#include <unistd.h>\n"
        "__attribute__((constructor)) static void f(void) {\n"
        f'  FILE *o = fopen("{world.home}/pwned", "w"); if (o) fclose(o);\n'
        f'  FILE *i = fopen("{world.project}/loaded", "w"); if (i) fclose(i);\n'
        "}\n",
    )
    library = world.project / "evil.so"
    world.outside("cc", "-shared", "-fPIC", "-o", library, source)
    assert library.exists()
    control = world.outside("true", env={"LD_PRELOAD": str(library)})
    assert control.returncode == 0
    assert world.path("~/pwned").exists()
    world.path("~/pwned").unlink()
    world.path("loaded").unlink()
    world.sandbox("--env", f"LD_PRELOAD={library}", "true")
    assert world.path("loaded").exists()
    assert not world.path("~/pwned").exists()
    world.path("loaded").unlink()
    world.global_config(f'[env]\nset = {{ LD_PRELOAD = "{library}" }}\n')
    assert world.sandbox("true").returncode == 0
    assert world.path("loaded").exists()
    assert not world.path("~/pwned").exists()


# --- the marker, nesting, the escape hatch --------------------------------------------------------


def inner(world: World, *args: str) -> str:
    return " ".join(world.argv(*args))


def test_check_tells_inside_from_outside(world: World) -> None:
    """--check prints where it is: 0 inside, 1 outside; a variable does not fool it."""
    done = world.sandbox("--check", env={"IN_AGENT_SANDBOX": "1"})
    assert (done.stdout, done.returncode) == ("outside sandbox\n", 1)
    source = str(world.runner.source)
    done = world.sh(f"unset IN_AGENT_SANDBOX; {inner(world, '--check')}", "--ro", source)
    assert (done.stdout, done.returncode) == ("inside sandbox\n", 0), done.stderr


def test_cannot_remove_the_marker(world: World) -> None:
    """Neither by rm, nor by mv, nor by a policy that covers it."""
    script = """
        m=/run/agent-sandbox
        rm -f $m/marker; rm -rf $m; mv $m $m.old; echo x > $m/marker; chmod 777 $m; mv /run /run2
        umount $m/marker; mount -t tmpfs none $m
        [ -e $m/marker ] && echo there
    """
    assert world.sh(script).stdout == "there\n"
    for flags in (("--exclude", "/run"), ("--rw", "/run"), ("--ro", "/run/agent-sandbox")):
        done = world.sh("[ -e /run/agent-sandbox/marker ] && echo there", *flags)
        assert done.returncode == 125 or done.stdout == "there\n"


def test_a_nested_start_is_a_clear_error(world: World) -> None:
    """125 and a hint, instead of a failure of bwrap."""
    done = world.sh(inner(world, "true"), "--ro", str(world.runner.source))
    assert done.returncode == 125
    assert "inside a sandbox" in done.stderr
    assert "hint:" in done.stderr


def test_the_escape_hatch_runs_plain_and_says_so(world: World) -> None:
    """AGENT_SANDBOX=false: no sandbox, one line on stderr, the command's exit code."""
    world.write("~/document", "d")
    done = world.sh("cat ~/document; exit 4", env={"AGENT_SANDBOX": "false"})
    assert (done.stdout, done.returncode) == ("d", 4)
    assert done.stderr == "agent-sandbox: notice: AGENT_SANDBOX is off: running without a sandbox\n"
    assert world.sandbox("agsbx-none", env={"AGENT_SANDBOX": "false"}).returncode == 127


def test_cannot_take_the_escape_hatch_from_a_file(world: World) -> None:
    """A policy that sets the variable changes the command's environment, not the sandbox."""
    world.global_config('[env]\nset = { AGENT_SANDBOX = "false" }\n')
    assert world.sh("[ -e /run/agent-sandbox/marker ]").returncode == 0


# --- timeout --------------------------------------------------------------------------------------


def test_a_timeout_ends_the_command_with_124(world: World, mark: str) -> None:
    """SIGTERM first, so that the handler runs; then 124 and a notice."""
    script = f"trap 'echo trapped; exit 0' TERM; sleep {mark} & wait"
    done = world.sh(script, "--timeout", "0.5")
    # Its group is signalled as well, and the trap may see both.
    assert (set(done.stdout.split()), done.returncode) == ({"trapped"}, 124)
    assert "--timeout" in done.stderr
    assert asleep(mark) == []
    assert world.sh("exit 3", "--timeout", "1m").returncode == 3


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "1x", ""])
def test_bad_timeouts_are_errors(world: World, value: str) -> None:
    """A limit that means nothing is refused."""
    assert world.sh("touch ran", f"--timeout={value}").returncode == 125
    assert not world.path("ran").exists()


def test_works_with_closed_standard_streams(world: World) -> None:
    """A caller that closed stdin, stdout or stderr gets the command's result all the same."""
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        script = f'"$@" {closed}; echo $? > code'
        world.outside("sh", "-c", script, "-", *world.argv("sh", "-c", "echo x > made; exit 6"))
        assert world.path("code").read_text() == "6\n", closed
        assert world.path("made").read_text() == "x\n", closed
        world.path("made").unlink()


def test_a_login_shell_keeps_the_path(world: World) -> None:
    """/etc/profile starts PATH anew; agents run their commands through `bash -lc`."""
    tools = world.write("tools/mine", "#!/bin/sh\necho found\n", 0o755).parent
    path = f"{tools}:/usr/bin:/bin"
    done = world.sandbox("bash", "-lc", "mine", env={"PATH": path})
    assert done.stdout == "found\n", done.stderr


def test_flags_without_a_command_are_an_error(world: World) -> None:
    """An empty variable in a script must not look like success."""
    done = world.sandbox("--network=off")
    assert (done.returncode, done.stdout) == (125, "")
    assert "no command" in done.stderr
    assert world.sandbox().returncode == 0


def test_a_reader_that_goes_away_is_no_bug(world: World) -> None:
    """`agent-sandbox --help | true`."""
    quoted = " ".join(world.argv("--help"))
    done = world.outside("bash", "-c", f"{quoted} | true; echo ${{PIPESTATUS[0]}}")
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


KEY = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
call = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
if sys.argv[1] == "add":
    libc.syscall(call[2], 1, 0)
    assert libc.syscall(call[0], b"user", b"agsbx", b"KEYSECRET", 9, -3) > 0
    os.execvp(sys.argv[2], sys.argv[2:])
found = libc.syscall(call[1], b"user", b"agsbx", 0, 0)
data = ctypes.create_string_buffer(64)
got = libc.syscall(call[2], 11, found, data, 64) if found > 0 else -1
print("read", data.raw[:9].decode() if got > 0 else "nothing")
"""


def test_cannot_read_the_callers_session_keyring(world: World) -> None:
    """Whoever possesses a keyring may read its keys; the control inherits it."""
    key = str(world.write("key.py", KEY))
    python = world.runner.python
    control = world.outside(python, key, "add", python, key, "read")
    must_work("KEYSECRET" in control.stdout, f"no keyrings here: {control.stderr}")
    done = world.outside(python, key, "add", *world.argv("/usr/bin/python3", key, "read"))
    assert done.stdout == "read nothing\n", done.stderr


def test_cannot_open_a_socket_to_the_hypervisor(world: World) -> None:
    """vsock is in no network namespace."""
    attempt = "import socket; socket.socket(40, socket.SOCK_STREAM)"
    done = world.sandbox("--network=off", "/usr/bin/python3", "-c", attempt)
    assert "Address family not supported" in done.stderr
