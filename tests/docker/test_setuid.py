"""A container's root leaves no setuid program in the host's files. On a real dockerd."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.launch import surface
from agent_sandbox.proxy.docker import profile

from .conftest import IMAGE, Filtered
from .test_attacks import admin
from .test_clients import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import Engine

WAYS = {
    "chmod": "cp /bin/busybox /x/f && chmod 4755 /x/f",
    "both bits": "cp /bin/busybox /x/f && chmod 6755 /x/f",
    "archive": (
        "cd /tmp && cp /bin/busybox f && chmod 4755 f && tar -c f -f t && tar -x -p -f t -C /x"
    ),
    "copy": "cp /bin/busybox /tmp/f && chmod 4755 /tmp/f && cp -a /tmp/f /x/f",
}


def is_setuid(file: Path) -> bool:
    return file.exists() and bool(file.stat().st_mode & stat.S_ISUID)


@pytest.fixture
def project(base: Path) -> Path:
    path = base / "project"
    path.mkdir()
    return path


@pytest.fixture
def client(daemon: Engine, start: Callable[..., Filtered], base: Path, project: Path) -> Client:
    return Client(start(daemon.socket, binds=[(str(project), True, False, False, True)]), base)


@pytest.mark.docker
@pytest.mark.kernel
@pytest.mark.parametrize("way", WAYS)
def test_cannot_leave_a_setuid_program(
    way: str, daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    words = ("run", "--rm", "--network=none", "-v", f"{project}:/x", IMAGE, "sh", "-c", WAYS[way])
    admin(daemon, base).run(*words)
    assert is_setuid(project / "f"), "control: without the filter it works"
    (project / "f").unlink()
    client.run(*words, check=False)
    assert not is_setuid(project / "f")


@pytest.mark.docker
@pytest.mark.kernel
def test_cannot_leave_one_through_another_container(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    """Its mounts, or its processes: /proc/PID/root leads to them."""
    way = "cp /bin/busybox /proc/1/root/x/f && chmod 4755 /proc/1/root/x/f"
    for who in (admin(daemon, base), client):
        run = ("run", "-d", "--name", "holder", "--network=none", "-v", f"{project}:/x", IMAGE)
        holder = who.run(*run, "sleep", "1000").stdout.strip()
        inside = (
            "run",
            "--rm",
            "--network=none",
            f"--pid=container:{holder}",
            IMAGE,
            "sh",
            "-c",
            way,
        )
        who.run(*inside, check=False)
        assert is_setuid(project / "f") == (who is not client)
        shared = ("run", "--rm", "--network=none", f"--volumes-from={holder}", IMAGE, "sh", "-c")
        who.run(*shared, WAYS["chmod"], check=False)
        assert is_setuid(project / "f") == (who is not client)
        who.run("rm", "-f", holder)
        (project / "f").unlink(missing_ok=True)


@pytest.mark.docker
@pytest.mark.kernel
def test_everyday_work_in_a_writable_directory_goes_on(client: Client, project: Path) -> None:
    work = (
        "cd /x && mkdir d && echo a > d/b && chmod 755 d/b && chmod 2775 d && ln -s b d/c && "
        "chown 1:1 d/b && mv d/b d/e && tar -c d -f t && chroot / /bin/sh -c 'cat /x/d/e' && "
        "(echo x | cat) && sleep 0"
    )
    done = client.run(
        "run", "--rm", "--network=none", "-v", f"{project}:/x", IMAGE, "sh", "-c", work
    )
    assert done.stdout.split() == ["a", "x"]


def test_the_profile_judges_every_call_of_the_table() -> None:
    made = json.loads(profile.text())
    rules: dict[str, list[dict[str, Any]]] = {}
    for one in made["syscalls"]:
        for name in one["names"]:
            rules.setdefault(name, []).append(one)
    assert made["defaultAction"] == "SCMP_ACT_ERRNO"
    for name in ("chmod", "fchmod", "fchmodat", "fchmodat2", "creat", "mknod", "mknodat"):
        (rule,) = rules[name]
        (argument,) = rule["args"]
        assert (argument["value"], argument["valueTwo"]) == (stat.S_ISUID, 0)
        assert argument["op"] == "SCMP_CMP_MASKED_EQ"
    for name in ("open", "openat"):
        assert len(rules[name]) == 2
        assert all(rule["args"] for rule in rules[name])
    for name in ("openat2", "io_uring_setup", "clone3"):
        assert [rule["action"] for rule in rules[name]] == ["SCMP_ACT_ERRNO"]
    for name in ("mount", "setns", "bpf", "open_by_handle_at", "keyctl", "kexec_load", "unknown"):
        assert name not in rules
    assert {"read", "setuid", "chroot", "execve", "mmap2"} <= set(rules)
    assert surface.ALLOW not in rules


@pytest.mark.parametrize(
    ("info", "needed"),
    [
        ({"SecurityOptions": ["name=seccomp,profile=default"]}, True), ({}, True), (None, True),
        ({"SecurityOptions": ["name=seccomp", "name=userns"]}, False),
        ({"SecurityOptions": ["name=rootless"]}, False), ({"SecurityOptions": "x"}, True),
    ],
)  # fmt: skip
def test_only_an_engine_whose_root_is_nobody_goes_without(info: object, needed: bool) -> None:
    assert bool(profile.wanted(info)) == needed
