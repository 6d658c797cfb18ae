"""The proxy of one run, a process of its own outside the sandbox.

    python -I -S egress.py ORDERS GATE SUPERVISOR [certified]

Three descriptors: orders in JSON, the line to the gate, and a stream to the supervisor. When the
supervisor shuts down its side of that stream, the report is written and the process ends; when the
supervisor dies, the process ends, too. When it dies itself, the command has no network any more.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from agent_sandbox.proxy.authority import Authority

PR_SET_DUMPABLE = 4


def main() -> None:
    """The process."""
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from agent_sandbox.launch import landlock
    from agent_sandbox.launch.syscalls import SYS_PRCTL, join_new_keyring, syscall
    from agent_sandbox.proxy import waiting

    machine = os.uname().machine
    # Not to be traced, and no /proc/PID/fd to take sockets from, for anybody but root.
    syscall(SYS_PRCTL[machine], PR_SET_DUMPABLE, 0, 0, 0, 0)
    # It needs no key, signals nobody, and has no business with abstract sockets.
    join_new_keyring(machine)
    landlock.restrict(machine)
    told, line, supervisor = (int(text) for text in sys.argv[1:4])
    waiting.close_others(told, line, supervisor)
    certified = sys.argv[4:] == ["certified"]
    authority = _authority(told, supervisor) if certified else None
    found = waiting.receive(line, supervisor)
    if not certified and not waiting.has_work(found, supervisor):
        waiting.say_nothing(supervisor)
        os._exit(0)
    _load_asyncio()
    from agent_sandbox.proxy.serving import run

    run(told, line, supervisor, found, authority)


def _load_asyncio() -> None:
    """It would import OpenSSL, for a third of this start, and copes without. Ours comes later."""
    if "asyncio" not in sys.modules:
        sys.modules["ssl"] = None  # type: ignore[assignment]
        import asyncio  # noqa: F401

        del sys.modules["ssl"]


def _authority(told: int, supervisor: int) -> Authority:
    """The certificates of this run; without them the command is not let go, and learns why."""
    _load_asyncio()
    from agent_sandbox.proxy import serving

    try:
        return serving.prepare(told)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is said, and the start refused
        os.write(supervisor, f"no certificates: {type(error).__name__}: {error}"[:500].encode())
        os._exit(1)


if __name__ == "__main__":
    main()
