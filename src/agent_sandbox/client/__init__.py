"""The client of the sandbox service (`sandboxctl serve`), for programs and agents.

    from agent_sandbox.client import Client

    client = Client()                          # SANDBOX_API and SANDBOX_TOKEN say where and who
    print(client.run("echo hello").stdout)     # a sandbox for one command

    with client.sandboxes.create(memory="512M", network=["pypi.org"]) as sandbox:
        sandbox.files.write("main.py", "print(6 * 7)")
        result = sandbox.exec(["python3", "main.py"], timeout=10)
        print(result.code, result.stdout)
        for event in sandbox.stream("make test"):
            if event.kind in ("stdout", "stderr"):
                print(event.text, end="")
        sandbox.files.download_tree("/workspace", "results")

The same for asyncio:

    from agent_sandbox.client import AsyncClient

    async with AsyncClient("https://sandboxes.example:8650", token, ca_file="ca.pem") as client:
        async with await client.sandboxes.create() as sandbox:
            result = await sandbox.exec("make test")

The address is `http://`, `https://` or `unix:///path/service.sock`; without one the service of this
machine is tried. The token comes from SANDBOX_TOKEN or the file SANDBOX_TOKEN_FILE, and a private
authority's certificate from the file SANDBOX_CA. A refusal is an `ApiError` with the service's
`code`, `message`, `hint` and `rule`. What is safe to repeat is repeated: a lost answer of `create`
or `run` makes no second sandbox, and a broken stream goes on where it was. Redirects are not
followed. `https_proxy` is used for https, but never for this machine or a socket.

Standard library only. Nothing here prints or exits.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .async_running import AsyncExecution, AsyncStream, AsyncTerminal
    from .asynchronous import AsyncClient, AsyncSandbox
    from .errors import (
        ApiError,
        BadAnswer,
        ClientError,
        CommandFailed,
        NotConfigured,
        Unreachable,
    )  # fmt: skip
    from .sync import Client, Sandbox
    from .sync_running import Execution, Stream, Terminal
    from .trees import Unpacked
    from .values import Entry, Event, Listing, Result, SandboxInfo

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncExecution",
    "AsyncSandbox",
    "AsyncStream",
    "AsyncTerminal",
    "BadAnswer",
    "Client",
    "ClientError",
    "CommandFailed",
    "Entry",
    "Event",
    "Execution",
    "Listing",
    "NotConfigured",
    "Result",
    "Sandbox",
    "SandboxInfo",
    "Stream",
    "Terminal",
    "Unpacked",
    "Unreachable",
]

# Loaded on first use: a program without a loop does not pay for asyncio.
_HOMES = ("errors", "values", "trees", "sync", "sync_running", "asynchronous", "async_running")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'agent_sandbox.client' has no attribute {name!r}")
    from importlib import import_module

    for home in _HOMES:
        if name.startswith("Async") == home.startswith("async"):
            module = import_module(f"{__name__}.{home}")
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(name)


def __dir__() -> list[str]:
    return sorted(__all__)
