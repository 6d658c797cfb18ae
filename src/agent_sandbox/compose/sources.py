"""Which paths of the host a container must not have, by any of their names."""

from __future__ import annotations

from ..policy import engines, paths, secrets
from .model import canonical

# Names that only engines' sockets have, wherever they lie.
SOCKET_NAMES = frozenset(
    path.rpartition("/")[2]
    for path in (*engines.SYSTEM, *engines.RUNTIME, *engines.HOME)
    if path.endswith(".sock")
) - {"api.sock"}
SOCKETS = frozenset(canonical(path) for path in engines.SYSTEM)
# Directories of the host, and what whoever has them can do.
DANGEROUS: tuple[tuple[str, str], ...] = (
    ("/etc", "accounts, cron and system services are configured there"),
    ("/root", "it is root's home, with root's keys"),
    ("/home", "it holds every user's keys and tokens"),
    ("/boot", "the kernel that starts next lies there"),
    ("/usr", "every program of the host lies there"),
    ("/bin", "every program of the host lies there"),
    ("/sbin", "every program of the host lies there"),
    ("/lib", "every program of the host loads code from there"),
    ("/lib64", "every program of the host loads code from there"),
    ("/opt", "programs of the host lie there"),
    ("/dev", "disks and memory of the host are files there"),
    ("/proc", "kernel settings and every process of the host are files there"),
    ("/sys", "kernel settings and devices of the host are files there"),
    ("/var/lib/docker", "images and containers of the engine are files there"),
    ("/var/lib/containerd", "images and containers of the engine are files there"),
    ("/var/lib/containers", "images and containers of the engine are files there"),
    ("/var/lib/kubelet", "every pod's secrets and volumes lie there"),
    ("/var/spool/cron", "what lies there is run by the host"),
    ("/var/log", "links that a container leaves there are followed by the host"),
)
# Files that nearly every image shares with its host, and that tell nothing.
HARMLESS = frozenset(
    ("/etc/localtime", "/etc/timezone", "/etc/hosts", "/etc/resolv.conf", "/etc/machine-id",
     "/etc/ssl/certs", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/zoneinfo",
     "/usr/share/ca-certificates", "/etc/ca-certificates", "/dev/null", "/dev/shm")
)  # fmt: skip


def socket(path: str, home: str) -> str:
    """The engine's socket that a mount of `path` shows: itself, or one below it. Or nothing."""
    path = canonical(path)
    known = set(SOCKETS)
    known.update(home + place[1:] for place in engines.HOME)
    if path in known or path.rpartition("/")[2] in SOCKET_NAMES:
        return path
    if paths.within(path, "/run/user"):
        return _rootless(path)
    # The home as a whole is a finding of its own; here it would name one odd engine of many.
    if path == home or paths.within(home, path):
        known = set(SOCKETS)
    below = sorted((k for k in known if paths.below(k, path)), key=lambda k: (paths.depth(k), k))
    first = canonical(engines.STANDARD)
    if first in below:
        return first
    return below[0] if below else ""


def _rootless(path: str) -> str:
    """Below /run/user/UID every user's own engine listens."""
    parts = path.split("/")
    if len(parts) <= 4:
        user = parts[3] if len(parts) == 4 else "UID"
        return f"/run/user/{user}/{engines.RUNTIME[0]}"
    rest = "/".join(parts[4:])
    hit = next((r for r in engines.RUNTIME if paths.within("/" + r, "/" + rest)), "")
    return f"/run/user/{parts[3]}/{hit}" if hit else ""


def is_socket_target(path: str) -> bool:
    """Whether a path inside is where clients look for an engine."""
    where = canonical(path)
    return where in SOCKETS or where.rpartition("/")[2] in SOCKET_NAMES


def danger(path: str, home: str) -> str:
    """Why a directory of the host is dangerous in a container; nothing when it is not."""
    path = canonical(path)
    if path == "/":
        return "it is the whole host"
    if path in HARMLESS or any(paths.within(path, h) for h in HARMLESS):
        return ""
    for place in secrets.HOME:
        if paths.within(path, home + place[1:]):
            return "credentials are kept there"
    if path == home:
        return "it is a home directory, with keys and tokens"
    if path in ("/var", "/var/lib", "/var/spool"):
        return "the engine's own files lie below it"
    return next((why for where, why in DANGEROUS if _reaches(path, where)), "")


def _reaches(path: str, where: str) -> bool:
    # A project below a home is what people mount; the homes themselves are not.
    if where == "/home":
        return paths.within(path, where) and path.count("/") <= 2
    return path == where if where == "/root" else paths.within(path, where)
