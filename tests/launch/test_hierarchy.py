"""Decisions about cgroups: tables of values."""

from __future__ import annotations

import pytest

from agent_sandbox.launch.hierarchy import (
    SELF,
    Hierarchy,
    Position,
    choose_base,
    hierarchies,
    settings_v1,
    settings_v2,
    used_seconds,
)
from agent_sandbox.policy.model import Limits

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
