"""Probes of a machine become findings: what works, what does not, why, and what to do. Pure.

Owns the tables of checks, causes and remedies. Touches no process and no file: `host.kernel` fills
in the Probes, `cli.doctor` shows the Findings.
"""

from __future__ import annotations

import shlex

from ..record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[["Probes"], "Finding | None"]
    Text = str | Callable[["Probes"], str]

OK = "ok"
WARN = "warn"
FAIL = "fail"

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
# The first Landlock with scopes (Linux 6.12).
SCOPE_ABI = 6
FIXED_VERSION = (0, 12)
ADVISORY = "GHSA-pxhw-h44j-8pfx"
FLATPAK = "flatpak"
PROFILE = "agent-sandbox-bwrap"
RESTRICTION = "kernel.apparmor_restrict_unprivileged_userns"
USERNS_CLONE = "kernel.unprivileged_userns_clone"
# Namespaces: far more than sandboxes need at a time.
ENOUGH = 15000
# ID or ID_LIKE of os-release(5) → how its package manager installs bwrap.
INSTALL = {
    "debian": "apt install bubblewrap", "ubuntu": "apt install bubblewrap",
    "fedora": "dnf install bubblewrap", "rhel": "dnf install bubblewrap",
    "arch": "pacman -S bubblewrap", "suse": "zypper install bubblewrap",
    "alpine": "apk add bubblewrap", "void": "xbps-install bubblewrap",
    "gentoo": "emerge sys-apps/bubblewrap", "nixos": "nix-env -iA nixos.bubblewrap",
}  # fmt: skip
FOR_ROOT = f"only the real root may make user namespaces: {USERNS_CLONE}=0"
ONE_SANDBOX = (
    "every layer works on this machine, so it is a mount of this sandbox: run it again with "
    "--debug, which shows them all"
)
UNKNOWN = "none is known: please report this with the output of 'sandboxctl doctor --json'"
LEAVE = "leave the sandbox and run it again; commands in here are sandboxed already"
SYSCALLS = "clone, unshare, mount, umount2 and pivot_root"


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


class Finding(Record):
    """One check's outcome. `cause` says what was found, `remedy` what to do about it."""

    check: str
    status: str
    cause: str
    remedy: str = ""


class Failure(Record):
    """A layer that bwrap could not build on this machine."""

    probes: Probes
    layer: str
    error: str


class Cause(Record):
    """A row of the table below: when it explains a failure, and what is said then."""

    applies: Callable[[Failure], bool]
    text: Text
    remedy: Text


def diagnose(probes: Probes) -> tuple[Finding, ...]:
    """Every check's finding, in the order in which a person should read them."""
    before = [check(probes) for check in BEFORE]
    tried = [_layer(probes, attempt) for attempt in probes.attempts]
    after = [check(probes) for check in AFTER]
    return tuple(f for f in (*before, *tried, *after) if f is not None)


def _ok(check: str, cause: str) -> Finding:
    return Finding(check=check, status=OK, cause=cause)


def _warn(check: str, cause: str, remedy: str) -> Finding:
    return Finding(check=check, status=WARN, cause=cause, remedy=remedy)


def _fail(check: str, cause: str, remedy: str) -> Finding:
    return Finding(check=check, status=FAIL, cause=cause, remedy=remedy)


# --- remedies ------------------------------------------------------------------------------------


def _root(probes: Probes) -> str:
    return "" if probes.uid == 0 else "sudo "


def _sysctl(probes: Probes, *names: str, value: int) -> str:
    root = _root(probes)
    where = "on the host, not in the container, " if probes.container else ""
    settings = " ".join(f"{name}={value}" for name in names)
    return (
        f"{where}set it now and for every start:\n"
        f"{root}sysctl -w {settings}\n"
        f"printf '%s\\n' {settings} | {root}tee /etc/sysctl.d/60-agent-sandbox.conf"
    )


def _install(probes: Probes) -> str:
    for name in probes.distributions:
        if name in INSTALL:
            return _root(probes) + INSTALL[name]
    return "install the package 'bubblewrap' of your distribution"


def _upgrade(probes: Probes, version: str) -> str:
    root, apt = _root(probes), "apt install" in _install(probes)
    lines = [f"upgrade to bubblewrap {version} or newer; where the distribution has none:"]
    if apt:
        lines.append(f"{root}apt install git meson gcc pkg-config libcap-dev")
    lines += [
        "git clone --branch v0.12.0 https://github.com/containers/bubblewrap",
        "meson setup --prefix=/usr/local bubblewrap/build bubblewrap",
        f"{root}meson install -C bubblewrap/build",
    ]
    if apt and probes.bwrap_real == "/usr/bin/bwrap":
        # The package's own stays first on the PATH of many, and other packages depend on it.
        lines += [
            f"{root}dpkg-divert --local --rename --add /usr/bin/bwrap",
            f"{root}ln -s /usr/local/bin/bwrap /usr/bin/bwrap",
        ]
    return "\n".join(lines)


def _unprivileged(probes: Probes) -> str:
    """How to take its rights from bwrap; empty when it has none."""
    path, root = shlex.quote(probes.bwrap_real), _root(probes)
    if "capabilities" in probes.bwrap_privileged:
        return f"{root}setcap -r {path}"
    if not probes.bwrap_privileged:
        return ""
    keep = f"\n{root}dpkg-statoverride --update --add root root 0755 {path}"
    return f"{root}chmod u-s,g-s {path}" + (keep if "apt install" in _install(probes) else "")


def _apparmor_remedy(probes: Probes) -> str:
    root, files = _root(probes), [shlex.quote(f) for f in probes.apparmor_files]
    if len(files) > 1:
        # With two equal claims on one path the kernel applies neither.
        lines = [f"{len(files)} files claim it, so no profile holds; keep one, for example:"]
        for other in files[1:]:
            lines.append(f"{root}apparmor_parser -R {other}")
            lines.append(f"{root}ln -s {other} /etc/apparmor.d/disable/")
        return "\n".join((*lines, f"{root}apparmor_parser -r {files[0]}"))
    if files:
        disabled = files[0].replace("/etc/apparmor.d/", "/etc/apparmor.d/disable/")
        return (
            f"load the profile for a bwrap that is there, if it is for {probes.bwrap_real}:\n"
            f"{root}rm -f {disabled}\n"
            f"{root}apparmor_parser -r {files[0]}"
        )
    path, text = f"/etc/apparmor.d/{PROFILE}", shlex.quote(profile_text(probes.bwrap_real))
    return (
        "give this bwrap a profile, which keeps the restriction for what bwrap starts:\n"
        # No here-document: its end would be lost in the indentation of the report.
        f"printf '%s' {text} | {root}tee {path} >/dev/null\n"
        f"{root}apparmor_parser -r {path}\n"
        "or lift the restriction from every program of this machine; "
        + _sysctl(probes, RESTRICTION, value=0)
    )


def profile_text(path: str) -> str:
    """An AppArmor profile for a bwrap: what it starts gets no capability in any namespace.

    A profile with flags=(unconfined) would give every program a way around the restriction,
    through bwrap. `pix … -> &` stacks, which no_new_privs allows since it only takes rights away.
    """
    escaped = "".join("\\" + c if c in '\\"*?[]{}^,@' else c for c in path)
    head = "flags=(attach_disconnected,mediate_deleted) {"
    rules = (
        "  userns, mount, umount, pivot_root,\n"
        "  file rwlkm /{**,},\n"
        "  network, unix, ptrace, signal, mqueue, io_uring, dbus,\n"
    )
    return (
        "abi <abi/4.0>,\n"
        "include <tunables/global>\n\n"
        f'profile {PROFILE} "{escaped}" {head}\n'
        "  capability,\n"
        f"{rules}"
        f"  pix /** -> &{PROFILE}//&{PROFILE}-command,\n"
        "}\n\n"
        f"profile {PROFILE}-command {head}\n"
        "  deny capability,\n"
        f"{rules}"
        f"  pix /** -> &{PROFILE}-command,\n"
        "}\n"
    )


def _confined_remedy(probes: Probes) -> str:
    root = _root(probes)
    return (
        "see what it denies, and allow that in the profile:\n"
        f"{root}dmesg | grep 'apparmor=\"DENIED\".*bwrap'\n"
        f"{root}grep -l bwrap /etc/apparmor.d/*"
    )


def _selinux_remedy(probes: Probes) -> str:
    root = _root(probes)
    return (
        "if SELinux logged a denial, allow that:\n"
        f"{root}ausearch -m avc -ts recent -c bwrap | audit2allow -M {PROFILE}\n"
        f"{root}semodule -i {PROFILE}.pp"
    )


# Tried on real engines (Docker, Kubernetes). WHO is replaced, IMAGE is where further options go.
DOCKER = (
    "start the container so that it can make namespaces:\n"
    "docker run WHO --security-opt no-new-privileges --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined IMAGE"
)
CONTAINERS = {
    "docker": DOCKER
    + f"\ntighter than seccomp=unconfined: Docker's default profile with {SYSCALLS} added",
    "podman": DOCKER.replace("docker run", "podman run").replace(
        "systempaths=unconfined", "unmask=ALL --security-opt label=disable"
    ),
    "kubernetes": "in the pod's spec:\n"
    "  hostUsers: false\n"
    "and in the container's securityContext:\n"
    "  runAsNonRoot: true\n"
    "  runAsUser: 1000\n"
    "  allowPrivilegeEscalation: false\n"
    "  capabilities: {drop: [ALL]}\n"
    "  seccompProfile: {type: Unconfined}\n"
    "  procMount: Unmasked\n"
    f"tighter than Unconfined: a Localhost profile that allows {SYSCALLS}",
    "lxc": "on the host: lxc config set NAME security.nesting true && lxc restart NAME",
    "": "allow user namespaces, mounts and a whole /proc in the container's configuration",
}


def _container_remedy(probes: Probes) -> str:
    """How to start this container instead; empty outside of one."""
    if not probes.container:
        return ""
    text = CONTAINERS.get(probes.container, CONTAINERS[""])
    user = "--user 1000:1000 --cap-drop ALL"
    root = "--cap-drop ALL --cap-add SETFCAP"
    text = text.replace("WHO", user if probes.uid else root)
    if probes.apparmor:
        text = text.replace("IMAGE", "--security-opt apparmor=unconfined IMAGE")
    if probes.apparmor_restricts:
        # docker-default forbids mounts; without it the rule for unconfined programs applies.
        text += (
            "\nand on the host, where AppArmor restricts programs without a profile:\n"
            f"sudo sysctl -w {RESTRICTION}=0"
        )
    return text


# --- the machine and bwrap itself ----------------------------------------------------------------


def _machine(probes: Probes) -> Finding:
    found = f"{probes.machine}, Linux {probes.kernel}"
    if probes.wsl == 1:
        return _fail(
            "machine", f"{found}: WSL 1 has no Linux kernel, so no namespaces",
            "in PowerShell: wsl --set-version <distribution> 2",
        )  # fmt: skip
    if not probes.machine_supported:
        return _fail(
            "machine", f"{found}: no seccomp filter is known for it",
            "use an x86_64 or aarch64 machine, with a 64-bit Python",
        )  # fmt: skip
    return _ok("machine", found + (", WSL 2" if probes.wsl else ""))


def _inside(probes: Probes) -> Finding | None:
    if not probes.nested:
        return None
    return _fail("outside a sandbox", "this is inside a sandbox of agent-sandbox", LEAVE)


def _container(probes: Probes) -> Finding:
    return _ok("container", probes.container or "none")


def _bwrap(probes: Probes) -> Finding:
    path = probes.bwrap
    if not path:
        return _fail("bwrap", "bwrap is not on the PATH", _install(probes))
    if probes.bwrap_error:
        return _fail(
            "bwrap", f"cannot run '{path}': {probes.bwrap_error}",
            _unprivileged(probes) or f"install it anew:\n{_install(probes)}",
        )  # fmt: skip
    version = _version(probes)
    if probes.bwrap_missing:
        lacks = ", ".join(probes.bwrap_missing)
        return _fail("bwrap", f"'{path}' {version} lacks {lacks}", _upgrade(probes, "0.8"))
    return _ok("bwrap", f"{path} {version}, with every option needed")


def _version(probes: Probes) -> str:
    return ".".join(map(str, probes.bwrap_version)) or "(unknown version)"


def _privileges(probes: Probes) -> Finding | None:
    """A privileged bwrap acts as root on anybody's arguments (CVE-2026-41163 was one way)."""
    if not probes.bwrap:
        return None
    if not probes.bwrap_privileged:
        return _ok("bwrap privileges", "none: neither setuid nor file capabilities")
    return _fail(
        "bwrap privileges",
        f"'{probes.bwrap_real}' has {probes.bwrap_privileged}: a flaw in it makes anybody root",
        _unprivileged(probes),
    )


def _mount_points(probes: Probes) -> Finding | None:
    """Tried where possible: distributions mend old versions and keep the number."""
    if not probes.bwrap or probes.bwrap_error:
        return None
    hole = probes.oldroot_hole
    if hole is None:
        hole = probes.bwrap_version < FIXED_VERSION
    if not hole:
        return _ok("bwrap mount points", "none is made behind a planted link")
    return _warn(
        "bwrap mount points",
        f"bwrap {_version(probes)} makes mount points on the host through a planted link to "
        f"/oldroot ({ADVISORY}); agent-sandbox never lets it, other programs may",
        _upgrade(probes, "0.12"),
    )


# --- the layers ----------------------------------------------------------------------------------


def _layer(probes: Probes, attempt: Attempt) -> Finding:
    check = LAYERS[attempt.layer]
    if attempt.ok:
        return _ok(check, "tried, holds")
    first = probes.attempts[0]
    if attempt is not first and attempt.error == first.error:
        return _fail(check, f"fails like the {LAYERS[first.layer]}", _layer(probes, first).remedy)
    if attempt.layer == START:
        return _fail(check, attempt.error, ONE_SANDBOX)
    failure = Failure(probes=probes, layer=attempt.layer, error=attempt.error)
    # What the program inside says is no refusal by the machine: bwrap had built the layer.
    for cause in CAUSES if attempt.error.startswith("bwrap:") else ():
        if cause.applies(failure):
            said = f"{_said(cause.text, probes)} ({attempt.error})"
            return _fail(check, said, _said(cause.remedy, probes))
    return _fail(check, attempt.error, UNKNOWN)


def _said(text: Text, probes: Probes) -> str:
    return text if isinstance(text, str) else text(probes)


def _has_profile(probes: Probes) -> bool:
    # "unconfined" alone is no profile; "name (unconfined)" is one that allows everything.
    return probes.apparmor_label not in ("", "unconfined")


# The first row that applies names the cause: from what forbids it surely to what may.
CAUSES = (
    Cause(
        applies=lambda f: f.layer == SECCOMP and not f.probes.seccomp_actions,
        text="the kernel was built without seccomp filters",
        remedy="use a kernel with CONFIG_SECCOMP_FILTER=y",
    ),
    Cause(
        applies=lambda f: f.probes.nested,
        text="a sandbox of agent-sandbox allows no further namespaces",
        remedy=LEAVE,
    ),
    Cause(
        applies=lambda f: f.probes.container == FLATPAK,
        text="this is inside a Flatpak, which allows no further namespaces",
        remedy="run it on the host: flatpak-spawn --host agent-sandbox COMMAND",
    ),
    Cause(
        applies=lambda f: not f.probes.userns_supported,
        text="the kernel was built without user namespaces",
        remedy="use a kernel with CONFIG_USER_NS=y",
    ),
    Cause(
        applies=lambda f: bool(f.probes.zero_limits),
        text=lambda p: "namespaces are switched off: " + "=0, ".join(p.zero_limits) + "=0",
        remedy=lambda p: _sysctl(p, *p.zero_limits, value=ENOUGH),
    ),
    Cause(
        # clone(2): ENOSPC is the limit of namespaces, not of the disk.
        applies=lambda f: "ENOSPC" in f.error or "user ns: No space left" in f.error,
        text=lambda p: (
            f"all {p.max_user_namespaces or 0} user namespaces are taken, 32 are nested, "
            "or a sandbox around this one forbids more"
        ),
        remedy=lambda p: _sysctl(
            p, "user.max_user_namespaces", value=max(ENOUGH, 2 * (p.max_user_namespaces or 0))
        ),
    ),
    Cause(
        applies=lambda f: f.probes.userns_clone == 0,
        text=FOR_ROOT,
        remedy=lambda p: _sysctl(p, USERNS_CLONE, value=1),
    ),
    Cause(
        # user_namespaces(7): EPERM for a caller in a chroot.
        applies=lambda f: f.probes.chroot,
        text="the kernel makes no user namespace for a process in a chroot",
        remedy="run it outside of the chroot",
    ),
    Cause(
        # user_namespaces(7), since Linux 5.12: who maps user 0 of the parent needs CAP_SETFCAP.
        applies=lambda f: "uid map" in f.error and f.probes.uid == 0 and not f.probes.setfcap,
        text="root lacks CAP_SETFCAP here, without which it cannot map itself",
        remedy=lambda p: (
            _container_remedy(p)
            or "run it as an ordinary user; in a systemd unit: CapabilityBoundingSet=CAP_SETFCAP"
        ),
    ),
    Cause(
        # The kernel gives a fresh /proc only to who sees all of the present one
        # (mount_too_revealing in fs/namespace.c).
        applies=lambda f: bool(f.probes.proc_masks) and "mount proc" in f.error,
        text=lambda p: (
            "parts of /proc are covered, so the kernel refuses a fresh one: "
            + ", ".join(p.proc_masks[:3])
        ),
        remedy=lambda p: (
            _container_remedy(p)
            or "in the systemd unit that started this: ProtectKernelTunables=no "
            "ProtectKernelLogs=no ProcSubset=all"
        ),
    ),
    Cause(
        applies=lambda f: f.probes.container != "",
        text=lambda p: f"the {p.container} container forbids it",
        remedy=_container_remedy,
    ),
    Cause(
        applies=lambda f: bool(f.probes.apparmor_restricts) and not _has_profile(f.probes),
        text="AppArmor lets only programs with a profile use user namespaces "
        f"({RESTRICTION}=1), and this bwrap has none",
        remedy=_apparmor_remedy,
    ),
    Cause(
        applies=lambda f: _has_profile(f.probes) and "(unconfined)" not in f.probes.apparmor_label,
        text=lambda p: f"AppArmor confines bwrap by the profile '{p.apparmor_label}'",
        remedy=_confined_remedy,
    ),
    Cause(
        applies=lambda f: f.probes.selinux == "enforcing",
        text="SELinux is enforcing and may forbid it",
        remedy=_selinux_remedy,
    ),
    Cause(
        applies=lambda f: f.probes.seccomp_mode == 2,
        text="this process runs under a seccomp filter that may forbid it",
        remedy="start it from a plain terminal; in a systemd unit: RestrictNamespaces=no and "
        "SystemCallFilter=@system-service @mount",
    ),
)


# --- what the layers rest on ---------------------------------------------------------------------


def _for_others(probes: Probes) -> Finding | None:
    """Root passes where other users do not."""
    if probes.uid != 0 or probes.userns_clone != 0:
        return None
    return _warn(
        "unprivileged users", FOR_ROOT, _sysctl(probes, USERNS_CLONE, value=1)
    )  # fmt: skip


def _apparmor(probes: Probes) -> Finding:
    if not probes.apparmor:
        return _ok("AppArmor", "not in use")
    if not probes.apparmor_restricts:
        return _ok("AppArmor", "in use, does not restrict user namespaces")
    if _has_profile(probes):
        return _ok(
            "AppArmor", f"restricts user namespaces; bwrap's profile: {probes.apparmor_label}"
        )
    cause = "restricts user namespaces, and this bwrap has no profile"
    remedy = _container_remedy(probes) or _apparmor_remedy(probes)
    if all(attempt.ok for attempt in probes.attempts):
        return _warn("AppArmor", f"{cause}: it may work for root alone", remedy)
    return _fail("AppArmor", cause, remedy)


def _seccomp(probes: Probes) -> Finding:
    held = any(a.layer == SECCOMP and a.ok for a in probes.attempts)
    if held or "kill_process" in probes.seccomp_actions:
        filtered = "; this process is under one" if probes.seccomp_mode == 2 else ""
        return _ok("seccomp", "filters are offered" + filtered)
    return _fail(
        "seccomp", "the kernel offers no filters, or only old ones",
        "use Linux 4.14 or newer with CONFIG_SECCOMP_FILTER=y",
    )  # fmt: skip


def _landlock(probes: Probes) -> Finding:
    abi = probes.landlock_abi
    if abi >= SCOPE_ABI:
        return _ok("Landlock", f"ABI {abi}, with scopes")
    left = (
        "with the host's network shared, abstract sockets stay reachable, "
        "and signals reach the caller's process group"
    )
    if abi:
        return _warn(
            "Landlock", f"ABI {abi} has no scopes: {left}",
            "use Linux 6.12 or newer, or close the first with --network=off",
        )  # fmt: skip
    return _warn(
        "Landlock", f"not in this kernel, or switched off: {left}",
        "use Linux 6.12 or newer; where it has CONFIG_SECURITY_LANDLOCK=y, add 'landlock' to the "
        "boot parameter lsm=",
    )  # fmt: skip


def _cgroups(probes: Probes) -> Finding:
    found = probes.cgroup or "none mounted"
    if probes.cgroup:
        found += ", writable" if probes.cgroup_writable else ", not writable"
    if not probes.limits_error:
        return _ok("cgroups", found + (f"; {probes.limits}" if probes.limits else ""))
    remedy = probes.limits_hint
    if probes.container:
        remedy += "\nor limit the container itself: --memory SIZE --pids-limit NUMBER"
    elif "controller" in probes.limits_error:
        root, drop_in = _root(probes), "/etc/systemd/system/user@.service.d"
        remedy += (
            "\nfor the controllers that are missing, delegate them to users and log in again:\n"
            f"{root}mkdir -p {drop_in}\n"
            "printf '[Service]\\nDelegate=cpu memory pids\\n' | "
            f"{root}tee {drop_in}/delegate.conf\n"
            f"{root}systemctl daemon-reload"
        )
    return _warn("cgroups", f"{found}; {probes.limits_error}", remedy)


def _state(probes: Probes) -> Finding:
    if not probes.state_error:
        return _ok("state directory", probes.state_dir)
    return _fail(
        "state directory", f"cannot use '{probes.state_dir}': {probes.state_error}",
        "make it a directory of your own that only you can write, or set XDG_STATE_HOME",
    )  # fmt: skip


BEFORE: tuple[Check, ...] = (_machine, _inside, _container, _bwrap, _privileges, _mount_points)
AFTER: tuple[Check, ...] = (_for_others, _apparmor, _seccomp, _landlock, _cgroups, _state)
