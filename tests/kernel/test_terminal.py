"""The terminal as people use it, driven through tmux: job control, keys, resize, full screen."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import itertools
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conftest import must_work
from kernel.conftest import World, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kernel


class Terminal:
    """A shell in a tmux window of the identity, with `as` as agent-sandbox."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sockets = world.mkdir(world.base / "tmux")
        self._ids = itertools.count()
        tool = world.write(
            world.base / "as", "#!/bin/sh\nexec " + " ".join(world.argv()) + ' "$@"\n', 0o755
        )
        shell = f"env PS1='outer> ' PATH={tool.parent}:/usr/bin:/bin bash --norc --noprofile"
        self._tmux("new-session", "-d", "-x", "100", "-y", "30", "-c", str(world.project), shell)
        self.expect("outer>")

    def _tmux(self, *args: str) -> str:
        env = {"TMUX_TMPDIR": str(self.sockets), "TERM": "xterm"}
        done = self.world.outside("tmux", "-f", "/dev/null", "-L", "t", *args, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press keys by tmux's names."""
        self._tmux("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type a line."""
        self._tmux("send-keys", "-l", text)
        self.keys("Enter")

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-S", "-200")

    def expect(self, text: str, seconds: float = 15) -> None:
        """Wait until a text is on the screen."""
        assert eventually(lambda: text in self.screen(), seconds), (
            f"no {text!r} in:\n{self.screen()}"
        )

    def answer(self, prompt: str) -> None:
        """Wait until the shell with that prompt answers: it is in the foreground and reads."""
        number = next(self._ids)
        self.type(f"echo at-{number}-$((40 + 2))")
        self.expect(f"at-{number}-42")
        assert self.screen().rstrip().endswith(prompt.rstrip()), self.screen()

    def resize(self, columns: int, rows: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def is_full_screen(self) -> bool:
        return self._tmux("display-message", "-p", "#{alternate_on}").strip() == "1"

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def terminal(world: World) -> Iterator[Terminal]:
    must_work(shutil.which("tmux"), "needs tmux")
    opened = Terminal(world)
    yield opened
    opened.close()


def inner_shell(terminal: Terminal) -> None:
    terminal.type("as --env 'PS1=inner> ' bash --norc --noprofile")
    terminal.expect("\ninner>")


def test_can_control_jobs_in_an_inner_shell(terminal: Terminal) -> None:
    """Ctrl-Z, bg, fg and Ctrl-C act on the job; the sandbox and its shell stay."""
    inner_shell(terminal)
    terminal.type("sleep 1000")
    time.sleep(0.3)
    terminal.keys("C-z")
    terminal.expect("Stopped")
    terminal.type("jobs")
    terminal.type("fg")
    time.sleep(0.3)
    terminal.keys("C-c")
    terminal.answer("inner>")
    terminal.type("exit 7")
    terminal.answer("outer>")
    assert "no job control" not in terminal.screen()


def test_ctrl_c_at_an_inner_prompt_does_not_end_the_sandbox(terminal: Terminal) -> None:
    """An interactive shell takes it as any shell does, however often."""
    inner_shell(terminal)
    for _ in range(3):
        terminal.keys("C-c")
        time.sleep(0.1)
    terminal.answer("inner>")
    terminal.keys("C-d")
    terminal.answer("outer>")


def test_can_suspend_and_continue_a_plain_command(terminal: Terminal) -> None:
    """Ctrl-Z gives the outer shell back, `fg` the command; it still has the terminal."""
    terminal.type("as cat")
    time.sleep(0.5)
    terminal.type("first")
    terminal.expect("first\nfirst")
    terminal.keys("C-z")
    terminal.expect("Stopped")
    terminal.answer("outer>")
    terminal.type("fg")
    time.sleep(0.3)
    terminal.type("second")
    terminal.expect("second\nsecond")
    terminal.keys("C-d")
    terminal.answer("outer>")


def test_can_suspend_twice_and_end_a_stopped_command(terminal: Terminal) -> None:
    """A second round works, and Ctrl-C after `fg` ends it with 130."""
    terminal.type("as sleep 1000")
    for _ in range(2):
        time.sleep(0.4)
        terminal.keys("C-z")
        terminal.answer("outer>")
        terminal.type("fg")
    time.sleep(0.4)
    terminal.keys("C-c")
    terminal.type("echo code=$?")
    terminal.expect("code=130")


def test_ctrl_c_reaches_the_commands_handler_once(terminal: Terminal) -> None:
    """The terminal signals the whole group; the command must not get it twice."""
    terminal.type(
        """as sh -c 'trap "echo caught" INT; echo ready-$((1+1)); sleep 1000; sleep 1; echo end; exit 5'"""
    )
    terminal.expect("ready-2")
    time.sleep(0.2)
    terminal.keys("C-c")
    terminal.expect("\nend")
    terminal.type("echo code=$?")
    terminal.expect("code=5")
    assert terminal.screen().count("\n^Ccaught") + terminal.screen().count("\ncaught") == 1


def test_resize_reaches_the_command(terminal: Terminal) -> None:
    """SIGWINCH arrives inside, and the new size can be asked for."""
    terminal.type(
        """as bash -c 'trap "stty size" WINCH; echo ready-$((1+1)); while :; do sleep 0.1; done'"""
    )
    terminal.expect("ready-2")
    terminal.resize(90, 20)
    terminal.expect("20 90")
    terminal.keys("C-c")
    terminal.answer("outer>")


def test_a_full_screen_program_draws_and_leaves(terminal: Terminal) -> None:
    """`less` takes the whole screen, scrolls, and gives the old screen back."""
    must_work(shutil.which("less"), "needs less")
    terminal.world.write("long", "".join(f"line {n}\n" for n in range(500)))
    terminal.type("as less long")
    assert eventually(terminal.is_full_screen)
    terminal.expect("line 10")
    terminal.keys("G")
    terminal.expect("line 499")
    terminal.keys("q")
    assert eventually(lambda: not terminal.is_full_screen())
    terminal.answer("outer>")


def test_the_outer_shell_has_the_terminal_again_after_a_kill(terminal: Terminal) -> None:
    """An inner interactive shell that is killed leaves no terminal in a dead group's hands."""
    inner_shell(terminal)
    terminal.type("kill -9 $$")
    terminal.answer("outer>")


def test_a_pipeline_keeps_its_job_control(terminal: Terminal) -> None:
    """In the middle of a pipeline we are one process of the job among others."""
    terminal.type("echo one | as cat | tr a-z A-Z")
    terminal.expect("\nONE")
    terminal.answer("outer>")


def test_a_background_job_runs_without_the_terminal(terminal: Terminal) -> None:
    """`as … &` works and is waited for."""
    terminal.type("as sh -c 'sleep 0.2; echo x > bg' &")
    terminal.type("wait; cat bg; echo done-$((1+1))")
    terminal.expect("done-2")
    assert terminal.world.path("bg").read_text() == "x\n"


STI = """
import ctypes, fcntl, os, sys, termios
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open('/dev/tty', os.O_RDWR)
for request in (0x5412, 0x100005412, 0xdeadbeef00005412):
    for letter in b'echo injected-$((6*7))\\n':
        if libc.syscall(16, fd, ctypes.c_ulong(request), ctypes.byref(ctypes.c_char(letter))) != 0:
            print('STI', ctypes.get_errno()); break
    else: print('STI done')
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the probe knows one syscall number")
def test_cannot_type_into_the_callers_terminal(terminal: Terminal) -> None:
    """TIOCSTI is refused, with dirty upper bits too; without the sandbox the text arrives."""
    legacy = Path("/proc/sys/dev/tty/legacy_tiocsti")
    allowed = terminal.world.runner.uid == 0 or (
        legacy.exists() and legacy.read_text().strip() == "1"
    )
    code = terminal.world.write("sti.py", STI)
    if allowed:
        terminal.type(f"/usr/bin/python3 {code}")
        terminal.expect("STI done")
        terminal.expect("injected-42")
        terminal.type("clear; tmux clear-history 2>/dev/null")
        terminal.type("clear")
        time.sleep(0.3)
    count = terminal.screen().count("injected-42")
    terminal.type(f"as /usr/bin/python3 {code}")
    terminal.expect("STI 1\nSTI 1\nSTI 1")
    terminal.answer("outer>")
    assert terminal.screen().count("injected-42") == count


def test_cannot_paste_through_the_console(world: World) -> None:
    """TIOCLINUX is refused in the same way, before the terminal is even asked."""
    code = (
        "import errno, fcntl, os\n"
        "m, s = os.openpty()\n"
        "for request in (0x541c, 0x5412):\n"
        "    try: fcntl.ioctl(s, request, b'\\2')\n"
        "    except OSError as e: print(errno.errorcode[e.errno])\n"
    )
    done = world.sandbox("/usr/bin/python3", "-c", code)
    assert done.stdout == "EPERM\nEPERM\n", done.stderr
    assert "EPERM\nEPERM" not in world.outside("/usr/bin/python3", "-c", code).stdout
