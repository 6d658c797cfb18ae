"""Commands in workspaces that a service owns: planned once, started often.

What does not depend on the workspace (facts, plan, bwrap's arguments, the filter) is made once for
each network policy and made anew when the machine has changed. A start fills in the directories,
the variables and the command. It is the library's own pipeline otherwise: bwrap on a thread of
reduced authority, limits, keeper, gate and proxy, the check of the mount table, and only then the
command.
"""

from __future__ import annotations

import _thread
import os
import time

from ..errors import HostError, reason
from ..host import facts as host_facts
from ..host import tools
from ..host.locate import Locator
from ..launch import (
    bwrap,
    descriptors,
    egress,
    execute,
    filters,
    finish,
    guards,
    keeper,
    sweeping,
    workspace,
)
from ..policy import merge, model, naming, network, owned
from ..record import Record
from . import starting
from .library import Policy, policy_values

TYPE_CHECKING = False
if TYPE_CHECKING:
    import resource
    import signal as _signal
    from collections.abc import Mapping

    from ..launch.enforcement import Enforcer
    from ..launch.spawner import Spawner
else:
    import _signal

# How old facts about the machine may be, in seconds. What appears later in a tree that is shown (a
# socket, a file that only its owner may read) is covered in sandboxes that start after that.
FRESH = 10.0
# How many policies are remembered in that time.
MOST = 256
# A change here is seen at once: most secrets of a machine lie in it.
WATCHED = "/etc"
# Signals that a server ignores or blocks, set back for bwrap.
DEFAULTS = (
    _signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP,
    _signal.SIGQUIT, _signal.SIGCHLD,
)  # fmt: skip
# The error of a bwrap that has failed. What it said went to the command's standard error.
NOT_BUILT = "bwrap-failed"
# Gives a terminal to the command alone. bwrap's own processes have none, so that Ctrl-C and Ctrl-Z
# reach the command and not what holds it.
SETSID = ("/usr/bin/setsid", "/bin/setsid")


# Where a machine keeps its settings. What not everybody may read there is no command's business.
SHOWN = ("/etc", "/usr/local/etc")


class Grant(Record):
    """What a template depends on."""

    network: str = "off"
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class Template(Record):
    """A command without its workspace: tokens stand for the directories."""

    command: bwrap.Command
    variables: Mapping[str, str]


class Call(Record):
    """One command: where, what, with which variables and bounds."""

    # The directory with the workspace's parts.
    place: str
    # Unique among the sandboxes of this machine; what a killed service left is found by it.
    name: str
    argv: tuple[str, ...]
    cwd: str = owned.WORK
    env: Mapping[str, str] = {}
    terminal: bool = False
    # For where no control group counts them.
    processes: int = 0
    # The largest file; 0 for no bound.
    file_bytes: int = 0


class Ground:
    """What the sandboxes of one service share. Safe to use from several threads."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir
        self._turn = _thread.allocate_lock()
        self._templates: dict[Grant, Template] = {}
        self._looked_at = 0.0
        self._stamp = 0
        uid = os.getuid()
        workspace.open_state(state_dir, uid)
        program = tools.find_bwrap({}, state_dir)
        if program is None:
            raise tools.missing_bwrap()
        self.tools = tools.check(program, bwrap.REQUIRED_OPTIONS, state_dir)
        self.setsid = next((path for path in SETSID if os.access(path, os.X_OK)), "")

    def template(self, grant: Grant) -> Template:
        """The command of a network policy, made anew when the machine has changed."""
        with self._turn:
            stamp = os.stat(WATCHED).st_mtime_ns
            now = time.monotonic()
            worn = now - self._looked_at > FRESH or len(self._templates) > MOST
            if stamp != self._stamp or worn:
                self._templates = {}
                self._stamp, self._looked_at = stamp, now
            found = self._templates.get(grant)
            if found is None:
                found = self._templates[grant] = self._make(grant)
            return found

    def forget(self) -> None:
        """Look at the machine again at the next start."""
        with self._turn:
            self._templates = {}

    def check(self, grant: Grant) -> None:
        """Refuse a policy that cannot be read; raises PolicyError.

        No template is made for that: everybody's starts would wait for one agent's many policies.
        """
        for text in grant.allow:
            network.parse(text, "Policy.allow")
        for text in grant.deny:
            network.parse(text, "Policy.deny", deny=True)

    def _make(self, grant: Grant) -> Template:
        wishes = Policy(
            network=grant.network, allow=grant.allow, deny=grant.deny, presets=("!@all", "@base")
        )
        layer = model.Layer(rank=model.FLAGS, values=policy_values(wishes))
        policy = merge.merge([layer], project=owned.WORK, home=owned.HOME, command="", env={})
        made = owned.plan(policy, self._facts(policy))
        texts = {owned.account_token(path): text for path, text in owned.TEXTS.items()}
        if made.egress is not None:
            texts.update(_naming_texts())
        machine = os.uname().machine
        command = bwrap.command(
            made,
            bwrap.Places(work="", home="", masks=f"{self._state_dir}/mask"),
            ("",),
            program=self.tools.bwrap,
            filter_bytes=filters.program(self._state_dir, machine, made.seccomp),
            copies=texts,
            # Nobody can talk to a proxy of ours: what it may let through is settled.
            outside={"control": ""},
        )
        return Template(command=command, variables=owned.variables(grant.network))

    def _facts(self, policy: model.Policy) -> model.HostFacts:
        locator = Locator()
        here = host_facts.Place(
            path=owned.WORK, real=owned.WORK, kind=model.DIR, uid=os.getuid(), gid=os.getgid(),
            user=owned.USER, home=owned.home(), state_dir=self._state_dir,
        )  # fmt: skip
        found = host_facts.gather(policy, here, {}, locator)
        closed = [match for top in SHOWN for match in _closed(top)]
        return found.replace(root_secrets=(*found.root_secrets, *closed))

    def command(self, template: Template, call: Call) -> bwrap.Command:
        """The whole command of one call."""
        made = template.command
        parts = {model.OWNED + part: call.place + part for part in owned.PARTS}
        options = [parts.get(option, option) for option in made.options]
        options += bwrap.entering(call.cwd, {**template.variables, **call.env, "PWD": call.cwd})
        argv = call.argv
        if call.terminal:
            argv = (self.setsid, "--ctty", "--", *argv)
        else:
            # No signal to its own process group reaches bwrap's.
            options.append("--new-session")
        return made.replace(
            options=tuple(options),
            command=argv,
            name=call.name,
            processes=call.processes,
            planned=tuple((dest, parts.get(source, source)) for dest, source in made.planned),
        )


def _closed(top: str) -> list[model.Match]:
    """What in a tree is not for everybody: the service's own TLS key and tokens, or root's files.

    The service's account can read them, and so could its commands, which have no other.
    """
    found = []
    todo = [top]
    while todo:
        try:
            with os.scandir(todo.pop()) as entries:
                items = [(one.path, one.is_dir(follow_symlinks=False)) for one in entries
                         if not one.is_symlink()]  # fmt: skip
        except OSError:
            # Closed to us as well, or removed meanwhile.
            continue
        for path, is_dir in items:
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                continue
            wanted = 0o005 if is_dir else 0o004
            if mode & wanted != wanted:
                kind = model.DIR if is_dir else model.FILE
                found.append(model.Match(path=path, real=path, kind=kind))
            elif is_dir:
                todo.append(path)
    return found


def _naming_texts() -> dict[str, str]:
    from ..host import names

    texts = naming.texts(names.switch(), names.own())
    return {f"{model.WORK_NET}/{naming.copy_name(path)}": text for path, text in texts.items()}


class Launched:
    """A started command: its processes on the host, and what stays with them."""

    def __init__(self, outer: int, init: int | None, held: keeper.Keeper, status: int) -> None:
        self.outer = outer
        self.init = init
        self.keeper = held
        self.network: egress.Network | None = None
        self.status = execute.ChildStatus(status)
        self.sandboxed = execute.Sandboxed(outer, init or outer)


def launch(
    command: bwrap.Command, streams: tuple[int, int, int], call: Call, *,
    spawner: Spawner, enforcer: Enforcer | None = None,
) -> Launched:  # fmt: skip
    """Start a command with these as its standard streams. Blocks until it has been let go."""
    start = _Start(command, call)
    try:
        return start.run(streams, spawner, enforcer)
    except BaseException:
        start.abandon()
        raise


class _Start:
    """A start, and what there is of it so far."""

    def __init__(self, command: bwrap.Command, call: Call) -> None:
        self._command = command
        self._call = call
        self._keeper: keeper.Keeper | None = None
        self._network: egress.Network | None = None
        self._opened: descriptors.Descriptors | None = None
        self._outer = 0
        self._launched: Launched | None = None

    def run(
        self, streams: tuple[int, int, int], spawner: Spawner, enforcer: Enforcer | None
    ) -> Launched:
        command = self._command
        self._keeper = held = starting.keeper_for(keeper.orders_of(command))
        if command.gate:
            self._network = egress.network(command, starting.gate_for)
            if self._network is not None:
                self._network.start()
        self._opened = opened = descriptors.open_descriptors(command)
        born = False

        def start() -> int:
            nonlocal born
            pid = enforcer.bear(spawn) if enforcer is not None else None
            born = pid is not None
            return pid if pid is not None else spawn()

        def spawn() -> int:
            return _spawn(command, opened, streams)

        try:
            self._outer = spawner.call(start)
        finally:
            descriptors.close_inherited(opened)
        status = execute.ChildStatus(opened.status)
        init = status.child(self._outer)
        launched = self._launched = Launched(self._outer, init, held, opened.status)
        launched.network = self._network
        launched.status = status
        if init is not None and self._call.file_bytes:
            try:
                guards.bound_files(init, self._call.file_bytes)
            except ProcessLookupError:
                init = None
        limits = None if born else enforcer
        finished = finish.complete(command, init, limits, held, network=self._network)
        if not finished:
            raise HostError(
                "cannot build the sandbox: bwrap ended before the command started",
                hint="'sandboxctl doctor' finds the cause on this machine",
                code=NOT_BUILT,
            )
        self._opened = None
        descriptors.release(opened)
        return launched

    def abandon(self) -> None:
        """End whatever there is."""
        if self._launched is not None:
            self._launched.sandboxed.kill()
            self._launched.sandboxed.join()
        if self._outer:
            try:
                os.kill(self._outer, _signal.SIGKILL)
            except ProcessLookupError:
                # Killed by somebody else, and buried as nobody's.
                pass
            reap(self._outer)
            if self._launched is None or self._launched.init is None:
                sweeping.end_orphans(self._command.name)
            else:
                reap(self._launched.init)
        if self._opened is not None:
            os.close(self._opened.release)
            os.close(self._opened.status)
        if self._network is not None:
            self._network.abandon()
        if self._keeper is not None:
            self._keeper.dismiss()


def reap(pid: int) -> resource.struct_rusage | None:
    """Take the exit status of a process that may have become our child, and what it has used."""
    try:
        return os.wait4(pid, 0)[2]
    except ChildProcessError:
        return None


def _spawn(
    command: bwrap.Command, opened: descriptors.Descriptors, streams: tuple[int, int, int]
) -> int:
    actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(streams)]
    # dup2 onto itself clears close-on-exec in the child only (posix_spawn in glibc and musl).
    actions += [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in opened.inherited]
    try:
        return os.posix_spawn(
            command.program, descriptors.argument_vector(command, opened), {},
            file_actions=actions, setsid=True, setsigmask=(), setsigdef=DEFAULTS,
        )  # fmt: skip
    except OSError as error:
        raise HostError(
            f"cannot start '{command.program}': {reason(error)}",
            hint="run 'sandboxctl doctor'",
            code="bwrap-failed",
        ) from error
