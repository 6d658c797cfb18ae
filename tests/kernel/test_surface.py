"""The kernel's surface from inside: what the filter refuses, asked of the real kernel.

Calls have arguments with which the kernel, unfiltered, says something else than the filter. The
control is bwrap without a filter and with every capability of its user namespace.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.launch import surface
from conftest import must_work

if TYPE_CHECKING:
    from kernel.conftest import World

pytestmark = pytest.mark.kernel

MACHINE = os.uname().machine
PYTHON = "/usr/bin/python3"
LEVELS = ("strict", "default", "off")
# bwrap's own /dev would need a second user namespace, and the capabilities would be of no use.
BARE = (
    "bwrap", "--unshare-all", "--unshare-user", "--cap-add", "ALL", "--ro-bind", "/", "/",
    "--dev-bind", "/dev", "/dev", "--proc", "/proc",
)  # fmt: skip

PROBE = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
said = []
for number, *words in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(word) for word in words])
    said.append(ctypes.get_errno() if result == -1 else 0)
print(json.dumps(said))
"""

# An address that nothing is at, and a flag that no call knows.
BAD, FLAG = 1, 1 << 20
CLONE_THREAD = 0x10000
# Refused at every level but off: call, arguments.
REFUSED: list[tuple[str, *tuple[int, ...]]] = [
    ("clone3", 0, 0), ("setns", -1, 0),
    # A thread needs more flags (EINVAL); a signal is none that unshare knows (EINVAL).
    *[
        (name, flag | more)
        for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
        for name, more in (("clone", CLONE_THREAD), ("unshare", 1))
    ],
    ("unshare", 0x80 | 1),
    ("io_uring_setup", 1, BAD), ("io_uring_enter", -1, 0, 0, 0, 0, 0),
    ("io_uring_register", -1, 0, 0, 0),
    ("perf_event_open", BAD, 0, -1, -1, FLAG), ("userfaultfd", 0x41),
    ("fanotify_init", 0x200, 0), ("fanotify_mark", -1, 0, 0, 0, 0),
    ("add_key", BAD, BAD, 0, 0, 0), ("request_key", BAD, BAD, 0, 0), ("keyctl", 999),
    ("mount", BAD, BAD, BAD, 0, 0), ("umount2", BAD, 0xFFFF), ("pivot_root", BAD, BAD),
    ("chroot", BAD), ("move_mount", -1, BAD, -1, BAD, FLAG), ("open_tree", -1, BAD, FLAG),
    ("fsopen", BAD, FLAG), ("fsconfig", -1, 0, 0, 0, 0), ("fsmount", -1, FLAG, 0),
    ("fspick", -1, BAD, FLAG), ("mount_setattr", -1, BAD, FLAG, 0, 0),
    ("pidfd_getfd", -1, 0, 0), ("reboot", 0, 0, 0, 0), ("swapon", BAD, FLAG),
    ("quotactl", 0xFFFF, 0, 0, 0), ("quotactl_fd", -1, 0, 0, 0),
    ("settimeofday", BAD, 0), ("clock_settime", 99, BAD), ("sethostname", BAD, -1),
    ("setdomainname", BAD, -1), ("iopl", 9), ("ioperm", 0, 0, 0), ("modify_ldt", 99, 0, 0),
    ("openat2", -100, BAD, BAD, 0), ("ustat", 0, BAD),
]  # fmt: skip
# The kernel asks for a capability of the first user namespace, or does so before it looks at the
# arguments in some version: the filter's word cannot be told from its own.
KERNEL_TOO: list[tuple[str, *tuple[int, ...]]] = [
    ("bpf", 0, BAD, FLAG), ("open_by_handle_at", -1, BAD, 0), ("open_tree_attr", -1, BAD, FLAG, 0),
    ("kexec_load", 0, 99, 0, -1), ("kexec_file_load", -1, -1, 0, 0, FLAG),
    ("init_module", BAD, 0, BAD), ("finit_module", -1, BAD, FLAG), ("delete_module", BAD, 0),
    ("syslog", 3, BAD, -1), ("acct", BAD), ("swapoff", BAD), ("vhangup",),
]  # fmt: skip
# Refused in strict alone.
STRICT: list[tuple[str, *tuple[int, ...]]] = [
    ("ptrace", 0xFFFF, 0), ("process_vm_readv", -1, 0, 0, 0, 0, 1),
    ("process_vm_writev", -1, 0, 0, 0, 0, 1), ("kcmp", -1, -1, 0, 0, 0),
    ("name_to_handle_at", -1, BAD, BAD, BAD, FLAG), ("personality", 0x40000), ("io_setup", 0, BAD),
    ("remap_file_pages", 1, 0, 0, 0, 0), ("mbind", 1, 0, 99, 0, 0, 0), ("set_mempolicy", 99, 0, 0),
    ("migrate_pages", -5, 0, 0, 0), ("move_pages", -5, 0, 0, 0, 0, FLAG), ("adjtimex", BAD),
    ("clock_adjtime", 99, BAD),
]  # fmt: skip


def judged(
    rows: list[tuple[str, *tuple[int, ...]]], level: str
) -> list[tuple[str, list[int], int]]:
    """The calls that this machine has: name, number and arguments, the filter's error."""
    numbers = surface.numbers(MACHINE)
    verdicts = surface.verdicts(MACHINE, strict=level == "strict")
    found = []
    for name, *words in rows:
        if name in numbers:
            number = numbers[name]
            # A check of arguments says EPERM.
            found.append((name, [number, *words], getattr(errno, verdicts[number], errno.EPERM)))
    return found


def ask(world: World, calls: list[list[int]], *command: str) -> list[int]:
    """The errors of some calls, inside (flags of agent-sandbox) or in another sandbox (argv)."""
    probe = world.path("probe.py")
    if not probe.exists():
        world.write("probe.py", PROBE)
    inner = (PYTHON, "-S", str(probe), json.dumps(calls))
    done = (
        world.outside(*command, *inner)
        if command and command[0] == "bwrap"
        else world.sandbox(*command, *inner)
    )
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout)
    return found


def names(codes: list[int]) -> list[str]:
    return [errno.errorcode.get(code, "ok") for code in codes]


@pytest.mark.parametrize("level", ["strict", "default"])
def test_cannot_make_the_calls_that_the_table_refuses(world: World, level: str) -> None:
    """Each is refused with the table's error, and without the filter with none or another."""
    rows = judged(REFUSED, level)
    calls = [call for _, call, _ in rows]
    got = ask(world, calls, f"--seccomp={level}")
    assert [(n, e) for (n, _, _), e in zip(rows, names(got), strict=True)] == [
        (n, errno.errorcode[e]) for n, _, e in rows
    ]
    control = ask(world, calls, *BARE)
    same = [n for (n, _, said), e in zip(rows, control, strict=True) if e == said]
    assert same == []


def test_cannot_make_the_calls_that_the_kernel_refuses_too(world: World) -> None:
    """The filter stands before code that asks for a capability only then."""
    rows = judged(KERNEL_TOO, "default")
    got = ask(world, [call for _, call, _ in rows])
    assert names(got) == [errno.errorcode[said] for _, _, said in rows]


def test_strict_refuses_more_and_default_does_not(world: World) -> None:
    """Tracing, other processes, memory policy, old asynchronous calls."""
    rows = judged(STRICT, "strict")
    calls = [call for _, call, _ in rows]
    got = ask(world, calls, "--seccomp=strict")
    assert names(got) == [errno.errorcode[said] for _, _, said in rows]
    default = ask(world, calls)
    assert [n for (n, _, said), e in zip(rows, default, strict=True) if e == said] == []


def test_cannot_make_a_call_that_is_younger_than_the_table(world: World) -> None:
    """A number that no kernel has, and one that the table does not have."""
    highest = max(surface.numbers(MACHINE).values())
    calls = [[highest + 1, 0], [highest + 2, 0], [1000, 0], [0x3FFFFFFF, 0]]
    assert names(ask(world, calls)) == ["ENOSYS"] * 4


# --- Sockets ------------------------------------------------------------------------------------

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_ALG, AF_VSOCK = 1, 2, 10, 16, 17, 38, 40


def sockets(*triples: tuple[int, int, int], name: str = "socket") -> list[list[int]]:
    return [[surface.numbers(MACHINE)[name], *triple] for triple in triples]


def test_cannot_open_sockets_of_other_families(world: World) -> None:
    """Packets, ciphers, the hypervisor, netlink but for routes; raw and rare internet protocols."""
    families = sockets(
        (AF_PACKET, 3, 0), (AF_ALG, 5, 0), (AF_VSOCK, 1, 0), (AF_NETLINK, 3, 16),
        (AF_NETLINK, 3, 15), (15, 3, 2), (31, 1, 0),
    )  # fmt: skip
    assert names(ask(world, families)) == ["EAFNOSUPPORT"] * len(families)
    protocols = sockets((AF_INET, 3, 255), (AF_INET, 1, 132), (AF_INET6, 1, 262))
    assert names(ask(world, protocols)) == ["EPROTONOSUPPORT"] * 3
    pair = sockets((AF_INET, 1, 0), name="socketpair")
    assert names(ask(world, pair)) == ["EAFNOSUPPORT"]
    # The controls are those that every kernel has.
    bare = names(ask(world, [families[0], families[3], protocols[0], pair[0]], *BARE))
    assert bare == ["ok", "ok", "ok", "ENOTSUP"]


def test_can_open_unix_internet_and_route_sockets(world: World) -> None:
    """What resolvers, servers and getifaddrs need."""
    usual = sockets(
        (AF_UNIX, 1, 0), (AF_UNIX, 2, 0), (AF_INET, 1, 6), (AF_INET, 2, 17), (AF_INET6, 1, 0),
        (AF_NETLINK, 3, 0),
    )  # fmt: skip
    assert names(ask(world, usual)) == ["ok"] * len(usual)


RECONNECT = """
import os, socket
if os.fork() == 0:
    host = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    host.bind("s")
    os.write(1, host.recv(9)); os._exit(0)
while not os.path.exists("s"): pass
one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
one.connect("s"); one.send(b"reached")
os.wait()
"""
PAIR = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    one, two = socket.socketpair(socket.AF_UNIX, kind)
    one.sendall(b"x"); print(two.recv(9))
    try: one.connect("s"); print("escaped")
    except OSError: pass
    try: one.sendto(b"y", "s")
    except OSError: pass
    else: assert two.recv(9) == b"y"  # a packet's address is ignored
for call in (lambda: socket.socket(socket.AF_UNIX), lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)):
    try: call(); print("escaped")
    except OSError as e: print(e.errno)
"""  # noqa: E501 - a script for the inside reads better in one piece


def test_cannot_reach_a_unix_socket_in_strict(world: World) -> None:
    """No socket with a path; a pair stays a pair. By default a datagram pair can be redirected."""
    assert world.sandbox(PYTHON, "-c", RECONNECT).stdout == "reached"
    world.path("s").unlink()
    done = world.sandbox("--seccomp=strict", PYTHON, "-c", PAIR)
    assert done.stdout.split() == ["b'x'", "b'x'", "97", "1"], done.stderr


# --- Set-user-id --------------------------------------------------------------------------------

SET_USER_ID = """
import ctypes, os, stat
libc = ctypes.CDLL(None, use_errno=True)
def attempt(how):
    try: how()
    except OSError as e: print(e.errno, end=" ")
    else: print("done", end=" ")
def create(name, flags):
    fd = os.open(name, flags | os.O_WRONLY, 0o4755)
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        os.link(f"/proc/self/fd/{fd}", "linked", dst_dir_fd=os.open(".", 0), follow_symlinks=True)
    os.close(fd)
os.umask(0)
os.close(os.open("plain", os.O_CREAT | os.O_WRONLY, 0o755))
attempt(lambda: os.chmod("plain", 0o4755))
attempt(lambda: os.chmod("plain", 0o4755, dir_fd=os.open(".", 0)))
attempt(lambda: os.chmod(os.open("plain", 0), 0o4755))
attempt(lambda: create("made", os.O_CREAT))
attempt(lambda: create(".", os.O_TMPFILE))
attempt(lambda: os.mknod("node", 0o4755 | stat.S_IFREG))
"""


def test_cannot_leave_a_set_user_id_program(world: World) -> None:
    """By no call that has a mode; a root sandbox would leave a root program for other users."""

    def marked() -> set[str]:
        return {
            p.name
            for p in world.project.iterdir()
            if p.lstat().st_mode & stat.S_ISUID and not p.is_symlink()
        }

    done = world.sandbox("--seccomp=off", PYTHON, "-c", SET_USER_ID)
    assert done.stdout.split() == ["done"] * 6, done.stderr
    assert marked() == {"plain", "made", "linked", "node"}
    for path in world.project.iterdir():
        path.unlink()
    done = world.sandbox(PYTHON, "-c", SET_USER_ID)
    assert done.stdout.split() == ["1"] * 6, done.stderr
    assert marked() == set()
    assert {p.name for p in world.project.iterdir()} == {"plain"}


def test_can_set_every_other_mode(world: World) -> None:
    """Group bits on directories too, as git's shared repositories want them."""
    done = world.sh(
        "umask 0; mkdir d && chmod 2775 d && chmod 1777 . && touch f && chmod 750 f && "
        "git init -q --shared=group r && stat -c %a d f r/.git/objects"
    )
    assert done.stdout.split()[:2] == ["2775", "750"], done.stderr
    assert int(done.stdout.split()[2], 8) & stat.S_ISGID


# --- Tracing ------------------------------------------------------------------------------------

TRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
SEIZE, INTERRUPT = 0x4206, 0x4207
def seize(pid):
    ctypes.set_errno(0)
    return libc.ptrace(SEIZE, pid, 0, 0) and ctypes.get_errno()
"""
TRACE_INIT = (
    TRACE
    + """
class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
def remote(call):
    here = ctypes.create_string_buffer(8)
    ours, theirs = Vector(ctypes.addressof(here), 8), Vector(1, 8)
    ctypes.set_errno(0)
    call(1, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
    return ctypes.get_errno()
def listed(path):
    try: return len(os.listdir(path))
    except OSError: return 0
print(seize(1), seize(1 | 1 << 32), remote(libc.process_vm_readv), remote(libc.process_vm_writev))
print(listed("/proc/1"), listed("/proc/1/fd"), os.path.exists("/proc/1/mem"))
"""
)


@pytest.mark.parametrize("level", LEVELS)
def test_cannot_reach_the_first_process(world: World, level: str) -> None:
    """bwrap's own process is unfiltered, with the host's /proc open, for a moment after the start.

    Whoever traces it then, or opens its descriptors, is out. Neither works at any time or level.
    """
    done = world.sandbox(f"--seccomp={level}", PYTHON, "-c", TRACE_INIT)
    assert done.stdout == "1 1 1 1\n0 0 False\n", done.stderr
    # The control: in bwrap alone, without capabilities, it can be traced and looked into.
    plain = [w for w in BARE if w not in ("--cap-add", "ALL")]
    control = world.outside(*plain, "--cap-drop", "ALL", PYTHON, "-c", TRACE_INIT).stdout.split()
    assert control[:1] == ["0"]
    assert control[2:4] == ["14", "14"]  # EFAULT: permitted, but nothing is at address 1
    assert int(control[5]) >= 3
    assert control[6] == "True"


def test_can_trace_processes_of_its_own(world: World) -> None:
    """Debuggers work; in strict they do not. A process outside cannot even be named."""
    code = TRACE + (
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import signal; signal.pause()\n"
        "print(seize(child), seize(int(sys.argv[1])))\n"
        "os.kill(child, 9)\n"
    )
    outside = str(os.getpid())
    assert world.sandbox(PYTHON, "-c", code, outside).stdout == "0 3\n"
    assert world.sandbox("--seccomp=strict", PYTHON, "-c", code, outside).stdout == "1 1\n"


# --- Other tables -------------------------------------------------------------------------------

# Executes machine code; getpid in three dresses.
OTHER_TABLE = """
import ctypes, mmap, sys
code = bytes.fromhex(sys.argv[1])
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(code)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_long)(address)())
"""
NATIVE = "b8270000000f05c3"
I386 = "b814000000cd80c3"
X32 = "b8270000400f05c3"
SIGSYS_CODE = 128 + 31


@pytest.mark.skipif(MACHINE != "x86_64", reason="machine code of x86_64")
@pytest.mark.parametrize("code", [I386, X32], ids=["i386", "x32"])
def test_cannot_use_another_table_of_calls(world: World, code: str) -> None:
    """The process is killed; the same page with the machine's own call works."""
    native = world.sandbox(PYTHON, "-c", OTHER_TABLE, NATIVE)
    assert int(native.stdout) > 1, native.stderr
    assert world.sandbox(PYTHON, "-c", OTHER_TABLE, code).returncode == SIGSYS_CODE
    assert world.outside(*BARE, PYTHON, "-c", OTHER_TABLE, code).returncode != SIGSYS_CODE


# --- Levels -------------------------------------------------------------------------------------

STILL_HELD = """
import errno, fcntl, os
m, s = os.openpty()
for request in (0x5412, 0x541c):
    try: fcntl.ioctl(s, request, b"\\2")
    except OSError as e: print(errno.errorcode[e.errno])
"""


def test_off_opens_the_kernel_but_not_the_terminal(world: World) -> None:
    """Said on every run; calls reach the kernel, which has its own opinion of them."""
    rows = judged([("keyctl", 999), ("clone3", 0, 0), ("setns", -1, 0)], "off")
    got = ask(world, [call for _, call, _ in rows], "--seccomp=off")
    assert names(got) == ["ENOTSUP", "EINVAL", "EBADF"]
    done = world.sandbox("--seccomp=off", PYTHON, "-c", STILL_HELD)
    assert done.stdout == "EPERM\nEPERM\n"
    assert done.stderr.count("seccomp is off (flag --seccomp)") == 1


def test_cannot_switch_the_filter_off_from_a_project_s_file(world: World) -> None:
    """It may only tighten; the control is the same line in the user's own file."""
    world.project_config('seccomp = "off"')
    done = world.sandbox("true")
    assert done.returncode == 125
    assert 'seccomp = "off"' in done.stderr
    world.project_config('seccomp = "strict"')
    assert world.sandbox(PYTHON, "-c", PAIR).stdout.split()[-2:] == ["97", "1"]
    world.path(".agent-sandbox.toml").unlink()
    world.global_config('seccomp = "off"')
    assert "seccomp is off" in world.sandbox("true").stderr


def test_the_level_is_shown(world: World) -> None:
    """By --debug and in the report."""
    flags = ("--seccomp=strict", "--report", "report.json")
    assert world.sandbox(*flags, "true").returncode == 0
    report: dict[str, Any] = json.loads(world.path("report.json").read_text())
    assert report["policy"]["seccomp"] == {"value": "strict", "source": "flag --seccomp"}
    assert "seccomp = strict  [flag --seccomp]" in world.sandbox("--debug", *flags, "true").stderr


def test_the_library_has_the_setting(world: World) -> None:
    """As every other one."""
    done = world.python(
        "from agent_sandbox import Policy, Sandbox\n"
        "for level in ('strict', 'default'):\n"
        "    code = 'import socket; socket.socket(socket.AF_UNIX)'\n"
        "    box = Sandbox(Policy(project='.', seccomp=level))\n"
        "    print(box.run(['/usr/bin/python3', '-c', code], capture=True).code)\n"
    )
    assert done.stdout.split() == ["1", "0"], done.stderr


def test_the_filter_stands_on_every_process_inside(world: World) -> None:
    """Also on a child in a session of its own, after exec."""
    must_work(shutil.which("setsid"), "needs setsid")
    done = world.sh("setsid -w sh -c 'grep ^Seccomp: /proc/self/status'")
    assert done.stdout.split() == ["Seccomp:", "2"]
