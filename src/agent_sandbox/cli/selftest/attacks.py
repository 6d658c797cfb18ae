"""The escape attempts as data: what each tries, in which run, what stops it, and who says so.

The attempt itself is the function of the same name in `attempts`. A verdict looks at the host where
it can: a file that changed, a service that was reached, a program that ran. It returns what went
wrong, or nothing; `Untried` when there is no saying. A verdict is asked only when the attempt has
left its evidence.
"""

from __future__ import annotations

import os
import signal
import stat

from ...record import Record
from .attempts import files, processes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .world import World

    Verdict = Callable[["World", "Evidence"], str]

# Layers, by the names of docs/threat-model.md.
MOUNTS = "mount namespace"
PIDS = "pid namespace"
USERS = "user namespace"
NETWORK = "network namespace"
LANDLOCK = "Landlock scope"
SECCOMP = "seccomp"
POLICY = "policy"
PLANNING = "planning"
START = "start"
LIMITS = "limits"


class Untried(Exception):
    """There is no verdict, for this reason."""


class Evidence(Record):
    """What is known of one attempt: what it printed, and how its sandbox ended."""

    answer: str = ""
    # The attempt itself knows that it got out.
    got: bool = False
    # The sandbox's exit code; None when it was not started or did not end.
    code: int | None = None
    # What the supervisor wrote.
    said: str = ""


class Run(Record):
    """One start of a sandbox, in which several attempts are made."""

    name: str
    project: str
    # May hold {base} and {home} of the world.
    flags: tuple[str, ...] = ()
    # Attempts that only prepare others.
    steps: tuple[str, ...] = ()
    # Another run that must have ended before.
    after: str = ""
    # Standard input is the world's own terminal, and the controlling one.
    terminal: bool = False
    # The kernel refuses setns(2) to the supervisor: it cannot finish the mounts.
    crippled: bool = False


class Attack(Record):
    """One way out."""

    name: str
    what: str
    # The number in docs/threat-model.md.
    invariant: int
    layer: str
    verdict: Verdict
    run: str = "main"
    # The start itself must be refused, with these words; then nothing has run.
    refusal: str = ""
    # Words with which a start says that this machine cannot do it; then it is excused.
    excuse: str = ""
    root_only: bool = False
    # What to know when it escapes.
    note: str = ""


MAIN_FLAGS = (
    "--ro", "fixed", "--ro", "deep/er/file", "--ro", "kept", "--ro", "{base}/engine",
    "--exclude", ".env", "--exclude", "keys", "--exclude", "saved",
)  # fmt: skip
RUNS: tuple[Run, ...] = (
    Run(name="main", project="main", flags=MAIN_FLAGS, steps=("plant_link",)),
    Run(
        name="offline", project="offline", flags=("--network=off", "--tmp-size", "8M"),
        terminal=True,
    ),
    Run(name="limited", project="limited", flags=("--pids", str(processes.PROCESSES // 2))),
    Run(name="cloned", project="cloned"),
    Run(name="weaker", project="weaker", crippled=True),
    Run(name="second", project="main", flags=("--rw", "cache"), after="main"),
)  # fmt: skip


# --- verdicts -------------------------------------------------------------------------------------


def got(_: World, seen: Evidence) -> str:
    """The attempt knows best."""
    return seen.answer if seen.got else ""


def changed(*names: str) -> Verdict:
    """Files that say '# yours' must go on saying just that."""

    def verdict(world: World, _: Evidence) -> str:
        wrong = [name for name in names if world.text(f"{world.base}/{name}") != "# yours\n"]
        return f"{wrong[0]} was changed" if wrong else ""

    return verdict


def leaked(*names: str) -> Verdict:
    """A secret is in what the attempt printed."""

    def verdict(world: World, seen: Evidence) -> str:
        out = [name for name in names if world.secrets[name] in seen.answer]
        return f"a secret came out ({out[0]})" if out else ""

    return verdict


def reached(*names: str) -> Verdict:
    """A service of the host has heard from the attempt."""

    def verdict(world: World, _: Evidence) -> str:
        heard = [name for name in names if world.listeners[name].reached()]
        return "the host's service was reached" if heard else ""

    return verdict


def ran(name: str) -> Verdict:
    """A program of the attempt has run outside."""
    return lambda world, _: (
        "its program ran outside" if os.path.lexists(f"{world.base}/ran-{name}") else ""
    )


def planted(name: str) -> Verdict:
    """A file that names a program of the attempt: it might run where this machine lets it."""
    return lambda world, _: (
        f"{name} names its program" if "payload-" in world.text(f"{world.main}/{name}") else ""
    )


def signalled(number: int) -> Verdict:
    """The canary has got a signal."""
    return lambda world, _: (
        "a process outside got the signal" if number in world.canary.noted() else ""
    )


def either(*verdicts: Verdict) -> Verdict:
    """The first that finds something."""

    def verdict(world: World, seen: Evidence) -> str:
        return next((said for v in verdicts if (said := v(world, seen))), "")

    return verdict


def _beside(world: World, _: Evidence) -> str:
    return "the host's /tmp was written" if os.path.lexists(f"/tmp/{world.tag}") else ""


def _remounted(world: World, _: Evidence) -> str:
    there = os.path.lexists(f"{world.main}/kept/remounted")
    return "a read-only directory was made writable" if there else ""


def _devices(world: World, seen: Evidence) -> str:
    # Both: inside the call may succeed on a node of the sandbox's own, and others on this machine
    # may set the mode of the host's.
    set_inside = seen.got and world.device_changed()
    return "the mode of the host's /dev/null was set" if set_inside else ""


def _state(world: World, _: Evidence) -> str:
    found = world.touched_in(world.state, skip=("homes", "run"))
    return f"{found[len(world.state) + 1 :]} in our own state was written" if found else ""


def _planted(world: World, seen: Evidence) -> str:
    if not os.path.islink(f"{world.main}/cache"):
        raise Untried("the first run has planted no link")
    return leaked("home")(world, seen)


def _started(world: World, _: Evidence) -> str:
    there = os.path.lexists(f"{world.project('weaker')}/started")
    return "the command ran in an unfinished sandbox" if there else ""


def _answered(_: World, seen: Evidence) -> str:
    return seen.answer if "answered" in seen.answer else ""


def _typed(world: World, _: Evidence) -> str:
    return "letters were typed into the terminal" if world.typed() else ""


def _suid(world: World, _: Evidence) -> str:
    for name in ("suid-1", "suid-2"):
        path = f"{world.main}/{name}"
        if os.path.lexists(path) and os.lstat(path).st_mode & stat.S_ISUID:
            return "a set-user-id program is in the project"
    return ""


def _orphan(world: World, _: Evidence) -> str:
    return "a process outlives the sandbox" if world.orphan_lives() else ""


def _clean(world: World, seen: Evidence) -> str:
    if lost := changed("home/precious/file")(world, seen):
        return f"the clean-up followed a link: {lost}"
    left = os.listdir(f"{world.state}/run")
    return f"left behind: {left[0]}" if left else ""


def _control(world: World, _: Evidence) -> str:
    for name in files.CONTROL:
        if world.text(f"{world.main}/{name}").startswith(world.tag):
            return f"{name} was made"
    return ""


def _network(world: World, seen: Evidence) -> str:
    if "a route" in seen.answer:
        return "there is a way out"
    return reached("tcp", "udp")(world, seen)


def _flooded(world: World, seen: Evidence) -> str:
    if not seen.got and "exceeded its tmp-size limit" not in seen.said:
        raise Untried(f"its sandbox ended with {seen.code}, and not because of the limit")
    return got(world, seen)


# --- the table ------------------------------------------------------------------------------------

OLD_KERNEL = "Linux before 6.12 cannot close this while the network is shared"

ATTACKS: tuple[Attack, ...] = (
    Attack(
        name="weaker_start", what="start although a layer cannot be made", invariant=1,
        layer=START, run="weaker", refusal="cannot finish the sandbox's mounts", verdict=_started,
    ),
    Attack(
        name="write_home", what="add a line to ~/.bashrc", invariant=2, layer=MOUNTS,
        verdict=changed("home/.bashrc"),
    ),
    Attack(
        name="write_beside", what="write outside of the project, and in the host's /tmp",
        invariant=2, layer=MOUNTS, verdict=either(changed("elsewhere/file"), _beside),
    ),
    Attack(
        name="write_read_only", what="write, link, replace or remove a read-only file",
        invariant=2, layer=MOUNTS, verdict=changed("home/work/main/fixed"),
    ),
    Attack(
        name="replace_above", what="replace a directory above a read-only file", invariant=2,
        layer=f"{MOUNTS} (pins)", verdict=changed("home/work/main/deep/er/file"),
    ),
    Attack(
        name="undo_mounts", what="remount a read-only directory, unmount a mask", invariant=2,
        layer=f"{SECCOMP}, no capabilities", verdict=either(_remounted, leaked("excluded")),
    ),
    Attack(
        name="system_trees", what="write /usr and /etc", invariant=2, layer=MOUNTS, verdict=got,
    ),
    Attack(
        name="kernel_settings", what="write /proc/sys as root", invariant=2, layer=MOUNTS,
        verdict=got, root_only=True,
    ),
    Attack(
        name="device_nodes", what="change the host's device nodes as root", invariant=2,
        layer=MOUNTS, verdict=_devices, root_only=True,
    ),
    Attack(
        name="read_home", what="read a key in ~/.ssh", invariant=3, layer=MOUNTS,
        verdict=leaked("home"),
    ),
    Attack(
        name="read_excluded", what="read an excluded file, also by other names", invariant=3,
        layer=MOUNTS, verdict=leaked("excluded"),
    ),
    Attack(
        name="read_saved", what="read an excluded file that was saved anew outside", invariant=3,
        layer=f"{MOUNTS} (keeper)", verdict=leaked("saved"),
    ),
    Attack(
        name="root_secrets", what="open /etc/shadow as root", invariant=3, layer=MOUNTS,
        verdict=got, root_only=True,
    ),
    Attack(
        name="own_state", what="write agent-sandbox's own state", invariant=4, layer=MOUNTS,
        verdict=_state,
    ),
    Attack(
        name="planted_link", what="plant a link that the next run mounts", invariant=4,
        layer=PLANNING, run="second", refusal="cannot follow", verdict=_planted,
    ),
    Attack(
        name="cloned_policy", what="let a cloned project's policy file show ~/.ssh", invariant=4,
        layer=f"{POLICY} (trust)", run="cloned", refusal="asks for more than your own settings",
        verdict=leaked("home"),
    ),
    Attack(
        name="own_bwrap", what="bring a bwrap in the project", invariant=4, layer=PLANNING,
        verdict=ran("own_bwrap"),
    ),
    Attack(
        name="project_socket", what="connect to a service's socket in the project", invariant=5,
        layer=MOUNTS, verdict=reached("project_socket"),
    ),
    Attack(
        name="engine_socket", what="connect to a container engine in a shown directory",
        invariant=5, layer=MOUNTS, verdict=reached("engine_socket"),
    ),
    Attack(
        name="abstract_socket", what="connect to an abstract socket", invariant=5, layer=LANDLOCK,
        verdict=reached("abstract_socket"), note=f"{OLD_KERNEL}; --network=off does",
    ),
    Attack(
        name="other_families", what="open sockets to the hypervisor, the kernel, the wire",
        invariant=5, layer=SECCOMP, verdict=got,
    ),
    Attack(
        name="signal_process", what="signal a process outside", invariant=6, layer=PIDS,
        verdict=signalled(signal.SIGWINCH),
    ),
    Attack(
        name="signal_group", what="signal the caller's process group", invariant=6, layer=LANDLOCK,
        verdict=signalled(signal.SIGURG), note="Linux before 6.12 cannot close this",
    ),
    Attack(
        name="command_lines", what="read arguments and variables of processes outside",
        invariant=6, layer=PIDS, verdict=leaked("command line"),
    ),
    Attack(
        name="trace", what="trace bwrap's first process, and one outside", invariant=6,
        layer=f"{SECCOMP}, {PIDS}", verdict=got,
    ),
    Attack(
        name="terminal", what="type into the terminal", invariant=6, layer=SECCOMP, run="offline",
        verdict=either(_typed, got),
    ),
    Attack(
        name="foreign_calls", what="make system calls of 32-bit programs", invariant=6,
        layer=SECCOMP, verdict=_answered,
    ),
    Attack(
        name="capabilities", what="hold a capability", invariant=7, layer=USERS, verdict=got,
    ),
    Attack(
        name="namespaces", what="make a user namespace inside", invariant=2,
        layer=f"{SECCOMP}, {USERS}", verdict=got,
    ),
    Attack(
        name="kernel_calls", what="use io_uring, bpf, userfaultfd, perf, fsopen", invariant=2,
        layer=SECCOMP, verdict=got,
    ),
    Attack(
        name="descriptors", what="use a directory that the caller left open", invariant=7,
        layer="exec", verdict=leaked("home"),
    ),
    Attack(
        name="variables", what="read a token and a proxy's password in variables", invariant=7,
        layer="environment", verdict=leaked("variable", "password"),
    ),
    Attack(
        name="keyring", what="read a key of the session keyring", invariant=7,
        layer=f"{SECCOMP}, keyring", verdict=leaked("keyring"),
    ),
    Attack(
        name="set_user_id", what="leave a set-user-id program", invariant=2, layer=SECCOMP,
        verdict=_suid,
    ),
    Attack(
        name="orphan", what="leave a process behind", invariant=8, layer=PIDS, verdict=_orphan,
    ),
    Attack(
        name="clean_up", what="make the clean-up delete your files, or fail", invariant=8,
        layer="workspace", verdict=_clean,
    ),
    Attack(
        name="git_control", what="plant a git hook, or a program in .git/config", invariant=9,
        layer=MOUNTS,
        verdict=either(
            ran("git_control"), planted(".git/hooks/pre-commit"), planted(".git/config")
        ),
    ),
    Attack(
        name="git_replaced", what="move .git away and put a copy in its place", invariant=9,
        layer=f"{MOUNTS} (pins)",
        verdict=either(ran("git_replaced"), planted(".git/hooks/post-commit")),
    ),
    Attack(
        name="git_nested", what="plant a hook in a repository below the project", invariant=9,
        layer="end of the run",
        verdict=either(ran("git_nested"), planted("vendor/.git/hooks/pre-commit")),
    ),
    Attack(
        name="control_files", what="make settings that editors, shells and agents act on",
        invariant=9, layer=f"{MOUNTS} (held names)", verdict=_control,
    ),
    Attack(
        name="network", what="reach the host's loopback with --network=off", invariant=10,
        layer=NETWORK, run="offline", verdict=_network,
    ),
    Attack(
        name="processes", what="start more processes than --pids allows", invariant=1,
        layer=LIMITS, run="limited", excuse="cannot limit", verdict=got,
    ),
    # Last: it ends its sandbox.
    Attack(
        name="flood", what="fill /tmp beyond --tmp-size", invariant=1, layer=LIMITS, run="offline",
        verdict=_flooded,
    ),
)  # fmt: skip
