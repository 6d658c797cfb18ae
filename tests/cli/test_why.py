"""`sandboxctl why HOST` answers as the proxy would, and asks nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agent_sandbox.cli import why
from agent_sandbox.errors import SandboxError
from agent_sandbox.policy.network import decide
from agent_sandbox.policy.resolve import resolve
from agent_sandbox.sandbox.prepare import Prepared
from conftest import ROOT
from policy.facts import facts, policy_of

if TYPE_CHECKING:
    from pathlib import Path


def answer(target: str, **flags: object) -> why.Answer:
    """The answer under some flags, on a machine on paper."""
    policy = policy_of(flags=flags)
    machine = facts(policy)
    prepared = Prepared(policy=policy, facts=machine, plan=resolve(policy, machine), layers=())
    return why.answer_for(prepared, target)


ANSWERS = [
    ("example.com:443", ["example.com"], "allowed", "example.com (flags: allow)"),
    ("example.com", ["example.com"], "allowed", "example.com (flags: allow)"),
    ("EXAMPLE.com.:443", ["example.com"], "allowed", "example.com (flags: allow)"),
    ("example.com:8443", ["example.com"], "refused", "network = allow (flags: allow)"),
    ("other.example:443", ["example.com"], "refused", "network = allow (flags: allow)"),
    ("x.example.com:443", ["*.example.com"], "allowed", "*.example.com (flags: allow)"),
    ("10.0.0.1:443", ["10.0.0.0/8"], "allowed", "10.0.0.0/8 (flags: allow)"),
    ("10.0.0.1:443", ["*"], "refused", "network = allow (flags: allow)"),
    ("169.254.169.254:80", ["169.254.0.0/16"], "refused", "network = allow (flags: allow)"),
    ("[fd00::7]:443", ["fd00::/8"], "allowed", "fd00::/8 (flags: allow)"),
    ("::ffff:10.0.0.1", ["10.0.0.1"], "allowed", "10.0.0.1 (flags: allow)"),
    ("localhost:5432", ["localhost:5432"], "allowed", "localhost:5432 (flags: allow)"),
    ("localhost", ["localhost:5432"], "refused", "network = allow (flags: allow)"),
]


@pytest.mark.parametrize(("target", "allow", "verdict", "rule"), ANSWERS)
def test_the_answer_names_verdict_rule_and_source(
    target: str, allow: list[str], verdict: str, rule: str
) -> None:
    """From the same decision as the proxy's."""
    found = answer(target, allow=allow)
    assert (found.kind, found.verdict, found.rule) == ("host", verdict, rule)
    assert found.detail.startswith("reachable: " if verdict == "allowed" else "not reachable: ")


def test_a_denied_host_names_its_rule() -> None:
    """Whatever allows it."""
    found = answer("a.example.com:443", network="public", deny=["*.example.com"])
    assert (found.verdict, found.rule) == ("refused", "*.example.com (flags: deny)")


@pytest.mark.parametrize(
    ("target", "mode", "verdict"),
    [
        ("example.com", "public", "allowed"), ("example.com:12345", "learn", "allowed"),
        ("127.0.0.1:80", "public", "refused"), ("localhost:80", "learn", "refused"),
        ("168.63.129.16:80", "public", "refused"), ("8.8.8.8", "public", "allowed"),
        ("example.com", "on", "allowed"), ("example.com", "off", "refused"),
    ],
)  # fmt: skip
def test_the_mode_answers_where_no_rule_does(target: str, mode: str, verdict: str) -> None:
    """And is named as the rule."""
    found = answer(target, network=mode)
    assert (found.verdict, found.rule) == (verdict, f"network = {mode} (flags: network)")


def test_a_name_comes_with_the_condition_on_its_address() -> None:
    """Which only a lookup could tell."""
    assert "address is not public" in answer("example.com", network="public").detail
    assert "address is not public" not in answer("8.8.8.8", network="public").detail


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("https://example.com/x", "example.com"), ("*.example.com", "why example.com:443"),
        ("*", "why example.com:443"), ("example.com:*", "why example.com:443"), ("127.1", "write"),
        ("example.com:0", "1 to 65535"), ("a b", "of its own"),
    ],
)  # fmt: skip
def test_what_is_no_single_host_is_an_error(target: str, hint: str) -> None:
    """With a hint."""
    with pytest.raises(SandboxError) as caught:
        answer(target, network="public")
    assert hint in caught.value.hint


def test_abstract_sockets_are_out_of_reach_without_the_hosts_network() -> None:
    """In each mode that does not share it."""
    for mode in ("off", "allow", "public", "learn"):
        found = answer("@x", network=mode)
        assert (found.verdict, found.rule) == ("refused", f"network = {mode} (flags: network)")


WATCHED = """
import sys
seen = []
sys.addaudithook(lambda event, _: seen.append(event) if event.startswith("socket.") else None)
if sys.argv[1] == "control":
    import socket
    socket.getaddrinfo("127.0.0.1", 1)
else:
    from agent_sandbox.cli import ctl
    assert ctl.main(sys.argv[1:]) == 0
sys.stderr.write("\\n".join(seen))
"""


def watched(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run sandboxctl and tell every use of a socket."""
    home = tmp_path / "home"
    project = home / "project"
    project.mkdir(parents=True, exist_ok=True)
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *words], cwd=project, check=False, capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT / "src"), "HOME": str(home), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip


def test_nothing_is_looked_up(tmp_path: Path) -> None:
    """The question alone could carry a secret away (invariant 10)."""
    assert "socket.getaddrinfo" in watched(tmp_path, "control").stderr
    done = watched(tmp_path, "why", "--allow", "example.com", "--json", "example.com:443")
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert (told["verdict"], told["target"]) == ("allowed", "example.com:443")
    assert told["rule"] == "example.com (flag --allow)"


def test_the_answer_is_the_decision() -> None:
    """For many hosts, rules and ports."""
    rules = ["a.example", "*.b.example:81", "*:444", "localhost:80"]
    policy = policy_of(flags={"allow": rules, "deny": ["x.b.example"]})
    egress = resolve(policy, facts(policy)).egress
    assert egress is not None
    for host in ("a.example", "b.example", "x.b.example", "y.b.example", "localhost", "c"):
        for port in (80, 81, 443, 444):
            found = answer(f"{host}:{port}", allow=rules, deny=["x.b.example"])
            assert (found.verdict == "allowed") is decide(egress, host, port).allowed
