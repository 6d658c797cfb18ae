"""Landlock scopes: the command cannot reach abstract sockets or signal processes outside.

Only the scope bits are used, no file rights: the mounts decide those. With the host's network
shared, abstract sockets (X11, D-Bus, …) are otherwise reachable; and `kill(0, …)` would reach every
process of the caller's process group, which the sandbox keeps for job control.
"""

from __future__ import annotations

import os

from . import syscalls

LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET = 1 << 0
LANDLOCK_SCOPE_SIGNAL = 1 << 1
# The first version with scopes (Linux 6.12).
SCOPE_ABI = 6


def abi() -> int:
    """The kernel's Landlock version; 0 when it has none or it is switched off."""
    try:
        return syscalls.syscall(
            syscalls.SYS_landlock_create_ruleset, 0, 0, LANDLOCK_CREATE_RULESET_VERSION
        )
    except OSError:
        return 0


def restrict(machine: str) -> bool:
    """Scope the calling thread; False when this kernel cannot."""
    if abi() < SCOPE_ABI:
        return False
    scopes = LANDLOCK_SCOPE_ABSTRACT_UNIX_SOCKET | LANDLOCK_SCOPE_SIGNAL
    # struct landlock_ruleset_attr: handled_access_fs, handled_access_net, scoped.
    attributes = bytes(16) + scopes.to_bytes(8, "little")
    ruleset = syscalls.syscall(syscalls.SYS_landlock_create_ruleset, attributes, len(attributes), 0)
    try:
        syscalls.no_new_privileges(machine)
        syscalls.syscall(syscalls.SYS_landlock_restrict_self, ruleset, 0)
    finally:
        os.close(ruleset)
    return True
