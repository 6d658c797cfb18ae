"""Probes of a machine become findings: what works, what does not, why, and what to do. Pure.

Owns the checks, their order, and the Findings; `remedies` has the causes and what helps. Touches no
process and no file: `host.kernel` fills in the Probes, `cli.doctor` shows the Findings.
"""

from __future__ import annotations

from ..record import Record
from .probes import (
    CAPABILITIES,
    FLATPAK,
    LANDLOCK,
    LAYERS,
    MOUNT,
    NETWORK,
    NO_USERNS,
    SECCOMP,
    START,
    USER,
    WHOLE,
    Attempt,
    Probes,
)
from .remedies import (
    CAUSES,
    FOR_ROOT,
    LEAVE,
    USERNS_CLONE,
    Failure,
    apparmor_remedy,
    container_remedy,
    has_profile,
    install,
    sudo,
    sysctl,
    unprivileged,
    upgrade,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .remedies import Text

    Check = Callable[[Probes], "Finding | None"]

# With the values of `probes`: who reads or shows a diagnosis needs one import.
__all__ = [
    "CAPABILITIES", "FAIL", "FLATPAK", "LANDLOCK", "LAYERS", "MOUNT", "NETWORK", "NO_USERNS", "OK",
    "SECCOMP", "START", "USER", "WARN", "WHOLE", "Attempt", "Finding", "Probes", "diagnose",
]  # fmt: skip

OK = "ok"
WARN = "warn"
FAIL = "fail"
# The first Landlock with scopes (Linux 6.12).
SCOPE_ABI = 6
FIXED_VERSION = (0, 12)
ADVISORY = "GHSA-pxhw-h44j-8pfx"
ONE_SANDBOX = (
    "every layer works on this machine, so it is a mount of this sandbox: run it again with "
    "--debug, which shows them all"
)
UNKNOWN = "none is known: please report this with the output of 'sandboxctl doctor --json'"


class Finding(Record):
    """One check's outcome. `cause` says what was found, `remedy` what to do about it."""

    check: str
    status: str
    cause: str
    remedy: str = ""


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
        return _fail("bwrap", "bwrap is not on the PATH", install(probes))
    if probes.bwrap_error:
        return _fail(
            "bwrap", f"cannot run '{path}': {probes.bwrap_error}",
            unprivileged(probes) or f"install it anew:\n{install(probes)}",
        )  # fmt: skip
    version = _version(probes)
    if probes.bwrap_missing:
        lacks = ", ".join(probes.bwrap_missing)
        return _fail("bwrap", f"'{path}' {version} lacks {lacks}", upgrade(probes, "0.8"))
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
        unprivileged(probes),
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
        upgrade(probes, "0.12"),
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


# --- what the layers rest on ---------------------------------------------------------------------


def _for_others(probes: Probes) -> Finding | None:
    """Root passes where other users do not."""
    if probes.uid != 0 or probes.userns_clone != 0:
        return None
    return _warn(
        "unprivileged users", FOR_ROOT, sysctl(probes, USERNS_CLONE, value=1)
    )  # fmt: skip


def _apparmor(probes: Probes) -> Finding:
    if not probes.apparmor:
        return _ok("AppArmor", "not in use")
    if not probes.apparmor_restricts:
        return _ok("AppArmor", "in use, does not restrict user namespaces")
    if has_profile(probes):
        return _ok(
            "AppArmor", f"restricts user namespaces; bwrap's profile: {probes.apparmor_label}"
        )
    cause = "restricts user namespaces, and this bwrap has no profile"
    remedy = container_remedy(probes) or apparmor_remedy(probes)
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
        root, drop_in = sudo(probes), "/etc/systemd/system/user@.service.d"
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
