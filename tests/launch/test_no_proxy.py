"""A network that nobody would control is refused before anything is made."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from agent_sandbox import Policy
from agent_sandbox.errors import HostError, SandboxError, UsageError
from agent_sandbox.launch import egress
from agent_sandbox.policy.resolve import resolve
from agent_sandbox.sandbox import prepare
from agent_sandbox.sandbox.library import policy_values
from policy.facts import facts, policy_of

if TYPE_CHECKING:
    from pathlib import Path


def prepared(state: Path, flags: dict[str, object]) -> prepare.Prepared:
    """A plan on paper, whose state directory does not exist yet."""
    policy = policy_of(flags=flags)
    machine = facts(policy).replace(state_dir=str(state), uid=os.getuid())
    return prepare.Prepared(policy=policy, facts=machine, plan=resolve(policy, machine), layers=())


@pytest.mark.parametrize(
    "flags",
    [
        {"network": "allow"}, {"network": "public"}, {"network": "learn"}, {"allow": ["a.example"]},
        {"network": "off", "publish": ["8080"]},
    ],
)  # fmt: skip
def test_cannot_start_without_the_proxy(
    flags: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with the host's network nor with a plan that nobody holds (invariant 1)."""
    monkeypatch.setattr(egress, "PROGRAM", str(tmp_path / "missing"))
    made = prepared(tmp_path / "state", flags)
    assert made.plan.network is False
    with pytest.raises(HostError) as caught:
        prepare.build(made, ["true"])
    assert caught.value.code == "no-proxy"
    assert not (tmp_path / "state").exists()


def test_other_modes_do_not_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: they get as far as the tools."""

    def no_tools(_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(egress, "PROGRAM", str(tmp_path / "missing"))
    monkeypatch.setattr(prepare, "find_tools", no_tools)
    for mode in ("on", "off"):
        with pytest.raises(InterruptedError):
            prepare.build(prepared(tmp_path / mode, {"network": mode}), ["true"])


def test_the_library_takes_hosts_and_ports() -> None:
    """As lists, by the names of the flags."""
    values = policy_values(
        Policy(network="public", allow=["a.example:81"], deny=("localhost",), publish=["8080"])
    )
    assert {key: setting.value for key, setting in values.items()} == {
        "network": "public", "allow": ("a.example:81",), "deny": ("localhost",),
        "publish": ("8080",),
    }  # fmt: skip
    assert str(values["allow"].source) == "Policy.allow"


@pytest.mark.parametrize("field", ["allow", "deny", "publish"])
def test_the_library_takes_no_string_for_a_list(field: str) -> None:
    """Its letters would be hosts."""
    with pytest.raises(UsageError, match=f"Policy.{field}"):
        policy_values(Policy(**{field: "8080"}))  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["allow", "deny", "publish"])
def test_the_library_names_a_mistake(field: str) -> None:
    """Before any sandbox is made."""
    with pytest.raises(SandboxError, match=f"Policy.{field}"):
        policy_values(Policy(**{field: ["https://a.example"]}))  # type: ignore[arg-type]
