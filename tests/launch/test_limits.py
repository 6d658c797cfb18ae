"""Limits: the choice of a mechanism, RLIMIT_NPROC, and the real kernel through bwrap.

The kernel tests run as root (cgroups of this machine) and as an unprivileged user (RLIMIT_NPROC).
They say nothing about the mechanism: where pytest itself runs under cgroup v2 or systemd, they try
that. Each attack is first made without a limit, so that no test passes by accident.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

from agent_sandbox.launch import cgroups
from agent_sandbox.launch.cgroups import PREFIX
from agent_sandbox.launch.enforcement import read
from agent_sandbox.launch.hierarchy import hierarchies
from agent_sandbox.launch.limits import Machine, ProcessCount, enforcer, hint, kernel_version
from agent_sandbox.policy.model import Limits

from .conftest import SOURCE
from .machine import need, refusal

NOBODY = 65534
MIB = 1 << 20
# Of this process: other workers test at the same time.
MINE = f"test-{os.getpid()}-"


@pytest.mark.parametrize(
    ("release", "version"),
    [("6.18.44-fc-v445", (6, 18)), ("5.4-rc1", (5, 4)), ("5.14", (5, 14)), ("odd", (0, 0))],
)
def test_kernel_version(release, version):
    assert kernel_version(release) == version


@pytest.mark.parametrize("uid", [0, 1000])
@pytest.mark.parametrize("systemd", [True, False])
def test_hint_names_the_flags_to_drop(uid, systemd):
    text = hint(["memory", "cpu-time"], uid=uid, systemd=systemd)
    assert text.endswith("or drop --memory, --cpu-time")


@pytest.mark.parametrize("limits", [Limits(), Limits(timeout=3.0)])
def test_nothing_is_made_when_no_limit_is_ours(limits):
    assert enforcer(limits, uid=0, name="x", machine=Machine(proc="/nonexistent")) is None


# RLIMIT_NPROC on the made-up machine.


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
import agent_sandbox.launch.cgroups as cgroups
cgroups.LEAF, mkdir = ".", os.mkdir
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


def made_groups():
    """Our groups in the hierarchies of this machine."""
    trees = hierarchies(read("/proc/self/mountinfo"), read("/proc/self/cgroup"))
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
    if "pids:" not in read("/proc/self/cgroup"):
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
    monkeypatch.setattr(cgroups, "unified", lambda *_: "not here")
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
