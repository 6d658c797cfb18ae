"""The process behind `Sandbox.wrap`: supervises a sandbox inside a process of somebody else.

    python -I -S stand_in.py FD NAME

FD holds the command, marshalled by the library that called `wrap`; NAME is for whoever looks for
what a killed run has left. Runs as a script, in the process
that another program started, so it finds its package by its own place. It does what the command
line does: closes what the caller left open, restricts, verifies, passes signals on, and ends with
the command's exit code.
"""

from __future__ import annotations

import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .bwrap import Command


def dump(command: Command) -> bytes:
    """A command as bytes."""
    return marshal.dumps(tuple(getattr(command, field) for field in command.__fields__))


def main() -> None:
    """Run the command and end as it ends."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from agent_sandbox.errors import SandboxError
    from agent_sandbox.launch import bwrap, execute, syscalls

    syscalls.die_with_parent(os.uname().machine)
    fd = int(sys.argv[1])
    with open(fd, "rb") as file:
        # From our own library, through a descriptor that nobody else has.
        values = marshal.loads(file.read())  # noqa: S302
    command = bwrap.Command(**dict(zip(bwrap.Command.__fields__, values, strict=True)))
    try:
        outcome = execute.run(command, signals=execute.Signals(), timeout=None, shield=False)
        code = outcome.code if outcome.started or not outcome.code else 125
    except SandboxError as error:
        sys.stderr.write(f"agent-sandbox: error: {error.message}\nhint: {error.hint}\n")
        code = error.exit_code
    os._exit(code)


if __name__ == "__main__":
    main()
