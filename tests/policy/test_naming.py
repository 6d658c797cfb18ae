"""What the command reads about names where a stub answers."""

from __future__ import annotations

import pytest

from agent_sandbox.policy import environment, naming, profiles
from agent_sandbox.policy.model import FILE, WORK_NET, Link, Match
from agent_sandbox.policy.resolve import resolve

from .facts import facts, policy_of


@pytest.mark.parametrize(
    "text",
    [
        "",
        "passwd: files\nhosts: files mdns4_minimal [NOTFOUND=return] resolve dns\ngroup: files\n",
        "hosts:\tmymachines resolve\n  hosts: more\n",
        "passwd: files",
    ],
)
def test_names_come_from_files_and_dns_alone(text: str) -> None:
    """One line for hosts, whatever there was; other lines stay."""
    lines = naming.switch(text).splitlines()
    assert [line for line in lines if "hosts" in line] == ["hosts: files dns"]
    assert [x for x in text.splitlines() if "hosts" not in x] == [
        x for x in lines if "hosts" not in x
    ]


def test_nothing_of_the_hosts_own_names_is_told() -> None:
    """The stub's address, and loopback with the host's own name."""
    texts = naming.texts("hosts: resolve\n", "machine")
    assert texts[naming.RESOLV_CONF].splitlines()[0] == "nameserver 127.0.0.1"
    assert texts[naming.HOSTS] == "127.0.0.1 localhost machine\n::1 localhost\n"
    assert naming.texts("", "")[naming.HOSTS] == "127.0.0.1 localhost\n::1 localhost\n"
    assert set(texts) == set(naming.FILES)


def test_every_spelling_of_a_proxy_variable_names_the_same_proxy() -> None:
    """Programs read one case or the other, and some stop at a socks URL."""
    for name, value in naming.VARIABLES.items():
        assert naming.VARIABLES.get(name.lower(), value) == value
        if name.lower() in ("http_proxy", "https_proxy", "all_proxy"):
            assert value == "http://127.0.0.1:3128"


@pytest.mark.parametrize("mode", ["allow", "public", "learn"])
def test_the_users_own_proxy_is_replaced(mode: str) -> None:
    """It cannot be reached from there; only a value that is set on purpose wins."""
    names = {"HTTPS_PROXY": "http://corp:1", "no_proxy": "corp", "ftp_proxy": "http://corp:2"}
    policy = policy_of(flags={"network": mode, "env": {"keep": ["HTTPS_PROXY"]}})
    profile = profiles.find("none", "test")
    env, why = environment.build(policy, facts(policy, env=names), profile)
    assert {name: env[name] for name in naming.VARIABLES} == naming.VARIABLES
    assert "ftp_proxy" not in env
    assert why["HTTPS_PROXY"] == f"network = {mode}"
    policy = policy_of(flags={"network": mode, "env": {"set": {"NO_PROXY": "mine"}}})
    env, _ = environment.build(policy, facts(policy, env=names), profile)
    assert (env["NO_PROXY"], env["no_proxy"]) == ("mine", naming.LOCAL)


def test_files_about_names_are_covered_where_they_really_are() -> None:
    """A link out of /etc is followed on the host, and its place is shown with our text."""
    policy = policy_of(flags={"network": "public"})
    stub = "/run/systemd/resolve/stub-resolv.conf"
    link = Link(at=naming.RESOLV_CONF, text=stub)
    found = (
        Match(path=naming.RESOLV_CONF, real=stub, kind=FILE, links=(link,)),
        Match(path=naming.HOSTS, real=naming.HOSTS, kind=FILE),
    )
    plan = resolve(policy, facts(policy).replace(naming=found))
    mounts = {m.dest: (m.kind, m.source) for m in plan.mounts}
    assert mounts[stub] == ("ro", f"{WORK_NET}/resolv.conf")
    assert mounts[naming.HOSTS] == ("ro", f"{WORK_NET}/hosts")
    assert not plan.network
    assert plan.egress is not None
