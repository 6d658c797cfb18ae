"""One round: start sandboxes, kill something at a moment, start once more, look for leftovers."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from kernel.conftest import eventually

from . import processes
from .scenes import Scene

if TYPE_CHECKING:
    from kernel.conftest import World

SEED = int(os.environ.get("AGENT_SANDBOX_CHAOS_SEED") or random.SystemRandom().randrange(10**6))
# For pytest's workers, which are started after this.
os.environ["AGENT_SANDBOX_CHAOS_SEED"] = str(SEED)
RUNS = int(os.environ.get("AGENT_SANDBOX_CHAOS_RUNS") or 240)
# Enough for a command's ten seconds of grace.
END_SECONDS = 30.0
# The kernel takes as long as it needs to take a dying process apart.
GONE_SECONDS = 15.0
EXIT = 7

# Fills /tmp with what is hard to remove, leaves a process behind, and tries what must not work.
SCRIPT = f"""
mkdir -p /tmp/d/e/f; echo x > /tmp/d/e/f/g; ln -s / /tmp/link; chmod 0 /tmp/d/e
sleep 1000 &
sleep "$1"
mkdir .git/hooks; echo evil > .git/hooks/post-checkout; echo evil > "$2"; rm -f "$2"
exit {EXIT}
"""
LIBRARY = """
import subprocess, sys
from agent_sandbox import Policy, Sandbox
how, *argv = sys.argv[1:]
box = Sandbox(Policy(config=True))
if how == "run":
    sys.exit(box.run(argv).code)
with box.wrap(argv) as wrapped:
    done = subprocess.run(wrapped.argv, pass_fds=wrapped.fds, env=wrapped.env, check=False)
sys.exit(done.returncode)
"""
FLAGS: tuple[tuple[str, ...], ...] = (
    (), (), ("--network=off",), ("--home=ephemeral",), ("--timeout=20",), ("--pids=300",),
)  # fmt: skip
SIGNALS = (
    *(("kill", (signal.SIGKILL,)),) * 7,
    ("terminate", (signal.SIGTERM,)),
    ("interrupt", (signal.SIGINT,)),
    ("hang up", (signal.SIGHUP,)),
    *(("stop, kill", (signal.SIGSTOP, signal.SIGKILL)),) * 2,
)


# Below the state directory: looked at one by one, and what a private home holds is the user's.
KEPT = ("run", "homes")


EVERYBODY = "everybody"


def send(pid: int, number: int) -> bool:
    """Signal a process; false when it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def owner(path: Path) -> int:
    try:
        return path.lstat().st_uid
    except OSError:
        return 0


def start(path: str) -> str:
    """What a file begins with: it may tell who left it."""
    try:
        return repr(Path(path).read_bytes()[:400])
    except OSError as error:
        return str(error)


class Chaos:
    """Rounds in one world through one front end, and what they found."""

    def __init__(self, world: World, front: str) -> None:
        self.world = world
        self.front = front
        self.mark = f"chaos-{os.getpid()}-{world.runner.uid}-{front}"
        self.marks = (self.mark, str(world.base), f"{world.runner.source}/")
        self.scenes = [Scene(world, number) for number in range(4)]
        self.victims: Counter[str] = Counter()
        self.problems: list[str] = []
        self.seen: set[str] = set()
        self.said = world.base / "said"
        self.flags = [flags for flags in FLAGS if self._accepts(flags)]
        for scene in self.scenes:
            self._accustom(scene)
        begun = time.monotonic()
        process = self._start(random.Random(SEED), self.scenes[0])
        assert process.wait(END_SECONDS) == EXIT
        # How long a run takes here and now; moments are spread over a little more than that.
        self.span = (time.monotonic() - begun) * 1.1

    def _accepts(self, flags: tuple[str, ...]) -> bool:
        """Whether this machine can hold a limit; the others are always there."""
        done = self.world.sandbox(*flags, "true", cwd=self.scenes[0].path)
        assert done.returncode == 0 or "--pids=300" in flags, done.stderr
        return done.returncode == 0

    def _accustom(self, scene: Scene) -> None:
        """Run once in a project: what is remembered about it is there from now on."""
        assert self.world.sandbox("true", cwd=scene.path).returncode == 0
        self.kept = self._kept()

    def _start(self, dice: random.Random, scene: Scene) -> subprocess.Popen[str]:
        seconds = f"{dice.uniform(0, 0.2):.3f}"
        argv = ("sh", "-c", SCRIPT, self.mark, seconds, scene.hidden)
        runner = self.world.runner
        line = runner.command("run", *dice.choice(self.flags), *argv)
        env: dict[str, str | None] = {"HOME": str(self.world.home), "MARK": self.mark}
        if self.front == "library":
            line = [runner.python, "-c", LIBRARY, dice.choice(("run", "run", "wrap")), *argv]
            env["PYTHONPATH"] = str(runner.source)
        with self.said.open("ab") as errors:
            return runner.popen(
                line, cwd=scene.path, env=env, stdout=subprocess.DEVNULL, stderr=errors
            )

    def round(self, number: int) -> None:
        """One round; problems are noted, and cleared away so that the next starts clean."""
        dice = random.Random(f"{SEED} {self.front} {self.world.runner.uid} {number}")
        scene = dice.choice(self.scenes)
        self.said.write_bytes(b"")
        started = []
        for _ in range(dice.choice((1, 1, 1, 2, 3))):
            started.append(self._start(dice, scene))
            time.sleep(dice.choice((0.0, 0.1)) * dice.random() * (len(started) > 1))
        told = self._strike(dice, started[0])
        ended = [self._end(process) for process in started]
        wrong = [f"does not end: {what}" for what in ended if isinstance(what, list)]
        if any(code != EXIT for code in ended[1:]):
            wrong.append(f"another run fails: {self.said.read_text(errors='replace')}")
        again = self.world.sandbox("true", cwd=scene.path)
        if again.returncode:
            wrong.append(f"the next run fails: {again.stderr}")
        left = self._leftovers(scene)
        codes = [code if isinstance(code, int) else "none" for code in ended]
        where = f"seed {SEED} round {number} {scene.name}: {told}, codes {codes}"
        self.problems += [f"{where}: {what}" for what in (*wrong, *left)]
        if left:
            self._clear(scene)

    def _strike(self, dice: random.Random, process: subprocess.Popen[str]) -> str:
        """Wait for a moment and signal somebody; says whom and how."""
        stage = dice.choice(("time", "workspace", "child", "child", "command"))
        base = set(self.world.workspaces())
        if stage == "workspace":
            eventually(lambda: set(self.world.workspaces()) - base or process.poll() is not None)
        elif stage == "child":
            eventually(lambda: processes.descendants(process.pid) or process.poll() is not None)
        elif stage == "command":
            eventually(lambda: self._has_command(process) or process.poll() is not None)
        delay = dice.uniform(0, self.span if stage == "time" else dice.choice((0.01, 0.1)))
        time.sleep(delay)
        self.seen.update(self.world.workspaces())
        role, pids = self._victims(dice, process)
        name, signals = dice.choice(SIGNALS)
        hit = False
        for number in signals:
            hit = sum(send(pid, number) for pid in pids) > 0 or hit
            if number == signal.SIGSTOP:
                time.sleep(dice.uniform(0, 0.05))
        self.victims[role if hit else "nobody, too late"] += 1
        return f"{name} {role} {delay * 1000:.1f} ms after {stage}"

    def _has_command(self, process: subprocess.Popen[str]) -> bool:
        below = processes.descendants(process.pid)
        return any(processes.role(pid, process.pid) == processes.COMMAND for pid in below)

    def _victims(
        self, dice: random.Random, process: subprocess.Popen[str]
    ) -> tuple[str, list[int]]:
        """Somebody of the run, each role that is there now as likely as any other, or everybody."""
        by_role: dict[str, list[int]] = {}
        whole = [process.pid, *processes.descendants(process.pid)]
        for pid in whole:
            by_role.setdefault(processes.role(pid, process.pid), []).append(pid)
        if len(whole) > 1 and dice.random() < 0.1:
            return EVERYBODY, dice.sample(whole, len(whole))
        role = dice.choice(sorted(by_role))
        return role, [dice.choice(by_role[role])]

    def _end(self, process: subprocess.Popen[str]) -> int | list[str]:
        """The supervisor's exit code, or what hangs.

        A shell would continue what has stopped with its command.
        """
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            try:
                return process.wait(0.05)
            except subprocess.TimeoutExpired:
                for pid in (process.pid, *processes.descendants(process.pid)):
                    if processes.is_stopped(pid):
                        send(pid, signal.SIGCONT)
        found = [processes.shown(p) for p in (process.pid, *processes.descendants(process.pid))]
        process.kill()
        process.wait()
        return found

    def _leftovers(self, scene: Scene) -> list[str]:
        """What should not be there once one more run has started."""
        eventually(lambda: not processes.marked(self.marks), GONE_SECONDS)
        found = [f"process {line}" for line in processes.marked(self.marks)]
        run = self.world.state / "run"
        found += [f"workspace {p.name}: {sorted(os.listdir(p))}" for p in sorted(run.iterdir())]
        found += [f"file {path}: {start(path)}" for path in sorted(self._kept() - self.kept)]
        found += [f"mount {line}" for line in self._mounts()]
        found += [f"cgroup {path}" for path in self._groups()]
        found += scene.changes()
        return found

    def _kept(self) -> set[str]:
        """Files of ours outside of the runs and of the private homes, which stay on purpose."""
        state = self.world.state
        found = {str(path) for path in state.rglob("*") if path.parts[len(state.parts)] not in KEPT}
        if self.world.runner.uid:
            # Here the owner tells: nobody else runs as this user.
            for place in map(Path, ("/tmp", "/var/tmp", "/dev/shm")):
                found |= {str(p) for p in place.iterdir() if owner(p) == self.world.runner.uid}
        return found

    def _mounts(self) -> list[str]:
        table = Path("/proc/self/mountinfo").read_text(errors="replace")
        return [line for line in table.splitlines() if str(self.world.base) in line]

    def _groups(self) -> list[str]:
        """Control groups that bear the name of a run of ours."""
        return [
            os.path.join(directory, name)
            for directory, names, _ in os.walk("/sys/fs/cgroup")
            for name in names
            if any(run in name for run in self.seen)
        ]

    def _clear(self, scene: Scene) -> None:
        for line in processes.marked(self.marks):
            send(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(self.world.state / "run")
        self.world.runner.directory(self.world.state / "run").chmod(0o700)
        fresh = Scene(self.world, scene.number + len(self.scenes))
        self.scenes[self.scenes.index(scene)] = fresh
        self._accustom(fresh)
