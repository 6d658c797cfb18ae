"""Starts the sandboxes of `selftest`, as a user would, and collects what the attempts print."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess  # noqa: TID253 - not on the launch path
import sys
import termios
import time

from ...host.facts import SYSTEM_TREES
from ...launch import joined, seccomp, syscalls
from ...policy import paths
from .attacks import RUNS, Evidence
from .attempts import frame
from .verdicts import Ended
from .world import search_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from .attacks import Attack, Run
    from .world import World

# How long a run may take on a slow and busy machine.
SECONDS = 30.0
# Between a request to end and the end.
GRACE = 1.0
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from attempts.frame import main; main()"


def launcher() -> list[str]:
    """`agent-sandbox` of this installation, as its own command does it."""
    entry = f"{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}/entry.py"
    return [sys.executable, "-I", "-S", "-X", "frozen_modules=on", entry, "run"]


class Running:
    """A run that was started: its process, and the evidence so far."""

    def __init__(self, run: Run, attacks: Sequence[Attack], world: World) -> None:
        self.run = run
        self.world = world
        self.evidence: dict[str, Evidence] = {}
        # Attempts that failed by a fault of their own, with the fault.
        self.broken: dict[str, str] = {}
        self.code: int | None = None
        # Nothing more is to come: it has ended, or was made to.
        self.over = False
        self.deadline = time.monotonic() + SECONDS
        self._rest = b""
        self._errors = f"{world.base}/errors-{run.name}"
        names = [*run.steps, *(attack.name for attack in attacks if attack.run == run.name)]
        self._process = self._start(names)

    def _start(self, names: Sequence[str]) -> subprocess.Popen[bytes]:
        run, world = self.run, self.world
        project = world.project(run.project)
        terminal = run.terminal and world.terminal >= 0
        shown = [word.format(base=world.base, home=world.home) for word in run.flags]
        line = [*launcher(), *shown, *_interpreter_flags(), "--ro", f"{world.base}/program"]
        line += ["--", os.path.realpath(sys.executable), "-I", "-S", "-c", START]
        line += [f"{world.base}/program", json.dumps(facts(world)), *names]
        with open(self._errors, "wb") as errors:
            # In a group of its own Ctrl-C reaches us alone, and we end it in an orderly way.
            return subprocess.Popen(  # noqa: S603 - our own program
                line, cwd=project, env=_environment(world, project), stdout=subprocess.PIPE,
                stdin=world.terminal if terminal else subprocess.PIPE,
                stderr=errors, pass_fds=(world.descriptor,),
                start_new_session=terminal, process_group=None if terminal else self._group(),
                preexec_fn=_before(run, terminal=terminal),  # noqa: PLW1509 - there is one thread
            )  # fmt: skip

    def _group(self) -> int:
        """The main run shares a group with the canary, as a job shares its caller's."""
        return self.world.canary.pid if self.run.name == "main" else 0

    @property
    def output(self) -> int:
        """Where the attempts print."""
        assert self._process.stdout is not None  # noqa: S101 - made with a pipe
        return self._process.stdout.fileno()

    def heed(self) -> list[str]:
        """Take in what was printed; returns the names of the attempts that it told of."""
        chunk = os.read(self.output, 65536)
        if not chunk:
            self._finish()
            return []
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [name for line in lines if (name := self._take(line))]

    def _take(self, line: bytes) -> str:
        tag, _, rest = line.decode("utf-8", "replace").partition(" ")
        if tag != self.world.tag:
            return ""
        name, kind, text = json.loads(rest)
        if kind == frame.ASK:
            self.world.save()
            self._answer()
            return ""
        if kind == frame.BROKEN:
            self.broken[name] = text
        else:
            self.evidence[name] = Evidence(answer=text, got=kind == frame.GOT)
        return str(name)

    def _answer(self) -> None:
        """Tell the attempt that the host has done its part."""
        if self._process.stdin is not None:
            try:
                os.write(self._process.stdin.fileno(), b"x")
            except BrokenPipeError:
                # It has died meanwhile, and leaves no evidence.
                return

    def ended(self) -> Ended:
        """What is known at the end."""
        return Ended(
            evidence=self.evidence, broken=self.broken, code=self.code,
            said=self.world.text(self._errors),
        )  # fmt: skip

    def _finish(self) -> None:
        # All of its output is gone, so it ends now, or it never will.
        try:
            code = self._process.wait(max(0.1, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            return
        self.code = code if code >= 0 else 128 - code
        self._close()

    def end(self) -> None:
        """Ask it to end, twice; then make it. What is inside dies with it."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(number)
                try:
                    self._process.wait(GRACE)
                except subprocess.TimeoutExpired:
                    continue
        self._close()

    def _close(self) -> None:
        self.over = True
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def make_all(
    world: World, attacks: Sequence[Attack], progress: Callable[[int], None]
) -> dict[str, Ended]:
    """Make every attempt: all sandboxes at once, but for those that need another's traces."""
    package = os.path.dirname(os.path.abspath(frame.__file__))
    shutil.copytree(
        package, f"{world.base}/program/attempts", ignore=shutil.ignore_patterns("__pycache__")
    )
    wanted = needed(attacks)
    todo = [run for run in RUNS if run.name in wanted]
    done: dict[str, Ended] = {}
    active: list[Running] = []
    with selectors.DefaultSelector() as selector:
        try:
            while todo or active:
                for run in [r for r in todo if not r.after or r.after in done]:
                    todo.remove(run)
                    started = Running(run, attacks, world)
                    active.append(started)
                    selector.register(started.output, selectors.EVENT_READ, started)
                _wait(selector, active, progress)
                for ended in [r for r in active if r.over or _late(r, selector)]:
                    active.remove(ended)
                    done[ended.run.name] = ended.ended()
                    if ended.run.name == "main":
                        world.use_git()
        finally:
            for running in active:
                running.end()
    return done


def needed(attacks: Iterable[Attack]) -> set[str]:
    """The runs for some attacks, with those that must come before."""
    wanted = {attack.run for attack in attacks}
    return wanted | {run.after for run in RUNS if run.name in wanted and run.after}


def _wait(
    selector: selectors.DefaultSelector, active: Sequence[Running],
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    first = min(running.deadline for running in active)
    for key, _ in selector.select(max(0.0, first - time.monotonic())):
        running: Running = key.data
        fd = running.output
        told = running.heed()
        if running.over:
            selector.unregister(fd)
        progress(len(told))


def _late(running: Running, selector: selectors.DefaultSelector) -> bool:
    """End a run whose time is over."""
    if time.monotonic() < running.deadline:
        return False
    selector.unregister(running.output)
    running.end()
    return True


def facts(world: World) -> dict[str, str]:
    """What an attacker knows: names and places, never a secret."""
    ports = {n: o.port for n, o in world.listeners.items() if n in ("tcp", "udp")}
    return {
        "tag": world.tag, "base": world.base, "home": world.home, "state": world.state,
        "canary": str(world.canary.pid), **ports,
    }  # fmt: skip


def _environment(world: World, project: str) -> dict[str, str]:
    """The caller's variables, with some that must not be passed on."""
    return {
        "HOME": world.home, "PATH": search_path(world, project), "PWD": project,
        "LANG": "C.UTF-8", "SELFTEST_TOKEN": world.secrets["variable"],
        "https_proxy": f"http://me:{world.secrets['password']}@127.0.0.1:9",
        "DOCKER_HOST": f"unix://{world.base}/engine/socket",
    }  # fmt: skip


def _interpreter_flags() -> list[str]:
    """Show this Python inside, where no system tree does."""
    found = dict.fromkeys(os.path.realpath(p) for p in (sys.base_prefix, sys.base_exec_prefix))
    shown = [p for p in found if not any(paths.within(p, tree) for tree in SYSTEM_TREES)]
    return [word for path in shown for word in ("--ro", path)]


def _before(run: Run, *, terminal: bool) -> Callable[[], None] | None:
    """What the supervisor's process does before it becomes agent-sandbox."""
    if terminal:
        return _take_terminal
    return _refuse_setns if run.crippled else None


def _take_terminal() -> None:
    """Make standard input the controlling terminal: TIOCSTI works on no other."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _refuse_setns() -> None:
    """Forbid a call that the keeper needs, as the seccomp profile of a container might."""
    machine = os.uname().machine
    number = joined.NUMBERS[machine][0]
    code = b"".join(
        (operation | yes << 16 | no << 24 | value << 32).to_bytes(8, "little")
        for operation, yes, no, value in (
            (seccomp.BPF_LD_W_ABS, 0, 0, seccomp.DATA_NR),
            (seccomp.BPF_JEQ_K, 0, 1, number),
            (seccomp.BPF_RET_K, 0, 0, seccomp.VERDICTS["EPERM"]),
            (seccomp.BPF_RET_K, 0, 0, seccomp.SECCOMP_RET_ALLOW),
        )
    )
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    program = Program(len(code) // 8, ctypes.addressof(buffer))
    syscalls.no_new_privileges(machine)
    syscalls.syscall(
        syscalls.SYS_PRCTL[machine], PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program)
    )
