"""What changes outside while a sandbox runs: saves, replaced directories, late mounts."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.launch.watching import REMAKES
from conftest import IS_ROOT, must_work

from .conftest import World, end_group, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

# Runs the command line with the keeper's duties taken away.
RUN = """
from agent_sandbox.cli.run import main
sys.exit(main(sys.argv[1:]))
"""
UNHELD = f"""
import sys
from agent_sandbox.launch import bwrap
bwrap.duties = lambda *_: ()
{RUN}"""
# Runs it as for a user who has no inotify instance left.
BLIND = f"""
import sys
from agent_sandbox.launch import watching
watching.instance = lambda: -1
{RUN}"""


class Session:
    """A shell inside that answers questions while the test changes things outside."""

    def __init__(
        self, world: World, *flags: str, held: bool = True, launcher: str = ""
    ) -> None:  # fmt: skip
        self.world = world
        line = world.argv(*flags, "sh")
        launcher = launcher if held else UNHELD
        if launcher:
            line = [world.runner.python, "-c", launcher, *flags, "sh"]
        self.process = world.runner.popen(
            line, cwd=world.project, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=world.env({"PYTHONPATH": str(world.runner.source), "PYTHONDONTWRITEBYTECODE": "1"}),
        )  # fmt: skip
        assert self.ask("echo here").endswith("here")

    def ask(self, script: str) -> str:
        """What a script prints inside."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{{ {script}; }} 2>&1; echo; echo =end\n")
        self.process.stdin.flush()
        lines = []
        while (line := self.process.stdout.readline()) not in ("=end\n", ""):
            lines.append(line)
        return "".join(lines).strip()

    def becomes(self, script: str, wanted: str) -> bool:
        """Whether a script soon prints something with these words in it."""
        said: list[str] = []

        def heard() -> bool:
            said[:] = [self.ask(script)]
            return wanted in said[0]

        assert eventually(heard), (said, self.process.poll())
        return True

    def end(self) -> str:
        """Leave the shell; what is said at the end."""
        out, _ = self.process.communicate("exit\n", timeout=30)
        return out

    def close(self) -> None:
        end_group(self.process)


def save(world: World, name: str, text: str) -> None:
    """What every editor does: write a new file and rename it over the old one."""
    new = world.write(name + ".new~", text)
    new.rename(world.path(name))


@pytest.mark.parametrize("held", [True, False], ids=["held", "control"])
def test_cannot_read_an_excluded_file_that_was_saved_outside(world: World, held: bool) -> None:
    """The kernel drops the mask with the old file; the keeper puts a new one on."""
    world.write(".env", "old-secret")
    session = Session(world, "--exclude", ".env", held=held)
    try:
        assert "secret" not in session.ask("cat .env")
        for number in range(3):
            save(world, ".env", f"new-secret-{number}")
            if not held:
                assert session.becomes("cat .env", f"new-secret-{number}")
                return
            assert session.becomes("cat .env", "denied")
        assert "secret" not in session.ask("cat .env; cat < .env; head -c 9 .env")
    finally:
        session.close()
    assert world.path(".env").read_text() == "new-secret-2"


@pytest.mark.parametrize("held", [True, False], ids=["held", "control"])
def test_cannot_write_a_read_only_file_that_was_saved_outside(world: World, held: bool) -> None:
    """Nor one in a directory that is pinned."""
    world.write("conf/app/rules.toml", "old")
    session = Session(world, "--ro", "conf/app/rules.toml", held=held)
    try:
        save(world, "conf/app/rules.toml", "new")
        if not held:
            assert session.becomes("echo mine > conf/app/rules.toml; cat conf/app/*", "mine")
            return
        # In the first moment the write may have gone through: saved once more, it holds.
        assert session.becomes("echo mine > conf/app/rules.toml", "Read-only")
        save(world, "conf/app/rules.toml", "newer")
        assert session.becomes("cat conf/app/rules.toml", "newer")
        assert session.becomes("echo mine > conf/app/rules.toml", "Read-only")
        assert "busy" in session.ask("mv conf x")
    finally:
        session.close()


def test_cannot_keep_a_saved_file_writable_by_opening_it_all_the_time(world: World) -> None:
    """A mount with writers cannot be made read-only; it must be so before it is there."""
    world.write("rules.toml", "0")
    session = Session(world, "--ro", "rules.toml")
    try:
        session.ask("(while :; do : >> rules.toml; done) 2>/dev/null & echo")
        for number in range(20):
            save(world, "rules.toml", str(number))
            assert session.becomes("echo mine >> rules.toml", "Read-only")
    finally:
        session.close()


def test_cannot_read_a_directory_that_was_replaced_outside(world: World) -> None:
    """Its parents are pinned again as well, and what is hidden below them."""
    world.write("conf/keys/a.pem", "old-secret")
    session = Session(world, "--exclude", "conf/keys")
    try:
        world.path("conf").rename(world.path("conf.old"))
        world.write("conf/keys/a.pem", "new-secret")
        assert session.becomes("ls -a conf/keys | wc -l", "2")
        assert session.becomes("mv conf x", "busy")
        assert "secret" not in session.ask("cat conf/keys/a.pem conf.old/keys/a.pem")
    finally:
        session.close()


def test_an_excluded_file_that_appears_later_is_hidden(world: World) -> None:
    """The rule names it, though it was not there at the start."""
    session = Session(world, "--exclude", "later.key")
    control = Session(world)
    try:
        save(world, "later.key", "secret")
        assert session.becomes("cat later.key", "denied")
        assert control.becomes("cat later.key", "secret")
    finally:
        session.close()
        control.close()


@pytest.mark.parametrize("way", ["missing", "swapped"])
def test_cannot_read_an_excluded_file_that_appears_in_a_new_directory(
    world: World, way: str
) -> None:
    """The directories on the way are not there yet, or the command puts others in their place.

    Control: a session without the rule.
    """
    # Without held names nothing else makes the keeper look.
    rules = world.write("~/rules.toml", '[filesystem]\npresets = ["!@control", "!@git"]\n')
    if way == "swapped":
        world.mkdir("conf/deep")
    session = Session(world, "-c", str(rules), "--exclude", "conf/deep/later.key")
    control = Session(world, "-c", str(rules))
    try:
        if way == "swapped":
            session.ask("mv conf old; mkdir -p conf/deep; chmod 777 conf conf/deep")
        save(world, "conf/deep/later.key", "secret")
        assert session.becomes("cat conf/deep/later.key", "denied")
        assert control.becomes("cat conf/deep/later.key", "secret")
    finally:
        session.close()
        control.close()


def test_git_outside_may_rewrite_its_configuration(world: World) -> None:
    """`git config` saves by rename too; inside it stays read-only."""
    world.outside("git", "init", "-q")
    session = Session(world)
    try:
        world.outside("git", "config", "user.name", "me")
        assert session.becomes("git config user.name", "me")
        assert session.becomes("echo x >> .git/config", "Read-only")
    finally:
        session.close()


LATE = """
mount --make-rshared /
mkfifo {fifo}; chmod 666 {fifo}
{command} < {fifo} > {out} 2>&1 &
exec 3> {fifo}
echo 'echo started' >&3
until grep -q started {out}; do sleep 0.01; done
mount -t tmpfs -o mode=0777 late {target}
echo 'touch {target}/in; ls {target}; grep -c " {target} " /proc/self/mountinfo; echo done' >&3
until grep -q done {out}; do sleep 0.01; done
exec 3>&-
wait
ls {target}
"""


@pytest.mark.parametrize("place", ["project", "toolchain"])
def test_cannot_see_what_the_host_mounts_later(world: World, place: str) -> None:
    """Below the project, and below a read-only tree, where it would be writable.

    Control: with the propagation that bwrap leaves, the mount appears.
    """
    must_work(IS_ROOT, "only root mounts on the host")
    target = world.mkdir("mnt") if place == "project" else world.mkdir("~/tools/mnt")
    flags = ["--ro", str(world.path("~/tools"))] if place == "toolchain" else []
    bare = "--bind" if place == "project" else "--ro-bind"
    seen = {}
    for name, command in (
        ("ours", world.argv(*flags, "sh")),
        ("bwrap", ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc",
                   bare, str(target.parent), str(target.parent), "sh"]),
    ):  # fmt: skip
        out = world.base / f"out-{name}"
        script = LATE.format(
            fifo=world.base / f"fifo-{name}", out=out, target=target,
            command=shlex.join(
                ["setpriv", f"--reuid={world.runner.uid}", f"--regid={world.runner.gid}",
                 "--clear-groups", "env", "-C", str(world.project), "-i",
                 f"HOME={world.home}", f"PATH={os.environ['PATH']}", *command]
            ),
        )  # fmt: skip
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        seen[name] = (out.read_text(), done.stdout)
    assert seen["bwrap"][0].startswith("started\nin\n")
    assert seen["bwrap"][1] == "in\n"
    inside, outside = seen["ours"]
    assert outside == ""
    assert inside.endswith("0\ndone\n")


# Takes every inotify instance that the user may have, and keeps them.
EXHAUST = """
import ctypes, os, resource
libc = ctypes.CDLL(None)
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
count = 0
while libc.inotify_init1(0) >= 0: count += 1
print(count, flush=True)
os.read(0, 1)
"""


@contextmanager
def no_instances(world: World) -> Iterator[str]:
    """This user has no inotify instance left.

    Who runs the tests has others to run at this moment, which use and free instances: there a
    launcher pretends. Only a throw-away user has them all to lose.
    """
    if world.runner.uid == os.getuid():
        yield BLIND
        return
    process = world.runner.popen(
        [world.runner.python, "-c", EXHAUST], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0
        yield ""
    finally:
        end_group(process)


def test_cannot_profit_from_a_user_without_inotify_instances(world: World) -> None:
    """Another sandbox can use them up. Saved and new files are covered all the same; it is said.

    The control is `held=False` above: without a keeper's duties both are read.
    """
    world.write(".env", "old-secret")
    report = world.home / "report.json"
    flags = ("--exclude", ".env", "--exclude", "later", "--report", str(report))
    with no_instances(world) as launcher:
        session = Session(world, *flags, launcher=launcher)
        try:
            save(world, ".env", "new-secret")
            save(world, "later", "new-secret")
            assert session.becomes("cat .env", "denied")
            assert session.becomes("cat later", "denied")
            said = session.end()
        finally:
            session.close()
    assert said.count("no inotify instance") == 1
    (notice,) = [n for n in json.loads(report.read_text())["notices"] if "inotify" in n]
    assert "max_user_instances" in notice


def test_cannot_take_the_keeper_s_inotify_instance_away(world: World) -> None:
    """It is opened before bwrap starts: whoever comes later changes nothing."""
    if world.runner.uid == os.getuid():
        pytest.skip("only a throw-away user has all of its instances to lose")
    session = Session(world, "--exclude", "later")
    try:
        with no_instances(world):
            save(world, "later", "new-secret")
            assert session.becomes("cat later", "denied")
        assert "inotify" not in session.end()
    finally:
        session.close()


TAKE = """
import ctypes, sys
libc = ctypes.CDLL(None)
print(sum(libc.inotify_init1(0) >= 0 for _ in range(int(sys.argv[1]))))
"""


@pytest.mark.skipif(
    bool(os.statvfs("/proc/sys").f_flag & os.ST_RDONLY),
    reason="the limit cannot be set: /proc/sys is read-only",
)
def test_cannot_use_up_the_user_s_inotify_instances(world: World) -> None:
    """A sandbox gets half of them. Control: a process outside gets more."""
    with open("/proc/sys/fs/inotify/max_user_instances") as file:
        half = int(file.read()) // 2
    take = ("python3", "-c", TAKE, str(half + 8))
    assert int(world.sandbox(*take).stdout) <= half
    if world.runner.uid:
        assert int(world.outside(*take).stdout) > half


HELD = {"directory": ".vscode", "socket": ".envrc"}


@pytest.mark.parametrize("kind", HELD)
@pytest.mark.parametrize("held", [True, False], ids=["held", "control"])
def test_cannot_take_a_held_name_that_was_removed_outside(
    world: World, kind: str, held: bool
) -> None:
    """`git clean -d` takes placeholders away: the keeper makes them again, time after time."""
    path = world.path(HELD[kind])
    remove = path.rmdir if kind == "directory" else path.unlink
    take = f"mkdir {path.name}/x || mkdir {path.name} && echo taken"
    session = Session(world, held=held)
    try:
        for _ in range(3):
            before = path.lstat().st_ctime_ns
            remove()
            if not held:
                assert session.becomes(take, "taken")
                return
            assert eventually(lambda old=before: path.exists() and path.lstat().st_ctime_ns != old)  # type: ignore[misc]
            assert session.becomes(
                f"touch {path.name}/x; rm -rf {path.name}; ls -ad {path.name}", path.name
            )
            assert "taken" not in session.ask(take)
        assert "inotify" not in session.end()
    finally:
        session.close()
    assert not os.path.lexists(path)


def test_a_removed_project_is_not_made_again_for_ever(world: World) -> None:
    """Somebody who insists outside wins; what is made there inside is named at the end."""
    session = Session(world)
    path = world.path(".vscode")
    try:
        for _ in range(REMAKES):
            before = path.lstat().st_ctime_ns
            path.rmdir()
            assert eventually(lambda old=before: path.exists() and path.lstat().st_ctime_ns != old)  # type: ignore[misc]
        path.rmdir()
        assert session.becomes(
            "mkdir .vscode; echo x > .vscode/tasks.json; ls -d .vscode", ".vscode"
        )
    finally:
        session.close()
