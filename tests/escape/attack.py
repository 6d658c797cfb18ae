"""What an attack is, the scene in which it takes place, and how the verdict is found outside.

An attack is a script that runs inside. It runs twice in the same scene: fresh, and once more in the
project and private home that its first run has prepared. After each run the test looks at the host:
did a guarded file change, did a secret come out, was a host service reached, did a payload run? The
control is the same attack in a new scene without the one protection that it names: there it must
escape, or the test proves nothing.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import stat
import subprocess
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.record import Record
from conftest import make_readable
from escape.protections import INTERPRETER
from kernel.conftest import World, end_group, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from conftest import As
    from kernel.conftest import Done

    Step = Callable[["Scene"], object]
    Verdict = Callable[["Scene"], bool]
    Drive = Callable[["Scene", list[str]], "Run"]

ROOT, USER = "root", "user"
BOTH = (ROOT, USER)
PYTHON = "/usr/bin/python3"
# A sandbox that could not be built; errors.EXIT_CANNOT_BUILD.
REFUSED = 125
SECONDS = 30.0
LAUNCHER = (
    "__init__.py", "patching.py", "protections.py", "weak_proxy.py", "weaken.py",
    "without_authority.py", "without_files.py", "without_network.py",
)  # fmt: skip
# Project files beyond this size are no place where a script would put a secret.
MAX_BYTES = 1 << 20
_numbers = itertools.count(1)


class Run(Record):
    """How one start of the sandbox ended."""

    code: int
    text: str


class Listener:
    """A host service: anything that arrives counts, answered or not."""

    def __init__(self, family: int, kind: int, address: Any) -> None:
        self._socket = socket.socket(family, kind)
        self._socket.bind(address)
        self._connected = kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET)
        if self._connected:
            self._socket.listen()
        self._socket.setblocking(False)
        self._reached = False

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def reached(self) -> bool:
        """Whether anybody has connected or sent something: the kernel has it queued."""
        try:
            if self._connected:
                self._socket.accept()[0].close()
            else:
                self._socket.recv(1)
        except BlockingIOError:
            return self._reached
        self._reached = True
        return True

    def close(self) -> None:
        self._socket.close()


class Scene(World):
    """A world with something to steal, to change, to reach, and to make the host execute."""

    def __init__(self, runner: As, base: Path) -> None:
        super().__init__(runner, base)
        self.token = secrets.token_hex(6)
        # Never a part of a script: whoever prints it has read it.
        self.secret = f"SECRET{secrets.token_hex(12)}"
        # No sandbox sees this directory: only a payload that runs on the host can write there.
        self.outside_dir = runner.directory(base / "outside")
        self.marker = self.outside_dir / "pwned"
        self.cwd = self.project
        self.source = runner.source
        self.caller: dict[str, str | None] = {}
        self.options: dict[str, Any] = {}
        # What a setup or a drive wants to find again.
        self.kept: dict[str, Any] = {}
        self.output = ""
        self.codes: list[int] = []
        self.cleanup = ExitStack()
        self.facts = {
            "home": str(self.home),
            "project": str(self.project),
            "base": str(base),
            "state": str(self.state),
            "outside": str(self.outside_dir),
            "marker": str(self.marker),
            "token": self.token,
            "uid": str(runner.uid),
            # Nobody else sleeps for that long.
            "mark": str(int(self.token, 16)),
        }
        self._guarded: dict[Path, object] = {}
        self._hidden: set[tuple[int, int]] = set()
        self._listeners: list[Listener] = []

    # --- preparing ---------------------------------------------------------------------------

    def guard(self, name: str | Path, text: str = "# yours\n", mode: int = 0o644) -> Path:
        """A file that must stay as it is."""
        return self.watch(self.write(name, text, mode))

    def hide(self, name: str | Path, mode: int = 0o644) -> Path:
        """A file whose content must not come out."""
        return self.keep_hidden(self.guard(name, self.secret + "\n", mode))

    def keep_hidden(self, path: Path) -> Path:
        """A file of the host's own that holds the secret, and so is no leak."""
        info = path.stat()
        self._hidden.add((info.st_dev, info.st_ino))
        return path

    def watch(self, path: Path) -> Path:
        """Something that must stay as it is now, also if that is missing."""
        self._guarded[path] = condition(path)
        return path

    def unwanted(self, path: Path) -> Path:
        """Something outside of this world that must not appear; removed afterwards."""
        self.cleanup.callback(remove, path)
        return self.watch(path)

    def listen(
        self, address: str | Path | tuple[str, int], kind: int = socket.SOCK_STREAM,
        family: int = socket.AF_UNIX, *, relative: bool = False,
    ) -> Listener:  # fmt: skip
        """A host service at a path, an abstract name or an internet address.

        With `relative` the kernel does not know the path: it lists the name that was bound.
        """
        if isinstance(address, tuple) or str(address).startswith("\0"):
            listener = Listener(family, kind, address)
        else:
            path = self.path(address)
            if not path.parent.exists():
                self.runner.directory(path.parent)
            here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            name = f"/proc/self/fd/{here}/{path.name}" if relative else str(path)
            try:
                listener = Listener(family, kind, name)
            finally:
                os.close(here)
            path.chmod(0o666)
            self.runner.own(path)
        self._listeners.append(listener)
        self.cleanup.callback(listener.close)
        return listener

    def enter(self, directory: Path) -> None:
        """Where the next run takes place."""
        self.cwd = directory

    def background(self, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """A host process of the identity, ended with the scene."""
        process = self.runner.popen(argv, **self._options(options))
        self.cleanup.callback(end_group, process)
        return process

    # --- running -----------------------------------------------------------------------------

    def command(self, attack: Attack, number: int) -> list[str]:
        """The script of a run, with the facts that an attacker would know as its variables."""
        script = attack.then if number == 2 and attack.then else attack.script
        quote = repr if attack.python else shlex.quote
        lines = [f"{name}={quote(value)}" for name, value in self.facts.items()]
        # Put together inside, so that nobody who quotes the script seems to have run it.
        said = (
            f'print("ran", {number}, token, flush=True)'
            if attack.python
            else (f"echo ran {number} $token")
        )
        program = [PYTHON, "-c"] if attack.python else ["sh", "-c"]
        return [*program, "\n".join([*lines, said, script])]

    def ran(self, number: int) -> bool:
        """Whether the script of a run was started: a typo or a failed start is no defence."""
        return f"ran {number} {self.token}" in self.output

    def attempt(self, attack: Attack, number: int, weak: Sequence[str] = ()) -> Run:
        """Run the attack once, without some protections, and what the user does afterwards."""
        names = [name for name in weak if not name.startswith("-")]
        more = [word for name in weak if name.startswith("-") for word in name.split(" ")]
        own = attack.then_flags if number == 2 else attack.first_flags
        flags = [flag.format_map(self.facts) for flag in (*attack.flags, *own, *more)]
        self.kept["changes"] = [*attack.conditions, *names]
        argv = [*self.launcher(self.kept["changes"]), *flags]
        run = attack.drive(self, [*argv, *self.command(attack, number)])
        self.output += run.text
        self.codes.append(run.code)
        attack.host(self)
        return run

    def launcher(self, changes: Sequence[str], tool: str = "run") -> list[str]:
        """agent-sandbox or sandboxctl as it is, or by way of the test-only launcher."""
        isolated = ["-I", "-S"] if INTERPRETER not in changes else []
        python = [self.runner.python, *isolated, "-X", "frozen_modules=on"]
        changes = [name for name in changes if name != INTERPRETER]
        if not changes:
            return [*python, f"{self.source}/agent_sandbox/cli/entry.py", tool]
        weak = [str(launcher_copy(self.runner)), str(self.source), ",".join(changes)]
        return [*python, *weak, tool]

    def ctl_as_started(self, *args: str) -> Done:
        """Run sandboxctl on the host, with the same protections as the last run."""
        return self.outside(*self.launcher(self.kept["changes"], "ctl"), *args)

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start something on the host as the caller of the sandbox."""
        options = {**self.options, **options, "cwd": self.cwd, "env": self.caller}
        return self.runner.popen(argv, **self._options(options))

    # --- verdicts ----------------------------------------------------------------------------

    def tampered(self) -> list[Path]:
        """Guarded paths that are not what they were."""
        return [path for path, before in self._guarded.items() if condition(path) != before]

    def leaked(self) -> bool:
        """Whether the secret came out: on a stream, or in a file that the host can read."""
        return self.secret in self.output or any(
            self.secret in text for text in self._texts(self.project)
        )

    def _texts(self, top: Path) -> Iterator[str]:
        for directory, _, names in os.walk(top):
            for name in names:
                path = os.path.join(directory, name)
                info = os.lstat(path)
                plain = stat.S_ISREG(info.st_mode) and info.st_size < MAX_BYTES
                if plain and (info.st_dev, info.st_ino) not in self._hidden:
                    with open(path, errors="replace") as file:
                        yield file.read()

    def reached(self) -> bool:
        """Whether a host service was reached."""
        return any(listener.reached() for listener in self._listeners)

    def asleep(self) -> list[int]:
        """Processes that sleep for `mark` seconds, as the host sees them."""
        return running("sleep", self.facts["mark"])

    def verdict(self) -> str:
        """What went wrong, in words; empty when nothing did."""
        found = [f"changed {path}" for path in self.tampered()]
        found += ["a secret came out"] if self.leaked() else []
        found += ["a host service was reached"] if self.reached() else []
        found += ["a payload ran on the host"] if self.marker.exists() else []
        return ", ".join(found)


def nothing(_: Scene) -> None:
    """No preparation, or a user who does nothing."""


def anything(scene: Scene) -> bool:
    """The usual verdict: whatever must not happen to the host has happened."""
    return bool(scene.verdict())


def to_the_end(scene: Scene, argv: Sequence[str]) -> Run:
    """Run a sandbox as most callers do; its whole process group dies with a timeout."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return finish(scene.popen(argv, **{**streams, **scene.options}))


def finish(process: subprocess.Popen[str], seconds: float = SECONDS) -> Run:
    """Wait for a sandbox, and end what hangs."""
    with process:
        try:
            out, err = process.communicate(timeout=seconds)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Run(code=process.returncode, text=(out or "") + (err or ""))


class Attack(Record):
    """One way out, and the protection that closes it."""

    name: str
    # The number in docs/threat-model.md.
    invariant: int
    what: str
    # The protection that the control takes away: a name in protections.py, or a flag that grants
    # what is attacked. Several joined by ' + ' are layers: each of them alone must hold, too.
    without: str
    # What runs inside, in sh, or in Python; `then` is the second run where it differs.
    script: str
    then: str = ""
    python: bool = False
    setup: Step = nothing
    # What the user does on the host after each run.
    host: Step = nothing
    escaped: Verdict = anything
    flags: tuple[str, ...] = ()
    # More flags of one of the runs.
    first_flags: tuple[str, ...] = ()
    then_flags: tuple[str, ...] = ()
    # Runs that may end before the command starts, with exit code 125, instead of being harmless.
    may_stop: tuple[int, ...] = ()
    who: tuple[str, ...] = BOTH
    drive: Drive = to_the_end
    # Names of protections.CONDITIONS that hold in every run, the control's too.
    conditions: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[str, ...]:
        """What the control takes away, one by one."""
        return tuple(self.without.split(" + "))


class Trial(Record):
    """An attack, to be tried by one identity."""

    attack: Attack
    runner: As
    places: Path

    @contextmanager
    def scene(self) -> Iterator[Scene]:
        """A fresh scene, prepared, and cleared away afterwards."""
        base = self.places / f"{self.runner.name}-{next(_numbers)}"
        base.mkdir(mode=0o755)
        base.chmod(0o755)
        scene = Scene(self.runner, base)
        try:
            self.attack.setup(scene)
            yield scene
        finally:
            for pid in scene.asleep():
                os.kill(pid, signal.SIGKILL)
            scene.cleanup.close()
            # Not shutil: an attack may leave directories deeper than Python's recursion.
            if os.getuid():
                subprocess.run(["chmod", "-R", "u+rwX", base], check=False, capture_output=True)
            subprocess.run(["rm", "-rf", base], check=True)

    def run(self) -> None:
        """The attack fails, fresh and prepared; without its protection it succeeds."""
        self.must_hold(())
        if len(self.attack.layers) > 1:
            for layer in self.attack.layers:
                self.must_hold((layer,))
        self.must_escape(self.attack.layers)

    def must_hold(self, weak: Sequence[str]) -> None:
        """Nothing has happened to the host after a run, nor after a second one.

        Where only a layer is missing, a run that repeats the first would tell nothing new.
        """
        attack = self.attack
        numbers = (1, 2) if attack.then or not weak else (1,)
        with self.scene() as scene:
            for number in numbers:
                run = scene.attempt(attack, number, weak)
                said = f"run {number} without {weak}: {run.text[-2000:]}"
                assert not attack.escaped(scene), f"{scene.verdict() or 'escaped'}: {said}"
                # A script that never ran proves nothing.
                stopped = number in attack.may_stop and run.code == REFUSED
                assert scene.ran(number) != stopped, said

    def must_escape(self, weak: Sequence[str]) -> None:
        """The control."""
        with self.scene() as scene:
            for number in (1, 2):
                scene.attempt(self.attack, number, weak)
                if self.attack.escaped(scene):
                    return
            raise AssertionError(f"the control did not escape without {weak}: {scene.output}")


def condition(path: Path) -> object:
    """What a path is now: type, mode, owner and content."""
    try:
        info = path.lstat()
    except PermissionError:
        return opened(path)
    except OSError:
        return None
    if stat.S_ISLNK(info.st_mode):
        content: object = os.readlink(path)
    elif stat.S_ISREG(info.st_mode):
        content = path.read_bytes()
    else:
        content = None
    return info.st_mode, info.st_uid, content


def opened(path: Path) -> object:
    """The same behind a directory that was closed, as its owner can do it. Root needs no such."""
    closed = next(p for p in reversed(path.parents) if not os.access(p, os.X_OK))
    mode = stat.S_IMODE(closed.lstat().st_mode)
    closed.chmod(0o700)
    try:
        return condition(path)
    finally:
        closed.chmod(mode)


def remove(path: Path) -> None:
    """Remove whatever a control has made outside of its world."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def launcher_copy(runner: As) -> Path:
    """The test-only launcher, where every identity can read it."""
    copy = runner.shared / "launcher" / "escape"
    if not copy.exists():
        copy.mkdir(parents=True)
        for name in LAUNCHER:
            shutil.copy(os.path.join(os.path.dirname(__file__), name), copy)
        make_readable(copy.parent)
    return copy / "weaken.py"


# --- steps that many attacks share ----------------------------------------------------------------


def guard(*names: str) -> Step:
    """Files that must stay as they are; '{base}/…' is outside of the home."""
    return lambda s: [s.guard(name.format_map(s.facts)) for name in names]


def hide(*names: str) -> Step:
    """Files whose content must not come out."""
    return lambda s: [s.hide(name.format_map(s.facts)) for name in names]


def steps(*parts: Step) -> Step:
    """One step after the other."""
    return lambda s: [part(s) for part in parts]


def prints(pattern: str) -> Verdict:
    """A verdict for what only the kernel's answer shows: what the script printed of it."""
    return lambda s: re.search(pattern, s.output) is not None


def trials(attacks: Sequence[Attack]) -> pytest.MarkDecorator:
    """Parametrize a test with each attack and each identity that this machine offers."""
    here = BOTH if os.geteuid() == 0 else (USER,)
    chosen = [(attack, who) for attack in attacks for who in attack.who if who in here]
    return pytest.mark.parametrize(
        "trial", chosen, indirect=True, ids=[f"{attack.name}-{who}" for attack, who in chosen]
    )
