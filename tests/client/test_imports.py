"""The client can be taken along: it needs little of the package, and nothing of others."""

from __future__ import annotations

import json
import subprocess
import sys

from conftest import ROOT

ALLOWED = {
    "errors", "record", "client", "service", "service.http", "service.http.events",
    "service.http.frames",
}  # fmt: skip


def loaded(name: str) -> set[str]:
    """The modules that a program has which uses one client."""
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        f"from agent_sandbox.client import {name}\n"
        f"{name}('http://127.0.0.1:1', environ={{}})\n"
        "import json; print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


def test_both_clients_need_the_standard_library_and_little_of_ours() -> None:
    for name in ("Client", "AsyncClient"):
        modules = loaded(name)
        ours = {m.removeprefix("agent_sandbox.") for m in modules if m.startswith("agent_sandbox.")}
        assert {m for m in ours if not m.startswith("client.")} <= ALLOWED
        foreign = {m.partition(".")[0] for m in modules} - sys.stdlib_module_names
        assert foreign - {"agent_sandbox", "__main__"} == set()


def test_a_program_without_a_loop_does_not_pay_for_asyncio() -> None:
    assert "asyncio" not in loaded("Client")
    assert "asyncio" in loaded("AsyncClient")


def test_every_public_name_is_there() -> None:
    import agent_sandbox.client

    for name in agent_sandbox.client.__all__:
        assert getattr(agent_sandbox.client, name).__name__ == name
    assert dir(agent_sandbox.client) == sorted(agent_sandbox.client.__all__)
