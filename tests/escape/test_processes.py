"""Processes: none of the host's can be signalled, traced or read, and none of ours survives."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from escape.attack import ROOT, USER, Attack, Run, Scene, Trial, finish, hide, steps, trials
from kernel.conftest import end_group, eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.kernel

STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
LAYERS = "pid namespace + landlock"
# Only root can do without a user namespace, which is a layer of its own against tracing.
TRACING = f"{LAYERS} + user namespace"
# PTRACE_ATTACH is 16; a tracer that ends lets go, so stop it for good.
TRACE = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print("attached" if libc.ptrace(16, int(pid), 0, 0) == 0 else "refused")
"""
READ_MEMORY = """
import re
try:
    for line in open(f"/proc/{pid}/maps"):
        start, end = (int(word, 16) for word in re.match(r"(\\w+)-(\\w+) ", line).groups())
        if "[stack]" in line:
            memory = open(f"/proc/{pid}/mem", "rb", 0)
            memory.seek(start)
            print(memory.read(end - start).decode(errors="replace"))
except OSError as error:
    print(error)
"""


def victim(scene: Scene) -> None:
    """A host process of the same user, with a secret in its environment and its arguments."""
    process = scene.background(
        "sh", "-c", "while :; do sleep 100; done", scene.secret, env={"TOKEN": scene.secret},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    scene.kept["victim"] = process
    scene.facts["pid"] = str(process.pid)


def victim_is_dead(scene: Scene) -> bool:
    """A signal that was sent has an effect before long; one that was not never has."""
    return scene.kept["victim"].poll() is not None or (
        "sent" in scene.output and eventually(lambda: scene.kept["victim"].poll() is not None, 2)
    )


def from_a_script(scene: Scene, argv: Sequence[str]) -> Run:
    """The caller is a script: it and the sandbox are one process group."""
    return finish(scene.popen(["sh", "-c", '"$@"; echo survived $(nice)', "-", *argv], **STREAMS))


def survivors(scene: Scene) -> bool:
    """Whether anything sleeps on although the sandbox has ended."""
    return bool(scene.asleep())


def killed_supervisor(scene: Scene, argv: Sequence[str]) -> Run:
    """kill -9 of the process that the user started, and of nothing else."""
    process = scene.popen(argv, **STREAMS)
    assert eventually(scene.asleep)
    process.kill()
    process.wait()
    # The streams end with the last process that has them: do not wait for that.
    assert process.stdout is not None
    text = os.read(process.stdout.fileno(), 4096).decode()
    for stream in (process.stdout, process.stderr):
        assert stream is not None
        stream.close()
    return Run(code=process.returncode, text=text)


def orphans(scene: Scene) -> bool:
    return not eventually(lambda: not scene.asleep(), 1.5)


def patient(scene: Scene, argv: Sequence[str]) -> Run:
    """A caller that waits a second longer than the timeout and its grace."""
    process = scene.popen(argv, **STREAMS)
    deadline = time.monotonic() + 2
    try:
        run = finish_before(process, deadline)
    finally:
        scene.kept["late"] = process.poll() is None
        end_group(process)
    return run


def finish_before(process: subprocess.Popen[str], deadline: float) -> Run:
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.stdout is not None
    text = os.read(process.stdout.fileno(), 4096).decode()
    return Run(code=process.returncode or 0, text=text)


def too_late(scene: Scene) -> bool:
    return bool(scene.kept["late"])


def signalled_by_hand(scene: Scene, argv: Sequence[str]) -> Run:
    """The user presses no key but sends SIGTERM twice."""
    process = scene.popen(argv, **STREAMS)
    assert eventually(scene.asleep)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    return patient_end(scene, process)


def patient_end(scene: Scene, process: subprocess.Popen[str]) -> Run:
    run = finish_before(process, time.monotonic() + 2)
    scene.kept["late"] = process.poll() is None
    end_group(process)
    return run


OTHERS = (
    Attack(
        name="kill-a-host-process", invariant=6, what="by its number", setup=victim,
        script="kill -9 $pid && echo sent", escaped=victim_is_dead, without=LAYERS,
    ),
    Attack(
        name="kill-by-descriptor", invariant=6, what="pidfd_send_signal(2)", setup=victim,
        python=True,
        script="""
import os, signal
try:
    signal.pidfd_send_signal(os.pidfd_open(int(pid)), 9)
    print("sent")
except OSError as error: print(error)
""", escaped=victim_is_dead, without=LAYERS,
    ),
    Attack(
        name="kill-the-callers-group", invariant=6, what="kill(0, SIGKILL)", drive=from_a_script,
        python=True, script="import os; os.kill(0, 9)",
        escaped=lambda s: s.output.count("survived") < len(s.codes), without="landlock",
    ),
    Attack(
        name="slow-down-the-callers-group", invariant=6, what="setpriority(PRIO_PGRP, 0)",
        drive=from_a_script, who=(USER,), python=True,
        script="""
import os
try: os.setpriority(os.PRIO_PGRP, 0, 13)
except OSError as error: print(error)
""", escaped=lambda s: "survived 13" in s.output, without="seccomp",
    ),
    Attack(
        name="slow-down-a-host-process", invariant=6, what="setpriority(2) by number",
        setup=victim, who=(USER,), python=True,
        script="""
import os
try: os.setpriority(os.PRIO_PROCESS, int(pid), 19)
except OSError as error: print(error)
""", escaped=lambda s: os.getpriority(os.PRIO_PROCESS, int(s.facts["pid"])) == 19,
        without="pid namespace",
    ),
    Attack(
        name="arguments-of-a-host-process", invariant=7, what="/proc/PID/cmdline", setup=victim,
        script="cat /proc/$pid/cmdline", without="pid namespace",
    ),
    Attack(
        name="trace-a-host-process", invariant=6, what="PTRACE_ATTACH", who=(ROOT,), setup=victim,
        python=True, script=TRACE, escaped=lambda s: "attached" in s.output, without=TRACING,
    ),
    Attack(
        name="memory-of-a-host-process", invariant=6, what="/proc/PID/mem", who=(ROOT,),
        setup=victim, python=True, script=READ_MEMORY, without=TRACING,
    ),
    Attack(
        name="environment-of-a-host-process", invariant=7, what="/proc/PID/environ", who=(ROOT,),
        setup=victim, script="cat /proc/$pid/environ", without=TRACING,
    ),
    Attack(
        name="root-of-a-host-process", invariant=3, what="/proc/PID/root and cwd", who=(ROOT,),
        setup=steps(hide("~/.ssh/id"), victim),
        script="cat /proc/$pid/root$home/.ssh/id /proc/$pid/cwd/../../.ssh/id", without=TRACING,
    ),
)  # fmt: skip

STAYING = (
    Attack(
        name="daemon", invariant=8, what="setsid, nohup, a double fork",
        script="""
            setsid sleep $mark >/dev/null 2>&1 </dev/null &
            nohup sleep $mark >/dev/null 2>&1 </dev/null &
            ( ( sleep $mark >/dev/null 2>&1 </dev/null & ) & )
            sleep 0.1
        """, escaped=survivors, without="pid namespace",
    ),
    Attack(
        name="orphan-of-a-killed-supervisor", invariant=8, what="kill -9 from outside",
        drive=killed_supervisor, script="setsid sleep $mark & sleep $mark", escaped=orphans,
        without="die with parent + keeper ends an orphan",
    ),
    Attack(
        name="ignore-the-timeout", invariant=8, what="SIGTERM has no effect", drive=patient,
        conditions=("short grace",), flags=("--timeout", "0.5"),
        script="trap '' TERM INT HUP; while :; do sleep 1; done", escaped=too_late,
        without="killed after the grace",
    ),
    Attack(
        name="stop-at-the-timeout", invariant=8, what="stopped processes handle no signal",
        drive=patient, conditions=("short grace",), flags=("--timeout", "0.5"),
        script="sleep 100 & kill -STOP $! $$; sleep 100", escaped=too_late,
        without="killed after the grace",
    ),
    Attack(
        name="ignore-the-user", invariant=8, what="two signals end everything",
        drive=signalled_by_hand, script="trap '' TERM INT HUP; sleep $mark; sleep $mark",
        escaped=too_late, without="killed after the grace",
    ),
)  # fmt: skip

ATTACKS = OTHERS + STAYING


@trials(OTHERS)
def test_cannot_touch_a_host_process(trial: Trial) -> None:
    trial.run()


@trials(STAYING)
def test_cannot_stay(trial: Trial) -> None:
    trial.run()
