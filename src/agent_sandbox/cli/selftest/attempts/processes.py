"""Attempts on everything but files: services, processes, the kernel, authority, network, limits."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import stat
import time

from . import frame
from .frame import Got, attempt, checked, each, facts, libc, refused, secrets, syscall, word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK = 1 << 20
# More than the limits of these attempts allow.
FLOOD = 24 * CHUNK
# How long the limit may take to be noticed.
FLOOD_SECONDS = 4
PROCESSES = 64
# asm-generic/ioctls.h, linux/ptrace.h, linux/sched.h, linux/keyctl.h, asm/unistd.h
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
PTRACE_SEIZE = 0x4206
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
KEYCTL_SEARCH, KEYCTL_READ, KEY_SPEC_SESSION_KEYRING = 10, 11, -3
X32_SYSCALL_BIT, X32_GETPID = 0x40000000, 39
# Raw packets, the kernel's cryptography, the hypervisor.
FAMILIES = (("AF_PACKET", 17, 3), ("AF_ALG", 38, 5), ("AF_VSOCK", 40, 1))


def _connect(address: str) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(1)
        line.connect(address)
    return "connected"


@attempt
def project_socket() -> str:
    """connect(2) needs no right to write."""

    def link() -> str:
        os.link("socket", "socket-alias")
        return _connect("socket-alias")

    return each(("connect", lambda: _connect("socket")), ("link", link))


@attempt
def engine_socket() -> str:
    """Whoever reaches an engine is root."""
    return _connect(f"{facts['base']}/engine/socket")


@attempt
def abstract_socket() -> str:
    """These have no path that could be hidden."""
    return _connect(f"\0{facts['tag']}")


@attempt
def other_families() -> str:
    """Sockets that know no network namespace, or lead into rarely used kernel code."""
    tries = [(name, lambda f=f, k=k: socket.socket(f, k).close()) for name, f, k in FAMILIES]
    return refused(each(*tries), "EAFNOSUPPORT", "EPERM", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT")


@attempt
def keyring() -> str:
    """Keyrings know no namespace; whoever inherits one possesses its keys."""
    name = facts["tag"].encode()
    key = syscall("keyctl", KEYCTL_SEARCH, KEY_SPEC_SESSION_KEYRING, b"user", name, 0)
    buffer = ctypes.create_string_buffer(200)
    size = syscall("keyctl", KEYCTL_READ, key, buffer, len(buffer))
    return secrets(buffer.raw[:size].decode())


# --- processes ------------------------------------------------------------------------------------


@attempt
def signal_process() -> str:
    """A signal that does no harm."""
    pid = int(facts["canary"])

    def by_handle() -> None:
        signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGWINCH)

    return each(("kill", lambda: os.kill(pid, signal.SIGWINCH)), ("pidfd", by_handle))


@attempt
def signal_group() -> str:
    """The sandbox is in its caller's group, for the sake of job control."""
    return each(("kill", lambda: os.kill(0, signal.SIGURG)))


@attempt
def command_lines() -> str:
    """Of every process that /proc shows."""
    seen = ""
    pids = [name for name in os.listdir("/proc") if name.isdigit()]
    for path in (f"/proc/{pid}/{name}" for pid in pids for name in ("cmdline", "environ")):
        try:
            with open(path, "rb") as file:
                seen += file.read().decode("utf-8", "replace") + "\n"
        except OSError:
            continue
    return f"{len(pids)} processes: {secrets(seen)}"


@attempt
def trace() -> str:
    """pid 1 is bwrap's own, and has the host's /proc open for a moment. The canary is outside."""
    canary = int(facts["canary"])

    def seize(pid: int) -> int:
        return checked(libc.ptrace(PTRACE_SEIZE, pid, 0, 0))

    def take(pid: int) -> int:
        return syscall("pidfd_getfd", os.pidfd_open(pid), 0, 0)

    def listed(pid: int) -> None:
        if not os.listdir(f"/proc/{pid}/fd"):
            raise FileNotFoundError(errno.ENOENT, "empty")

    said = each(
        ("trace bwrap", lambda: seize(1)),
        ("take from bwrap", lambda: take(1)),
        ("list bwrap", lambda: listed(1)),
        ("trace", lambda: seize(canary)),
        ("take", lambda: take(canary)),
        ("list", lambda: listed(canary)),
    )
    return refused(said, "EPERM", "EACCES", "ESRCH", "ENOENT")


@attempt
def terminal() -> str:
    """A comment is all that is typed. The kernel looks at the lower half of a request only."""
    letter = ctypes.create_string_buffer(b"#")

    def ask(request: int) -> int:
        return syscall("ioctl", 0, ctypes.c_ulong(request), letter)

    said = each(
        ("TIOCSTI", lambda: ask(TIOCSTI)),
        ("with upper bits", lambda: ask(0x1_0000_0000 | TIOCSTI)),
        ("/dev/tty", lambda: fcntl.ioctl(os.open("/dev/tty", os.O_RDWR), TIOCSTI, b"#")),
        ("TIOCLINUX", lambda: ask(TIOCLINUX)),
    )
    # Any other error is the terminal's own answer: the request has got there.
    return refused(said, "EPERM", "ENXIO")


@attempt
def foreign_calls() -> str:
    """32-bit and x32 programs number their calls anew; a filter may have forgotten them."""
    return each(("x32", lambda: _in_child(_x32)), ("i386", lambda: _in_child(_i386)))


def _x32() -> int:
    return checked(libc.syscall(ctypes.c_long(X32_SYSCALL_BIT | X32_GETPID)))


def _i386() -> int:
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # mov eax, 20 (getpid); int 0x80; ret
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(address)())


def _in_child(function: Callable[[], int]) -> str:
    """Whether a way to ask for the own pid works, in a process that may die of it."""
    pid = os.fork()
    if pid == 0:
        try:
            code = 0 if function() == os.getpid() else 1
        except OSError:
            code = 1
        os._exit(code)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return "answered" if os.WEXITSTATUS(status) == 0 else "refused"


@attempt
def orphan() -> str:
    """A process in a session of its own, two forks away. It ends by itself."""
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            lock = os.open("orphan", os.O_CREAT | os.O_RDWR, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(tell, b"x")
            time.sleep(20)
        os._exit(0)
    os.close(tell)
    if not os.read(ready, 1):
        raise RuntimeError("the process did not start")
    return "it runs"


# --- authority ------------------------------------------------------------------------------------


@attempt
def capabilities() -> str:
    """Every set, by the kernel's own account."""
    with open("/proc/self/status", encoding="utf-8", errors="replace") as file:
        lines = [line.split() for line in file if line.startswith("Cap")]
    held = [f"{name} {value}" for name, value in lines if int(value, 16)]
    return Got(" ".join(held)) if held else f"{len(lines)} empty sets"


@attempt
def namespaces() -> str:
    """In a user namespace of one's own, mounts could be undone."""
    said = each(
        ("user", lambda: checked(libc.unshare(CLONE_NEWUSER))),
        ("user and mounts", lambda: checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))),
        ("mounts", lambda: checked(libc.unshare(CLONE_NEWNS))),
    )
    return refused(said, "EPERM", "ENOSPC")


@attempt
def kernel_calls() -> str:
    """With arguments that do nothing: any answer but a refusal shows that the code is reached."""
    said = each(
        ("io_uring_setup", lambda: syscall("io_uring_setup", 1, 0)),
        ("bpf", lambda: syscall("bpf", -1, 0, 0)),
        ("userfaultfd", lambda: syscall("userfaultfd", 0)),
        ("perf_event_open", lambda: syscall("perf_event_open", 0, 0, -1, -1, 0)),
        ("fsopen", lambda: syscall("fsopen", 0, 0)),
    )
    return refused(said, "EPERM", "ENOSYS", "EACCES")


@attempt
def descriptors() -> str:
    """A directory that is open leads past every mount."""
    opened = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
    seen = ""
    for fd in opened:
        try:
            there = stat.S_ISDIR(os.fstat(fd).st_mode)
            file = os.open("id_ed25519", os.O_RDONLY, dir_fd=fd) if there else fd
            seen += os.pread(file, 4096, 0).decode("utf-8", "replace")
        except OSError:
            continue
    return f"{len(opened)} open: {secrets(seen)}"


@attempt
def variables() -> str:
    """Those that were passed, also after a program has forgotten them."""
    with open("/proc/self/environ", "rb") as file:
        seen = file.read().decode("utf-8", "replace")
    return f"{len(os.environ)} variables: {secrets(seen + ' '.join(os.environ.values()))}"


# --- network and limits ---------------------------------------------------------------------------


@attempt
def network() -> str:
    """The host's loopback, and any other way."""

    def tcp() -> None:
        socket.create_connection(("127.0.0.1", int(facts["tcp"])), 1).close()

    def udp() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.sendto(b"x", ("127.0.0.1", int(facts["udp"])))

    def route() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
            # An address for documentation (RFC 5737); to connect sends nothing.
            line.connect(("192.0.2.1", 9))
        return "a route"

    return each(("tcp", tcp), ("udp", udp), ("route", route))


@attempt
def processes() -> str:
    """Twice as many as are allowed; then all of them are ended."""
    pids: list[int] = []
    try:
        while len(pids) < PROCESSES:
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            pids.append(pid)
        said: str = Got(f"{len(pids)} processes")
    except OSError as error:
        said = f"{len(pids)} processes, then {word(error)}"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return said


@attempt
def flood() -> str:
    """Whoever holds the limit ends the sandbox, and us with it."""
    frame.say("flood", frame.ANSWER, f"{FLOOD >> 20} MiB on the way")
    with open(f"/tmp/{facts['tag']}-flood", "wb") as file:
        while file.tell() < FLOOD:
            file.write(os.urandom(CHUNK))
        file.flush()
        os.fsync(file.fileno())
    time.sleep(FLOOD_SECONDS)
    return Got(f"{FLOOD >> 20} MiB in /tmp, and still here")
