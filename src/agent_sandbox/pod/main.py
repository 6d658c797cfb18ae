"""The first process of a pod. Before anything else it closes itself to what it will run."""

from __future__ import annotations

import os
import sys

from ..launch import syscalls
from . import terms

# How this process ends when it cannot begin.
UNFIT = 2


def run() -> None:
    """Be the agent, to its end."""
    machine = os.uname().machine
    # First of all: memory, variables and descriptors are nobody's business (proc(5), ptrace(2)).
    from . import confine

    confine.hide(machine)
    syscalls.no_new_privileges(machine)
    syscalls.adopt_orphans(machine)
    given, code = dict(os.environ), UNFIT
    # No command gets these. Our own processes go on without what the image has (`enter`), which
    # libcrypto would read at its first use.
    os.environ.clear()
    os.environ.update(terms.VARIABLES)
    try:
        code = serve(machine, given)
    finally:
        # Nothing is left to be written, and nobody reads what Python would say.
        os._exit(code)


def serve(machine: str, given: dict[str, str]) -> int:
    """Make an identity, tell it, and serve until the lease is over."""
    import gc

    from . import agent, confine, identity, inner

    if os.getuid() == 0:
        # Nothing here is made for it: limits do not hold for root, and its files are the node's.
        return UNFIT
    bundle = inner.Bundle(root=sys.prefix)
    os.umask(0o022)
    os.chdir("/")
    _make_places(bundle.place)
    making = identity.Making(bundle)
    bounds = confine.Bounds(machine)
    probe = inner.Probe(bundle, bounds.usual.program)
    context, line = making.finish(given[terms.CA])
    here = agent.Agent(
        bundle, bounds, probe.result(), context, float(given.get(terms.UNCLAIMED, "600"))
    )
    here.listen(int(given.get(terms.AT, terms.PORT)))
    _say(line)
    # What is here now stays: a child that never looks at it shares its pages.
    gc.collect()
    gc.freeze()
    return here.run()


def _make_places(place: str) -> None:
    """The sandbox's directories. The engine may have made them already, as sub-paths."""
    from ..policy.owned import PARTS

    for part in ("/home", *PARTS):
        try:
            os.mkdir(place + part)
        except FileExistsError:
            continue
        os.chmod(place + part, 0o1777 if part == "/tmp" else 0o755)


def _say(line: str) -> None:
    """The only words ever: who listens here. They are out before any command can run."""
    os.write(1, line.encode("ascii"))
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.close(null)
