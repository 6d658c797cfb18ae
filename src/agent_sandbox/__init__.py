"""agent-sandbox: run any command-line agent in a bubblewrap sandbox.

The public names are loaded on first use, so that `import agent_sandbox` costs nothing.
"""

from __future__ import annotations

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .errors import CommandError, HostError, PolicyError, SandboxError, UsageError
    from .sandbox.library import CommandFailed, Policy, Result, Sandbox, Wrapped
    from .sandbox.process import Process

__all__ = [
    "CommandError",
    "CommandFailed",
    "HostError",
    "Policy",
    "PolicyError",
    "Process",
    "Result",
    "Sandbox",
    "SandboxError",
    "UsageError",
    "Wrapped",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'agent_sandbox' has no attribute {name!r}")
    from . import errors
    from .sandbox import library

    return getattr(errors, name) if hasattr(errors, name) else getattr(library, name)


def __dir__() -> list[str]:
    return sorted(__all__)
