"""Which variables reach the command."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import environment, profiles
from agent_sandbox.policy.decode import OURS
from agent_sandbox.policy.gitconfig import has_userinfo
from agent_sandbox.policy.profiles.builtin import PROFILES

from .facts import CWD, HOME, facts, policy_of


def built(
    env: dict[str, str],
    *,
    command: str = "sh",
    flags: dict[str, object] | None = None,
) -> tuple[dict[str, str], dict[str, str]]:
    """The environment of a command and its sources."""
    policy = policy_of(flags=flags, command=command)
    profile = profiles.find(str(policy.profile.value), "test")
    return environment.build(policy, facts(policy, env=env), profile)


SECRET = [
    "GITHUB_TOKEN", "GH_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "SSH_AUTH_SOCK",
    "GPG_AGENT_INFO", "DBUS_SESSION_BUS_ADDRESS", "ANTHROPIC_API_KEY", "OPENAI_API_KEY",
    "DOCKER_HOST", "KUBECONFIG", "NPM_TOKEN", "DATABASE_URL", "DISPLAY", "WAYLAND_DISPLAY",
    "XAUTHORITY", "VAULT_TOKEN", "SUDO_ASKPASS", "GIT_ASKPASS", "SSH_ASKPASS", "LD_PRELOAD",
    "BASH_ENV", "ENV", "PYTHONSTARTUP", "GIT_SSH_COMMAND", "GIT_CONFIG_COUNT", "TMUX",
    "VSCODE_IPC_HOOK_CLI", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "OLDPWD", "AGENT_SANDBOX",
]  # fmt: skip


@pytest.mark.parametrize("name", SECRET)
def test_cannot_receive_a_variable_that_nobody_listed(name: str) -> None:
    """Tokens, keys, agent sockets and what makes programs load code stay outside (invariant 7)."""
    env, _ = built({name: "x"})
    assert name not in env


@pytest.mark.parametrize(
    "name", ["PATH", "LANG", "LC_ALL", "LC_TIME", "TERM", "COLORTERM", "VIRTUAL_ENV", "JAVA_HOME"]
)
def test_can_receive_what_the_built_in_list_names(name: str) -> None:
    """Locale, terminal, paths and tool settings pass, and say why."""
    env, why = built({name: "/value"})
    assert env[name] == "/value"
    assert why[name] == "built-in list"


@pytest.mark.parametrize("name", sorted(environment.PROXIES))
def test_proxies_pass_exactly_with_the_network(name: str) -> None:
    """Without it they would only point nowhere."""
    assert built({name: "http://proxy:1"})[0].get(name) == "http://proxy:1"
    assert name not in built({name: "http://proxy:1"}, flags={"network": "off"})[0]


@pytest.mark.parametrize(
    "value",
    [
        "http://user:secret@proxy:3128",
        "socks5://u:p@h/",
        "https://ghp_token@proxy/",
        "http://plain/ http://u:secret@second/",
        "user:secret@proxy:3128",
    ],
    ids=["user-password", "socks", "token-only", "second-url", "no-scheme"],
)
def test_cannot_receive_userinfo_in_a_listed_value(value: str) -> None:
    """A listed name does not carry a credential along."""
    env, _ = built({"HTTPS_PROXY": value})
    assert "HTTPS_PROXY" not in env


@pytest.mark.parametrize(
    "value",
    [
        "http://proxy:3128",
        "http://proxy:3128/path@x",
        "/usr/bin:/home/u/a@b/bin",
        "https://h/p?to=a@b.c",
        "me@host",
        "",
    ],
)
def test_can_receive_addresses_without_userinfo(value: str) -> None:
    """An at-sign elsewhere is no credential."""
    assert not has_userinfo(value)


def test_a_named_variable_passes_whatever_it_holds() -> None:
    """The user said so."""
    env, why = built(
        {"HTTPS_PROXY": "http://u:p@h", "GH_TOKEN": "t"},
        flags={"env": {"keep": ["HTTPS_PROXY", "GH_TOKEN", "MISSING"]}},
    )
    assert env["HTTPS_PROXY"] == "http://u:p@h"
    assert env["GH_TOKEN"] == "t"
    assert "MISSING" not in env
    assert why["GH_TOKEN"] == "flags: env.keep"


def test_set_values_win_over_passed_ones() -> None:
    """And name their source."""
    env, why = built({"LANG": "C"}, flags={"env": {"set": {"LANG": "de", "NEW": ""}}})
    assert (env["LANG"], env["NEW"]) == ("de", "")
    assert why["LANG"] == "flags: env.set"


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_a_profile_s_variables_pass_only_with_it(profile: profiles.Profile) -> None:
    """An agent gets its own key and no other's."""
    caller = {name: "v" for p in PROFILES for name in p.env}
    env, why = built(caller, command=profile.commands[0])
    assert {n for n in caller if n in env} == set(profile.env)
    assert {why[n] for n in profile.env} <= {f"profile {profile.name}"}


@pytest.mark.parametrize("name", OURS)
def test_cannot_override_what_the_sandbox_sets(name: str) -> None:
    """The caller's value is not taken, and a policy that names one is refused, not ignored."""
    env, why = built({name: "caller"})
    assert env[name] != "caller"
    assert why[name] == "set by agent-sandbox"
    for table in ({"keep": [name]}, {"set": {name: "theirs"}}):
        with pytest.raises(PolicyError) as caught:
            built({}, flags={"env": table})
        assert name in caught.value.message


def test_the_sandbox_s_own_variables_are_complete() -> None:
    """As the design promises them."""
    env, _ = built({})
    assert env == {
        "IN_AGENT_SANDBOX": "1", "AGENT_SANDBOX_PATH": "",
        "AGENT_WORK_DIR": "/tmp/agent-work", "TMPDIR": "/tmp",
        "HOME": HOME, "PWD": CWD, "XDG_RUNTIME_DIR": "/run/user/1000",
    }  # fmt: skip
    assert set(env) == set(OURS)


def test_every_variable_has_a_source() -> None:
    """For --debug."""
    env, why = built({"LANG": "C", "HTTP_PROXY": "http://p"}, flags={"env": {"set": {"A": "1"}}})
    assert set(env) == set(why)
