"""systemd's scopes on a made-up machine, with a manager that answers as we like."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import scopes
from agent_sandbox.launch.cgroups import LEAF, PREFIX
from agent_sandbox.launch.hierarchy import SELF
from agent_sandbox.launch.limits import enforcer
from agent_sandbox.launch.scopes import Scope, start_transient
from agent_sandbox.policy.model import Limits

from .machine import need, refusal


def test_scope_command_is_exact():
    assert start_transient(["busctl", "--address=a"], "x.scope", [11, 12]) == [
        "busctl", "--address=a", "--quiet", "--timeout=5", "call", "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "StartTransientUnit",
        "ssa(sv)a(sa(sv))", "x.scope", "fail", "4", "Description", "s", "agent-sandbox run",
        "PIDs", "au", "2", "11", "12", "Delegate", "b", "true",
        "CollectMode", "s", "inactive-or-failed", "0",
    ]  # fmt: skip


@pytest.fixture
def managed(kernel, monkeypatch):
    """A user's session under systemd, with a manager that makes the scopes it is asked for."""
    kernel.boot_systemd()
    kernel.group("/user.slice/session-1.scope", procs=[1])
    kernel.enter("/user.slice/session-1.scope")
    kernel.controllers = "cpu memory pids"
    kernel.answer = ""
    kernel.asked = []

    def run(argv):
        kernel.asked.append(argv)
        if kernel.answer:
            return kernel.answer
        unit, pids = argv[argv.index("fail") - 1], argv[argv.index("au") + 2 :][:2]
        kernel.group(f"/user.slice/{unit}", controllers=kernel.controllers, procs=pids)
        for pid in pids:
            os.makedirs(f"{kernel.proc}/{pid}")
            kernel.write(f"{kernel.proc}/{pid}/cgroup", f"0::/user.slice/{unit}\n")
        return ""

    monkeypatch.setattr(scopes, "_run", run)
    monkeypatch.setattr(scopes, "_shares_pids", lambda _: True)
    monkeypatch.setattr(scopes, "SCOPE_SECONDS", 0.05)
    monkeypatch.setattr(scopes, "TOOL_DIRS", (f"{kernel.top}/bin",))
    os.makedirs(f"{kernel.top}/bin")
    kernel.write(f"{kernel.top}/bin/busctl", "")
    return kernel


def ended(pid):
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return True
    return False


@pytest.mark.parametrize("uid", [0, 1000])
def test_systemd_makes_a_scope_that_we_divide(managed, uid):
    held = enforcer(Limits(memory=4096, cpu_time=1.0), uid=uid, name="a", machine=managed.machine)
    assert isinstance(held, Scope)
    assert "agent-sandbox-a.scope" in held.describe
    assert held.exceeded() is None
    held.attach(4711)
    bus = "user/1000/bus" if uid else "dbus/system_bus_socket"
    assert managed.asked[0][1] == f"--address=unix:path={managed.top}/run/{bus}"
    scope = f"{managed.cg}/user.slice/agent-sandbox-a.scope"
    keeper = int(managed.asked[0][managed.asked[0].index("4711") + 1])
    assert managed.read(f"{scope}/cgroup.subtree_control") == "+memory"
    # A plain file here keeps the end of a longer number that was written before.
    assert managed.read(f"{scope}/{SELF}/cgroup.procs").startswith(str(keeper))
    assert managed.read(f"{scope}/{PREFIX}limits/memory.max") == "4096"
    assert managed.read(f"{scope}/{PREFIX}limits/{LEAF}/cgroup.procs") == "4711"
    managed.write(f"{scope}/{PREFIX}limits/memory.events", "oom_kill 2\n")
    assert held.exceeded() == "memory"
    assert not ended(keeper)
    held.close()
    assert ended(keeper)
    assert not os.path.exists(f"{scope}/{PREFIX}limits")


def test_the_keeper_of_a_scope_holds_no_descriptor_of_ours(managed):
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    held = enforcer(Limits(memory=4096), uid=1000, name="a", machine=managed.machine)
    held.attach(4711)
    os.close(writing)
    os.set_blocking(reading, False)
    assert os.read(reading, 1) == b"", "the other end is closed"
    os.close(reading)
    held.close()


def test_systemd_that_refuses_is_an_error_that_quotes_it(managed):
    managed.answer = "Call failed: Permission denied"
    held = enforcer(Limits(memory=4096), uid=1000, name="a", machine=managed.machine)
    with pytest.raises(HostError, match=r"made no scope \(Call failed: Permission denied\)"):
        held.attach(4711)
    held.close()


def test_systemd_that_delegates_no_memory_is_an_error(managed):
    managed.controllers = "cpu pids"
    held = enforcer(Limits(memory=4096), uid=1000, name="a", machine=managed.machine)
    with pytest.raises(HostError, match="systemd delegates no memory"):
        held.attach(4711)
    held.close()


def test_systemd_without_a_manager_to_ask_is_an_error(managed, monkeypatch):
    monkeypatch.setattr(scopes, "_shares_pids", lambda _: False)
    error = refusal(managed, Limits(memory=4096), uid=1000)
    assert f"no user manager answers at '{managed.top}/run/user/1000/bus'" in error.message
    assert "systemctl --user status" in error.hint


def test_systemd_on_cgroup_v1_is_an_error(managed):
    managed.write(f"{managed.cg}/cgroup.controllers", "hugetlb\n")
    assert "it uses cgroup v1" in refusal(managed, Limits(memory=4096), uid=1000).message


PEER_CHECK = """
import sys
from agent_sandbox.launch.scopes import _shares_pids
print(_shares_pids(sys.argv[1]))
"""


def test_a_manager_of_another_pid_namespace_is_not_asked(public_source):
    """It would take our pid for a process of its own."""
    path = f"{public_source}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert scopes._shares_pids(path)
        assert not scopes._shares_pids(f"{public_source}/none")
        argv = ["/usr/bin/python3", "-c", PEER_CHECK, path]
        bind = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev",
            "/dev",
            "--setenv",
            "PYTHONPATH",
            public_source,
        ]
        for flags, seen in (
            (["--proc", "/proc"], "True"),
            (["--unshare-pid", "--proc", "/proc"], "False"),
        ):
            done = subprocess.run(
                [*bind, *flags, *argv], capture_output=True, text=True, check=False
            )
            need(done.returncode == 0, f"bwrap does not work here: {done.stderr}")
            assert done.stdout.strip() == seen
