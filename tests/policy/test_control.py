"""Names that the host acts on: read-only where they are, held where they are not."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import control
from agent_sandbox.policy.explain import look_up
from agent_sandbox.policy.model import DIR, FILE, RO, RW, SOCKET, Named

from .facts import CWD, plan_of, rules, steps

MISSING = (
    Named(path=f"{CWD}/.envrc", kind=FILE, missing=True),
    Named(path=f"{CWD}/.mcp.json", kind=FILE, missing=True),
    Named(path=f"{CWD}/.vscode", kind=DIR, missing=True),
)


def test_every_name_of_the_list_is_protected() -> None:
    """The names that peers protect, and our own policy files."""
    wanted = {
        ".envrc", ".mcp.json", ".vscode", ".idea", ".devcontainer", ".claude", ".codex", ".agents",
        ".opencode", "opencode.json", ".cursor", ".husky", ".githooks", ".agent-sandbox.toml",
        ".agent-sandbox.json", ".agent-sandbox.jsonc",
    }  # fmt: skip
    assert wanted <= {name for name, _ in control.names(())}


def test_in_a_directory_that_the_agent_writes_only_some_names_are_protected() -> None:
    """`.claude/plans` stays writable, `.claude/settings.json` does not."""
    found = dict(control.names((".claude",)))
    assert ".claude" not in found
    assert found[".claude/settings.json"] == FILE
    assert found[".claude/hooks"] == DIR


def test_missing_names_are_held() -> None:
    """What stands on the host shows in no `git status`; inside it is an empty document."""
    plan = plan_of(control=MISSING)
    held = {m.dest: m for m in plan.mounts if m.kind == "hold"}
    assert set(held) == {n.path for n in MISSING}
    assert {look_up(plan, path).level for path in held} == {RO}
    sources = [held[n.path].source for n in MISSING]
    assert sources == [control.EMPTY.source, control.SHOWN[".mcp.json"].source, ""]
    assert {p.path: p.node for p in plan.placeholders} == {
        f"{CWD}/.envrc": SOCKET, f"{CWD}/.mcp.json": SOCKET, f"{CWD}/.vscode": DIR,
    }  # fmt: skip
    texts = {m.dest: m.source for m in plan.mounts if m.kind == "text"}
    assert texts["/run/agent-sandbox/mcp.json"] == '{"mcpServers": {}}'
    assert texts["/run/agent-sandbox/neutral"] == ""


def test_names_that_are_there_are_read_only() -> None:
    """And nothing is put on the host for them."""
    there = (Named(path=f"{CWD}/.vscode", kind=DIR, missing=False),)
    plan = plan_of({f"{CWD}/.vscode": DIR}, control=there)
    assert f"ro {CWD}/.vscode" in steps(plan, CWD)
    assert plan.placeholders == ()


@pytest.mark.parametrize("where", ["user", "flags"])
def test_a_name_that_the_user_opens_is_not_held(where: str) -> None:
    """Also when it does not exist yet, and without a notice about that."""
    plan = plan_of(control=MISSING, **{where: rules(rw=[".vscode"])})  # type: ignore[arg-type]
    assert look_up(plan, f"{CWD}/.vscode/tasks.json").level == RW
    assert not [n for n in plan.notices if ".vscode" in n]
    assert look_up(plan, f"{CWD}/.envrc").level == RO


def test_nothing_is_held_where_nothing_can_be_written() -> None:
    """A project that is shown read-only needs no placeholder."""
    plan = plan_of({f"{CWD}/x": FILE}, control=MISSING, flags=rules(ro=["."]))
    assert plan.placeholders == ()


def test_held_parts_pin_their_directory() -> None:
    """`mv .claude x; mkdir .claude` must not free the name."""
    named = (Named(path=f"{CWD}/.claude/settings.json", kind=FILE, missing=True),)
    assert f"pin {CWD}/.claude" in steps(plan_of(control=named), CWD)


def test_a_profile_s_missing_file_is_held_by_a_plain_one() -> None:
    """The agent outside reads it meanwhile: it must find an empty document, not a socket."""
    state = "/home/u/.claude"
    named = (Named(path=f"{state}/settings.json", kind=FILE, missing=True, tracked=False),)
    plan = plan_of({state: DIR}, control=named, flags=rules(rw=["~/.claude"]))
    (held,) = plan.placeholders
    assert (held.node, held.text) == (FILE, "{}\n")
    assert look_up(plan, f"{state}/settings.json").level == RO


@pytest.mark.parametrize(
    ("path", "kind"), [("~/.claude/settings.json", FILE), ("~/.claude/hooks", DIR), ("A.md", FILE)]
)
def test_the_kind_of_a_missing_path_is_told_by_its_name(path: str, kind: str) -> None:
    """Profiles list files and directories alike."""
    assert control.kind_by_name(path) == kind
