"""Reads what this machine's kernel allows, and tries each layer of the sandbox in a tiny run.

Changes nothing that stays. Judges nothing: `policy.diagnosis` does. What belongs to the launcher
(options, filter, Landlock) comes in as parameters. Not on the launch path.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess  # noqa: TID253 - tries things, so it is never part of a launch
import sys
import tempfile

from ..errors import SandboxError, reason
from ..policy import paths
from ..policy.diagnosis import (
    CAPABILITIES,
    FLATPAK,
    LANDLOCK,
    MOUNT,
    NETWORK,
    NO_USERNS,
    SECCOMP,
    USER,
    WHOLE,
    Attempt,
    Probes,
)
from ..policy.model import MARKER
from . import facts
from .locate import Locator

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    Restrict = Callable[[str], bool]

SECONDS = 20
MAX_ERROR = 600
SYSCTL = "/proc/sys/"
# From linux/capability.h.
CAP_SETFCAP = 31
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
APPARMOR_DIR = "/etc/apparmor.d"
# Mounts below /proc that the kernel does not count when it refuses a fresh one: they lie on
# directories that are always empty.
HARMLESS_PROC = ("/proc/sys/fs/binfmt_misc", "/proc/fs/nfsd")
# Words in pid 1's cgroup, and the engine that each stands for.
CGROUP_WORDS = (("docker", "docker"), ("libpod", "podman"), ("lxc", "lxc"))


def text_of(path: str) -> str:
    """A small file's text without its end of line; empty when it is missing or closed."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20).decode("utf-8", "replace").strip("\n\0 ")
    except OSError:
        return ""


def number_of(path: str) -> int | None:
    """A number in a file of the kernel; None when there is none."""
    text = text_of(path)
    return int(text) if text.isdigit() else None


def probe(
    bwrap: str | None, *, required: Iterable[str], machines: Container[str], landlock_abi: int,
    env: Mapping[str, str],
) -> Probes:  # fmt: skip
    """Read the machine. `bwrap` is the program to look at, None when there is none."""
    path = bwrap or ""
    uname = os.uname()
    version, offered, error = _ask(path) if path else ((), set[str](), "")
    real = os.path.realpath(path) if path else ""
    usable = bool(path) and not error
    apparmor = text_of("/sys/module/apparmor/parameters/enabled") == "Y"
    cgroup, writable = _cgroup()
    state_dir, state_error = _state(env)
    mountinfo = text_of("/proc/self/mountinfo")
    return Probes(
        uid=os.getuid(), kernel=uname.release, machine=uname.machine,
        machine_supported=uname.machine in machines and sys.maxsize > 1 << 32,
        distributions=distributions(text_of("/etc/os-release")),
        bwrap=path, bwrap_real=real, bwrap_version=version, bwrap_error=error,
        bwrap_privileged=_privileges(real) if path else "",
        bwrap_missing=tuple(o for o in required if o not in offered) if usable else (),
        oldroot_hole=_oldroot_hole(path) if usable else None,
        setfcap=bool(int(_status("CapEff"), 16) >> CAP_SETFCAP & 1),
        userns_supported=os.path.exists("/proc/self/ns/user"),
        userns_clone=number_of(SYSCTL + "kernel/unprivileged_userns_clone"),
        max_user_namespaces=number_of(SYSCTL + "user/max_user_namespaces"),
        zero_limits=_zero_limits(), apparmor=apparmor,
        apparmor_restricts=number_of(SYSCTL + "kernel/apparmor_restrict_unprivileged_userns"),
        apparmor_label=_label(path) if apparmor and usable else "",
        apparmor_files=_profile_files(APPARMOR_DIR) if apparmor else (),
        selinux={"1": "enforcing", "0": "permissive"}.get(text_of("/sys/fs/selinux/enforce"), ""),
        chroot=is_chroot(mountinfo),
        seccomp_actions=tuple(text_of(SYSCTL + "kernel/seccomp/actions_avail").split()),
        seccomp_mode=int(_status("Seccomp")),
        landlock_abi=landlock_abi, cgroup=cgroup, cgroup_writable=writable,
        container=_container(env, mountinfo), proc_masks=proc_masks(mountinfo),
        wsl=_wsl(text_of(SYSCTL + "kernel/osrelease")), nested=os.path.lexists(MARKER),
        state_dir=state_dir, state_error=state_error,
    )  # fmt: skip


# --- bwrap ---------------------------------------------------------------------------------------


def _ask(bwrap: str) -> tuple[tuple[int, ...], set[str], str]:
    """The version of bwrap, the options that its help names, and why it does not run."""
    code, shown, error = run([bwrap, "--version"])
    if code == 0:
        version = _version(shown)
        code, shown, error = run([bwrap, "--help"])
        words = (line.split() for line in shown.splitlines())
        offered = {w[0] for w in words if w and w[0].startswith("--")}
        if offered:
            return version, offered, ""
    return (), set(), error or f"it ended with exit code {code}"


def _version(shown: str) -> tuple[int, ...]:
    numbers = shown.strip().rpartition(" ")[2].split(".")
    return tuple(int(n) for n in numbers) if all(n.isdigit() for n in numbers) else ()


def _privileges(real: str) -> str:
    """Rights that the file itself gives to whoever runs it."""
    try:
        mode = os.stat(real).st_mode
    except OSError:
        return ""
    bits = ((stat.S_ISUID, "setuid"), (stat.S_ISGID, "setgid"))
    found = [word for bit, word in bits if mode & bit]
    try:
        os.getxattr(real, "security.capability")
        found.append("file capabilities")
    except OSError:
        pass
    return " and ".join(found)


def _oldroot_hole(bwrap: str) -> bool | None:
    """Whether bwrap makes a mount point behind a link that a sandbox could have planted."""
    try:
        top = tempfile.mkdtemp(prefix="agent-sandbox-doctor-")
    except OSError:
        return None
    try:
        os.mkdir(f"{top}/inside")
        os.mkdir(f"{top}/outside")
        # While bwrap builds the root, the host's lies at /oldroot.
        os.symlink(f"/oldroot{top}/outside", f"{top}/inside/link")
        control = [bwrap, *ROOT, "--bind", f"{top}/inside", f"{top}/inside"]
        if run([*control, *_python("")])[0] != 0:
            return None
        run([*control, "--ro-bind", "/dev/null", f"{top}/inside/link/planted", *_python("")])
        return os.path.lexists(f"{top}/outside/planted")
    finally:
        shutil.rmtree(top, ignore_errors=True)


# --- what forbids namespaces ---------------------------------------------------------------------


def _zero_limits() -> tuple[str, ...]:
    names = (f"user/max_{kind}_namespaces" for kind in NAMESPACES)
    return tuple(n.replace("/", ".") for n in names if number_of(SYSCTL + n) == 0)


def _label(bwrap: str) -> str:
    """The AppArmor label that this bwrap runs under, which anybody may read while it runs.

    It waits for the end of its arguments, so it is there to be looked at and has done nothing yet.
    """
    reading, writing = os.pipe()
    try:
        process = subprocess.Popen(  # noqa: S603 - the bwrap that is asked about
            [bwrap, "--args", str(reading)], pass_fds=(reading,), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return ""
    finally:
        os.close(reading)
    try:
        current = text_of(f"/proc/{process.pid}/attr/apparmor/current")
        return current or text_of(f"/proc/{process.pid}/attr/current")
    finally:
        process.kill()
        process.wait()
        os.close(writing)


def _profile_files(directory: str) -> tuple[str, ...]:
    """Files in AppArmor's directory that hold a profile for a bwrap."""
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return ()
    found = []
    for name in names:
        lines = map(str.strip, text_of(f"{directory}/{name}").splitlines())
        if any("/bwrap" in line for line in lines if line[-1:] == "{" and line[0] != "#"):
            found.append(f"{directory}/{name}")
    return tuple(found)


def distributions(release: str) -> tuple[str, ...]:
    """ID and ID_LIKE of os-release(5)."""
    values = dict(line.split("=", 1) for line in release.splitlines() if "=" in line)
    return tuple(f"{values.get('ID', '')} {values.get('ID_LIKE', '')}".replace('"', "").split())


def _mount_points(mountinfo: str) -> list[str]:
    return [line.split()[4] for line in mountinfo.splitlines() if len(line.split()) > 4]


def is_chroot(mountinfo: str) -> bool:
    """In a chroot no mount has the root as its mount point (proc(5), mountinfo)."""
    points = _mount_points(mountinfo)
    return bool(points) and "/" not in points


def proc_masks(mountinfo: str) -> tuple[str, ...]:
    """Mounts that cover parts of /proc."""
    points = (p for p in _mount_points(mountinfo) if p.startswith("/proc/"))
    return tuple(p for p in points if not any(paths.within(p, h) for h in HARMLESS_PROC))


def _status(field: str) -> str:
    """A number about this process; 0 when the kernel does not tell."""
    for line in text_of("/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return value.strip()
    return "0"


def _wsl(release: str) -> int:
    if "microsoft" not in release.lower():
        return 0
    # WSL 1 calls itself 4.4.0-NNNNN-Microsoft; WSL 2 is a real kernel with another spelling.
    return 1 if release.endswith("-Microsoft") else 2


def _container(env: Mapping[str, str], mountinfo: str) -> str:
    """The engine whose container this is, or what its configuration calls it."""
    if os.path.exists("/.flatpak-info"):
        return FLATPAK
    cgroup = text_of("/proc/1/cgroup")
    if env.get("KUBERNETES_SERVICE_HOST") or "kubepods" in cgroup:
        return "kubernetes"
    if os.path.exists("/run/.containerenv"):
        return "podman"
    # A file system that was copied out of an image has the marker, but not Docker's own mounts.
    if os.path.exists("/.dockerenv") and "/etc/hostname" in _mount_points(mountinfo):
        return "docker"
    for word, engine in CGROUP_WORDS:
        if word in cgroup:
            return engine
    # systemd's convention: https://systemd.io/CONTAINER_INTERFACE
    return env.get("container", "") or text_of("/run/systemd/container")


# --- cgroups and state ---------------------------------------------------------------------------


def _cgroup() -> tuple[str, bool]:
    """The version that has the controllers, and whether we may write our own group."""
    own: dict[str, str] = {}
    for line in text_of("/proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        own.update(dict.fromkeys(names.split(","), path))
    if "memory" in own:
        return "v1", os.access(f"/sys/fs/cgroup/memory{own['memory']}", os.W_OK)
    place = "/sys/fs/cgroup" + own.get("", "/")
    if not os.path.exists(f"{place}/cgroup.procs"):
        return "", False
    return "v2", os.access(place, os.W_OK) and os.access(f"{place}/cgroup.procs", os.W_OK)


def _state(env: Mapping[str, str]) -> tuple[str, str]:
    """The state directory and what is wrong with it."""
    try:
        at = facts.place(env, "/", Locator())
    except SandboxError as error:
        return "", error.message
    path = at.state_dir
    try:
        info = os.lstat(path)
    except FileNotFoundError:
        parent = path
        while not os.path.lexists(parent):
            parent = paths.parent(parent)
        writable = os.access(parent, os.W_OK | os.X_OK)
        return path, "" if writable else f"'{parent}' is not writable"
    except OSError as error:
        return path, reason(error)
    if not stat.S_ISDIR(info.st_mode):
        return path, "not a directory"
    if info.st_uid != at.uid or info.st_mode & 0o022:
        return path, "others own it or can write it"
    return path, "" if os.access(path, os.W_OK | os.X_OK) else "not writable"


# --- trying --------------------------------------------------------------------------------------

# What runs inside each layer: it attempts what the layer forbids, and complains if that worked.
NOTHING = ""
SEES_OWN_PROC = "import os, sys; sys.exit('host processes seen' if os.getpid() > 9 else 0)"
HAS_OWN_LOOPBACK = "import socket; socket.socket().bind(('127.0.0.1', 0))"
CANNOT_NEST = (
    "import ctypes, sys\n"
    "sys.exit(0 if ctypes.CDLL(None).unshare(0x10000000) else 'a namespace was made')"
)
HAS_NO_CAPABILITY = (
    "import sys; found = open('/proc/self/status').read().split('CapEff:')[1].split()[0]\n"
    "sys.exit(f'capabilities {found} are left' if int(found, 16) else 0)"
)
# ENOTTY without the filter, EPERM with it: /dev/null is no terminal.
CANNOT_TYPE = (
    "import fcntl, sys\n"
    "try: fcntl.ioctl(0, 0x5412, b'x')\n"
    "except PermissionError: sys.exit(0)\n"
    "except OSError: pass\n"
    "sys.exit('TIOCSTI was not filtered')"
)
CANNOT_CONNECT = (
    "import socket, sys\n"
    "try: socket.socket(socket.AF_UNIX).connect('\\0' + sys.argv[1])\n"
    "except PermissionError: sys.exit(0)\n"
    "sys.exit('an abstract socket outside was reached')"
)
ROOT = ("--unshare-user", "--ro-bind", "/", "/")
FRESH = ("--unshare-pid", "--dev", "/dev", "--proc", "/proc")
# layer → options besides ROOT, what runs inside
TRIALS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    (USER, (), NOTHING),
    (MOUNT, FRESH, SEES_OWN_PROC),
    (NETWORK, ("--unshare-net",), HAS_OWN_LOOPBACK),
    (NO_USERNS, ("--disable-userns",), CANNOT_NEST),
    (CAPABILITIES, ("--cap-drop", "ALL"), HAS_NO_CAPABILITY),
)
EVERYTHING = ("--unshare-all", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL", *FRESH)


def try_layers(
    bwrap: str, *, filter_bytes: bytes, restrict: Restrict | None
) -> tuple[Attempt, ...]:
    """Try each layer alone, then all together as the launcher does. None skips Landlock."""
    made = [
        _attempt(layer, [bwrap, *ROOT, *options, *_python(code)]) for layer, options, code in TRIALS
    ]
    made.append(_with_filter(SECCOMP, [bwrap, *ROOT], filter_bytes, None))
    if restrict is not None:
        made.append(try_landlock(restrict))
    made.append(_with_filter(WHOLE, [bwrap, *ROOT, *EVERYTHING], filter_bytes, restrict))
    return tuple(made)


def try_landlock(restrict: Restrict) -> Attempt:
    """A process that was scoped tries to reach an abstract socket of this one."""
    name = f"agent-sandbox-doctor-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        return _attempt(LANDLOCK, [*_python(CANNOT_CONNECT), name], restrict=restrict)


def _with_filter(
    layer: str, command: Sequence[str], filter_bytes: bytes, restrict: Restrict | None
) -> Attempt:
    reading, writing = os.pipe()
    try:
        os.write(writing, filter_bytes)
        os.close(writing)
        argv = [*command, "--seccomp", str(reading), *_python(CANNOT_TYPE)]
        return _attempt(layer, argv, restrict=restrict, keep=(reading,))
    finally:
        os.close(reading)


def _attempt(
    layer: str, argv: Sequence[str], *, restrict: Restrict | None = None, keep: Sequence[int] = ()
) -> Attempt:
    code, _, error = run(argv, restrict=restrict, keep=keep)
    if code == 0:
        return Attempt(layer=layer, ok=True)
    ended = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return Attempt(layer=layer, ok=False, error=error or ended)


def _python(code: str) -> list[str]:
    # -I and -S: nothing of the user's, and a third of the start-up time.
    return [sys.executable, "-I", "-S", "-c", code]


def run(
    argv: Sequence[str], *, restrict: Restrict | None = None, keep: Sequence[int] = ()
) -> tuple[int, str, str]:
    """Run a short command: its exit code, its output, and its complaint on one printable line."""
    try:
        done = subprocess.run(  # noqa: S603 - bwrap or this interpreter
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=False,
            pass_fds=keep, cwd="/", env={"PATH": os.defpath, "LC_ALL": "C"},
            preexec_fn=None if restrict is None else lambda: _give_up(restrict),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {SECONDS} seconds"
    except OSError as error:
        return 126, "", reason(error)
    return done.returncode, done.stdout.decode("utf-8", "replace"), printable(done.stderr)


def printable(output: bytes) -> str:
    """What a program said, on one line and safe for a terminal."""
    words = " ".join(output.decode("utf-8", "replace").split())
    return "".join(c if c.isprintable() else "?" for c in words)[:MAX_ERROR]


def _give_up(restrict: Restrict) -> None:
    """In the child, between fork and exec: what the launcher does before it starts bwrap."""
    try:
        if restrict(os.uname().machine):
            return
        complaint = "Landlock has no scopes here"
    except OSError as error:
        complaint = f"Landlock: {reason(error)}"
    os.write(2, complaint.encode())
    os._exit(1)
