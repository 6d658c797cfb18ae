"""What was found out about a machine, as values: `host.kernel` fills them in.

Owns the names of the layers, and the Probes. Judges nothing: `diagnosis` does.
"""

from __future__ import annotations

from ..record import Record

USER = "user"
MOUNT = "mount"
NETWORK = "network"
NO_USERNS = "no-userns"
CAPABILITIES = "capabilities"
SECCOMP = "seccomp"
LANDLOCK = "landlock"
WHOLE = "whole"
START = "start"
# Layers that `host.kernel` tries, as a person calls them; START is a sandbox that failed by itself.
LAYERS = {
    USER: "user namespace",
    MOUNT: "mounts and /proc",
    NETWORK: "network namespace",
    NO_USERNS: "no nested namespaces",
    CAPABILITIES: "no capabilities",
    SECCOMP: "seccomp filter",
    LANDLOCK: "Landlock scopes",
    WHOLE: "all layers together",
    START: "this sandbox",
}
FLATPAK = "flatpak"


class Attempt(Record):
    """One layer, tried by a real run; `error` is what bwrap or the program inside said."""

    layer: str
    ok: bool
    error: str = ""


class Probes(Record):
    """What was read from the machine. Sysctls are None where the kernel has none."""

    uid: int
    kernel: str
    machine: str
    machine_supported: bool
    distributions: tuple[str, ...]
    # The program as found, and the file behind it: AppArmor knows only the latter.
    bwrap: str
    bwrap_real: str
    bwrap_version: tuple[int, ...]
    bwrap_error: str
    bwrap_privileged: str
    bwrap_missing: tuple[str, ...]
    # Whether bwrap made a mount point behind a planted link; None when that could not be tried.
    oldroot_hole: bool | None
    # CAP_SETFCAP is in force.
    setfcap: bool
    userns_supported: bool
    userns_clone: int | None
    max_user_namespaces: int | None
    # Limits of namespaces (user.max_*_namespaces) that are zero.
    zero_limits: tuple[str, ...]
    apparmor: bool
    apparmor_restricts: int | None
    # The label that the kernel gives to this bwrap, and the files with a profile for a bwrap.
    apparmor_label: str
    apparmor_files: tuple[str, ...]
    selinux: str
    chroot: bool
    seccomp_actions: tuple[str, ...]
    seccomp_mode: int
    landlock_abi: int
    cgroup: str
    cgroup_writable: bool
    container: str
    proc_masks: tuple[str, ...]
    wsl: int
    nested: bool
    state_dir: str
    state_error: str
    attempts: tuple[Attempt, ...] = ()
    # What holds --memory and --pids here, or why nothing does and what helps; empty: not tried.
    limits: str = ""
    limits_error: str = ""
    limits_hint: str = ""
