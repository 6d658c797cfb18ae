"""The private /tmp: on disk, alone, and gone at the end without costing anybody a file."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import os
import signal
import subprocess

import pytest

from kernel.conftest import World, end_group, eventually, running

pytestmark = pytest.mark.kernel


def test_tmp_is_private_and_on_disk(world: World) -> None:
    """/tmp starts empty but for the work directory, is not a tmpfs, and its files stay inside."""
    script = """
        ls -A /tmp; stat -c %a /tmp; stat -f -c %T /tmp; echo "$TMPDIR $AGENT_WORK_DIR"
        touch /tmp/agsbx-inside "$AGENT_WORK_DIR/f" && touch /var/tmp/agsbx-inside && mktemp >/dev/null && echo ok
    """
    lines = world.sh(script).stdout.splitlines()
    assert lines[:2] == ["agent-work", "1777"]
    assert lines[2] not in ("tmpfs", "ramfs")
    assert lines[3:] == ["/tmp /tmp/agent-work", "ok"]
    assert not os.path.exists("/tmp/agsbx-inside")
    assert not os.path.exists("/var/tmp/agsbx-inside")


def test_cannot_see_the_hosts_tmp(world: World, tmp_path: os.PathLike[str]) -> None:
    """Files of the host's /tmp are not there; a second run does not see those of the first."""
    assert world.sh(f"ls -d {tmp_path}").returncode != 0
    world.sh("echo x > /tmp/left")
    assert world.sh("ls /tmp/left").returncode != 0


@pytest.mark.parametrize("end", ["exit 0", "exit 7", "kill -9 $$"])
def test_the_workspace_is_removed_at_the_end(world: World, end: str) -> None:
    """However the command ends."""
    world.sh(f"mkdir -p /tmp/a/b; echo x > /tmp/a/b/c; echo x > $AGENT_WORK_DIR/d; {end}")
    assert world.workspaces() == []


def test_planted_links_do_not_cost_a_file(world: World) -> None:
    """Links to the project and the real home, below /tmp and as /tmp's own children, are not followed."""
    world.write("kept/file", "kept")
    world.write("~/document", "kept")
    done = world.sh(
        f"cd /tmp && ln -s {world.project} p && ln -s {world.home} h && mkdir d && "
        f"ln -s {world.home} d/h && ln -s {world.project}/kept d/k && ln -s / root && "
        "rmdir agent-work && ln -s /etc agent-work && rm -rf /var/tmp/* ; ln -s ~ /var/tmp/h"
    )
    assert done.returncode == 0, done.stderr
    assert world.path("kept/file").read_text() == "kept"
    assert world.path("~/document").read_text() == "kept"
    assert world.workspaces() == []


def test_deep_nesting_is_removed(world: World) -> None:
    """3,000 levels: neither recursion nor the length of a path stops the clean-up."""
    code = (
        "import os\n"
        "os.chdir('/tmp')\n"
        "for _ in range(3000):\n"
        "    os.mkdir('d'); open('f', 'w').close(); os.chdir('d')\n"
    )
    done = world.sandbox("/usr/bin/python3", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert world.workspaces() == []


def test_closed_directories_are_removed(world: World) -> None:
    """chmod 000 and 555 on directories with content do not keep them."""
    script = """
        cd /tmp && mkdir -p a/b/c r/s && echo x > a/b/c/f && echo x > r/s/f
        chmod 000 a/b/c && chmod 000 a/b && chmod 000 a && chmod 555 r/s r && chmod 000 /tmp/agent-work
        mkfifo pipe; ln -s loop loop; touch -- -rf '
new'
    """
    done = world.sh(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert world.workspaces() == []


def test_a_closed_tmp_itself_is_removed(world: World) -> None:
    """Even the mode of /tmp belongs to the sandbox."""
    done = world.sh("touch /tmp/f; chmod 000 /tmp /var/tmp")
    assert (done.returncode, done.stderr) == (0, "")
    assert world.workspaces() == []


def test_a_killed_supervisor_is_swept_at_the_next_start(world: World) -> None:
    """kill -9 leaves a workspace behind; the next start removes it, and only it."""
    mark = f"81{world.runner.uid}{os.getpid()}"
    args = ("sh", "-c", f"echo x > /tmp/f; echo ready; sleep {mark}")
    first = world.start(*args, stdout=subprocess.PIPE)
    second = world.start(*args, stdout=subprocess.PIPE)
    try:
        assert first.stdout.readline() == second.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        assert len(world.workspaces()) == 2
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        assert eventually(lambda: len(running("sleep", mark)) == 1)
        assert world.sh("true").returncode == 0
        assert len(world.workspaces()) == 1
        assert second.poll() is None
    finally:
        end_group(first)
        end_group(second)
    assert world.sh("true").returncode == 0
    assert world.workspaces() == []


def test_can_keep_the_workspace(world: World) -> None:
    """--keep-workspace says where it is, and later starts leave it there."""
    done = world.sh("echo kept > /tmp/f", "--keep-workspace")
    kept = done.stderr.split("'")[1]
    assert "workspace kept in" in done.stderr
    assert world.sh("true").returncode == 0
    with open(f"{kept}/tmp/f") as file:
        assert file.read() == "kept\n"
    assert len(world.workspaces()) == 1


def test_two_sandboxes_do_not_share(world: World) -> None:
    """Two at once, in one project, have a /tmp each."""
    first = world.start(
        "sh", "-c", "echo mine > /tmp/f; echo ready; read line; cat /tmp/*",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert first.stdout.readline() == "ready\n"  # type: ignore[union-attr]
        other = world.sh("ls /tmp; echo theirs > /tmp/g")
        assert other.stdout == "agent-work\n"
        out, _ = first.communicate("\n", 20)
        assert out == "mine\n"
    finally:
        end_group(first)
    assert world.workspaces() == []


def test_many_can_start_at_once(world: World) -> None:
    """Twelve first starts on a fresh state directory: none trips over another's directories."""
    started = [
        world.start(
            "sh",
            "-c",
            f"echo {n} > /tmp/f; sleep 0.1; cat /tmp/f",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for n in range(12)
    ]
    results = [process.communicate(timeout=60) for process in started]
    assert results == [(f"{n}\n", "") for n in range(12)]
    assert world.workspaces() == []


def test_a_project_below_tmp_works(world: World) -> None:
    """A project in the host's /tmp is shown at its own path inside the private one."""
    project = world.runner.project()
    sibling = world.runner.project()
    done = world.sh(f"pwd; echo x > made; ls -d {sibling}; ls -A {project.parent}", cwd=project)
    assert done.stdout.split() == [str(project), project.name], done.stderr
    assert (project / "made").read_text() == "x\n"
    assert world.workspaces() == []


def test_cannot_use_a_state_directory_that_others_can_write(world: World) -> None:
    """Whoever can write it decides what is trusted: the start is refused."""
    world.sh("true")
    world.state.chmod(0o777)
    done = world.sh("true")
    assert done.returncode == 125
    assert "state directory" in done.stderr
    world.state.chmod(0o700)
    assert world.sh("true").returncode == 0


def test_an_orphan_of_a_killed_start_is_ended_at_the_next_start(world: World) -> None:
    """Killed in bwrap's first milliseconds, a supervisor leaves its child: built here by hand."""
    mark = f"82{world.runner.uid}{os.getpid()}"
    assert world.sh("true").returncode == 0
    left = world.state / "run" / "0123456789abcdef"
    world.runner.directory(left)
    world.runner.directory(left / "tmp")
    (left / "lock").write_text("")
    world.runner.own(left)
    orphan = world.runner.popen(
        [
            "bwrap",
            "--unshare-all",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--proc",
            "/proc",
            "--bind",
            str(left / "tmp"),
            "/tmp",
            "sleep",
            mark,
        ],
        cwd=world.project,
    )
    try:
        assert eventually(lambda: len(running("sleep", mark)) == 1)
        assert world.sh("true").returncode == 0
        assert eventually(lambda: running("sleep", mark) == [])
        assert world.workspaces() == []
    finally:
        end_group(orphan)
