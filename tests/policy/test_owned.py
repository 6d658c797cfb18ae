"""The plan of a workspace that a service owns: values in, values out."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import owned
from agent_sandbox.policy.merge import merge
from agent_sandbox.policy.model import (
    EXCLUDE,
    FLAGS,
    OWNED,
    HostFacts,
    Layer,
    Match,
    Plan,
    Setting,
    Source,
)


def made(uid: int = 1001, *, network: str = "off", secrets: tuple[str, ...] = ()) -> Plan:
    source = Source(layer=FLAGS, where="test")
    values = {
        "network": Setting(value=network, source=source),
        "filesystem.presets": Setting(value=("!@all", "@base"), source=source),
    }
    layer = Layer(rank=FLAGS, values=values)
    policy = merge([layer], project=owned.WORK, home=owned.HOME, command="", env={})
    facts = HostFacts(
        uid=uid, gid=uid, user="x", home=owned.home(), env={"SECRET": "x"}, state_dir="/state",
        cwd=Match(path=owned.WORK, real=owned.WORK, kind="dir"),
        system=tuple(Match(path=p, real=p, kind="dir") for p in ("/usr", "/etc", "/opt")),
        path_dirs=(Match(path="/home/me/bin", real="/home/me/bin", kind="dir"),), matches={},
        resolver=None, engine_sockets=(), docker_socket=None, docker_wanted="", git=None,
        git_config=(), root_secrets=tuple(Match(path=p, real=p, kind="file") for p in secrets),
    )  # fmt: skip
    return owned.plan(policy, facts)


def test_only_its_own_parts_are_writable() -> None:
    plan = made()
    writable = {m.dest: m.source for m in plan.mounts if m.kind == "rw"}
    assert writable == {part: OWNED + part for part in ("/workspace", "/home/agent", "/tmp")}
    assert plan.placeholders == ()
    assert plan.awaited == ()
    assert plan.home_points == ()
    assert not plan.network


def test_shows_the_system_and_nothing_of_the_servers_user() -> None:
    plan = made()
    shown = {m.dest for m in plan.mounts if m.kind == "ro"}
    assert shown == {"/usr", "/etc", "/etc/passwd", "/etc/group"}
    assert plan.env == {}
    assert "SECRET" not in owned.variables("off")


@pytest.mark.parametrize(("uid", "sealed"), [(0, True), (1001, False)])
def test_root_outside_gets_roots_seals_whatever_its_number_inside(
    uid: int, *, sealed: bool
) -> None:
    plan = made(uid, secrets=("/etc/shadow",))
    dests = {m.dest for m in plan.mounts if m.kind in ("seal", "ro")}
    assert ("/proc/sys" in dests) == sealed
    assert ("/dev/null" in dests) == sealed
    assert {"/", "/proc"} <= dests
    assert plan.identity == 1000
    assert [m.dest for m in plan.mounts if m.level == EXCLUDE] == ["/etc/shadow", "/proc/1"]


@pytest.mark.parametrize("mode", ["public", "allow"])
def test_a_controlled_network_brings_its_variables(mode: str) -> None:
    assert made(network=mode).egress is not None
    assert "HTTPS_PROXY" in owned.variables(mode)
    assert "HTTPS_PROXY" not in owned.variables("off")
