"""Why a layer of a sandbox fails on a machine, and what helps: commands and settings. Pure.

Owns the table of causes, and the text of every remedy that depends on the machine. Decides no
finding: `diagnosis` does.
"""

from __future__ import annotations

import shlex

from ..record import Record
from .probes import FLATPAK, SECCOMP

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .probes import Probes

    Text = str | Callable[[Probes], str]

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
LEAVE = "leave the sandbox and run it again; commands in here are sandboxed already"
SYSCALLS = "clone, unshare, mount, umount2 and pivot_root"


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


def sudo(probes: Probes) -> str:
    """What a command for root starts with."""
    return "" if probes.uid == 0 else "sudo "


def sysctl(probes: Probes, *names: str, value: int) -> str:
    """How to set these to a value."""
    root = sudo(probes)
    where = "on the host, not in the container, " if probes.container else ""
    settings = " ".join(f"{name}={value}" for name in names)
    return (
        f"{where}set it now and for every start:\n"
        f"{root}sysctl -w {settings}\n"
        f"printf '%s\\n' {settings} | {root}tee /etc/sysctl.d/60-agent-sandbox.conf"
    )


def install(probes: Probes) -> str:
    """How to install bwrap."""
    for name in probes.distributions:
        if name in INSTALL:
            return sudo(probes) + INSTALL[name]
    return "install the package 'bubblewrap' of your distribution"


def upgrade(probes: Probes, version: str) -> str:
    """How to get a newer bwrap."""
    root, apt = sudo(probes), "apt install" in install(probes)
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


def unprivileged(probes: Probes) -> str:
    """How to take its rights from bwrap; empty when it has none."""
    path, root = shlex.quote(probes.bwrap_real), sudo(probes)
    if "capabilities" in probes.bwrap_privileged:
        return f"{root}setcap -r {path}"
    if not probes.bwrap_privileged:
        return ""
    keep = f"\n{root}dpkg-statoverride --update --add root root 0755 {path}"
    return f"{root}chmod u-s,g-s {path}" + (keep if "apt install" in install(probes) else "")


def apparmor_remedy(probes: Probes) -> str:
    """How to make AppArmor let bwrap use user namespaces."""
    root, files = sudo(probes), [shlex.quote(f) for f in probes.apparmor_files]
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
        + sysctl(probes, RESTRICTION, value=0)
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
    root = sudo(probes)
    return (
        "see what it denies, and allow that in the profile:\n"
        f"{root}dmesg | grep 'apparmor=\"DENIED\".*bwrap'\n"
        f"{root}grep -l bwrap /etc/apparmor.d/*"
    )


def _selinux_remedy(probes: Probes) -> str:
    root = sudo(probes)
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


def container_remedy(probes: Probes) -> str:
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


def has_profile(probes: Probes) -> bool:
    """Whether AppArmor has a profile for this bwrap."""
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
        remedy=lambda p: sysctl(p, *p.zero_limits, value=ENOUGH),
    ),
    Cause(
        # clone(2): ENOSPC is the limit of namespaces, not of the disk.
        applies=lambda f: "ENOSPC" in f.error or "user ns: No space left" in f.error,
        text=lambda p: (
            f"all {p.max_user_namespaces or 0} user namespaces are taken, 32 are nested, "
            "or a sandbox around this one forbids more"
        ),
        remedy=lambda p: sysctl(
            p, "user.max_user_namespaces", value=max(ENOUGH, 2 * (p.max_user_namespaces or 0))
        ),
    ),
    Cause(
        applies=lambda f: f.probes.userns_clone == 0,
        text=FOR_ROOT,
        remedy=lambda p: sysctl(p, USERNS_CLONE, value=1),
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
            container_remedy(p)
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
            container_remedy(p)
            or "in the systemd unit that started this: ProtectKernelTunables=no "
            "ProtectKernelLogs=no ProcSubset=all"
        ),
    ),
    Cause(
        applies=lambda f: f.probes.container != "",
        text=lambda p: f"the {p.container} container forbids it",
        remedy=container_remedy,
    ),
    Cause(
        applies=lambda f: bool(f.probes.apparmor_restricts) and not has_profile(f.probes),
        text="AppArmor lets only programs with a profile use user namespaces "
        f"({RESTRICTION}=1), and this bwrap has none",
        remedy=apparmor_remedy,
    ),
    Cause(
        applies=lambda f: has_profile(f.probes) and "(unconfined)" not in f.probes.apparmor_label,
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
