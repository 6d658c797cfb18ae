"""Profiles as data, placed on a machine, and as claims on paths."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import paths, profiles
from agent_sandbox.policy.explain import look_up
from agent_sandbox.policy.model import DIR, FILE, GLOBAL, PROJECT
from agent_sandbox.policy.profiles import COPY, MERGE, MODES, PRIVATE, RO, RW, Profile
from agent_sandbox.policy.profiles.builtin import PROFILES
from agent_sandbox.policy.profiles.decode import decode
from agent_sandbox.policy.profiles.places import Part, parts
from agent_sandbox.policy.resolve import resolve
from policy.facts import CWD, HOME, facts, find, layer, plan_of, policy_of, rules

EACH = pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)


def placed(profile: Profile, **env: str) -> dict[str, Part]:
    """Parts by their path inside."""
    return {part.path: part for part in parts(profile, env, home=HOME, project=CWD)}


def known(name: str) -> Profile:
    return profiles.find(name, "test")


@EACH
def test_each_profile_is_chosen_by_the_names_of_its_commands(profile: Profile) -> None:
    """The small table, which every start loads, agrees with the large one."""
    assert profile.name in profiles.NAMES
    assert dict.fromkeys(profile.commands, profile.name).items() <= profiles.BY_COMMAND.items()
    assert len(PROFILES) == len(profiles.NAMES)


@EACH
def test_an_agent_s_directories_are_private(profile: Profile) -> None:
    """Whatever no table knows stays inside: only listed parts are the host's."""
    roots = [s.path for s in profile.state if s.mode == PRIVATE]
    assert roots
    for state in profile.state:
        assert state.mode in MODES
        if state.mode in (RW, COPY, MERGE):
            assert any(paths.below(state.path, root) for root in roots), state
        if state.mode in (COPY, MERGE):
            # The process outside opens it right in the directory, never through another.
            assert state.path.rpartition("/")[0] in roots
    assert not any(paths.below(one, other) for one in roots for other in roots)


# What each agent outside runs, sources or loads, or takes its trust from.
ACTED_ON = {
    "claude": "settings.json settings.local.json CLAUDE.md agents commands hooks plugins skills "
    "output-styles rules shell-snapshots session-env .config.json ide local statusline.sh",
    "codex": "config.toml hooks.json prompts rules skills plugins tmp shell_snapshots AGENTS.md",
    "opencode": "opencode.json plugin plugins command agent tool node_modules package.json bin",
    "gemini": "settings.json commands extensions .env policies trustedFolders.json GEMINI.md",
    "qwen": "settings.json commands extensions .env trustedFolders.json QWEN.md",
    "pi": "settings.json models.json extensions skills prompts bin AGENTS.md",
    "copilot": "mcp-config.json agents hooks skills pkg settings.json",
    "aider": "oauth-keys.env",
}


@EACH
def test_cannot_write_what_the_host_acts_on(profile: Profile) -> None:
    """No path of the host at which a sandbox may write holds one of these names."""
    names = ACTED_ON[profile.name].split()
    plan = plan_of({f"{HOME}/.x": FILE}, command=profile.commands[0])
    shared = [m.source for m in plan.mounts if m.kind == "rw" and m.source.startswith("/")]
    for root in [s.path for s in profile.state if s.mode == PRIVATE]:
        for name in names:
            path = f"{HOME}{root[1:]}/{name}"
            assert not any(paths.within(path, one) for one in shared if one != CWD), path
            assert look_up(plan, path).level in ("private", "ro")


@EACH
def test_hosts_are_added_where_only_rules_let_through(profile: Profile) -> None:
    """With allow and learn, and each can be denied."""
    command = profile.commands[0]
    for mode in ("allow", "learn"):
        policy = policy_of(command=command, flags={"network": mode, "allow": ["mine.example"]})
        assert [s.value for s in policy.allow] == ["mine.example", *profile.hosts]
        assert {str(s.source) for s in policy.allow[1:]} == {f"profile {profile.name}"}
    for mode in ("on", "off", "public"):
        assert policy_of(command=command, flags={"network": mode}).allow == ()
    assert policy_of(flags={"network": "allow"}).allow == ()


@EACH
def test_every_profile_says_how_its_own_sandbox_is_off(profile: Profile) -> None:
    """`sandboxctl profile show` prints it."""
    assert any("sandbox" in note for note in profile.notes)


def test_claude_s_file_is_beside_its_directory_unless_a_variable_moves_both() -> None:
    """Claude Code itself does the same."""
    part = placed(known("claude"))[f"{HOME}/.claude/.claude.json"]
    assert part.outside == f"{HOME}/.claude.json"
    moved = placed(known("claude"), CLAUDE_CONFIG_DIR="/data/c")
    assert moved["/data/c/.claude.json"].outside == "/data/c/.claude.json"
    assert moved["/data/c/settings.json"].root == "/data/c"
    assert "/data/c/projects/-home-u-p" in moved


@pytest.mark.parametrize(
    ("project", "name"),
    [
        ("/home/u/my.app_1", "-home-u-my-app-1"),
        ("/home/\u00fc/\U0001f600", "-home-----"),
        ("/" + "x" * 199, "-" + "x" * 199),
        ("/" + "x" * 200, ""),
    ],
)
def test_a_project_has_the_name_that_claude_code_gives_it(project: str, name: str) -> None:
    """A name that would be cut has a hash in it: then transcripts stay inside."""
    found = [
        part.path.rpartition("/")[2]
        for part in parts(known("claude"), {}, home=HOME, project=project)
        if part.mode == RW
    ]
    assert found == ([name] if name else [])


@pytest.mark.parametrize(
    ("name", "variable", "value", "path"),
    [
        ("codex", "CODEX_HOME", "/data/x", "/data/x/auth.json"),
        ("opencode", "XDG_DATA_HOME", "/d", "/d/opencode/auth.json"),
        ("opencode", "XDG_CONFIG_HOME", "/d", "/d/opencode/plugin"),
        ("opencode", "XDG_STATE_HOME", "/d", "/d/opencode"),
        ("opencode", "XDG_CACHE_HOME", "/d", "/d/opencode"),
        ("gemini", "GEMINI_CLI_HOME", "/d", "/d/.gemini/oauth_creds.json"),
        ("qwen", "QWEN_HOME", "/d", "/d/oauth_creds.json"),
        ("pi", "PI_CODING_AGENT_DIR", "/d", "/d/auth.json"),
        ("copilot", "COPILOT_HOME", "/d", "/d/config.json"),
    ],
)
def test_variables_move_the_state(name: str, variable: str, value: str, path: str) -> None:
    """And pass, so that the agent inside looks there."""
    assert path in placed(known(name), **{variable: value})
    assert path not in placed(known(name), **{variable: "relative"})
    plan = plan_of(command=name, env={variable: value, "PATH": "/usr/bin"})
    assert plan.env[variable] == value


@pytest.mark.parametrize("value", [CWD, f"{CWD}/.c", HOME, "/home", "/"])
def test_state_in_or_around_the_project_is_refused(value: str) -> None:
    """A sandbox could reach it by another way."""
    with pytest.raises(PolicyError) as caught:
        placed(known("claude"), CLAUDE_CONFIG_DIR=value)
    assert caught.value.code == "bad-state-path"


def test_variables_are_set_for_the_agent_and_for_root() -> None:
    """Claude Code refuses a flag to root unless it is told that it is in a sandbox."""
    plan = plan_of(command="claude")
    assert plan.env["CLAUDE_CONFIG_DIR"] == f"{HOME}/.claude"
    assert "IS_SANDBOX" not in plan.env
    assert plan_of(command="claude", uid=0).env["IS_SANDBOX"] == "1"
    set_by_user = plan_of(command="gemini", flags={"env": {"set": {"GEMINI_SANDBOX": "x"}}})
    assert set_by_user.env["GEMINI_SANDBOX"] == "x"
    assert "CLAUDE_CONFIG_DIR" not in plan_of().env


def test_what_is_there_is_shown_read_only_and_the_rest_is_the_sandbox_s_own() -> None:
    """The directory itself, settings, transcripts and a login."""
    tree = {f"{HOME}/.claude/settings.json": FILE, f"{HOME}/.claude/agents": DIR}
    plan = plan_of(tree, command="claude")
    assert look_up(plan, f"{HOME}/.claude/x").level == "private"
    assert look_up(plan, f"{HOME}/.claude/settings.json").level == "ro"
    assert look_up(plan, f"{HOME}/.claude/agents/a").level == "ro"
    assert look_up(plan, f"{HOME}/.claude/hooks").level == "private"
    assert look_up(plan, f"{HOME}/.claude/projects/-home-u-p/x").level == "rw"
    assert look_up(plan, f"{HOME}/.claude/projects/other").level == "private"
    assert plan.made == (f"{HOME}/.claude/projects/-home-u-p",)
    assert [(s.name, s.outside) for s in plan.steps] == [
        (".claude.json", f"{HOME}/.claude.json"),
        (".credentials.json", f"{HOME}/.claude/.credentials.json"),
    ]


def test_an_exclude_of_the_user_wins() -> None:
    """No transcripts, if somebody says so; and nothing is made for them."""
    plan = plan_of(
        {f"{HOME}/.claude/projects/-home-u-p": DIR, f"{HOME}/.claude/settings.json": FILE},
        command="claude", flags=rules(exclude=["~/.claude/settings.json"]),
    )  # fmt: skip
    assert look_up(plan, f"{HOME}/.claude/settings.json").level in ("private", "exclude", "absent")
    assert not any(m.source == f"{HOME}/.claude/settings.json" for m in plan.mounts)


# --- links

DOT = f"{HOME}/dot"
# The way to ~/.codex/config.toml: the tree, links in what was a project, whether it is followed.
WAYS: dict[str, tuple[dict[str, str], tuple[str, ...], bool]] = {
    "none": ({f"{HOME}/.codex/config.toml": FILE}, (), True),
    "right in the home": (
        {f"{HOME}/.codex": "-> dot/codex", f"{DOT}/codex/config.toml": FILE}, (), True,
    ),
    "out of the home": (
        {f"{HOME}/.codex": "-> /data/codex", "/data/codex/config.toml": FILE}, (), True,
    ),
    "a second one": (
        {f"{HOME}/.codex": "-> dot/codex", f"{DOT}/codex": "-> x", f"{DOT}/x/config.toml": FILE},
        (), False,
    ),
    "to secrets": (
        {f"{HOME}/.codex": "-> .ssh", f"{HOME}/.ssh/config.toml": FILE}, (), False,
    ),
    "to our own state": (
        {f"{HOME}/.codex": "-> .local/state/agent-sandbox/x",
         f"{HOME}/.local/state/agent-sandbox/x/config.toml": FILE}, (), False,
    ),
    "in what was a project": (
        {f"{HOME}/.codex": "-> dot/codex", f"{DOT}/codex/config.toml": FILE},
        (f"{HOME}/.codex",), False,
    ),
    "below the directory": (
        {f"{HOME}/.codex/config.toml": "-> ../dot/c", f"{DOT}/c": FILE}, (), False,
    ),
    "to what is shown anyway": (
        {f"{HOME}/.codex/config.toml": "-> hooks.json", f"{HOME}/.codex/hooks.json": FILE},
        (), True,
    ),
    "to what is not shown": (
        {f"{HOME}/.codex/config.toml": "-> history.jsonl", f"{HOME}/.codex/history.jsonl": FILE},
        (), False,
    ),
    "to a read-only store": (
        {f"{HOME}/.codex/config.toml": "-> /nix/store/a/c", "/nix/store/a/c": FILE}, (), True,
    ),
    "to a daemon's directory": (
        {f"{HOME}/.codex/config.toml": "-> /nix/var/c", "/nix/var/c": FILE}, (), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_only_links_of_the_user_lead_to_an_agent_s_state(name: str) -> None:
    """Whatever is writable now: an earlier run may have written anywhere else."""
    tree, doubted, followed = WAYS[name]
    policy = policy_of(command="codex")
    found = facts(policy, tree)
    state = tuple(one.replace(doubted=doubted) for one in found.state)
    names: list[str] = []
    notices: list[str] = []
    try:
        plan = resolve(policy, found.replace(state=state))
        names += [step.name for step in plan.steps]
        notices += plan.notices
    except PolicyError as error:
        # The directory itself.
        notices.append(str(error))
    assert followed == ("config.toml" in names)
    assert followed != any("a sandbox may have made" in text for text in notices)


def test_cannot_follow_a_link_to_where_a_part_would_be_made() -> None:
    """The directory of transcripts is a link, and this project has none there yet."""
    policy = policy_of(command="claude")
    tree = {f"{HOME}/.claude/projects": f"-> {HOME}/private", f"{HOME}/private/x": FILE}
    found = facts(policy, tree)
    planted = find(tree, f"{HOME}/.claude/projects")
    state = tuple(
        one.replace(above=planted, at=f"{HOME}/private/-home-u-p") if one.part.mode == RW else one
        for one in found.state
    )
    plan = resolve(policy, found.replace(state=state))
    assert plan.made == ()
    assert not any(m.source.startswith(f"{HOME}/private") for m in plan.mounts)
    # The control.
    assert resolve(policy, facts(policy, {f"{HOME}/.claude/x": FILE})).made


def test_one_agent_s_instructions_may_be_a_link_to_another_s() -> None:
    """Many keep one file for all; any other file of that agent stays its own."""
    for name, level in (("CLAUDE.md", "ro"), ("history.md", "private")):
        tree = {f"{HOME}/.codex/AGENTS.md": f"-> ../.claude/{name}", f"{HOME}/.claude/{name}": FILE}
        assert look_up(plan_of(tree, command="codex"), f"{HOME}/.codex/AGENTS.md").level == level


@pytest.mark.parametrize("target", [CWD, f"{CWD}/..", "/home"])
def test_state_that_is_really_around_the_project_is_refused(target: str) -> None:
    """The text of the path does not tell."""
    with pytest.raises(PolicyError) as caught:
        plan_of({f"{HOME}/.claude": f"-> {target}", f"{CWD}/x": FILE}, command="claude")
    assert caught.value.code in ("bad-state-path", "planted-link")


def test_state_that_is_really_in_the_project_is_read_only_there() -> None:
    """Known parts, unknown ones, and the directory itself; transcripts are at their place."""
    tree = {f"{HOME}/.claude": "-> p/claude", f"{CWD}/claude/settings.json": FILE}
    plan = plan_of(tree, command="claude")
    assert look_up(plan, f"{CWD}/claude/settings.json").level == "ro"
    assert look_up(plan, f"{CWD}/claude/unheard-of").level == "ro"
    assert look_up(plan, f"{CWD}/x").level == "rw"
    assert look_up(plan, f"{HOME}/.claude/x").level == "private"
    # The control.
    assert look_up(plan_of(tree), f"{CWD}/claude/settings.json").level == "rw"


# --- of the user


def own(**table: Any) -> Profile:
    """One profile of the user, called mine."""
    (made,) = decode({"mine": table}, "f: profiles")
    return made


def test_a_profile_of_the_user_is_decoded() -> None:
    """With its name as its command, unless it says otherwise."""
    made = own(private=["~/.mine"], rw=["~/.m"], hosts=["a.example"], env=["K"])
    assert made.commands == ("mine",)
    assert [(s.path, s.mode) for s in made.state] == [("~/.mine", PRIVATE), ("~/.m", RW)]
    assert made.hosts == ("a.example",)
    policy = policy_of(user={"profiles": {"mine": {"commands": ["m"], "env": ["K"]}}}, command="m")
    assert policy.profile.value == "mine"
    assert policy.agent is not None
    assert policy.agent.env == ("K",)


def test_extending_adds_and_what_is_named_again_changes() -> None:
    """Ours with one directory more; another name gets its own command."""
    made = own(extends="claude", rw=["~/.claude/todos"], ro=["~/.claude/CLAUDE.md"])
    base = known("claude")
    assert made.commands == ("mine",)
    assert {s.path for s in base.state} | {"~/.claude/todos"} == {s.path for s in made.state}
    (ours,) = decode({"claude": {"rw": ["~/.claude/todos"]}}, "f")
    assert ours.commands == ("claude",)
    assert len(ours.state) == len(base.state) + 1
    (again,) = decode({"codex": {"ro": ["~/.codex/sessions"]}}, "f")
    assert [s.mode for s in again.state if s.path == "~/.codex/sessions"] == [RO]
    (apart,) = decode({"codex": {"private": ["~/.codex/sessions"]}}, "f")
    assert [s.path for s in apart.state if s.mode == RW] == ["~/.codex/archived_sessions"]


@pytest.mark.parametrize(
    "table",
    [
        {"rw": ["x"]}, {"rw": ["~"]}, {"rw": ["~/"]}, {"rw": ["/"]}, {"rw": ["~/a/../.ssh"]},
        {"rw": ["~/*"]}, {"rw": "~/a"}, {"rw": [1]}, {"copy": ["~/.a/b"]}, {"merge": ["~/.a"]},
        {"private": ["~/.a", "~/.a/b"]}, {"env": ["HOME"]}, {"env": ["A=B"]},
        {"set-env": {"HOME": "/"}}, {"set-env": {"A": 1}}, {"set-env": []}, {"hosts": ["a b"]},
        {"extends": "nobody"}, {"extends": 1}, {"notes": ["a\nb"]}, {"protect": ["b"]},
    ],
)  # fmt: skip
def test_a_bad_profile_is_an_error(table: dict[str, Any]) -> None:
    """Nothing is guessed."""
    with pytest.raises(PolicyError):
        own(**table)


@pytest.mark.parametrize("name", ["none", "..", ".", "", "a/b", "a b", "x" * 65, "\u00e9"])
def test_a_bad_name_is_an_error(name: str) -> None:
    """It names a directory, too."""
    with pytest.raises(PolicyError):
        decode({name: {}}, "f")


def test_profiles_belong_in_the_user_s_own_file() -> None:
    """Trust does not help: they choose what of the home is shown."""
    data = {"profiles": {"mine": {"rw": ["~/.ssh"]}}}
    assert layer(GLOBAL, data).values["profiles"].value
    with pytest.raises(PolicyError) as caught:
        layer(PROJECT, data)
    assert caught.value.code == "user-only-key"
