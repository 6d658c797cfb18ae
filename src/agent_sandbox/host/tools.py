"""The programs of the host that a launch uses: bwrap, and an `env` that can reset signals.

Helpers are never taken from a directory that the sandbox could have written. What a program can do
is asked once and remembered in the state directory, keyed by the file's identity.
"""

from __future__ import annotations

import os
import stat

from ..errors import HostError
from ..policy import paths
from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

STANDARD_DIRS = ("/usr/bin", "/bin", "/usr/local/bin", "/run/current-system/sw/bin")
ENV_PROGRAMS = ("/usr/bin/env", "/bin/env")


class Tools(Record):
    """Paths of usable programs; `env` is empty when none can reset signals."""

    bwrap: str
    env: str


def find_bwrap(env: Mapping[str, str], project: str) -> str | None:
    """The first bwrap in a directory that the project cannot supply."""
    named = [d for d in env.get("PATH", "").split(":") if d.startswith("/")]
    for directory in (*STANDARD_DIRS, *named):
        path = f"{directory}/bwrap"
        if os.access(path, os.X_OK) and not paths.within(os.path.realpath(path), project):
            return path
    return None


def missing_bwrap() -> HostError:
    """The error for a machine without bubblewrap."""
    return HostError(
        "cannot find 'bwrap'",
        hint="install it: 'apt install bubblewrap', 'dnf install bubblewrap' or "
        "'pacman -S bubblewrap'",
        code="no-bwrap",
    )


def check(bwrap: str, required: Sequence[str], state_dir: str) -> Tools:
    """Tools that were tried, from memory when the files have not changed."""
    env = next((p for p in ENV_PROGRAMS if os.access(p, os.X_OK)), "")
    identity = f"2 {_identity(bwrap)} {_identity(env) if env else '-'} {','.join(required)}"
    memory = f"{state_dir}/tools"
    try:
        with open(memory, encoding="utf-8") as file:
            known, _, usable = file.read().rstrip("\n").partition("\n")
        if known == identity:
            return Tools(bwrap=bwrap, env=usable)
    except (OSError, ValueError):
        pass
    _check_bwrap(bwrap, required)
    usable = env if env and _resets_signals(env) else ""
    fresh = f"{memory}.{os.urandom(4).hex()}"
    with open(fresh, "w", encoding="utf-8") as file:
        file.write(f"{identity}\n{usable}\n")
    os.replace(fresh, memory)
    return Tools(bwrap=bwrap, env=usable)


def _identity(path: str) -> str:
    info = os.stat(path)
    return f"{path}:{info.st_dev}:{info.st_ino}:{info.st_size}:{info.st_mtime_ns}"


def _check_bwrap(bwrap: str, required: Sequence[str]) -> None:
    # Setuid bwrap had holes of its own and upstream has dropped the mode (CVE-2026-41163).
    if os.stat(bwrap).st_mode & stat.S_ISUID:
        raise HostError(
            f"cannot use '{bwrap}': it is setuid root",
            hint=f"run 'chmod u-s {bwrap}' as root and allow user namespaces instead; "
            "'sandboxctl doctor' shows how",
            code="setuid-bwrap",
        )
    # Only on the first run with this bwrap: options are probed, versions are not compared.
    import subprocess

    done = subprocess.run(  # noqa: S603 - a fixed program of the system
        [bwrap, "--help"], capture_output=True, text=True, timeout=10, check=False
    )
    offered = set((done.stdout + done.stderr).split())
    lacking = [option for option in required if option not in offered]
    if lacking:
        raise HostError(
            f"cannot use '{bwrap}': it lacks " + ", ".join(lacking),
            hint="install bubblewrap 0.8 or newer",
            code="old-bwrap",
        )


def _resets_signals(env: str) -> bool:
    """Whether this env is one of coreutils 8.31 or newer."""
    import subprocess

    command = [env, "--default-signal=INT", "--", "true"]
    return (
        subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0  # noqa: S603
    )
