"""The bubblewrap strategy: a Plan becomes bwrap's arguments. Pure but for file descriptors.

Arguments and the descriptors that they refer to travel together as one Command.
"""

from __future__ import annotations

from ..errors import HostError
from ..policy import paths
from ..policy.assemble import IN_HOME
from ..policy.model import (
    EXCLUDE,
    MARKER,
    MASK_DIR,
    MASK_FILE,
    OWNED,
    PRIVATE_HOME,
    README,
    RO,
    RW,
    STATE,
    WORK_CACHES,
    WORK_DOCKER,
    WORK_GIT,
    WORK_GIT_AUTH,
    WORK_HOME,
    WORK_NET,
    WORK_STATE,
    WORK_TMP,
    WORK_VAR_TMP,
)  # fmt: skip
from ..record import Record

# Operations of the keeper on one path; `joined` carries them out.
MASK, READ_ONLY, PIN, SEAL, COPY = "mask", "ro", "pin", "seal", "copy"
# Read-only, and made again when somebody outside removes it.
HOLD_DIRECTORY, HOLD_SOCKET = "hold-dir", "hold-socket"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..policy.model import Mount, Plan

NAME = "bwrap"
# bwrap counts every argument, those from --args too (MAX_ARGS in bubblewrap.c).
MAX_ARGUMENTS = 9000
REQUIRED_OPTIONS = (
    "--args", "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop",
    "--perms", "--file", "--seccomp", "--json-status-fd", "--block-fd",
)  # fmt: skip
# Signals that must not end bwrap's own outer process: it would take the command with it before the
# command's handlers ran. They are ignored around bwrap and set back for the command.
SHIELDED = ("INT", "QUIT", "HUP", "TERM")


class Places(Record):
    """Where the parts of a run that exist only for it are on the host."""

    work: str
    home: str
    masks: str
    # A workspace that belongs to a service; its token, where the place is to be filled in later.
    owned: str = OWNED


class Command(Record):
    """What to execute: the program, its arguments, and the texts that go in by descriptor."""

    program: str
    options: tuple[str, ...]
    command: tuple[str, ...]
    # Option that takes a descriptor → content to put behind it.
    texts: tuple[tuple[str, str, bytes], ...]
    # Mounts that are made after bwrap's, because there are too many for it: (operation, source,
    # destination) for the keeper.
    bulk: tuple[tuple[str, str, str], ...] = ()
    # What the keeper must hold when somebody outside replaces it: (operation, path).
    duties: tuple[tuple[str, str], ...] = ()
    # How much the private /tmp may hold; 0 for no limit.
    tmp_bytes: int = 0
    # How many processes there may be when nobody has said a number; 0 for no limit.
    processes: int = 0
    # The run's name, by which what is left of it can be found after a crash.
    name: str = ""
    # Its lock file, where its first process is written down; empty where there is none.
    lock: str = ""
    # Every mount that the finished root must have: destination and source ('' for an empty one).
    planned: tuple[tuple[str, str], ...] = ()
    # What the gate at its network and the proxy outside are told; empty where there are none.
    gate: bytes = b""
    proxy: bytes = b""
    # Whether the proxy has to make certificates before the command starts.
    certified: bool = False
    # What the filter in front of the container engine is told.
    docker: bytes = b""
    # What answers for git's keys and credentials is told.
    git_auth: bytes = b""
    # What keeps an agent's files in step with the host's is told.
    state: bytes = b""
    # Addresses and ports of the host that lead inside.
    published: tuple[tuple[str, int], ...] = ()


def command(
    plan: Plan, places: Places, argv: Sequence[str], *, program: str, filter_bytes: bytes,
    reset_signals: str = "", heeded: Sequence[str] = SHIELDED, copies: Mapping[str, str] = {},
    outside: Mapping[str, object] = {},
) -> Command:  # fmt: skip
    """Build the bwrap command for a plan. `copies`: sources that are texts, not files.

    `outside` is for the proxy alone: values of secrets, and what goes with them.
    """
    options = ["--unshare-all"]
    if plan.network:
        options.append("--share-net")
    # --unshare-all only tries the user namespace; as root it would keep every capability.
    options += ["--unshare-user", "--disable-userns", "--die-with-parent", "--cap-drop", "ALL"]
    if plan.identity is not None:
        options += ["--uid", str(plan.identity), "--gid", str(plan.identity)]
    texts: list[tuple[str, str, bytes]] = []
    # Only what the plan shows: a text may be of a file that nobody inside is to read.
    copies = {m.source: copies[m.source] for m in plan.mounts if m.source in copies}
    mounts, bulk = _split(plan.mounts, copies)
    for mount in mounts:
        if mount.dest == MARKER:
            # The marker is the last step.
            for token, text in copies.items():
                options += _file(_inside(token), text, texts)
        options += _arguments(mount, places, texts)
    # The name that the user typed, links and all; every link on the way is there.
    options += entering(plan.env.get("PWD") or plan.cwd, plan.env)
    if len(options) + len(argv) > MAX_ARGUMENTS - 100:
        raise HostError(
            f"cannot build the sandbox: {len(plan.mounts)} mounts are more than bwrap takes",
            hint="hide whole directories instead of many single files",
            code="too-many-mounts",
        )
    texts.append(("--seccomp", "", filter_bytes))
    gate, proxy = _network_orders(plan, places.work, outside)
    return Command(
        gate=gate,
        proxy=proxy,
        certified=any(not one.base_url for one in plan.secrets),
        docker=_docker_orders(plan, places.work),
        git_auth=_git_orders(plan, places.work),
        state=_state_orders(plan, places),
        published=tuple((one.address, one.port) for one in plan.publish),
        program=program,
        options=tuple(options),
        command=(*_trampoline(argv, reset_signals, heeded), *argv),
        texts=tuple(texts),
        bulk=bulk,
        duties=duties(plan.mounts, plan.awaited),
        tmp_bytes=plan.limits.tmp_size or 0,
        processes=plan.limits.default_pids or 0,
        name=places.work.rpartition("/")[2],
        planned=tuple(
            (
                m.dest,
                source_path(m.source, places) if m.kind in BINDS and m.source not in copies else "",
            )
            for m in plan.mounts
            if m.kind in BINDS or m.kind in ("tmpfs", "hold", "cover")
        ),
    )


def entering(cwd: str, env: Mapping[str, str]) -> list[str]:
    """The options that differ from command to command."""
    options = ["--chdir", cwd] if cwd else []
    for name, value in sorted(env.items()):
        options += ["--setenv", name, value]
    return options


def _network_orders(plan: Plan, work: str, outside: Mapping[str, object]) -> tuple[bytes, bytes]:
    if plan.egress is None and not plan.publish:
        return b"", b""
    # Only where a proxy decides.
    from .egress import told

    caps = [{name: getattr(one, name) for name in one.__fields__} for one in plan.budgets]
    bases = [one.base_port for one in plan.secrets if one.base_url]
    # A workspace of a service has no such page.
    page = README if plan.identity is None else ""
    more = {"project": plan.project, "budgets": caps, "page": page, **outside}
    return told(plan.egress, plan.publish, work, bases=bases, more=more)


def _docker_orders(plan: Plan, work: str) -> bytes:
    if plan.docker_filter is None:
        return b""
    from .dockerproxy import told

    return told(plan.docker_filter, work)


def _state_orders(plan: Plan, places: Places) -> bytes:
    if not plan.steps:
        return b""
    from .instep import told

    return told(plan, places)


def _git_orders(plan: Plan, work: str) -> bytes:
    if plan.git_auth is None:
        return b""
    from .gitauth import told

    return told(plan.git_auth, work)


def _inside(token: str) -> str:
    """Where a text lies in the sandbox, on the sealed root; it is shown where it belongs, too."""
    return f"{paths.parent(MARKER)}/{token.removeprefix('@work/')}"


def _split(
    mounts: Sequence[Mount], copies: Mapping[str, str]
) -> tuple[Sequence[Mount], tuple[tuple[str, str, str], ...]]:
    """Take the mounts that the keeper makes out of a plan.

    bwrap parses the whole mount table at every bind and seal: 1,000 take it 1.6 s, 2,000 already
    6 s, and even the first ones 0.15 ms each. For the keeper each is two system calls.
    """
    kept: list[Mount] = []
    bulk: list[tuple[str, str, str]] = []
    # A mask that is in place is the source for all others of its kind: the namespace cannot bind
    # from outside itself.
    first: dict[str, str] = {}
    by_dest = {mount.dest: mount for mount in mounts if mount.kind != SEAL}
    # Where more is mounted below: bwrap comes first, and a later bind would cover that.
    around = _around(by_dest)
    for mount in mounts:
        if mount.kind in ("mask-file", "mask-dir") and mount.kind in first:
            bulk.append((COPY, first[mount.kind], mount.dest))
        elif mount.kind == "hold":
            bulk.append(("ro", mount.source or mount.dest, mount.dest))
        elif mount.kind == "cover":
            # A link is covered itself: bwrap would follow it.
            bulk.append(("ro", mount.source, mount.dest))
        elif mount.source in copies:
            bulk.append(("ro", _inside(mount.source), mount.dest))
        elif mount.kind in (PIN, SEAL):
            bulk.append((mount.kind, mount.dest, mount.dest))
        elif mount.kind == "ro" and mount.dest not in around and _shows_already(mount, by_dest):
            bulk.append(("ro", mount.dest, mount.dest))
        else:
            first.setdefault(mount.kind, mount.dest)
            kept.append(mount)
    return kept, tuple(bulk)


def _around(dests: Iterable[str]) -> set[str]:
    """Every directory above one of these paths."""
    found: set[str] = set()
    for dest in dests:
        above = paths.parent(dest)
        while above not in found:
            found.add(above)
            above = paths.parent(above)
    return found


def duties(mounts: Sequence[Mount], awaited: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Protections that lie in a tree of the host, where a save or a rename outside undoes them."""
    by_dest = {m.dest: m for m in mounts if m.kind != "symlink"}
    found = [(MASK, path) for path in awaited]
    for mount in mounts:
        operation = HELD.get(mount.kind) or (MASK if mount.level == EXCLUDE else "")
        if not operation or mount.kind == "seal":
            continue
        if mount.kind == "hold" and (mount.source or not mount.file):
            operation = HOLD_SOCKET if mount.file else HOLD_DIRECTORY
        above = next((by_dest[p] for p in paths.parents(mount.dest) if p in by_dest), None)
        if above is not None and above.level in (RO, RW) and above.source == above.dest:
            # A mask is read-only and empty already: only the host's own tree can change.
            found.append((operation, mount.dest))
    return tuple(found)


def _shows_already(mount: Mount, by_dest: Mapping[str, Mount]) -> bool:
    """Whether a mount's destination shows the host's own file already, or a part of /proc."""
    above = next((by_dest[p] for p in paths.parents(mount.dest) if p in by_dest), None)
    if above is None or mount.source != mount.dest:
        return False
    return above.kind == "proc" or (above.level in (RO, RW) and above.source == above.dest)


def _trampoline(argv: Sequence[str], reset_signals: str, heeded: Sequence[str]) -> tuple[str, ...]:
    """`env` puts the shielded signals back to their defaults, and reports 126 and 127."""
    if not reset_signals or not heeded or "=" in argv[0]:
        return ()
    return (reset_signals, "--default-signal=" + ",".join(heeded), "--")


def descriptor_token(index: int) -> str:
    """What stands in the options for the descriptor of a text. No real argument holds a NUL."""
    return f"\0{index}"


def source_path(token: str, places: Places) -> str:
    """The host path behind a token of the plan."""
    if not token.startswith("@"):
        return token
    fixed = {
        WORK_TMP: f"{places.work}/tmp",
        WORK_VAR_TMP: f"{places.work}/var-tmp",
        WORK_HOME: f"{places.work}/home",
        WORK_DOCKER: f"{places.work}/docker.sock",
        WORK_GIT_AUTH: f"{places.work}/git-auth.sock",
        PRIVATE_HOME: places.home,
        MASK_DIR: f"{places.masks}/dir",
        MASK_FILE: f"{places.masks}/file",
    }
    if token in fixed:
        return fixed[token]
    if paths.below(token, OWNED):
        return places.owned + token[len(OWNED) :]
    if paths.below(token, STATE):
        from .agentplaces import place

        return place(places.home, token)
    for prefix in (WORK_CACHES, WORK_GIT, WORK_NET, WORK_STATE):
        if paths.below(token, prefix):
            return places.work + token[len("@work") :]
    raise HostError(f"cannot build the sandbox: unknown source '{token}'", code="internal-bug")


def _arguments(
    mount: Mount, places: Places, texts: list[tuple[str, str, bytes]]
) -> tuple[str, ...]:
    dest = mount.dest
    kind = mount.kind
    if kind in BINDS:
        return (BINDS[kind], source_path(mount.source, places), dest)
    if kind == "tmpfs":
        mode = "0700" if dest.startswith("/run/user/") else "0755"
        return ("--perms", mode, "--tmpfs", dest)
    if kind == "symlink":
        return () if mount.rule == IN_HOME else ("--symlink", mount.source, dest)
    if kind == "text":
        return _file(dest, mount.source + "\n", texts)
    if kind == "program":
        return _file(dest, mount.source, texts, mode="0555")
    return (SIMPLE[kind], dest)


def _file(
    dest: str, text: str, texts: list[tuple[str, str, bytes]], mode: str = "0444"
) -> tuple[str, ...]:
    """Make a file of the sandbox's own."""
    texts.append(("--file", dest, text.encode("utf-8", "surrogateescape")))
    # Its place in the order matters: a descriptor option is written where the mount stands.
    return ("--perms", mode, "--file", descriptor_token(len(texts) - 1), dest)


# Kinds of mounts that protect something → what the keeper does to hold them.
HELD: Mapping[str, str] = {
    "mask-file": MASK, "mask-dir": MASK, "ro": READ_ONLY, "hold": READ_ONLY, "pin": PIN,
}  # fmt: skip

BINDS: Mapping[str, str] = {
    "ro": "--ro-bind",
    "mask-dir": "--ro-bind",
    "mask-file": "--ro-bind",
    "rw": "--bind",
    "pin": "--bind",
}
SIMPLE: Mapping[str, str] = {
    "dev": "--dev",
    "proc": "--proc",
    "dir": "--dir",
}


def printable(built: Command) -> list[str]:
    """The whole command as one argument list, for people; descriptors are shown as numbers.

    Mounts that are made in bulk afterwards are shown as bwrap options too: they mean the same.
    """
    numbers = {descriptor_token(index): str(10 + index) for index in range(len(built.texts))}
    shown = [numbers.get(option, option) for option in built.options]
    for index, (option, dest, _) in enumerate(built.texts):
        if not dest:
            shown += [option, str(10 + index)]
    for operation, source, dest in built.bulk:
        if operation == SEAL:
            shown += ["--remount-ro", dest]
        else:
            shown += ["--bind" if operation == PIN else "--ro-bind", source, dest]
    return [built.program, *shown, "--", *built.command]
