"""cgroup v2 on a made-up machine. What the real kernel does with it is in test_limits."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch.cgroups import LEAF, Groups
from agent_sandbox.launch.hierarchy import SELF
from agent_sandbox.launch.limits import enforcer
from agent_sandbox.policy.model import Limits

from .machine import refusal


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
    # A plain file keeps the end of a longer number that was written before.
    moved = kernel.read(f"{kernel.cg}/own/{SELF}/cgroup.procs")
    assert moved.startswith((str(os.getpid()), str(child.pid)))
    held.close()
    # The next run finds itself in the leaf and goes beside it.
    kernel.enter(f"/own/{SELF}")
    held = enforcer(Limits(pids=9), uid=0, name="b", machine=kernel.machine)
    assert held.describe.endswith("/own/agent-sandbox-b")
    held.close()


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
