"""A made-up machine: directories and files that behave as cgroup v2 where it matters."""

from __future__ import annotations

import errno
import os

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch.cgroups import PREFIX
from agent_sandbox.launch.limits import Machine, enforcer

MUST_WORK = os.environ.get("AGENT_SANDBOX_MUST_WORK") == "1"


def need(condition: object, why: str) -> None:
    """Skip where a test cannot run; in CI it must."""
    if not condition:
        (pytest.fail if MUST_WORK else pytest.skip)(why)


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


def refusal(kernel, limits, *, uid=0):
    with pytest.raises(HostError) as caught:
        enforcer(limits, uid=uid, name="a", machine=kernel.machine)
    assert caught.value.code == "limit-unavailable"
    assert caught.value.exit_code == 125
    assert kernel.groups() == []
    return caught.value
