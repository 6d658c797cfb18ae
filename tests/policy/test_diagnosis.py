"""What doctor says about a machine: one row per way in which a machine can fail."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from agent_sandbox.policy import remedies
from agent_sandbox.policy.diagnosis import (
    CAPABILITIES,
    FAIL,
    LANDLOCK,
    LAYERS,
    MOUNT,
    NETWORK,
    OK,
    SECCOMP,
    START,
    USER,
    WARN,
    WHOLE,
    Attempt,
    Finding,
    Probes,
    diagnose,
)
from agent_sandbox.policy.remedies import profile_text

TRIED = tuple(Attempt(layer=layer, ok=True) for layer in LAYERS if layer != START)
HEALTHY = Probes(
    uid=1000, kernel="6.12.1", machine="x86_64", machine_supported=True,
    distributions=("debian",), bwrap="/usr/bin/bwrap", bwrap_real="/usr/bin/bwrap",
    bwrap_version=(0, 12, 0), bwrap_error="", bwrap_privileged="", bwrap_missing=(),
    oldroot_hole=False, setfcap=False, userns_supported=True, userns_clone=1,
    max_user_namespaces=60000, zero_limits=(), apparmor=False, apparmor_restricts=None,
    apparmor_label="", apparmor_files=(), selinux="", chroot=False,
    seccomp_actions=("kill_process", "errno", "allow"), seccomp_mode=0, landlock_abi=6,
    cgroup="v2", cgroup_writable=True, container="", proc_masks=(), wsl=0, nested=False,
    state_dir="/home/u/.local/state/agent-sandbox", state_error="", attempts=TRIED,
    limits="tried",
)  # fmt: skip
# What bwrap really says (0.8.0 and 0.12.0).
NO_PERMISSION = "bwrap: No permissions to create a new namespace, likely because the kernel …"
UID_MAP = "bwrap: setting up uid map: Permission denied"
LOOPBACK = "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted"
NO_SPACE = "bwrap: Creating new namespace failed: nesting depth or … exceeded (ENOSPC)"
NO_PROC = "bwrap: Can't mount proc on /newroot/proc: Operation not permitted"
RESTRICTED = {"apparmor": True, "apparmor_restricts": 1, "apparmor_label": "unconfined"}


def find(probes: Probes, check: str) -> Finding:
    return next(finding for finding in diagnose(probes) if finding.check == check)


def failing(layer: str, error: str, **changes: object) -> Finding:
    """The finding about one layer that bwrap refused, on a machine with these properties."""
    attempts = tuple(a.replace(ok=False, error=error) if a.layer == layer else a for a in TRIED)
    return find(HEALTHY.replace(attempts=attempts, **changes), LAYERS[layer])


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    """Every check is there, every one is fine, none has a remedy."""
    findings = diagnose(HEALTHY)
    assert {finding.status for finding in findings} == {OK}
    assert not any(finding.remedy for finding in findings)
    assert {LAYERS[attempt.layer] for attempt in TRIED} <= {finding.check for finding in findings}


@pytest.mark.parametrize(
    ("changes", "check", "status", "cause", "remedy"),
    [
        ({"wsl": 1}, "machine", FAIL, "WSL 1", "wsl --set-version"),
        ({"machine": "riscv64", "machine_supported": False}, "machine", FAIL, "riscv64", "x86_64"),
        ({"nested": True}, "outside a sandbox", FAIL, "inside a sandbox", "leave the sandbox"),
        ({"bwrap": ""}, "bwrap", FAIL, "not on the PATH", "sudo apt install bubblewrap"),
        ({"bwrap_error": "exec format error"}, "bwrap", FAIL, "exec format", "apt install"),
        (
            {"bwrap_version": (0, 6, 1), "bwrap_missing": ("--disable-userns",)},
            "bwrap", FAIL, "0.6.1 lacks --disable-userns", "dpkg-divert",
        ),
        ({"oldroot_hole": True}, "bwrap mount points", WARN, "GHSA-pxhw-h44j-8pfx", "0.12 or new"),
        (
            {"oldroot_hole": None, "bwrap_version": (0, 8, 0)},
            "bwrap mount points", WARN, "bwrap 0.8.0", "meson install",
        ),
        (
            {"bwrap_privileged": "setuid"},
            "bwrap privileges", FAIL, "setuid", "sudo chmod u-s,g-s /usr/bin/bwrap",
        ),
        (
            {"bwrap_privileged": "setuid", "bwrap_error": "setuid use is not supported"},
            "bwrap", FAIL, "not supported", "chmod u-s",
        ),
        (
            {"bwrap_privileged": "file capabilities"},
            "bwrap privileges", FAIL, "file capabilities", "setcap -r /usr/bin/bwrap",
        ),
        ({"landlock_abi": 4}, "Landlock", WARN, "ABI 4 has no scopes", "--network=off"),
        ({"landlock_abi": 0}, "Landlock", WARN, "not in this kernel", "lsm="),
        (
            {"seccomp_actions": (), "attempts": ()},
            "seccomp", FAIL, "no filters", "CONFIG_SECCOMP_FILTER",
        ),
        (
            {"uid": 0, "userns_clone": 0},
            "unprivileged users", WARN, "userns_clone=0",
            "sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        ({**RESTRICTED, "uid": 0}, "AppArmor", WARN, "root alone", "apparmor_parser -r"),
        (
            {"limits_error": "cannot limit memory: not writable", "limits_hint": "log in"},
            "cgroups", WARN, "cannot limit memory", "log in",
        ),
        (
            {"limits_error": "cgroup v2: no pids controller in 'x'", "limits_hint": "log in"},
            "cgroups", WARN, "no pids controller", "Delegate=cpu memory pids",
        ),
        (
            {"limits_error": "x", "limits_hint": "y", "container": "docker"},
            "cgroups", WARN, "x", "--pids-limit",
        ),
        (
            {"state_error": "others own it or can write it"},
            "state directory", FAIL, "others own it", "XDG_STATE_HOME",
        ),
    ],
)  # fmt: skip
def test_what_the_machine_lacks_is_named(
    changes: dict[str, object], check: str, status: str, cause: str, remedy: str
) -> None:
    """Checks that read the machine rather than try it."""
    found = find(HEALTHY.replace(**changes), check)
    assert found.status == status
    assert cause in found.cause
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("layer", "error", "changes", "cause", "remedy"),
    [
        (USER, NO_SPACE, {"nested": True}, "allows no further", "leave the sandbox"),
        (USER, NO_SPACE, {"container": "flatpak"}, "Flatpak", "flatpak-spawn --host"),
        (USER, NO_PERMISSION, {"userns_supported": False}, "without user", "CONFIG_USER_NS=y"),
        (
            USER, NO_SPACE, {"zero_limits": ("user.max_user_namespaces",)},
            "user.max_user_namespaces=0", "sudo sysctl -w user.max_user_namespaces=15000",
        ),
        (
            NETWORK, NO_SPACE, {"zero_limits": ("user.max_net_namespaces",)},
            "user.max_net_namespaces=0", "sudo sysctl -w user.max_net_namespaces=15000",
        ),
        (USER, NO_SPACE, {}, "all 60000 user namespaces", "user.max_user_namespaces=120000"),
        (
            WHOLE, "bwrap: unshare user ns: No space left on device", {"max_user_namespaces": 1},
            "all 1 user", "user.max_user_namespaces=15000",
        ),
        (
            USER, NO_PERMISSION, {"userns_clone": 0},
            "unprivileged_userns_clone=0", "sudo sysctl -w kernel.unprivileged_userns_clone=1",
        ),
        (USER, NO_PERMISSION, {"chroot": True}, "chroot", "outside of the chroot"),
        (
            USER, UID_MAP, {"uid": 0, "container": "docker"},
            "CAP_SETFCAP", "docker run --cap-drop ALL --cap-add SETFCAP",
        ),
        (USER, UID_MAP, {"uid": 0}, "CAP_SETFCAP", "CapabilityBoundingSet=CAP_SETFCAP"),
        (
            MOUNT, NO_PROC, {"proc_masks": ("/proc/kcore",), "container": "docker"},
            "/proc/kcore", "--security-opt systempaths=unconfined IMAGE",
        ),
        (MOUNT, NO_PROC, {"proc_masks": ("/proc/sys",)}, "/proc/sys", "ProtectKernelTunables=no"),
        (
            USER, NO_PERMISSION, {"container": "docker"},
            "the docker container", "docker run --user 1000:1000 --cap-drop ALL",
        ),
        (USER, NO_PERMISSION, {"container": "podman"}, "podman", "podman run --user 1000:1000"),
        (USER, NO_PERMISSION, {"container": "podman"}, "podman", "--security-opt unmask=ALL"),
        (USER, NO_PERMISSION, {"container": "kubernetes"}, "kubernetes", "procMount: Unmasked"),
        (USER, NO_PERMISSION, {"container": "lxc"}, "lxc", "security.nesting true"),
        (USER, NO_PERMISSION, {"container": "rkt"}, "rkt", "allow user namespaces"),
        (
            USER, "bwrap: Failed to make / slave: Permission denied",
            {**RESTRICTED, "apparmor_label": "docker-default (enforce)", "container": "docker"},
            "docker", "--security-opt apparmor=unconfined IMAGE",
        ),
        (
            USER, UID_MAP, {**RESTRICTED, "container": "docker"},
            "docker", "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        (USER, UID_MAP, RESTRICTED, "has none", 'profile agent-sandbox-bwrap "/usr/bin/bwrap"'),
        (NETWORK, LOOPBACK, RESTRICTED, "bwrap has none", "apparmor_parser -r /etc/apparmor.d/"),
        (
            USER, NO_PERMISSION, {"apparmor": True, "apparmor_label": "vendor-bwrap (enforce)"},
            "'vendor-bwrap (enforce)'", "dmesg",
        ),
        (USER, NO_PERMISSION, {"selinux": "enforcing"}, "SELinux", "audit2allow"),
        (USER, NO_PERMISSION, {"seccomp_mode": 2}, "seccomp filter", "RestrictNamespaces=no"),
        (
            SECCOMP, "bwrap: prctl(PR_SET_SECCOMP): Invalid argument", {"seccomp_actions": ()},
            "without seccomp filters", "CONFIG_SECCOMP_FILTER=y",
        ),
        (USER, "bwrap: something new", {}, "bwrap: something new", "doctor --json"),
        (LANDLOCK, "Landlock: operation not permitted", {}, "Landlock:", "doctor --json"),
    ],
)  # fmt: skip
def test_a_refused_layer_is_explained(
    layer: str, error: str, changes: dict[str, object], cause: str, remedy: str
) -> None:
    """Each way in which a machine refuses a layer has its own cause and its own remedy."""
    found = failing(layer, error, **changes)
    assert found.status == FAIL
    assert cause in found.cause
    assert error in found.cause
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("distributions", "command"),
    [
        (("debian",), "apt install"), (("ubuntu", "debian"), "apt install"),
        (("linuxmint", "ubuntu", "debian"), "apt install"), (("fedora",), "dnf install"),
        (("rocky", "rhel", "centos", "fedora"), "dnf install"), (("arch",), "pacman -S"),
        (("opensuse-leap", "suse", "opensuse"), "zypper install"), (("alpine",), "apk add"),
        (("unheard-of",), "the package 'bubblewrap'"), ((), "the package 'bubblewrap'"),
    ],
)  # fmt: skip
def test_the_package_manager_is_the_distributions_own(
    distributions: tuple[str, ...], command: str
) -> None:
    """By ID, else by ID_LIKE."""
    found = find(HEALTHY.replace(bwrap="", distributions=distributions), "bwrap")
    assert command in found.remedy


@pytest.mark.parametrize("uid", [0, 1000])
def test_only_users_are_told_to_use_sudo(uid: int) -> None:
    """Root in a container often has none."""
    changes = {"uid": uid, "userns_clone": 0, "bwrap_privileged": "setuid", "oldroot_hole": True}
    probes = HEALTHY.replace(**changes, **RESTRICTED)
    told = "\n".join(finding.remedy for finding in diagnose(probes))
    assert ("sudo" in told) == (uid != 0)


def test_one_refusal_is_explained_once() -> None:
    """When not even a user namespace can be made, the other layers do not repeat why."""
    attempts = tuple(a.replace(ok=False, error=NO_PERMISSION) for a in TRIED)
    findings = diagnose(HEALTHY.replace(attempts=attempts, userns_clone=0))
    causes = [finding.cause for finding in findings if finding.status == FAIL]
    assert sum(NO_PERMISSION in cause for cause in causes) == 1
    assert len(causes) == len(TRIED)


def test_a_layer_without_effect_is_not_blamed_on_the_machine() -> None:
    """Bwrap built it, and what ran inside could do what the layer forbids."""
    found = failing(CAPABILITIES, "capabilities ff are left", container="docker", **RESTRICTED)
    assert found.status == FAIL
    assert found.cause == "capabilities ff are left"
    assert "doctor --json" in found.remedy


def test_a_sandbox_that_fails_on_a_healthy_machine_is_its_own_fault() -> None:
    """Even where something else might have been to blame."""
    said = "bwrap: Can't bind mount /oldroot/x on /newroot/x: No such file or directory"
    failed = Attempt(layer=START, ok=False, error=said)
    found = diagnose(HEALTHY.replace(attempts=(*TRIED, failed), container="docker"))
    (finding,) = [f for f in found if f.status == FAIL]
    assert finding.cause == said
    assert "--debug" in finding.remedy


def test_without_bwrap_only_that_is_said() -> None:
    """Nothing could be tried."""
    changes = {"bwrap": "", "bwrap_real": "", "bwrap_version": (), "attempts": ()}
    findings = diagnose(HEALTHY.replace(**changes, oldroot_hole=None))
    assert [f.check for f in findings if f.status != OK] == ["bwrap"]
    assert not any(f.check.startswith("bwrap ") for f in findings)


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (("/etc/apparmor.d/bwrap",), "rm -f /etc/apparmor.d/disable/bwrap"),
        (("/etc/apparmor.d/a", "/etc/apparmor.d/b"), "apparmor_parser -R /etc/apparmor.d/b"),
    ],
)
def test_no_second_profile_is_recommended(files: tuple[str, ...], remedy: str) -> None:
    """Two profiles for one path cancel each other."""
    found = failing(USER, UID_MAP, apparmor_files=files, **RESTRICTED)
    assert remedy in found.remedy
    assert "profile agent-sandbox-bwrap" not in found.remedy


def test_a_profile_in_force_is_enough() -> None:
    """Whoever made it, and also one that allows everything."""
    for label in ("bwrap (enforce)", "bwrap (unconfined)"):
        found = find(HEALTHY.replace(**{**RESTRICTED, "apparmor_label": label}), "AppArmor")
        assert found.status == OK
        assert label in found.cause


@pytest.mark.parametrize("path", ["/usr/bin/bwrap", "/home/a b/bwrap", "/nix/store/{x}[1]/bwrap"])
def test_the_profile_names_this_bwrap(path: str) -> None:
    """Characters with a meaning to AppArmor are taken as they are; so are those of the shell."""
    text = profile_text(path)
    plain = text.split('"')[1]
    assert "".join(c for c in plain if c != "\\") == path
    assert "deny capability" in text
    assert "unconfined" not in text
    found = failing(USER, UID_MAP, bwrap_real=path, **RESTRICTED)
    indented = "\n".join(f"        {line}" for line in found.remedy.splitlines()[1:])
    install = indented.split("sudo apparmor_parser", maxsplit=1)[0]
    command = install.replace("| sudo tee /etc/apparmor.d/agent-sandbox-bwrap >/dev/null", "| cat")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == text.split()


def test_the_profile_is_one_for_apparmor() -> None:
    """Where its parser is installed and knows user namespaces."""
    parser = shutil.which("apparmor_parser", path="/usr/sbin:/sbin:/usr/bin")
    if parser is None:
        pytest.skip("needs apparmor_parser")
    argv = [parser, "--skip-kernel-load", "--skip-cache"]
    text = profile_text("/usr/bin/bwrap")
    done = subprocess.run(argv, input=text.encode(), capture_output=True, check=False)
    if b"abi/4.0" in done.stderr:
        pytest.skip("needs AppArmor 4")
    assert done.returncode == 0, done.stderr


def test_every_cause_can_be_reached() -> None:
    """A row that another one hides would be dead text: the table above has an example for each."""
    rows = test_a_refused_layer_is_explained.pytestmark[0].args[1]
    used = set()
    for layer, error, changes, *_ in rows:
        failure = remedies.Failure(probes=HEALTHY.replace(**changes), layer=layer, error=error)
        hits = [n for n, cause in enumerate(remedies.CAUSES) if cause.applies(failure)]
        used |= set(hits[:1])
    assert used == set(range(len(remedies.CAUSES)))
