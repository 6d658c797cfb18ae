"""The errors of agent-sandbox: one root, leaves by whose fault it is.

Owns the shape of an error (message, hint, stable code, exit code). Prints nothing and never exits:
front ends decide how an error is shown.

    SandboxError
    ├── UsageError      the caller's flags or arguments are wrong
    ├── PolicyError     a policy file or rule is wrong, or asks for what it may not
    ├── HostError       this machine cannot build the sandbox
    ├── CommandError    the command itself cannot be executed (126) or found (127)
    └── InternalBug     a state that our own code promised could not happen
"""

from __future__ import annotations

EXIT_TIMEOUT = 124
EXIT_CANNOT_BUILD = 125
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
EXIT_SIGNAL_BASE = 128


class SandboxError(Exception):
    """Anything that stops a sandbox from being planned, built or run."""

    exit_code = EXIT_CANNOT_BUILD

    def __init__(self, message: str, *, hint: str = "", code: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code


class UsageError(SandboxError):
    """Flags or arguments that cannot be understood."""


class PolicyError(SandboxError):
    """A policy that is malformed, contradicts itself, or asks for more than it may."""


class HostError(SandboxError):
    """This machine lacks something that the policy needs."""


class CommandError(SandboxError):
    """The command cannot be found, seen or executed inside the sandbox."""

    def __init__(self, message: str, *, hint: str = "", code: str, exit_code: int) -> None:
        super().__init__(message, hint=hint, code=code)
        self.exit_code = exit_code


class InternalBug(SandboxError):
    """A promise that our own code broke; worth a report."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"internal error: {message}",
            hint="this is a bug in agent-sandbox: please report it with the output of --debug",
            code="internal-bug",
        )


def reason(error: OSError) -> str:
    """The kernel's words for an OSError, in the lower case of our messages."""
    text = error.strerror or str(error)
    return text[:1].lower() + text[1:]
