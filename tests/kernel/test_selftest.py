"""`sandboxctl selftest` for real: it holds here, and it tells when one protection is gone."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.cli.selftest.attacks import ATTACKS
from conftest import As, closed_sockets

from .conftest import World, end_group, eventually

if TYPE_CHECKING:
    Done = subprocess.CompletedProcess[str]

pytestmark = pytest.mark.kernel

# `sandboxctl selftest ARGUMENTS…`, with a change to itself or to what it starts.
DRIVER = """
import shutil, sys
from agent_sandbox.cli import ctl
from agent_sandbox.cli.selftest import attacks, runs, world
source, weaker, change, weak, *arguments = sys.argv[1:]
if weak:
    runs.launcher = lambda: [sys.executable, "-I", "-S", weaker, source, weak]
exec(change)
sys.exit(ctl.main(["selftest", *arguments]))
"""

# agent-sandbox with protections taken away: `weaker.py SOURCE NAME+NAME ARGUMENTS…`.
WEAKER = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
names = sys.argv.pop(1).split("+")
from agent_sandbox.cli import run
from agent_sandbox.host import facts, git, tools
from agent_sandbox.launch import (
    bwrap, cgroups, execute, finish, landlock, limits, scopes, seccomp, sweeping, syscalls,
)
from agent_sandbox.policy import assemble, environment, resolve
from agent_sandbox.policy.model import Mount
from agent_sandbox.sandbox import changes, prepare

ALLOW = bytes((6, 0, 0, 0, 0, 0, 0xFF, 0x7F))


def nothing(*_, **__):
    return None


def plans(change):
    old = prepare.resolve
    prepare.resolve = lambda *a: change(old(*a))


def mounts(change):
    def of_plan(plan):
        return plan.replace(mounts=tuple(n for m in plan.mounts for n in change(m)))
    plans(of_plan)


def options(change):
    old = bwrap.command
    def command(*a, **o):
        built = old(*a, **o)
        return built.replace(options=tuple(change(list(built.options))))
    bwrap.command = command


def real_home(plan):
    home = Mount(kind="rw", dest=plan.home, source=plan.home, level="rw")
    kept = [m for m in plan.mounts if m.dest != plan.home and m.rule != assemble.IN_HOME]
    return plan.replace(mounts=(home, *kept), home_points=())


def quietly(self):
    self._watch.close()
    return ()


def all_capabilities(words):
    at = words.index("--cap-drop")
    return [*words[:at], "--cap-add", "ALL", *words[at + 2:]]


def shared_pids(words):
    others = ["user", "ipc", "uts", "cgroup-try"]
    if "--share-net" not in words:
        others.append("net")
    kept = [w for w in words if w not in ("--unshare-all", "--share-net")]
    return [*(f"--unshare-{name}" for name in others), *kept]


def naive_removal(top):
    for name in os.listdir(top):
        path = f"{top}/{name}"
        try:
            os.chmod(path, 0o700)
            naive_removal(path) if os.path.isdir(path) else os.unlink(path)
        except OSError:
            pass
    try:
        os.rmdir(top)
    except OSError:
        pass


def first_bwrap(env, project):
    found = [f"{place}/bwrap" for place in env["PATH"].split(":")]
    return next(path for path in found if os.access(path, os.X_OK))


def loose_layout(old):
    def layout(*a, **o):
        found = old(*a, **o)
        return found and found.replace(control=(), absent=(), absent_files=())
    return layout


def every_variable(old):
    def build(policy, found, profile):
        env, why = old(policy, found, profile)
        return {**found.env, **env}, why
    return build


def put(module, name, value):
    assert hasattr(module, name), (module, name)
    setattr(module, name, value)


CHANGES = {
    "finish": lambda: put(finish, "complete", lambda *_, **__: True),
    "private home": lambda: plans(real_home),
    "private tmp": lambda: mounts(
        lambda m: (m.replace(source="/tmp"),) if m.dest == "/tmp" else (m,)
    ),
    "read-only": lambda: mounts(
        lambda m: (m.replace(kind="rw", level="rw"),) if m.rule == "flag --ro" else (m,)
    ),
    "pins": lambda: put(assemble, "_pin", nothing),
    "seccomp": lambda: put(seccomp, "build", lambda *_: ALLOW),
    "capabilities": lambda: options(all_capabilities),
    "nested": lambda: options(lambda words: [w for w in words if w != "--disable-userns"]),
    "changes": lambda: put(changes.Changes, "settle", quietly),
    "system trees": lambda: mounts(
        lambda m: (m.replace(kind="rw"),) if m.dest in ("/usr", "/etc") else (m,)
    ),
    "kernel settings": lambda: mounts(
        lambda m: () if m.dest in ("/proc", "/proc/sys") and m.kind in ("ro", "seal") else (m,)
    ),
    "devices": lambda: mounts(
        lambda m: () if m.kind == "seal" and m.dest.startswith("/dev/") else (m,)
    ),
    "masks": lambda: mounts(lambda m: () if m.rule == "flag --exclude" else (m,)),
    "duties": lambda: put(bwrap, "duties", lambda *_: ()),
    "root's secrets": lambda: put(facts, "_root_secrets", lambda *_: ()),
    "planted": lambda: put(resolve, "planted", nothing),
    "trust": lambda: put(prepare, "_require_trust", nothing),
    "bwrap": lambda: put(tools, "find_bwrap", first_bwrap),
    "services": lambda: put(facts, "_services", lambda *_: ()),
    "engines": lambda: put(facts, "_engine_sockets", lambda *_: ()),
    "landlock": lambda: put(landlock, "restrict", lambda _: False),
    "pids": lambda: options(shared_pids),
    "descriptors": lambda: put(execute, "hide_descriptors", nothing),
    "variables": lambda: put(environment, "build", every_variable(environment.build)),
    "passwords": lambda: put(environment, "has_userinfo", lambda _: False),
    "keyring": lambda: put(syscalls, "join_new_keyring", nothing),
    "clean-up": lambda: put(sweeping, "remove_tree", naive_removal),
    "git": lambda: put(git, "layout", loose_layout(git.layout)),
    "control": lambda: put(facts, "_control", lambda *_, **__: ()),
    "network": lambda: plans(lambda plan: plan.replace(network=True)),
    "limits": lambda: put(prepare, "make_enforcer", nothing),
    "no limits": lambda: put(limits, "_nproc", lambda *_: "none") or [
        put(cgroups, name, lambda *_: "none") for name in ("unified", "legacy")
    ] + [put(scopes, "scope", lambda *_: "none")],
    "tmp size": lambda: plans(
        lambda plan: plan.replace(limits=plan.limits.replace(tmp_size=None))
    ),
}
for name in names:
    CHANGES[name]()
run.script()
"""


class Selftest:
    """The verb, run by an identity in a world of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._weaker = world.write(world.base / "weaker.py", WEAKER)
        # Not the project: where the throw-away world goes.
        self.place = world.mkdir(world.base / "cache")
        self.env: dict[str, str | None] = {"XDG_CACHE_HOME": str(self.place)}

    def argv(self, *arguments: str, weak: str = "", change: str = "") -> list[str]:
        return [str(self.world.runner.source), str(self._weaker), change, weak, *arguments]

    def run(self, *arguments: str, weak: str = "", change: str = "") -> Done:
        line = self.argv(*arguments, weak=weak, change=change)
        with closed_sockets(absent=False):
            return self.world.python(DRIVER, *line, env=self.env, timeout=120)

    def report(self, weak: str = "", change: str = "") -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit code, and the rows by name."""
        done = self.run("--json", weak=weak, change=change)
        assert done.stdout, done.stderr
        report = json.loads(done.stdout)
        assert report["ok"] is (done.returncode == 0)
        return done.returncode, {row["attack"]: row for row in report["attacks"]}


@pytest.fixture
def selftest(world: World) -> Selftest:
    return Selftest(world)


def with_result(rows: dict[str, dict[str, Any]], result: str) -> set[str]:
    return {name for name, row in rows.items() if row["result"] == result}


def test_everything_holds_here(selftest: Selftest) -> None:
    """As the command itself is installed; and nothing of it is left."""
    with closed_sockets(absent=False):
        done = selftest.world.ctl("selftest", "--json", env=selftest.env)
    report = json.loads(done.stdout)
    assert done.returncode == 0, [r for r in report["attacks"] if r["result"] != "held"]
    assert {row["result"] for row in report["attacks"]} == {"held"}
    root = selftest.world.runner.uid == 0
    assert len(report["attacks"]) == sum(root or not attack.root_only for attack in ATTACKS)
    # Each was really tried: the attempt itself has answered, or the start was refused with words.
    assert all(row["answer"] for row in report["attacks"])
    assert report["seconds"] < 10
    assert os.listdir(selftest.place) == []
    assert done.stderr == ""


# What is taken away → the attempts that then get out. Those in brackets depend on the kernel.
CONTROLS: dict[str, tuple[set[str], set[str]]] = {
    "finish": ({"weaker_start"}, {"*"}),
    "private home": ({"write_home", "read_home", "own_state"}, {"*"}),
    "private tmp": ({"write_beside"}, {"*"}),
    "read-only": ({"write_read_only"}, {"undo_mounts"}),
    "pins": ({"replace_above"}, set()),
    # What gets past the pins is put away at the end of the run.
    "pins+changes": ({"replace_above", "git_replaced", "git_nested"}, set()),
    "seccomp": (
        {"terminal", "set_user_id", "foreign_calls", "kernel_calls", "trace"},
        {"other_families"},
    ),
    "capabilities": ({"capabilities"}, set()),
    "seccomp+nested": ({"namespaces"}, {"*"}),
    "masks": ({"read_excluded", "read_saved"}, set()),
    "duties": ({"read_saved"}, set()),
    "planted": ({"planted_link"}, set()),
    "trust": ({"cloned_policy"}, set()),
    "bwrap": ({"own_bwrap"}, set()),
    "services": ({"project_socket"}, set()),
    "services+engines": ({"project_socket", "engine_socket"}, set()),
    "landlock": ({"abstract_socket", "signal_group"}, set()),
    "pids+landlock": ({"signal_process", "command_lines", "orphan"}, {"*"}),
    "descriptors": ({"descriptors"}, set()),
    "variables": ({"variables"}, set()),
    "passwords": ({"variables"}, set()),
    "keyring+seccomp": ({"keyring"}, {"*"}),
    "clean-up": ({"clean_up"}, set()),
    "changes": ({"git_nested"}, set()),
    "git+changes": ({"git_control", "git_replaced", "git_nested"}, set()),
    # The planted policy file stops the second run.
    "control": ({"control_files"}, {"*"}),
    "network": ({"network"}, set()),
    "limits": ({"processes"}, set()),
    "tmp size": ({"flood"}, set()),
}
ROOT_CONTROLS: dict[str, set[str]] = {
    # For others bwrap makes a second user namespace in any case, in which no mount is theirs.
    "seccomp+capabilities+nested": {"undo_mounts"},
    "system trees": {"system_trees"},
    "kernel settings": {"kernel_settings"},
    "devices": {"device_nodes"},
    "root's secrets": {"root_secrets"},
}


@pytest.mark.parametrize("weak", CONTROLS)
def test_tells_when_a_protection_is_gone(selftest: Selftest, weak: str) -> None:
    expected, possible = CONTROLS[weak]
    code, rows = selftest.report(weak)
    escaped = with_result(rows, "escaped")
    assert expected <= escaped, {n: rows[n] for n in expected - escaped}
    if "*" not in possible:
        assert escaped <= expected | possible, {n: rows[n] for n in escaped - expected}
        assert not (missed := with_result(rows, "not tried")), {n: rows[n] for n in missed}
    assert code == 1
    assert all(rows[name]["reason"] for name in escaped)
    assert os.listdir(selftest.place) == []


@pytest.mark.parametrize("weak", ROOT_CONTROLS)
def test_tells_root_when_a_protection_is_gone(superuser: As, places: Path, weak: str) -> None:
    """Protections against what root's uid may do without any capability."""
    base = places / f"selftest-{weak.replace(' ', '-')}"
    superuser.directory(base)
    code, rows = Selftest(World(superuser, base)).report(weak)
    escaped = with_result(rows, "escaped")
    assert ROOT_CONTROLS[weak] <= escaped, rows
    assert code == 1


def test_every_attempt_can_get_out() -> None:
    """No row is there for show: each escapes in some control."""
    shown = set().union(*(rows for rows, _ in CONTROLS.values()), *ROOT_CONTROLS.values())
    missing = {attack.name for attack in ATTACKS} - shown
    # The kernel may have none of these sockets; see CONTROLS["seccomp"].
    assert missing <= {"other_families"}


def test_an_attempt_that_was_not_made_did_not_hold(selftest: Selftest) -> None:
    """One sandbox that does not start, one attempt with a fault: exit code 1, and the reason."""
    change = """
attacks.RUNS = tuple(
    r.replace(flags=("--no-such-flag",)) if r.name == "limited" else r for r in attacks.RUNS
)
runs.RUNS = attacks.RUNS
facts = runs.facts
runs.facts = lambda w: {**facts(w), "canary": "nobody"}
"""
    code, rows = selftest.report(change=change)
    assert code == 1
    assert with_result(rows, "not tried") == {"processes", "signal_process", "trace"}
    assert "--no-such-flag" in rows["processes"]["reason"]
    assert "ValueError" in rows["trace"]["reason"]
    assert with_result(rows, "escaped") == set()


def test_what_the_machine_does_not_have_is_excused(selftest: Selftest) -> None:
    """Without git there is no hook to plant."""
    code, rows = selftest.report(change="world.shutil.which = lambda _: None")
    assert code == 0
    missing = with_result(rows, "not tried")
    assert missing == {"git_control", "git_replaced", "git_nested"}
    assert {rows[name]["reason"] for name in missing} == {"git is not installed"}
    assert with_result(rows, "held") == set(rows) - missing


def test_a_limit_that_cannot_be_had_is_excused(selftest: Selftest) -> None:
    """A start that is refused for it is what was promised."""
    change = "runs.launcher = lambda: [sys.executable, '-I', '-S', weaker, source, 'no limits']"
    code, rows = selftest.report(change=change)
    assert with_result(rows, "not tried") == {"processes"}
    assert "cannot limit" in rows["processes"]["reason"]
    assert code == 0


@pytest.mark.parametrize(
    "change",
    [
        "runs.launcher = lambda: ['/bin/sh', '-c', 'echo agent-sandbox: broken >&2; exit 125']",
        "world.find_bwrap = lambda *_: None",
    ],
    ids=["no start", "no bwrap"],
)
def test_without_a_sandbox_the_exit_code_is_125(selftest: Selftest, change: str) -> None:
    """With a hint, and without a table."""
    done = selftest.run(change=change)
    assert (done.returncode, done.stdout) == (125, "")
    assert "hint: " in done.stderr
    assert "broken" in done.stderr or "bwrap" in done.stderr
    assert os.listdir(selftest.place) == []


FIRST_ANSWER = r" [1-9][0-9]* of "


def read_until(fd: int, wanted: str, seconds: float = 30.0) -> str:
    """What a terminal shows until a pattern is there, or its end."""
    text = ""
    while not re.search(wanted, text) and select.select([fd], [], [], seconds)[0]:
        try:
            text += os.read(fd, 65536).decode(errors="replace")
        except OSError:
            break
    return text


def on_a_terminal(selftest: Selftest, **env: str) -> tuple[subprocess.Popen[str], int]:
    screen, theirs = os.openpty()
    line = [selftest.world.runner.python, "-c", DRIVER, *selftest.argv()]
    search = {"PYTHONPATH": str(selftest.world.runner.source), "PYTHONDONTWRITEBYTECODE": "1"}
    process = selftest.world.runner.popen(
        line, env=selftest.world.env({**search, **selftest.env, "TERM": "xterm", **env}),
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    return process, screen


@pytest.mark.parametrize("plain", [False, True], ids=["colour", "NO_COLOR"])
def test_a_terminal_sees_progress_and_colour(selftest: Selftest, plain: bool) -> None:
    process, screen = on_a_terminal(selftest, NO_COLOR="1" if plain else "")
    try:
        text = read_until(screen, "attempts in ")
        assert process.wait(30) == 0, text
    finally:
        end_group(process)
        os.close(screen)
    assert "attempts made" in text
    assert ("\x1b[32mheld" in text) is not plain
    done = selftest.run()
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_an_interrupted_selftest_leaves_nothing(selftest: Selftest, number: int) -> None:
    """No directory, and no process of it."""
    process, screen = on_a_terminal(selftest)
    try:
        # The flood is still going on.
        read_until(screen, FIRST_ANSWER)
        (made,) = os.listdir(selftest.place)
        os.kill(process.pid, number)
        assert process.wait(30) == 128 + number
        assert os.listdir(selftest.place) == []
        assert eventually(lambda: not mentioned(made))
    finally:
        end_group(process)
        os.close(screen)


def mentioned(word: str) -> list[str]:
    """Processes with a word in their arguments."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_killed_selftest_is_cleared_away_by_the_next(selftest: Selftest) -> None:
    process, screen = on_a_terminal(selftest)
    read_until(screen, FIRST_ANSWER)
    (left,) = os.listdir(selftest.place)
    process.kill()
    end_group(process)
    os.close(screen)
    assert os.listdir(selftest.place) == [left]
    assert eventually(lambda: not mentioned(left), 30)
    # A young one could still be somebody's.
    assert selftest.run(change="world.YOUNG = 0").returncode == 0
    assert os.listdir(selftest.place) == []


def test_a_sandbox_that_hangs_is_ended(selftest: Selftest) -> None:
    """Its attempts were not made; the others are judged."""
    change = """
class Impatient(runs.Running):
    def __init__(self, run, *rest):
        super().__init__(run, *rest)
        if run.name == "limited":
            self.deadline -= runs.SECONDS - 2
runs.Running = Impatient
real = runs.launcher()
hang = 'case "$*" in *--pids*) exec sleep 60;; esac; exec "$@"'
runs.launcher = lambda: ["/bin/sh", "-c", hang, "sh", *real]
"""
    code, rows = selftest.report(change=change)
    assert (code, rows["processes"]["result"]) == (1, "not tried")
    assert rows["processes"]["reason"] == "its sandbox did not end"
    assert rows["read_home"]["result"] == "held"
    assert os.listdir(selftest.place) == []
