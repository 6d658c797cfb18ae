"""The examples in integrations/: they say what the code says, and can be parsed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from agent_sandbox.cli import ctl, hook, options
from conftest import ROOT

HERE = ROOT / "integrations"
DEVCONTAINER = HERE / "devcontainer" / ".devcontainer"


@pytest.mark.parametrize("path", sorted(HERE.rglob("*.json")), ids=lambda p: p.name)
def test_every_json_file_is_json(path: Path) -> None:
    assert isinstance(json.loads(path.read_text()), dict)


def test_the_hook_is_what_is_installed() -> None:
    shown = json.loads((HERE / "claude" / "hook.json").read_text())
    assert shown == hook._hook("/usr/local/bin/sandboxctl", [])


def test_the_prefix_is_what_is_installed() -> None:
    """And what `remove` knows."""
    shown = json.loads((HERE / "claude" / "prefix.json").read_text())
    assert shown == hook._prefix("/home/me/.local/share/agent-sandbox/claude-shell")
    assert hook.cleaned(shown) == {}


def test_the_mcp_server_takes_its_flags() -> None:
    server = json.loads((HERE / "mcp" / "mcp.json").read_text())["mcpServers"]["sandbox"]
    assert server["command"] == "sandboxctl"
    verb, *flags = server["args"]
    assert verb in {v.name for v in ctl.VERBS}
    parsed = options.parse(flags)
    assert (parsed.command, parsed.switches) == ((), frozenset())


def test_the_development_container_fits_its_dockerfile() -> None:
    """User and volumes exist in the image, and our commands are on PATH."""
    told = json.loads((DEVCONTAINER / "devcontainer.json").read_text())
    dockerfile = (DEVCONTAINER / told["build"]["dockerfile"]).read_text()
    user = told["remoteUser"]
    for mount in told["mounts"]:
        target = dict(part.split("=", 1) for part in mount.split(","))["target"]
        assert re.search(rf"install -d -o {user} .*\s{re.escape(target)}\b", dockerfile, re.DOTALL)
    assert "bubblewrap" in dockerfile
    for name in ("agent-sandbox", "sandboxctl"):
        assert f"/opt/agent-sandbox/bin/{name}" in dockerfile
    for command in told["postCreateCommand"].split(" && "):
        assert command.split()[1] in {v.name for v in ctl.VERBS}


def test_the_flake_balances_its_brackets() -> None:
    """There is no Nix here to read it; a lost bracket is the usual mistake."""
    text = (HERE / "nix" / "flake.nix").read_text()
    # Without indented strings, comments and strings.
    text = re.sub(r"''.*?[^'$]''(?!\$)|#[^\n]*|\"[^\"]*\"", "", text, flags=re.DOTALL)
    for one, other in ("{}", "[]", "()"):
        assert text.count(one) == text.count(other), (one, text)


def test_the_flake_builds_with_our_build_system() -> None:
    """As pyproject.toml has it."""
    flake = (HERE / "nix" / "flake.nix").read_text()
    assert 'build-backend = "hatchling.build"' in (ROOT / "pyproject.toml").read_text()
    assert "build-system = [ pkgs.python3Packages.hatchling ]" in flake
    assert (HERE / "nix" / "../..").resolve() == ROOT
