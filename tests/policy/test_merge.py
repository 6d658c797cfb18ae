"""Layers become one policy."""

from __future__ import annotations

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import merge, presets, settings
from agent_sandbox.policy.model import (
    BUILT_IN,
    EXCLUDE,
    FLAGS,
    GLOBAL,
    MANDATORY,
    PROJECT,
    RO,
    RW,
    Policy,
    Rule,
)
from agent_sandbox.policy.toolchains import VARIABLES

from .facts import CWD, HOME, layer, layers, policy_of, rules


def own_rules(policy: Policy) -> list[Rule]:
    """Rules that layers wrote, without those of presets and profiles."""
    return [r for r in policy.rules if r.source.layer in (GLOBAL, PROJECT, FLAGS)]


def active(policy: Policy) -> set[str]:
    """Names of the presets that are on."""
    return {str(p.value) for p in policy.presets}


def test_without_layers_every_value_is_the_default() -> None:
    """The defaults are the settings table's, and say so."""
    policy = policy_of()
    assert policy.network.value == "on"
    assert policy.docker.value == "off"
    assert policy.home.value == "private"
    assert policy.profile.value == "none"
    assert {str(policy.network.source), str(policy.docker.source)} == {"built-in default"}
    held = {key for key, setting in policy.limits.items() if setting.value is not None}
    assert held == {"limits.pids", "limits.tmp-size"}
    assert set(policy.limits) == {k for k in settings.BY_KEY if k.startswith("limits.")}
    assert policy.env_keep == ()
    assert policy.env_set == {}
    assert own_rules(policy) == []


@pytest.mark.parametrize(
    ("user", "project", "flags", "expected", "where"),
    [
        ({"network": "off"}, None, None, "off", "global.toml: network"),
        ({"network": "off"}, {"network": "on"}, None, "on", "project.toml: network"),
        ({"network": "off"}, {"network": "off"}, {"network": "on"}, "on", "flags: network"),
        (None, {"network": "off"}, {}, "off", "project.toml: network"),
        ({"network": "off"}, {}, {}, "off", "global.toml: network"),
        ({}, {}, {}, "on", "built-in default"),
    ],
)
def test_the_later_layer_wins_and_is_named(
    user: dict[str, object] | None,
    project: dict[str, object] | None,
    flags: dict[str, object] | None,
    expected: str,
    where: str,
) -> None:
    """A layer that says nothing changes nothing."""
    policy = policy_of(user=user, project=project, flags=flags)
    assert policy.network.value == expected
    assert str(policy.network.source) == where


def test_limits_merge_one_by_one() -> None:
    """Each limit has its own layer."""
    policy = policy_of(
        user={"limits": {"memory": "4G", "pids": 9}}, flags={"limits": {"memory": "1G"}}
    )
    assert policy.limits["limits.memory"].value == 1 << 30
    assert policy.limits["limits.pids"].value == 9
    assert policy.limits["limits.timeout"].value is None


def test_path_lists_concatenate_in_the_order_of_layers() -> None:
    """No layer takes another's rules away; each rule keeps its layer and what was written."""
    policy = policy_of(
        user=rules(ro=["a"], rw=["b"]), project=rules(exclude=["c"]), flags=rules(ro=["~/d", "/e"])
    )
    assert [(r.level, r.pattern, r.source.layer, r.written) for r in own_rules(policy)] == [
        (RW, f"{CWD}/b", GLOBAL, "b"),
        (RO, f"{CWD}/a", GLOBAL, "a"),
        (EXCLUDE, f"{CWD}/c", PROJECT, "c"),
        (RO, f"{HOME}/d", FLAGS, "~/d"),
        (RO, "/e", FLAGS, "/e"),
    ]
    assert not any(r.quiet for r in own_rules(policy))


def test_rules_know_whether_they_are_globs() -> None:
    """A glob is expanded, a path is looked up."""
    policy = policy_of(flags=rules(ro=["x", "*.x", "a/[12]/b", "q?"]))
    assert [r.glob for r in own_rules(policy)] == [False, True, True, True]


@pytest.mark.parametrize(
    "base", ["/home/u/app/[id]", "/home/u/what?", "/home/u/a*b", "/home/u/a[b"]
)
def test_wildcards_in_the_project_s_own_path_are_literal(base: str) -> None:
    """Only what the user wrote is a pattern: else an exclude in `app/[id]` would hide nothing."""
    policy = policy_of(flags=rules(exclude=["secret.txt"]), base=base)
    (rule,) = own_rules(policy)
    assert rule.glob is False
    assert rule.pattern == f"{base}/secret.txt"


def test_a_glob_below_a_directory_with_wildcards_starts_in_that_directory() -> None:
    """The directory's own brackets match themselves."""
    from agent_sandbox.policy import paths

    policy = policy_of(flags=rules(exclude=["*.pem"]), base="/home/u/[id]")
    (rule,) = own_rules(policy)
    base, rest = paths.split_glob(rule.pattern)
    matchers = [paths.compile_component(part, "test") for part in rest]
    names = "/home/u/[id]/key.pem".removeprefix(base).strip("/").split("/")
    assert all(m(n) for m, n in zip(matchers, names, strict=True))


def test_a_bad_glob_names_its_file_and_key() -> None:
    """Before anything is started."""
    with pytest.raises(PolicyError) as caught:
        policy_of(project=rules(exclude=["[invalid"]))
    assert caught.value.code == "bad-glob"
    assert "project.toml: filesystem.exclude" in caught.value.message


@pytest.mark.parametrize(
    ("user", "flags", "on", "off"),
    [
        (None, None, {"@base", "@git", "@lint/ts", "@lint/go", "@lint/python"}, {"@host"}),
        (None, [], {"@base"}, {"@host", "@git-strict"}),
        (["!@lint/python"], None, {"@base", "@lint/ts"}, {"@lint/python"}),
        (["!@lint/all", "@lint/python"], None, {"@lint/python"}, {"@lint/ts", "@lint/go"}),
        (["@lint/python", "!@lint/all"], None, {"@base"}, {"@lint/python"}),
        (["!@git"], ["@git"], {"@git"}, set()),
        (["@git"], ["!@git"], set(), {"@git"}),
        (["!@all"], None, set(), {"@base", "@git", "@toolchains", "@lint/ts"}),
        (["!@all", "@base"], None, {"@base"}, {"@git", "@caches"}),
        (["@base", "!@all"], None, set(), {"@base"}),
        (["!@all"], ["@all"], {"@base", "@git"}, {"@host"}),
        (["@host"], None, {"@host", "@base"}, set()),
        (["@git-strict"], None, {"@git-strict", "@git"}, set()),
        (["!@git", "@git-strict"], None, {"@git-strict", "@git"}, set()),
    ],
)
def test_presets_are_switched_left_to_right_over_all_layers(
    user: list[str] | None, flags: list[str] | None, on: set[str], off: set[str]
) -> None:
    """The last mention wins; without a mention of @all it comes first."""

    def table(names: list[str] | None) -> dict[str, object] | None:
        return None if names is None else {"filesystem": {"presets": names}}

    names = active(policy_of(user=table(user), flags=table(flags)))
    assert on <= names
    assert not off & names


def test_a_preset_names_the_layer_that_switched_it_last() -> None:
    """Provenance for --debug."""
    policy = policy_of(
        user={"filesystem": {"presets": ["!@git"]}}, flags={"filesystem": {"presets": ["@git"]}}
    )
    sources = {str(p.value): str(p.source) for p in policy.presets}
    assert sources["@git"] == "flags: filesystem.presets"
    assert sources["@base"] == "built-in default"


@pytest.mark.parametrize(
    ("command", "profile"),
    [
        ("claude", "claude"),
        ("/opt/bin/claude", "claude"),
        ("./codex", "codex"),
        ("claude-foo", "none"),
        ("bash", "none"),
        ("", "none"),
        ("opencode", "opencode"),
    ],
)
def test_the_profile_follows_the_command_s_name(command: str, profile: str) -> None:
    """A path's last part decides."""
    policy = policy_of(command=command)
    assert policy.profile.value == profile
    assert str(policy.profile.source) == "the command's name"


def test_a_named_profile_beats_the_command_s_name() -> None:
    """Also `none`."""
    assert policy_of(command="claude", flags={"profile": "codex"}).profile.value == "codex"
    assert policy_of(command="claude", flags={"profile": "none"}).profile.value == "none"


def test_an_unknown_profile_is_an_error_with_its_source() -> None:
    """The hint lists what there is."""
    with pytest.raises(PolicyError) as caught:
        policy_of(user={"profile": "claud"})
    assert caught.value.code == "unknown-profile"
    assert "global.toml: profile" in caught.value.message
    assert "claude" in caught.value.hint


def test_a_profile_s_state_is_private_and_its_programs_are_read_only() -> None:
    """What the agent outside would execute is shown at most."""
    by_path = {part.path: part.mode for part in policy_of(command="claude").parts}
    assert by_path[f"{HOME}/.claude"] == "private"
    assert by_path[f"{HOME}/.claude/settings.json"] == "ro"
    assert by_path[f"{HOME}/.claude/plugins"] == "ro"


def test_without_agents_a_profile_has_no_state() -> None:
    """`!@agents` keeps the real state out."""
    policy = policy_of(command="claude", flags={"filesystem": {"presets": ["!@agents"]}})
    assert policy.parts == ()
    assert policy_of(command="claude").parts != ()


def test_rules_of_presets_and_profiles_are_quiet() -> None:
    """Nobody is told about a linter that is not there."""
    assert all(r.quiet for r in policy_of(command="claude").rules)


def test_policy_files_in_use_are_protected_above_every_layer() -> None:
    """No rule makes the file writable that made the rules."""
    loaded = layer(PROJECT, {}).replace(file=f"{CWD}/.agent-sandbox.toml")
    flags = layer(FLAGS, rules(rw=[".agent-sandbox.toml"]))
    policy = merge.merge([loaded, flags], project=CWD, home=HOME, command="sh", env={})
    kept = [r for r in policy.rules if r.source.layer == MANDATORY]
    assert [(r.level, r.pattern) for r in kept] == [(RO, f"{CWD}/.agent-sandbox.toml")]
    assert policy.files == (f"{CWD}/.agent-sandbox.toml",)


def test_environment_names_concatenate_and_values_merge_by_name() -> None:
    """Later layers win per variable."""
    policy = policy_of(
        user={"env": {"keep": ["A"], "set": {"X": "1", "Y": "1"}}},
        flags={"env": {"keep": ["B"], "set": {"X": "2"}}},
    )
    assert [str(k.value) for k in policy.env_keep] == ["A", "B"]
    assert {n: s.value for n, s in policy.env_set.items()} == {"X": "2", "Y": "1"}
    assert str(policy.env_set["X"].source) == "flags: env.set"
    assert str(policy.env_set["Y"].source) == "global.toml: env.set"


@pytest.mark.parametrize(("name", "suffix"), VARIABLES, ids=[v[0] for v in VARIABLES])
def test_a_toolchain_that_a_variable_moved_is_shown_read_only(name: str, suffix: str) -> None:
    """Only its programs, never the package home around them."""
    policy = policy_of(env={name: "/data/tool"})
    assert (RO, f"/data/tool{suffix}") in [(r.level, r.pattern) for r in policy.rules]


@pytest.mark.parametrize(
    "value", ["", "relative", HOME, "/home", "/", CWD, f"{CWD}/venv", "/a\nb", "/home/u/p/.."]
)
def test_a_variable_cannot_show_a_home_or_the_project(value: str) -> None:
    """Nor anything that is no absolute path."""
    policy = policy_of(env={"VIRTUAL_ENV": value})
    assert not any("VIRTUAL_ENV" in r.source.where for r in policy.rules)


def test_without_toolchains_variables_show_nothing() -> None:
    """`!@toolchains` is whole."""
    policy = policy_of(
        env={"JAVA_HOME": "/data/java"}, flags={"filesystem": {"presets": ["!@toolchains"]}}
    )
    assert not any(r.pattern == "/data/java" for r in policy.rules)


WIDER: list[tuple[dict[str, object], dict[str, object], str]] = [
    ({"network": "on"}, {"network": "off"}, "network"),
    ({"network": "allow"}, {"network": "off"}, "network"),
    ({"network": "public"}, {"network": "allow"}, "network"),
    ({"network": "learn"}, {"network": "allow"}, "network"),
    ({"network": "public"}, {"allow": ["a.example"]}, "network"),
    ({"network": "on"}, {"network": "public"}, "network"),
    ({"network": "on"}, {"network": "learn"}, "network"),
    ({"allow": ["a.example"]}, {"network": "off"}, 'network = "allow"'),
    ({"allow": ["a.example"]}, {"network": "off"}, "allow = ['a.example']"),
    ({"allow": ["a.example"]}, {"network": "allow"}, "allow"),
    ({"allow": ["a.example"]}, {"allow": ["b.example"]}, "allow"),
    # Names no private address opens by itself, but a rule does.
    ({"allow": ["10.0.0.1"]}, {"network": "public"}, "allow"),
    ({"network": "off", "allow": ["10.0.0.1"]}, {"network": "public"}, "allow"),
    ({"deny": ["x.example"], "publish": ["8080"]}, {"network": "off"}, "publish"),
    ({"publish": ["8080"]}, {"network": "public"}, "publish"),
    ({"docker": "on"}, {}, "docker"),
    ({"docker": "filtered"}, {}, "docker"),
    ({"docker": "on"}, {"docker": "filtered"}, "docker"),
    ({"docker": {"images": ["*"]}}, {"docker": "filtered"}, "docker.images"),
    ({"docker": {"registries": ["*"]}}, {"docker": "filtered"}, "docker.registries"),
    ({"docker": {"keep": True}}, {}, "docker.keep"),
    ({"docker": {"mode": "warn"}}, {}, "docker.mode"),
    ({"docker": {"read-only": False}}, {"docker": {"read-only": True}}, "docker.read-only"),
    ({"docker": {"containers": 99}}, {}, "docker.containers"),
    ({"docker": {"memory": "99G"}}, {}, "docker.memory"),
    ({"docker": {"cpus": 99}}, {}, "docker.cpus"),
    ({"docker": {"pids": 9999}}, {}, "docker.pids"),
    ({"git": {"auth": "ssh-agent"}}, {}, "git.auth"),
    ({"git": {"auth": "ssh-agent"}}, {"git": {"auth": "helper"}}, "git.auth"),
    ({"home": "host"}, {}, "home"),
    ({"home": "private"}, {"home": "ephemeral"}, "home"),
    ({"seccomp": "off"}, {}, "seccomp"),
    ({"seccomp": "default"}, {"seccomp": "strict"}, "seccomp"),
    ({"profile": "claude"}, {}, "profile"),
    ({"env": {"keep": ["GITHUB_TOKEN"]}}, {}, "env.keep"),
    ({"env": {"set": {"ANTHROPIC_BASE_URL": "https://evil.example"}}}, {}, "env.set"),
    ({"env": {"set": {"PATH": "/home/u/p/bin"}}}, {}, "env.set"),
    ({"limits": {"memory": "8G"}}, {"limits": {"memory": "4G"}}, "limits.memory"),
    ({"limits": {"pids": 9}}, {"limits": {"pids": 8}}, "limits.pids"),
    ({"limits": {"pids": "none"}}, {}, "limits.pids"),
    ({"limits": {"tmp-size": "9G"}}, {}, "limits.tmp-size"),
    ({"limits": {"tmp-size": "none"}}, {"limits": {"tmp-size": "1T"}}, "limits.tmp-size"),
    ({"limits": {"timeout": "2h"}}, {"limits": {"timeout": "1h"}}, "limits.timeout"),
    ({"limits": {"cpu-time": "2h"}}, {"limits": {"cpu-time": "1h"}}, "limits.cpu-time"),
    ({"filesystem": {"presets": ["@host"]}}, {}, "preset @host"),
    ({"filesystem": {"presets": ["!@git"]}}, {}, "preset !@git"),
    ({"filesystem": {"presets": ["!@lint/all"]}}, {}, "preset !@lint/go"),
    ({"filesystem": {"presets": ["!@all"]}}, {}, "preset !@git"),
    (
        {"filesystem": {"presets": ["!@git-strict"]}},
        {"filesystem": {"presets": ["@git-strict"]}},
        "preset !@git-strict",
    ),
    (
        {"filesystem": {"presets": ["@toolchains"]}},
        {"filesystem": {"presets": ["!@toolchains"]}},
        "preset @toolchains",
    ),
    (
        {"filesystem": {"presets": ["@all"]}},
        {"filesystem": {"presets": ["!@agents"]}},
        "preset @agents",
    ),
]


@pytest.mark.parametrize(
    ("project", "user", "asked"), WIDER, ids=[f"{w[2]}-{i}" for i, w in enumerate(WIDER)]
)
def test_cannot_widen_from_a_project_file_unseen(
    project: dict[str, object], user: dict[str, object], asked: str
) -> None:
    """Whatever grants more than the layers below is listed and needs trust (invariant 4)."""
    found = merge.widenings(layer(PROJECT, project), layers(user=user))
    assert any(asked in item for item in found), found


TIGHTER: list[tuple[dict[str, object], dict[str, object]]] = [
    ({"network": "off"}, {}),
    ({"network": "on"}, {}),
    ({"network": "allow"}, {}),
    ({"network": "public"}, {}),
    ({"network": "learn"}, {}),
    ({"network": "public"}, {"network": "learn"}),
    ({"network": "learn"}, {"network": "public"}),
    ({"network": "allow"}, {"network": "public"}),
    ({"network": "allow"}, {"network": "allow", "allow": ["a.example"]}),
    # Below is everything; a list takes away.
    ({"network": "allow", "allow": ["a.example", "localhost:80"]}, {}),
    ({"allow": ["a.example"], "publish": ["8080"]}, {"network": "on"}),
    ({"deny": ["a.example"]}, {}),
    ({"deny": ["a.example"]}, {"network": "allow"}),
    ({"allow": [], "publish": []}, {"network": "allow"}),
    ({"docker": "off"}, {"docker": "on"}),
    ({"home": "ephemeral"}, {}),
    ({"seccomp": "strict"}, {}),
    ({"seccomp": "default"}, {"seccomp": "off"}),
    ({"home": "private"}, {"home": "host"}),
    ({"limits": {"memory": "8G"}}, {}),
    ({"limits": {"memory": "1G", "pids": 8}}, {"limits": {"memory": "4G", "pids": 8}}),
    ({"filesystem": {"presets": ["!@toolchains", "!@caches", "!@agents"]}}, {}),
    ({"filesystem": {"presets": ["@git-strict"]}}, {}),
    ({"filesystem": {"presets": ["@all"]}}, {}),
    ({"filesystem": {"presets": ["@lint/go"]}}, {"filesystem": {"presets": ["!@lint/all"]}}),
    ({"filesystem": {"exclude": ["x"], "ro": ["y"]}}, {}),
    ({}, {}),
]


@pytest.mark.parametrize(("project", "user"), TIGHTER)
def test_can_tighten_from_a_project_file(
    project: dict[str, object], user: dict[str, object]
) -> None:
    """What only takes away needs no trust; path rules are judged with the file system."""
    assert merge.widenings(layer(PROJECT, project), layers(user=user)) == []


@pytest.mark.parametrize(
    ("flags", "wider"),
    [
        ({}, False), ({"network": "on"}, False), ({"network": "off"}, True),
        ({"allow": ["b.example"]}, True), ({"network": "allow"}, True),
        ({"network": "public"}, True), ({"deny": ["b.example"]}, False),
    ],
)  # fmt: skip
def test_cannot_add_to_the_list_of_a_flag(flags: dict[str, object], wider: bool) -> None:
    """Who restricts the network by a flag means that list, and not the project's besides."""
    mine = layer(PROJECT, {"network": "allow", "allow": ["a.example"]})
    assert bool(merge.widenings(mine, [], layers(flags=flags))) is wider


@pytest.mark.parametrize(
    ("user", "project", "flags", "mode", "where"),
    [
        ({"allow": ["a"]}, None, None, "allow", "global.toml: allow"),
        ({"allow": []}, None, None, "allow", "global.toml: allow"),
        ({"network": "public", "allow": ["a"]}, None, None, "public", "global.toml: network"),
        ({"network": "public"}, {"allow": ["a"]}, None, "allow", "project.toml: allow"),
        ({"network": "public"}, None, {"allow": ["a"]}, "allow", "flags: allow"),
        ({"network": "off"}, None, {"allow": ["a"]}, "allow", "flags: allow"),
        ({"allow": ["a"]}, {"network": "off"}, None, "off", "project.toml: network"),
        ({"allow": ["a"]}, None, {"network": "on"}, "on", "flags: network"),
        ({"allow": ["a"]}, None, {"network": "learn", "allow": ["b"]}, "learn", "flags: network"),
        ({"deny": ["a"]}, None, {"publish": ["80"]}, "on", "built-in default"),
    ],
)
def test_an_allow_list_says_the_mode_unless_a_later_word_does(
    user: dict[str, object] | None, project: dict[str, object] | None,
    flags: dict[str, object] | None, mode: str, where: str,
) -> None:  # fmt: skip
    """At the same layer or a later one."""
    policy = policy_of(user=user, project=project, flags=flags)
    assert (policy.network.value, str(policy.network.source)) == (mode, where)


def test_lists_of_hosts_of_all_layers_add_up() -> None:
    """Each entry knows where it stands."""
    policy = policy_of(
        user={"allow": ["a"], "deny": ["x"]}, project={"allow": ["b"], "publish": ["80"]},
        flags={"allow": ["c"], "deny": ["y"]},
    )  # fmt: skip
    assert [(s.value, str(s.source)) for s in policy.allow] == [
        ("a", "global.toml: allow"), ("b", "project.toml: allow"), ("c", "flags: allow"),
    ]  # fmt: skip
    assert [s.value for s in policy.deny] == ["x", "y"]
    assert [s.value for s in policy.publish] == ["80"]


def test_every_setting_is_judged_for_widening() -> None:
    """A new key cannot slip past the judgement: it is in the tables above, or a path rule."""

    def keys(data: dict[str, object]) -> set[str]:
        return {
            f"{name}.{inner}" if isinstance(value, dict) else name
            for name, value in data.items()
            for inner in (value if isinstance(value, dict) else [""])
        }

    judged = {key for project, _, _ in WIDER for key in keys(project)}
    by_resolve = {"filesystem.ro", "filesystem.rw", "filesystem.exclude"}
    # No project's file may have them at all; and one more budget never widens.
    by_decode = {*settings.USER_ONLY, "budget"}
    # Judged one by one in test_commands.
    by_name = {"commands"}
    assert judged | by_resolve | by_decode | by_name == set(settings.BY_KEY)


def test_the_refusal_lists_what_was_asked_and_how_to_trust() -> None:
    """A person can decide from it."""
    error = merge.untrusted("/p/.agent-sandbox.toml", ['docker = "on"', "preset @host"])
    assert "/p/.agent-sandbox.toml" in error.message
    assert "preset @host" in error.message
    assert "sandboxctl trust" in error.hint
    assert error.code == "untrusted-config"


def test_preset_rules_are_of_the_built_in_layer() -> None:
    """Every layer of the user wins over a preset at the same path."""
    policy = policy_of()
    lint = [r for r in policy.rules if r.pattern == f"{CWD}/pyproject.toml"]
    assert [(r.level, r.source.layer) for r in lint] == [(RO, BUILT_IN)]
    assert set(presets.LINT_PYTHON) <= {r.pattern.removeprefix(f"{CWD}/") for r in policy.rules}
