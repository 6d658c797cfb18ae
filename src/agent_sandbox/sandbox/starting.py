"""From a plan to a running sandbox, for a program that lives on whatever becomes of the start."""

from __future__ import annotations

import _thread
import atexit
import os
import subprocess

from ..launch import descriptors, execute, finish, gate, keeper, sweeping
from ..launch.helping import Helpers
from ..launch.keeper_server import Server
from ..launch.spawner import spawner
from .changes import Changes
from .prepare import Prepared, build, make_enforcer
from .process import Process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import IO

    from ..launch.descriptors import Descriptors
    from ..launch.limits import Enforcer
    from .prepare import Built

    Stream = int | IO[bytes] | None


def start(
    prepared: Prepared, argv: tuple[str, ...], stdin: Stream, stdout: Stream, stderr: Stream
) -> Process:
    """Start bwrap on the spawner's thread, in a session of its own."""
    starting = _Starting(prepared, build(prepared, argv))
    try:
        return starting.finish(argv, *starting.spawn(stdin, stdout, stderr))
    except BaseException:
        # Ctrl-C comes at any moment, and the program may live on.
        starting.abandon()
        raise


class _Starting:
    """A start, and what there is of it so far."""

    def __init__(self, prepared: Prepared, built: Built) -> None:
        self._prepared = prepared
        self._built = built
        self._name = os.path.basename(built.space.path)
        self._changes = Changes(prepared, self._name)
        self._enforcer: Enforcer | None = None
        self._keeper: keeper.Keeper | None = None
        self._helpers: Helpers | None = None
        self._opened: Descriptors | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._process: Process | None = None

    def spawn(
        self, stdin: Stream, stdout: Stream, stderr: Stream
    ) -> tuple[Descriptors, subprocess.Popen[bytes], keeper.Keeper, Helpers]:
        """Start the helpers and bwrap, which waits."""
        command, space = self._built.command, self._built.space
        self._enforcer = make_enforcer(self._prepared.plan, self._prepared.facts.uid, space)
        self._keeper = kept = keeper_for(keeper.orders_of(command))
        self._helpers = helpers = Helpers(command, gate_for)
        helpers.start_first()
        helpers.start()
        opened = descriptors.open_descriptors(command)
        line = descriptors.argument_vector(command, opened)

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(  # noqa: S603 - the argument vector is ours
                line, executable=command.program, stdin=stdin, stdout=stdout, stderr=stderr,
                env={}, close_fds=True, pass_fds=opened.inherited, start_new_session=True,
            )  # fmt: skip

        self._popen = spawner().call(start, _end)
        self._opened = opened
        descriptors.close_inherited(opened)
        return opened, self._popen, kept, helpers

    def finish(
        self, argv: tuple[str, ...], opened: Descriptors, popen: subprocess.Popen[bytes],
        kept: keeper.Keeper, helpers: Helpers,
    ) -> Process:  # fmt: skip
        """Wait until the sandbox is finished and checked, and let the command go."""
        status = execute.ChildStatus(opened.status)
        init = status.child(popen.pid)
        process = self._process = Process(
            popen, status=status, init=init, space=self._built.space, enforcer=self._enforcer,
            keeper=kept, helpers=helpers, changes=self._changes, argv=argv,
            plan=self._prepared.plan,
        )  # fmt: skip
        finished = finish.complete(
            self._built.command, init, self._enforcer, kept, self._changes.begin,
            network=helpers.network,
        )  # fmt: skip
        helpers.ready()
        if not finished and init is not None:
            # Whatever it waits for, it must not go on by itself.
            process.kill()
        self._opened = None
        descriptors.release(opened)
        return process

    def abandon(self) -> None:
        """End and remove whatever there is."""
        if self._process is not None:
            self._process.close()
            if self._opened is not None:
                os.close(self._opened.release)
            return
        if self._popen is not None:
            _end(self._popen)
        sweeping.end_orphans(self._name)
        if self._helpers is not None:
            self._helpers.abandon()
        if self._keeper is not None:
            self._keeper.dismiss()
        if self._enforcer is not None:
            self._enforcer.close()
        self._changes.forget()
        sweeping.remove(self._built.space, keep=False)


def _end(popen: subprocess.Popen[bytes]) -> None:
    """End a bwrap that nobody waits for any more."""
    popen.kill()
    popen.wait()


_server: Server | None = None
_ends = ""
_creation = _thread.allocate_lock()


def end_with_us(prefix: str) -> None:
    """Have runs whose names begin like this ended when this program is killed."""
    global _ends  # noqa: PLW0603 - one per process by nature
    _ends = prefix
    _end_server()


def keeper_for(orders: keeper.Orders) -> keeper.Keeper:
    """A keeper for one sandbox; somebody may have killed what starts them."""
    server = _keepers()
    try:
        return server.keeper(orders)
    except OSError:
        _end_server(server)
        return _keepers().keeper(orders)


def gate_for(orders: gate.Orders) -> gate.Gate:
    """A gate for one sandbox, from the same server as its keeper."""
    server = _keepers()
    try:
        return server.gate(orders)
    except OSError:
        _end_server(server)
        return _keepers().gate(orders)


def _keepers() -> Server:
    """What starts this program's keepers; a fork starts anew, since two cannot share one line."""
    global _server  # noqa: PLW0603 - one per process by nature
    with _creation:
        if _server is None or _server.pid != os.getpid():
            if _server is None:
                atexit.register(_end_server)
            _server = Server(_ends)
        return _server


def _end_server(failed: Server | None = None) -> None:
    """End it; when it has `failed` somebody, only if nobody has replaced it yet."""
    global _server  # noqa: PLW0603 - one per process by nature
    with _creation:
        ended = _server if failed in (None, _server) else None
        if ended is not None:
            _server = None
    if ended is not None and ended.pid == os.getpid():
        ended.close()
