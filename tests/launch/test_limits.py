"""Limits: decisions as tables, v2 on a made-up machine, and the real kernel through bwrap.

The kernel tests run as root (cgroups of this machine) and as an unprivileged user (RLIMIT_NPROC).
They say nothing about the mechanism: where pytest itself runs under cgroup v2 or systemd, they try
that. Each attack is first made without a limit, so that no test passes by accident.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

import pytest

import agent_sandbox
from agent_sandbox.errors import HostError
from agent_sandbox.launch import limits as module
from agent_sandbox.launch.limits import (
    LEAF,
    PREFIX,
    SELF,
    Groups,
    Hierarchy,
    Machine,
    Position,
    ProcessCount,
    Scope,
    choose_base,
    enforcer,
    hierarchies,
    hint,
    kernel_version,
    settings_v1,
    settings_v2,
    start_transient,
    used_seconds,
)  # fmt: skip
from agent_sandbox.policy.model import Limits

SOURCE = os.path.dirname(agent_sandbox.__path__[0])
MUST_WORK = os.environ.get("AGENT_SANDBOX_MUST_WORK") == "1"
NOBODY = 65534
MIB = 1 << 20
# Of this process: other workers test at the same time.
MINE = f"test-{os.getpid()}-"


def need(condition: object, why: str) -> None:
    """Skip where a test cannot run; in CI it must."""
    if not condition:
        (pytest.fail if MUST_WORK else pytest.skip)(why)


# Decisions.

HYBRID_MOUNTS = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
33 31 0:30 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,xattr,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
HYBRID_OWN = "4:memory:/user/1\n3:cpu,cpuacct:/\n2:freezer:/x\n1:name=systemd:/s\n0::/s\n"


def test_hierarchies_pair_each_mount_with_our_own_group():
    own = {h.controllers: h.own for h in hierarchies(HYBRID_MOUNTS, HYBRID_OWN)}
    assert own == {
        ("cpu", "cpuacct"): "/sys/fs/cgroup/cpu,cpuacct",
        ("memory",): "/sys/fs/cgroup/memory/user/1",
        ("name=systemd",): "/sys/fs/cgroup/systemd/s",
        (): "/sys/fs/cgroup/unified/s",
    }


@pytest.mark.parametrize(
    ("root", "path", "own"),
    [
        ("/", "/", "/cg"),
        ("/", "/a/b", "/cg/a/b"),
        ("/docker/1", "/docker/1", "/cg"),
        ("/docker/1", "/docker/1/x", "/cg/x"),
        ("/docker/1", "/docker/12", None),
        ("/docker/1", "/", None),
        ("/", "/../other", None),
        ("/..", "/", None),
    ],
)
def test_hierarchies_find_our_group_only_where_the_mount_shows_it(root, path, own):
    found = hierarchies(f"1 2 0:9 {root} /cg rw - cgroup2 cgroup2 rw\n", f"0::{path}\n")
    assert [h.own for h in found] == ([own] if own else [])


def test_hierarchies_read_escaped_mount_points():
    found = hierarchies("1 2 0:9 / /a\\040b\\134c rw - cgroup2 none rw\n", "0::/\n")
    assert found == (Hierarchy(controllers=(), mount="/a b\\c", own="/a b\\c"),)


PLAIN = Position(
    own="/cg/a/b", is_root=False, delegated=False, parent_delegated=False, alone=True, systemd=False
)


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        ({}, "/cg/a/b"),
        ({"alone": False}, ""),
        ({"alone": False, "is_root": True}, "/cg/a/b"),
        ({"systemd": True}, ""),
        ({"systemd": True, "is_root": True}, ""),
        ({"systemd": True, "delegated": True}, "/cg/a/b"),
        ({"systemd": True, "delegated": True, "alone": False}, ""),
        ({"systemd": True, "parent_delegated": True, "alone": False}, "/cg/a"),
        ({"systemd": True, "own": f"/cg/a/{SELF}"}, "/cg/a"),
    ],
)
def test_base_is_a_group_that_is_ours_and_may_have_controllers(changes, base):
    found, refusal = choose_base(PLAIN.replace(**changes), controllers=True)
    assert found == base
    assert bool(refusal) != bool(base)


def test_base_may_hold_processes_when_no_controller_is_needed():
    assert choose_base(PLAIN.replace(alone=False), controllers=False) == ("/cg/a/b", "")


def test_settings_of_v2_bound_swap_and_kill_the_tree_as_one():
    found = [(s.file, s.value) for s in settings_v2(Limits(memory=4096, pids=7, cpu_time=1.0))]
    assert found == [
        ("memory.max", "4096"), ("memory.swap.max", "0"), ("memory.oom.group", "1"),
        ("pids.max", "7"),
    ]  # fmt: skip
    assert settings_v2(Limits(cpu_time=1.0)) == ()


def test_settings_of_v1_set_memory_before_memory_and_swap():
    files = [s.file for s in settings_v1(Limits(memory=4096), "memory")]
    assert files[:2] == ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"]
    assert settings_v1(Limits(cpu_time=1.0), "cpuacct") == ()


def test_used_seconds_reads_both_versions():
    assert used_seconds("usage_usec 1500000\nuser_usec 1\n", version=2) == 1.5
    assert used_seconds("1500000000\n", version=1) == 1.5
    assert used_seconds("", version=2) == used_seconds("", version=1) == 0


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.18.44-fc-v445", (6, 18)), ("5.4-rc1", (5, 4)), ("5.14", (5, 14)), ("odd", (0, 0))],
)
def test_kernel_version(release, version):
    assert kernel_version(release) == version


def test_scope_command_is_exact():
    assert start_transient(["busctl", "--address=a"], "x.scope", [11, 12]) == [
        "busctl", "--address=a", "--quiet", "--timeout=5", "call", "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager", "StartTransientUnit",
        "ssa(sv)a(sa(sv))", "x.scope", "fail", "4", "Description", "s", "agent-sandbox run",
        "PIDs", "au", "2", "11", "12", "Delegate", "b", "true",
        "CollectMode", "s", "inactive-or-failed", "0",
    ]  # fmt: skip


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("systemd", [True, False])
def test_hint_names_the_flags_to_drop(uid, systemd):
    text = hint(["memory", "cpu-time"], uid=uid, systemd=systemd)
    assert text.endswith("or drop --memory, --cpu-time")


@pytest.mark.parametrize("limits", [Limits(), Limits(timeout=3.0)])
def test_nothing_is_made_when_no_limit_is_ours(limits):
    assert enforcer(limits, uid=0, name="x", machine=Machine(proc="/nonexistent")) is None


# A made-up machine: directories and files that behave as cgroup v2 where it matters.


class Kernel:
    """Gives a new group the files that its parent's subtree_control says, and takes them back."""

    def __init__(self, top, monkeypatch):
        self.top = str(top)
        self.cg = f"{self.top}/cg"
        self.proc = f"{self.top}/proc"
        self.machine = Machine(proc=self.proc, run=f"{self.top}/run", release="6.1.0")
        self.has_swap = True
        self._mkdir, self._rmdir = os.mkdir, os.rmdir
        self.delegated = set()
        monkeypatch.setattr(os, "getxattr", self.getxattr)
        monkeypatch.setattr(os, "mkdir", self.mkdir)
        monkeypatch.setattr(os, "rmdir", self.rmdir)
        for path in (f"{self.proc}/self", f"{self.top}/run", self.cg):
            os.makedirs(path)
        self.write(f"{self.proc}/self/mountinfo", f"1 2 0:9 / {self.cg} rw - cgroup2 c rw\n")
        self.fill(self.cg, "cpu memory pids", root=True)
        self.enter("/")

    def write(self, path, text):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    def read(self, path):
        with open(path, encoding="utf-8") as file:
            return file.read()

    def fill(self, group, controllers, *, root=False):
        files = {"cgroup.controllers": controllers, "cgroup.subtree_control": ""}
        files |= {"cgroup.procs": "", "cpu.stat": "usage_usec 0\n"}
        if not root:
            files["cgroup.events"] = "populated 0\n"
        if not root and "memory" in controllers:
            files |= {"memory.max": "", "memory.events": "oom_kill 0\n", "memory.oom.group": ""}
            if self.has_swap:
                files["memory.swap.max"] = ""
        if not root and "pids" in controllers:
            files["pids.max"] = ""
        for name, text in files.items():
            self.write(f"{group}/{name}", text)

    def mkdir(self, path, *rest, **more):
        self._mkdir(path, *rest, **more)
        if str(path).startswith(self.cg + "/"):
            parent = os.path.dirname(path)
            self.fill(path, self.read(f"{parent}/cgroup.subtree_control").replace("+", ""))

    def rmdir(self, path, *rest, **more):
        if str(path).startswith(self.cg + "/"):
            for name in os.listdir(path):
                if not os.path.isdir(f"{path}/{name}"):
                    os.unlink(f"{path}/{name}")
        self._rmdir(path, *rest, **more)

    def getxattr(self, path, name):
        if path in self.delegated and name == "user.delegate":
            return b"1"
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def group(self, path, *, controllers="memory pids", procs=()):
        """A group that exists already."""
        os.makedirs(self.cg + path)
        self.fill(self.cg + path, controllers)
        self.write(f"{self.cg}{path}/cgroup.procs", "".join(f"{pid}\n" for pid in procs))

    def enter(self, path):
        self.write(f"{self.proc}/self/cgroup", f"0::{path}\n")

    def boot_systemd(self):
        os.makedirs(f"{self.top}/run/systemd/system")

    def groups(self):
        return [top for top, _, _ in os.walk(self.cg) if PREFIX in top]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    return Kernel(tmp_path, monkeypatch)


def test_v2_puts_the_process_below_the_limits(kernel):
    held = enforcer(Limits(memory=4096, pids=9), uid=0, name="a", machine=kernel.machine)
    group = f"{kernel.cg}/agent-sandbox-a"
    assert isinstance(held, Groups)
    assert held.describe == f"memory 4096, pids 9 by cgroup v2 {group}"
    assert held.poll is None, "the kernel kills the whole group, nothing needs to be watched"
    held.attach(4711)
    assert kernel.read(f"{kernel.cg}/cgroup.subtree_control") == "+memory +pids"
    files = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max")
    assert [kernel.read(f"{group}/{file}") for file in files] == ["4096", "0", "1", "9"]
    assert kernel.read(f"{group}/{LEAF}/cgroup.procs") == "4711"
    held.close()
    assert kernel.groups() == []
    held.close()


def test_v2_works_without_swap_accounting(kernel):
    kernel.has_swap = False
    held = enforcer(Limits(memory=4096), uid=0, name="a", machine=kernel.machine)
    assert kernel.read(f"{kernel.cg}/agent-sandbox-a/memory.max") == "4096"
    held.close()


def test_v2_counts_cpu_time_without_a_controller(kernel):
    kernel.group("/own", controllers="", procs=[1])
    kernel.enter("/own")
    held = enforcer(Limits(cpu_time=2.0), uid=0, name="a", machine=kernel.machine)
    assert held.poll is not None
    stat = f"{kernel.cg}/own/agent-sandbox-a/cpu.stat"
    assert held.exceeded() is None
    kernel.write(stat, "usage_usec 1999999\n")
    assert held.exceeded() is None
    kernel.write(stat, "usage_usec 2000001\n")
    assert held.exceeded() == "cpu-time"
    held.close()
    assert held.exceeded() == "cpu-time", "what was seen is not forgotten"


def test_v2_tells_a_kill_by_the_kernel(kernel):
    held = enforcer(Limits(memory=4096), uid=0, name="a", machine=kernel.machine)
    assert held.exceeded() is None
    kernel.write(f"{kernel.cg}/agent-sandbox-a/memory.events", "max 9\noom 1\noom_kill 1\n")
    assert held.exceeded() == "memory"
    held.close()


def test_v2_moves_itself_out_of_a_group_that_it_divides(kernel):
    child = subprocess.Popen(["sleep", "30"])
    try:
        kernel.group("/own", procs=[os.getpid(), child.pid])
        kernel.enter("/own")
        os.makedirs(f"{kernel.proc}/{child.pid}")
        shutil.copy(f"/proc/{child.pid}/stat", f"{kernel.proc}/{child.pid}/stat")
        held = enforcer(Limits(pids=9), uid=0, name="a", machine=kernel.machine)
    finally:
        child.kill()
        child.wait()
    assert held.describe.endswith("/own/agent-sandbox-a")
    assert kernel.read(f"{kernel.cg}/own/{SELF}/cgroup.procs") in {str(os.getpid()), str(child.pid)}
    held.close()
    # The next run finds itself in the leaf and goes beside it.
    kernel.enter(f"/own/{SELF}")
    held = enforcer(Limits(pids=9), uid=0, name="b", machine=kernel.machine)
    assert held.describe.endswith("/own/agent-sandbox-b")
    held.close()


def refusal(kernel, limits, *, uid=0):
    with pytest.raises(HostError) as caught:
        enforcer(limits, uid=uid, name="a", machine=kernel.machine)
    assert caught.value.code == "limit-unavailable"
    assert caught.value.exit_code == 125
    assert kernel.groups() == []
    return caught.value


def test_v2_does_not_move_the_processes_of_others(kernel):
    kernel.group("/own", procs=[os.getpid(), 1])
    kernel.enter("/own")
    error = refusal(kernel, Limits(memory=4096))
    assert error.message.startswith("cannot limit memory of the whole process tree: cgroup v2: ")
    assert f"other processes share '{kernel.cg}/own'" in error.message
    assert error.hint.endswith("or drop --memory")


def test_v2_leaves_the_groups_of_systemd_alone(kernel):
    kernel.boot_systemd()
    kernel.group("/app.slice/term.scope", procs=[os.getpid()])
    kernel.enter("/app.slice/term.scope")
    assert "belongs to systemd and is not delegated" in refusal(kernel, Limits(memory=1)).message


def test_v2_divides_what_systemd_delegated(kernel):
    kernel.boot_systemd()
    kernel.group("/app.slice/agents.service", procs=[os.getpid()])
    kernel.enter("/app.slice/agents.service")
    kernel.delegated.add(f"{kernel.cg}/app.slice/agents.service")
    held = enforcer(Limits(memory=4096), uid=1000, name="a", machine=kernel.machine)
    assert held.describe.endswith("/app.slice/agents.service/agent-sandbox-a")
    held.close()


def test_v2_goes_beside_its_own_leaf_of_a_delegated_group(kernel):
    kernel.boot_systemd()
    kernel.group("/agents.service")
    kernel.group("/agents.service/main", procs=[1, os.getpid()])
    kernel.enter("/agents.service/main")
    kernel.delegated.add(f"{kernel.cg}/agents.service")
    held = enforcer(Limits(memory=4096), uid=1000, name="a", machine=kernel.machine)
    assert held.describe.endswith("/agents.service/agent-sandbox-a")
    held.close()


def test_v2_takes_nothing_from_the_users_manager(kernel):
    kernel.boot_systemd()
    kernel.group("/user@1000.service")
    kernel.group("/user@1000.service/term.scope", procs=[os.getpid()])
    kernel.enter("/user@1000.service/term.scope")
    kernel.delegated.add(f"{kernel.cg}/user@1000.service")
    assert "is not delegated" in refusal(kernel, Limits(memory=4096)).message


def test_v2_refuses_a_group_without_the_controller(kernel):
    kernel.group("/own", controllers="pids", procs=[os.getpid()])
    kernel.enter("/own")
    assert "no memory controller" in refusal(kernel, Limits(memory=4096, pids=3)).message


def test_v2_refuses_when_the_limit_cannot_be_written(kernel, monkeypatch):
    fill = kernel.fill
    monkeypatch.setattr(kernel, "fill", lambda group, _controllers: fill(group, ""))
    message = refusal(kernel, Limits(memory=4096)).message
    assert f"cannot use '{kernel.cg}/agent-sandbox-a/memory.max': no such file" in message


def test_v2_reports_a_process_that_cannot_be_moved(kernel):
    held = enforcer(Limits(memory=4096), uid=0, name="a", machine=kernel.machine)
    os.unlink(f"{kernel.cg}/agent-sandbox-a/{LEAF}/cgroup.procs")
    with pytest.raises(HostError, match=r"cannot limit memory .*: cannot move it into") as caught:
        held.attach(4711)
    assert caught.value.code == "limit-unavailable"
    held.close()
    assert kernel.groups() == []


def test_a_dead_runs_group_is_swept_and_a_live_ones_is_not(kernel):
    kernel.group("/agent-sandbox-dead")
    kernel.group(f"/agent-sandbox-dead/{LEAF}")
    kernel.group("/somebody-else")
    live = enforcer(Limits(pids=9), uid=0, name="live", machine=kernel.machine)
    other = enforcer(Limits(pids=9), uid=0, name="other", machine=kernel.machine)
    names = {name for name in os.listdir(kernel.cg) if os.path.isdir(f"{kernel.cg}/{name}")}
    assert names == {"agent-sandbox-live", "agent-sandbox-other", "somebody-else"}
    live.close()
    other.close()


def test_a_name_in_use_is_refused_and_left_alone(kernel):
    held = enforcer(Limits(pids=9), uid=0, name="a", machine=kernel.machine)
    with pytest.raises(HostError, match="file exists"):
        enforcer(Limits(pids=8), uid=0, name="a", machine=kernel.machine)
    assert kernel.read(f"{kernel.cg}/agent-sandbox-a/pids.max") == "9"
    held.close()


def test_close_never_raises(kernel):
    held = enforcer(Limits(pids=9), uid=0, name="a", machine=kernel.machine)
    shutil.rmtree(f"{kernel.cg}/agent-sandbox-a")
    held.close()
    assert held.exceeded() is None


# RLIMIT_NPROC and systemd on the made-up machine.


@pytest.fixture
def bare(kernel):
    """A machine without cgroups."""
    kernel.write(f"{kernel.proc}/self/mountinfo", "")
    return kernel


def test_a_user_without_cgroups_can_limit_processes(bare):
    held = enforcer(Limits(pids=9), uid=1000, name="a", machine=bare.machine)
    assert isinstance(held, ProcessCount)
    assert held.poll is None
    assert held.exceeded() is None
    held.close()


def test_root_without_cgroups_cannot_limit_processes(bare):
    assert "root is exempt from RLIMIT_NPROC" in refusal(bare, Limits(pids=9)).message


def test_an_old_kernel_without_cgroups_cannot_limit_processes(bare):
    bare.machine = bare.machine.replace(release="5.13.19")
    assert "Linux 5.13.19 counts all" in refusal(bare, Limits(pids=9), uid=1000).message


@pytest.mark.parametrize("more", [{"memory": 4096}, {"cpu_time": 1.0}])
def test_a_user_without_cgroups_cannot_limit_what_rlimits_do_not_bound(bare, more):
    error = refusal(bare, Limits(pids=9, **more), uid=1000)
    assert "rlimits: they bound processes, not trees" in error.message
    assert "cgroup v2: not mounted; cgroup v1: no " in error.message


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

    monkeypatch.setattr(module, "_run", run)
    monkeypatch.setattr(module, "_shares_pids", lambda _: True)
    monkeypatch.setattr(module, "SCOPE_SECONDS", 0.05)
    monkeypatch.setattr(module, "TOOL_DIRS", (f"{kernel.top}/bin",))
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
    assert managed.read(f"{scope}/{SELF}/cgroup.procs") == str(keeper)
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
    monkeypatch.setattr(module, "_shares_pids", lambda _: False)
    error = refusal(managed, Limits(memory=4096), uid=1000)
    assert f"no user manager answers at '{managed.top}/run/user/1000/bus'" in error.message
    assert "systemctl --user status" in error.hint


def test_systemd_on_cgroup_v1_is_an_error(managed):
    managed.write(f"{managed.cg}/cgroup.controllers", "hugetlb\n")
    assert "it uses cgroup v1" in refusal(managed, Limits(memory=4096), uid=1000).message


PEER_CHECK = """
import sys
from agent_sandbox.launch.limits import _shares_pids
print(_shares_pids(sys.argv[1]))
"""


def test_a_manager_of_another_pid_namespace_is_not_asked(public_source):
    """It would take our pid for a process of its own."""
    path = f"{public_source}/socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        assert module._shares_pids(path)
        assert not module._shares_pids(f"{public_source}/none")
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


# The real kernel.

# Runs a program in a plain sandbox under limits, as the launcher does: held back until attached.
RUNNER = """
import json, os, sys, time
from agent_sandbox.errors import HostError
from agent_sandbox.launch.limits import enforcer
from agent_sandbox.policy.model import Limits

limits, code, name, leave = json.loads(sys.argv[1])
try:
    held = enforcer(Limits(**limits), uid=os.getuid(), name=name)
except HostError as error:
    sys.exit("unavailable: " + error.message)
block, release = os.pipe()
reading, info = os.pipe()
output, out = os.pipe()
for fd in (block, info):
    os.set_inheritable(fd, True)
argv = ["bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--cap-drop", "ALL",
        "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc",
        "--info-fd", str(info), "--block-fd", str(block), "--", "/usr/bin/python3", "-c", code]
outer = os.posix_spawnp("bwrap", argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)])
for fd in (block, info, out):
    os.close(fd)
text = b""
while part := os.read(reading, 4096):
    text += part
init = json.loads(text)["child-pid"]
if held:
    held.attach(init)
os.write(release, b"x")
if leave:
    os.read(output, 1)
    os.kill(os.getpid(), 9)
deadline = time.monotonic() + 30
verdict = None
while os.waitid(os.P_PID, outer, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
    time.sleep(held.poll if held and held.poll else 0.02)
    verdict = held.exceeded() if held and held.poll else None
    if verdict or time.monotonic() > deadline:
        try:
            os.kill(init, 9)
        except ProcessLookupError:
            pass
        break
status = os.waitstatus_to_exitcode(os.waitpid(outer, 0)[1])
said = b""
while part := os.read(output, 4096):
    said += part
result = {"status": status, "said": said.decode(), "late": time.monotonic() > deadline}
if held:
    result |= {"exceeded": held.exceeded(), "polled": verdict, "describe": held.describe}
    held.close()
print(json.dumps(result))
"""

# Fifty processes at most: one level deeper and in sessions of their own, so that nothing but the
# tree connects them.
BOMB = """
import os, sys, time
reading, writing = os.pipe()
for _ in range(50):
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        os.setsid()
        try:
            if os.fork() == 0:
                time.sleep(60)
            os.write(writing, b"x")
        except OSError:
            pass
        os._exit(0)
    os.waitpid(child, 0)
os.close(writing)
print(len(os.read(reading, 4096)), flush=True)
os._exit(0)
"""
# In a user namespace of its own a process may mount the hierarchy, from its own group downwards,
# and as the owner of the files write there: it raises the limit that it sees.
RAISE = f"""
import ctypes, os
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUSER = 0x20000, 0x2000000, 0x10000000
libc = ctypes.CDLL(None)
assert libc.unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWCGROUP) == 0
assert libc.mount(b"none", b"/mnt", b"cgroup", 0, b"pids") == 0
with open("/mnt/pids.max", "w") as file:
    file.write("max")
{BOMB}"""
# The launcher as it would be with the processes in the group that has the limits.
FLAT = """
import os
import agent_sandbox.launch.limits as limits
limits.LEAF, mkdir = ".", os.mkdir
os.mkdir = lambda path: None if path.endswith("/.") else mkdir(path)
"""
# 160 MiB by one process, and by eight of 20 MiB each.
HOG = "data = bytearray(160 << 20); print(len(data) >> 20, flush=True)"
HOGS = """
import os, time
for _ in range(8):
    reading, writing = os.pipe()
    if os.fork() == 0:
        data = bytearray(20 << 20)
        os.write(writing, b"x")
        time.sleep(60)
    os.close(writing)
    os.read(reading, 1)
if os.waitpid(-1, os.WNOHANG) == (0, 0):
    print("all", flush=True)
os._exit(0)
"""
# Two seconds of CPU time, by short-lived processes: none of them reaches a limit of its own.
BURN = """
import os, time
for _ in range(10):
    if os.fork() == 0:
        while time.process_time() < 0.2:
            pass
        os._exit(0)
    os.wait()
print("done", flush=True)
"""


@pytest.fixture(scope="session")
def public_source():
    """The package where every user can read it."""
    place = tempfile.mkdtemp(prefix="agent-sandbox-test-")
    os.chmod(place, 0o755)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(f"{SOURCE}/agent_sandbox", f"{place}/agent_sandbox", ignore=ignored)
    for top, folders, files in os.walk(place):
        for name in (*folders, *files):
            os.chmod(f"{top}/{name}", 0o755)
    yield place
    shutil.rmtree(place)


def made_groups():
    """Our groups in the hierarchies of this machine."""
    trees = hierarchies(module._read("/proc/self/mountinfo"), module._read("/proc/self/cgroup"))
    return [
        f"{tree.own}/{name}"
        for tree in trees
        if os.path.isdir(tree.own)
        for name in os.listdir(tree.own)
        if name.startswith(PREFIX + MINE)
    ]


@pytest.fixture
def run(public_source):
    """Run a program in a sandbox under limits; as root or the invoking user, or as another user."""

    def run(limits, code, *, user=None, leave=False, before=""):
        name = f"{MINE}{os.urandom(4).hex()}"
        argv = ["/usr/bin/python3", "-c", before + RUNNER, json.dumps([limits, code, name, leave])]
        env = {"PYTHONPATH": public_source, "PATH": "/usr/bin:/bin"}
        who = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        done = subprocess.run(
            argv, env=env, capture_output=True, text=True, cwd="/", timeout=60, check=False, **who
        )
        need(not done.stderr.startswith("unavailable: "), done.stderr)
        if leave:
            return name
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert not result["late"], "the limit did not end the run"
        return result

    return run


def need_v1():
    if "pids:" not in module._read("/proc/self/cgroup"):
        pytest.skip("this machine has no cgroup v1")
    need(os.getuid() == 0, "needs root")


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if request.node.get_closest_marker("kernel"):
        assert made_groups() == []


@pytest.mark.kernel
def test_can_use_memory_below_the_limit(run):
    result = run({"memory": 256 * MIB}, HOG)
    assert (result["status"], result["said"].strip()) == (0, "160")
    assert result["exceeded"] is None


@pytest.mark.kernel
def test_cannot_use_memory_above_the_limit(run):
    assert run({}, HOG)["said"].strip() == "160"
    result = run({"memory": 64 * MIB}, HOG)
    assert result["said"] == ""
    assert result["status"] != 0
    assert result["exceeded"] == "memory"


@pytest.mark.kernel
def test_cannot_use_more_memory_by_more_processes(run):
    assert run({}, HOGS)["said"].strip() == "all"
    result = run({"memory": 64 * MIB}, HOGS)
    assert result["said"] == ""
    assert result["exceeded"] == "memory"


@pytest.mark.kernel
def test_cannot_fork_more_processes_than_the_limit(run):
    assert run({}, BOMB)["said"].strip() == "50"
    result = run({"pids": 20}, BOMB)
    assert 10 <= int(result["said"]) < 20
    assert result["exceeded"] is None, "a refused fork is for the command to handle"


@pytest.mark.kernel
def test_can_use_cpu_time_below_the_limit(run):
    result = run({"cpu_time": 60.0}, BURN)
    assert (result["status"], result["said"].strip()) == (0, "done")
    assert result["exceeded"] is None


@pytest.mark.kernel
def test_cannot_use_cpu_time_above_the_limit(run):
    assert run({}, BURN)["said"].strip() == "done"
    result = run({"cpu_time": 1.0}, BURN)
    assert result["said"] == ""
    assert result["polled"] == "cpu-time"


@pytest.mark.kernel
def test_all_limits_hold_together(run):
    result = run({"memory": 64 * MIB, "pids": 20, "cpu_time": 30.0}, BOMB)
    assert int(result["said"]) < 20
    result = run({"memory": 64 * MIB, "pids": 20, "cpu_time": 30.0}, HOG)
    assert result["exceeded"] == "memory"
    result = run({"memory": 64 * MIB, "pids": 20, "cpu_time": 1.0}, BURN)
    assert result["exceeded"] == "cpu-time"


@pytest.mark.kernel
def test_a_killed_supervisors_groups_go_with_the_next_run(run):
    sleeper = "import time; print(1, flush=True); time.sleep(60)"
    name = run({"memory": 256 * MIB, "pids": 20}, sleeper, leave=True)
    deadline = time.monotonic() + 10
    while any(name in group for group in made_groups()) and time.monotonic() < deadline:
        run({"memory": 256 * MIB, "pids": 20}, "")
    assert made_groups() == []


@pytest.mark.kernel
def test_cannot_raise_a_limit_from_a_nested_namespace(run):
    """Where the policy allows nesting; the plain sandbox of these tests does."""
    need_v1()
    assert run({"pids": 20}, RAISE, before=FLAT)["said"].strip() == "50"
    assert int(run({"pids": 20}, RAISE)["said"]) < 20


@pytest.mark.kernel
def test_v1_sets_every_limit_of_this_machine(monkeypatch):
    """As root on cgroup v1, all three at once, with memory and swap bounded together."""
    need_v1()
    monkeypatch.setattr(module, "_unified", lambda *_: "not here")
    name = f"{MINE}{os.urandom(4).hex()}"
    held = enforcer(Limits(memory=64 * MIB, pids=20, cpu_time=1.0), uid=0, name=name)
    try:
        assert "cgroup v1" in held.describe
        assert held.poll is not None
        values = {}
        for group in made_groups():
            for file in ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max"):
                if os.path.exists(f"{group}/{file}"):
                    with open(f"{group}/{file}", encoding="utf-8") as opened:
                        values[file] = int(opened.read())
        assert values.pop("memory.memsw.limit_in_bytes", 64 * MIB) == 64 * MIB
        assert values == {"memory.limit_in_bytes": 64 * MIB, "pids.max": 20}
    finally:
        held.close()


@pytest.mark.kernel
def test_cannot_fork_more_processes_than_the_limit_as_an_unprivileged_user(run):
    """By RLIMIT_NPROC: the user's other processes do not count, the sandbox's all do."""
    need(os.getuid() == 0, "needs root to become another user")
    others = [subprocess.Popen(["sleep", "60"], user=NOBODY) for _ in range(30)]
    try:
        assert run({}, BOMB, user=NOBODY)["said"].strip() == "50"
        result = run({"pids": 20}, BOMB, user=NOBODY)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert 10 <= int(result["said"]) < 20
    assert "RLIMIT_NPROC" in result["describe"]


@pytest.mark.kernel
def test_root_is_exempt_from_the_rlimit(run):
    """The control for refusing it: as root the same rlimit bounds nothing."""
    need(os.getuid() == 0, "needs root")
    wrapped = f"import resource; resource.setrlimit(resource.RLIMIT_NPROC, (20, 20))\n{BOMB}"
    assert run({}, wrapped)["said"].strip() == "50"


def test_launch_path_stays_light():
    banned = (
        "{'re', 'typing', 'dataclasses', 'pathlib', 'subprocess', 'logging', 'enum', 'resource'}"
    )
    code = f"import sys, agent_sandbox.launch.limits; print(sorted({banned} & set(sys.modules)))"
    argv = [sys.executable, "-S", "-c", code]
    done = subprocess.run(
        argv, env={"PYTHONPATH": SOURCE}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
