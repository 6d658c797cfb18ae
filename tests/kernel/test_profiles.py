"""Agent profiles: the agent keeps its state, and cannot change what the host would run of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.policy.instep import TABLES
from agent_sandbox.policy.profiles import MERGE, PRIVATE, RW, Profile
from agent_sandbox.policy.profiles.builtin import PROFILES
from kernel.conftest import World, end_group, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.kernel

# The machines that run this are slow and loaded.
PATIENCE = 60.0


def slug(world: World) -> str:
    """The project in Claude Code's directory of transcripts."""
    return "".join(c if c.isalnum() else "-" for c in str(world.project))


def roots(profile: Profile) -> list[str]:
    return [state.path for state in profile.state if state.mode == PRIVATE]


def snapshot(world: World, profile: Profile) -> dict[str, str]:
    """Every file below an agent's directories on the host, without what is shared writable."""
    shared = [world.path(s.path.partition("{")[0]) for s in profile.state if s.mode == RW]
    found = {}
    for root in (world.path(path) for path in roots(profile)):
        for place in sorted(p for p in root.rglob("*") if p.is_file()):
            if not any(place.is_relative_to(one) for one in shared):
                found[str(place)] = place.read_text()
    return found


# Each name as a file and as a directory, written, removed and moved: what a table does not know,
# and what the host is known to run, source or load.
PLANT = """\
import contextlib, os, shutil, sys
def attempt(function, *arguments):
    with contextlib.suppress(OSError):
        function(*arguments)
def put(path):
    with open(path, "w") as file:
        file.write("evil")
roots, names = (words.split(",") for words in sys.argv[1:])
for root in map(os.path.expanduser, roots):
    attempt(os.makedirs, root)
    for name in names:
        path = root + "/" + name
        attempt(os.makedirs, os.path.dirname(path))
        attempt(put, path)
        attempt(shutil.rmtree, path)
        attempt(os.unlink, path)
        attempt(os.makedirs, path)
        attempt(put, path + "/x")
        attempt(os.rename, path, path + ".old")
        attempt(put, path)
    attempt(os.rename, root, root + ".old")
    attempt(os.makedirs, root)
    attempt(put, root + "/settings.json")
"""
MORE = (
    ".env", ".config.json", "bin/rg", "tmp/arg0/x/apply_patch", "shell-snapshots/s.sh",
    "session-env/x/hook.sh", "node_modules/x/index.js", "unheard-of",
)  # fmt: skip


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_cannot_change_what_the_host_would_run_of_an_agent(world: World, profile: Profile) -> None:
    """Whatever is written, replaced or made beside it: the host's directories stay as they were.

    Half of the names are there, the others are not. Control: with the directories opened by hand
    the same attack changes them.
    """
    parts = [s.path for s in profile.state if s.mode not in (PRIVATE, RW)]
    for path in parts[::2]:
        world.write(path if path.endswith((".json", ".md", ".toml")) else f"{path}/x", "{}")
    names = {
        path[len(root) + 1 :]
        for root in roots(profile)
        for path in parts
        if path.startswith(f"{root}/")
    }
    attack = ("python3", "-c", PLANT, ",".join(roots(profile)), ",".join((*names, *MORE)))
    before = snapshot(world, profile)
    done = world.sandbox("--profile", profile.name, *attack)
    assert done.returncode == 0, done.stderr
    assert snapshot(world, profile) == before
    for path in roots(profile):
        if not world.path(path).exists():
            world.mkdir(path)
    # A sandbox that may write them; the profile's own protections are off as well.
    world.sandbox(*(f"--rw={path}" for path in roots(profile)), *attack)
    assert "evil" in snapshot(world, profile).values()


def test_cannot_create_settings_in_a_directory_that_the_user_opened(world: World) -> None:
    """`--rw ~/.claude` shares it all, but what the host runs stays read-only, there or not."""
    world.write("~/.claude/agents/a.md", "mine")
    attack = "echo evil > ~/.claude/settings.json; echo evil > ~/.claude/agents/a.md; "
    attack += "mkdir -p ~/.claude/hooks/x; echo s > ~/.claude/note"
    world.sh(attack, "--profile=claude", "--rw", "~/.claude")
    assert not world.path("~/.claude/settings.json").exists()
    assert not world.path("~/.claude/hooks").exists()
    assert world.path("~/.claude/agents/a.md").read_text() == "mine"
    assert world.path("~/.claude/note").read_text() == "s\n"
    # The control.
    world.sh(attack, "--rw", "~/.claude")
    assert world.path("~/.claude/settings.json").read_text() == "evil\n"


def test_skills_are_shown_one_by_one_and_none_can_be_added(world: World) -> None:
    """Codex puts its own beside them, inside; also when the user has opened the directory."""
    world.write("~/.codex/skills/mine/SKILL.md", "mine")
    make = "cat ~/.codex/skills/mine/SKILL.md; echo evil > ~/.codex/skills/mine/SKILL.md; "
    make += "mkdir ~/.codex/skills/.system ~/.codex/skills/evil"
    assert world.sh(make, "--profile=codex").stdout == "mine"
    skills = world.path("~/.codex/skills")
    assert os.listdir(skills) == ["mine"]
    world.sh(make, "--profile=codex", "--rw", "~/.codex")
    assert os.listdir(skills) == ["mine"]
    assert (skills / "mine/SKILL.md").read_text() == "mine"
    # The control.
    world.sh(make, "--rw", "~/.codex")
    assert sorted(os.listdir(skills)) == [".system", "evil", "mine"]


def test_can_keep_the_state_of_an_agent(world: World) -> None:
    """Transcripts are the host's; the rest is there for the next run in this project."""
    place = f"~/.claude/projects/{slug(world)}"
    done = world.sh(f"echo s > {place}/s.jsonl; echo h > ~/.claude/history.jsonl",
                    "--profile", "claude")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert world.path(f"{place}/s.jsonl").read_text() == "s\n"
    assert not world.path("~/.claude/history.jsonl").exists()
    read = f"cat {place}/s.jsonl ~/.claude/history.jsonl"
    assert world.sh(read, "--profile", "claude").stdout == "s\nh\n"
    assert world.sh(read).returncode != 0
    other = world.mkdir("~/work/other")
    assert world.sh(f"ls {place}", "--profile", "claude", cwd=other).returncode != 0


def test_the_state_is_forgotten_with_an_ephemeral_home(world: World) -> None:
    """But a login and a transcript are the host's."""
    script = "echo h > ~/.claude/note; echo '{\"numStartups\": 7}' > ~/.claude/.claude.json; "
    script += f"echo s > ~/.claude/projects/{slug(world)}/s"
    flags = ("--profile=claude", "--home=ephemeral")
    assert world.sh(script, *flags).returncode == 0
    assert world.sh("cat ~/.claude/note", *flags).returncode != 0
    assert document(world.path("~/.claude.json")) == {"numStartups": 7}
    assert world.path(f"~/.claude/projects/{slug(world)}/s").read_text() == "s\n"


def test_the_state_works_below_the_host_s_own_home(world: World) -> None:
    """`--home=host`: the home is read-only, the state is as always."""
    world.write("~/.claude/settings.json", "{}")
    world.write("~/.claude.json", '{"numStartups": 1}')
    script = "cat ~/.claude/.claude.json; echo x > ~/.claude/x; cat ~/.claude/settings.json"
    done = world.sh(f"{script}; cat ~/.claude.json", "--profile=claude", "--home=host")
    assert done.stdout.split() == ["{", '"numStartups":', "1", "}{}"], done.stderr
    assert sorted(os.listdir(world.path("~/.claude"))) == ["projects", "settings.json"]


@pytest.mark.parametrize(
    ("profile", "variable", "value", "settings"),
    [
        ("claude", "CLAUDE_CONFIG_DIR", "~/.config/claude", "settings.json"),
        ("codex", "CODEX_HOME", "~/dot/codex", "AGENTS.md"),
        ("opencode", "XDG_CONFIG_HOME", "~/cfg", "opencode/opencode.json"),
        ("pi", "PI_CODING_AGENT_DIR", "~/p i", "models.json"),
    ],
)
def test_the_state_is_where_a_variable_says(
    world: World, profile: str, variable: str, value: str, settings: str
) -> None:
    """It is shown there, writable, and the host's stays as it is."""
    place = world.path(value)
    world.write(f"{value}/{settings}", "mine")
    script = f'cat "${variable}/{settings}"; echo evil > "${variable}/{settings}"; '
    script += f'f=$(dirname "${variable}/{settings}")/fresh; echo x > "$f" && echo " made"'
    done = world.sh(script, "--profile", profile, env={variable: str(place)})
    assert done.stdout == "mine made\n", done.stderr
    assert (place / settings).read_text() == "mine"
    assert list(place.rglob("fresh")) == []


def test_cannot_have_state_in_the_project(world: World) -> None:
    """The sandbox would write there what the agent outside runs."""
    done = world.sh("true", "--profile=claude", env={"CLAUDE_CONFIG_DIR": f"{world.project}/.c"})
    assert done.returncode == 125
    assert "in the project" in done.stderr


def test_cannot_be_led_out_by_a_link_in_the_state(world: World) -> None:
    """A sandbox could write there once, with `--rw`, and may have planted one."""
    world.write("~/.ssh/id", "key")
    world.write("~/private/notes", "private")
    world.mkdir("~/.claude/projects")
    world.link(f"~/.claude/projects/{slug(world)}", world.path("~/.ssh"))
    world.link("~/.claude/skills", world.path("~/.ssh"))
    world.link("~/.claude/agents", world.path("~/private"))
    script = f"cat ~/.claude/projects/{slug(world)}/id ~/.claude/skills/id ~/.ssh/id "
    script += "~/.claude/agents/notes"
    done = world.sh(script, "--profile", "claude")
    assert done.stdout == ""
    assert "which a sandbox may have made" in done.stderr
    # The control: what is no link is shown.
    for name in ("skills", "agents"):
        world.path(f"~/.claude/{name}").unlink()
    world.write("~/.claude/skills/id", "skill")
    assert world.sh("cat ~/.claude/skills/id", "--profile", "claude").stdout == "skill"


def test_a_link_in_the_state_is_followed_when_the_user_names_it(world: World) -> None:
    """As the notice says."""
    world.write("~/dotfiles/skills/s.md", "skill")
    world.link("~/.claude/skills", world.path("~/dotfiles/skills"))
    read = ("cat ~/.claude/skills/s.md", "--profile", "claude")
    assert "name it with --ro" in world.sh(*read).stderr
    named = world.sh(*read, "--ro", "~/.claude/skills")
    assert named.stdout == "skill", named.stderr
    assert "not shown" not in named.stderr


# What a run in the user's dotfiles plants in the directory that the agent's is a link to, and how
# a later run would look at it.
PLANTED_LINKS = {
    "copy": ("codex", "config.toml", "~/.ssh/id_ed25519", "cat ~/.codex/config.toml"),
    "copy, not listed": ("codex", "config.toml", "~/private/x", "cat ~/.codex/config.toml"),
    "ro": ("claude", "agents", "~/private", "cat ~/.claude/agents/x"),
    "rw": ("codex", "sessions", "~/private", "cat ~/.codex/sessions/x"),
    "merge": ("claude", ".credentials.json", "~/private/x", "cat ~/.claude/.credentials.json"),
    "one of many": ("codex", "skills/s", "~/private", "cat ~/.codex/skills/s/x"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED_LINKS)
def test_cannot_be_led_out_by_a_link_from_another_run(world: World, name: str) -> None:
    """The agent's directory is a link to the user's dotfiles, and those are a project, too."""
    profile, part, target, script = PLANTED_LINKS[name]
    secret = '{"claudeAiOauth": {"accessToken": "theirs"}}'
    world.write("~/private/x", secret)
    world.write("~/.ssh/id_ed25519", secret)
    dotfiles = world.mkdir("~/dot")
    world.write(f"~/dot/{profile}/AGENTS.md", "mine")
    world.link(f"~/.{profile}", f"dot/{profile}")
    plant = f"mkdir -p $(dirname {profile}/{part}); ln -s {world.path(target)} {profile}/{part}"
    assert world.sh(plant, cwd=dotfiles).returncode == 0
    seen = world.sh(script, "--profile", profile)
    assert "theirs" not in seen.stdout
    assert "which a sandbox may have made" in seen.stderr
    assert world.path("~/private/x").read_text() == secret
    # The control: the same with plain files is shown, through the user's own link.
    planted = world.path(f"~/dot/{profile}/{part}")
    planted.unlink()
    if world.path(target).is_dir():
        world.write(planted / "x", secret)
    else:
        world.write(planted, secret)
    shown = world.sh(script, "--profile", profile)
    assert "theirs" in shown.stdout, shown.stderr


def test_cannot_write_a_login_through_a_planted_link(world: World) -> None:
    """`--rw ~/.claude` once, and every later run would write to what it has linked."""
    target = world.write("~/private/x.json", '{"a": 1}')
    world.mkdir("~/.claude")
    plant = f"ln -s {target} ~/.claude/.credentials.json"
    assert world.sh(plant, "--rw", "~/.claude").returncode == 0
    login = 'echo \'{"claudeAiOauth": {"accessToken": "t", "refreshToken": "r", '
    login += '"expiresAt": 1}}\' > ~/.claude/.credentials.json'
    done = world.sh(login, "--profile=claude")
    assert done.returncode == 0, done.stderr
    assert target.read_text() == '{"a": 1}'
    # The control: without the link it is kept.
    world.path("~/.claude/.credentials.json").unlink()
    world.sh(login, "--profile=claude")
    assert "claudeAiOauth" in world.path("~/.claude/.credentials.json").read_text()


def test_cannot_swap_the_agent_s_directory_for_a_link(world: World) -> None:
    """A second link, in what was a project, on the way to the agent's directory."""
    world.write("~/private/AGENTS.md", "theirs")
    dotfiles = world.mkdir("~/dot")
    world.write("~/dot/codex/AGENTS.md", "mine")
    world.link("~/.codex", "dot/codex")
    read = ("cat ~/.codex/AGENTS.md", "--profile=codex")
    assert world.sh(*read).stdout == "mine"
    assert world.sh("mv codex old; ln -s ../private codex", cwd=dotfiles).returncode == 0
    done = world.sh(*read)
    assert done.returncode == 125
    assert "cannot follow" in done.stderr
    assert "theirs" not in done.stdout


def test_cannot_use_a_link_in_what_was_a_project(world: World) -> None:
    """The control: the same link in a directory that never was one is followed."""
    world.write("~/dot/opencode/AGENTS.md", "mine")
    world.link("~/.config/opencode", "../dot/opencode")
    read = ("cat ~/.config/opencode/AGENTS.md", "--profile=opencode")
    shown = world.sh(*read)
    assert shown.stdout == "mine", shown.stderr
    assert world.sh("true", cwd=world.path("~/.config")).returncode == 0
    done = world.sh(*read)
    assert done.returncode == 125
    assert "cannot follow" in done.stderr


def test_cannot_change_the_state_that_a_link_has_put_in_the_project(world: World) -> None:
    """The agent's directory in the user's dotfiles is read-only there; the rest is not.

    Control: without a profile the same attack works.
    """
    dotfiles = world.mkdir("~/dot")
    world.write("~/dot/claude/settings.json", "mine")
    world.link("~/.claude", "dot/claude")
    attack = "echo evil > claude/settings.json; mkdir claude/hooks; mv claude other; "
    attack += "echo x > note; cat ~/.claude/settings.json"
    done = world.sh(attack, "--profile=claude", cwd=dotfiles)
    assert done.stdout == "mine", done.stderr
    assert world.path("~/dot/claude/settings.json").read_text() == "mine"
    assert not world.path("~/dot/claude/hooks").exists()
    assert world.path("~/dot/note").read_text() == "x\n"
    # Also where the user opens that directory: what the host acts on stays as it is.
    opened = world.sh(attack, "--profile=claude", "--rw", "~/dot/claude")
    assert opened.returncode == 0, opened.stderr
    assert world.path("~/dot/claude/settings.json").read_text() == "mine"
    assert not world.path("~/dot/claude/hooks").exists()
    place = "".join(c if c.isalnum() else "-" for c in str(dotfiles))
    kept = world.sh(f"echo s > ~/.claude/projects/{place}/s", "--profile=claude", cwd=dotfiles)
    assert kept.returncode == 0, kept.stderr
    assert world.path(f"~/dot/claude/projects/{place}/s").read_text() == "s\n"
    world.sh(attack, "--profile=none", cwd=dotfiles)
    assert world.path("~/dot/other/settings.json").read_text() == "evil\n"


def test_cannot_have_state_in_the_project_by_a_link(world: World) -> None:
    """A variable that names a link into the project, or around it."""
    world.mkdir(".c")
    world.link("~/cfglink", world.path(".c"))
    world.link("~/around", world.path("~/work"))
    for name in ("cfglink", "cfglink/sub", "around"):
        env = {"CLAUDE_CONFIG_DIR": f"{world.home}/{name}"}
        done = world.sh("true", "--profile=claude", env=env)
        assert done.returncode == 125, name
        assert "in the project" in done.stderr
    # The control: a link that leads elsewhere.
    world.link("~/elsewhere", world.mkdir("~/cfg"))
    env = {"CLAUDE_CONFIG_DIR": f"{world.home}/elsewhere"}
    assert world.sh("true", "--profile=claude", env=env).returncode == 0


def test_cannot_replace_a_linked_setting_in_a_directory_that_the_user_opened(world: World) -> None:
    """A link cannot be held. Control: without the profile it is replaced."""
    world.write("~/dot/settings.json", "mine")
    settings = world.path("~/.claude/settings.json")
    world.link("~/.claude/settings.json", world.path("~/dot/settings.json"))
    attack = "rm ~/.claude/settings.json; echo evil > ~/.claude/settings.json"
    done = world.sh(attack, "--profile=claude", "--rw", "~/.claude")
    assert done.returncode == 125
    assert settings.read_text() == "mine"
    world.sh(attack, "--rw", "~/.claude")
    assert settings.read_text() == "evil\n"


AGENT = "#!/bin/sh\nls ~/.pi/agent/auth.json; echo key=$ANTHROPIC_API_KEY\n"


def test_cannot_choose_a_profile_by_a_program_of_the_project(world: World) -> None:
    """It would get the user's login and keys by being called like an agent.

    Control: the same program outside of every project has its profile.
    """
    env: dict[str, str | None] = {"ANTHROPIC_API_KEY": "k"}
    world.write("~/.pi/agent/auth.json", '{"x": {"type": "api_key", "key": "y"}}')
    world.write("bin/pi", AGENT, mode=0o755)
    outside = world.write("~/tools/pi", AGENT, mode=0o755)
    world.link("~/linked/pi", world.path("bin/pi"))
    usual = "/usr/bin:/bin"
    seen = world.sandbox("pi", env={**env, "PATH": f"{outside.parent}:{usual}"})
    assert "key=k" in seen.stdout, seen.stderr
    assert "auth.json" in seen.stdout
    attempts = (
        ("./bin/pi", usual), (str(world.path("bin/pi")), usual),
        ("pi", f"{world.project}/bin:{usual}"), ("pi", f"{world.home}/linked:{usual}"),
        ("pi", f"{world.project}/bin:{outside.parent}:{usual}"),
        # Inside, the first may not be there.
        ("pi", f"{outside.parent}:{world.project}/bin:{usual}"),
    )  # fmt: skip
    for command, path in attempts:
        done = world.sandbox("--ro", "~/linked", command, env={**env, "PATH": path})
        assert "key=\n" in done.stdout, (command, path, done.stderr)
        assert "auth.json" not in done.stdout
        assert "--profile pi" in done.stderr
    named = world.sandbox("--profile=pi", "./bin/pi", env=env)
    assert "key=k" in named.stdout, named.stderr
    # In another project, which a sandbox has written before.
    elsewhere = world.mkdir("~/work/other")
    path = f"{world.project}/bin:{usual}"
    done = world.sandbox("pi", env={**env, "PATH": path}, cwd=elsewhere)
    assert "key=\n" in done.stdout, done.stderr


def test_cannot_read_sessions_of_a_project_of_the_same_name(world: World) -> None:
    """`a-b` and `a/b` have one directory. Control: its own project still has it."""
    one, two = world.mkdir("~/pa-b"), world.mkdir("~/pa/b")
    place = "".join(c if c.isalnum() else "-" for c in str(one))
    line = json.dumps({"type": "user", "cwd": str(one), "message": "theirs"})
    world.write(f"~/.claude/projects/{place}/s.jsonl", line)
    read = (f"cat ~/.claude/projects/{place}/s.jsonl", "--profile=claude")
    done = world.sh(*read, cwd=two)
    assert "theirs" not in done.stdout
    assert f"sessions of '{one}'" in done.stderr
    assert "theirs" in world.sh(*read, cwd=one).stdout


def test_links_in_what_is_shared_are_told(world: World) -> None:
    """An agent outside would write through them; they are named at the next start."""
    world.mkdir("~/.codex")
    plant = "mkdir ~/.codex/sessions/2026; ln -s ~/.bashrc ~/.codex/sessions/2026/x.jsonl"
    first = world.sh(plant, "--profile=codex")
    assert first.returncode == 0, first.stderr
    assert "is a link in what" not in first.stderr
    assert "2026/x.jsonl' is a link in what" in world.sh("true", "--profile=codex").stderr


def test_a_setting_that_is_gone_from_the_host_is_gone_inside(world: World) -> None:
    """No empty file of that name is left for the agent to stumble over."""
    world.write("~/.claude/settings.json", "{}")
    assert world.sh("cat ~/.claude/settings.json", "--profile=claude").stdout == "{}"
    world.path("~/.claude/settings.json").unlink()
    assert world.sh("ls ~/.claude/settings.json", "--profile=claude").returncode != 0


# --- the file that both sides write


def document(path: Path) -> Any:
    """A JSON file; None while there is none. It is never torn."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


UPDATE = """\
import json, os, sys, time
path = os.environ["CLAUDE_CONFIG_DIR"] + "/.claude.json"
def get():
    try:
        with open(path) as file:
            return json.load(file)
    except FileNotFoundError:
        return {}
def put(**values):
    # As Claude Code does it: the lock, a new file, a rename.
    while True:
        try:
            os.mkdir(path + ".lock")
            break
        except FileExistsError:
            time.sleep(0.01)
    with open(path + ".tmp", "w") as file:
        json.dump({**get(), **values}, file)
    os.rename(path + ".tmp", path)
    os.rmdir(path + ".lock")
def wait(key, value):
    while get().get(key) != value:
        time.sleep(0.02)
"""


def inside(world: World, code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python as the agent claude."""
    return world.sandbox("--profile=claude", "python3", "-c", UPDATE + code, **options)


def running(world: World, code: str, **options: Any) -> subprocess.Popen[str]:
    """The same, without waiting for its end."""
    return world.start(
        "--profile=claude", "python3", "-c", UPDATE + code, start_new_session=True, **options
    )


EVIL = {"evil": {"command": "sh", "args": ["-c", "id"]}}
PLANTED = {
    "mcpServers": EVIL, "hooks": {"Stop": []}, "bypassPermissionsModeAccepted": True,
    "projects": {"/": {"hasTrustDialogAccepted": True}},
}  # fmt: skip
LOOSE = """\
import sys
from agent_sandbox.launch.instep_server import File, Pair
from agent_sandbox.policy import instep
root, name, outside, base, lock = sys.argv[1:]
instep.TABLES["all"] = instep.Keys(top=dict.fromkeys(("mcpServers", "hooks"), lambda _: True))
file = File(mode="merge", root=root, name=name, outside=outside, keys="all", base=base)
Pair(file, "/", lock).step(last=True)
"""


def test_cannot_plant_servers_hooks_or_trust_in_the_host_s_file(world: World) -> None:
    """A login inside is kept, what the host would run or trust is not.

    Control: with the table of keys gone, the same files bring the planted server to the host.
    """
    trusted = {str(world.project): {"allowedTools": [], "hasTrustDialogAccepted": False}}
    world.write("~/.claude.json", json.dumps({"numStartups": 1, "projects": trusted}), mode=0o600)
    mine = {
        str(world.project): {
            "hasTrustDialogAccepted": True, "allowedTools": ["Bash"], "mcpServers": EVIL,
            "lastCost": 2,
        }
    }  # fmt: skip
    planted = {**PLANTED, "projects": {**PLANTED["projects"], **mine}}  # type: ignore[dict-item]
    login = {"oauthAccount": {"emailAddress": "a@example.com"}, "numStartups": 2}
    done = inside(world, f"put(**{planted!r}); put(**{login!r})")
    assert done.returncode == 0, done.stderr
    trusted[str(world.project)]["lastCost"] = 2
    host = world.path("~/.claude.json")
    assert document(host) == {**login, "projects": trusted}
    assert host.stat().st_mode & 0o777 == 0o600
    assert "'mcpServers'" in done.stderr
    # Also not in the next run, in which it is still there.
    seen = inside(world, "print(list(get()['mcpServers']))")
    assert seen.stdout == "['evil']\n", seen.stderr
    assert document(host) == {**login, "projects": trusted}
    home = world.state / "homes/claude" / str(world.project)[1:]
    done = world.python(
        LOOSE, str(home / "+state/.claude"), ".claude.json", str(host),
        str(home / "+base/.claude"), str(world.home / "lock"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert document(host)["mcpServers"] == EVIL


def test_a_login_inside_is_kept_for_every_project_and_the_host(world: World) -> None:
    """Made while no file of that kind is there."""
    tokens = {"claudeAiOauth": {"accessToken": "t-1", "refreshToken": "r-1", "expiresAt": 1}}
    code = f"""
put(oauthAccount={{"emailAddress": "a@example.com"}}, hasCompletedOnboarding=True)
with open(os.path.dirname(path) + "/.credentials.json", "w") as file:
    json.dump({tokens!r}, file)
"""
    assert inside(world, code).returncode == 0
    assert document(world.path("~/.claude.json"))["hasCompletedOnboarding"] is True
    credentials = world.path("~/.claude/.credentials.json")
    assert document(credentials) == tokens
    assert credentials.stat().st_mode & 0o777 == 0o600
    read = "cat ~/.claude/.credentials.json ~/.claude/.claude.json"
    other = world.sh(read, "--profile=claude", cwd=world.mkdir("~/work/other"))
    assert "t-1" in other.stdout, other.stderr
    assert "a@example.com" in other.stdout


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Sandboxes to be ended whatever happens."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        end_group(process)


def test_two_sandboxes_and_the_host_stay_in_step_while_they_run(
    world: World, started: list[subprocess.Popen[str]]
) -> None:
    """Two projects; each sees what the other and the host change, and nothing is lost."""
    host = world.path("~/.claude.json")
    world.write("~/.claude.json", '{"numStartups": 1}', mode=0o600)
    other = world.mkdir("~/work/other")
    first = running(world, "wait('theme', 'light'); put(numStartups=2); wait('userID', 'u')")
    second = running(
        world, "wait('numStartups', 2); put(userID='u'); wait('theme', 'light')", cwd=other
    )
    started += [first, second]
    # The host's own agent, by rename.
    world.write("~/.claude.json.new", '{"numStartups": 1, "theme": "light"}')
    os.replace(world.path("~/.claude.json.new"), host)
    for process in started:
        assert process.wait(PATIENCE) == 0
    assert document(host) == {"numStartups": 2, "theme": "light", "userID": "u"}


def test_a_killed_supervisor_loses_nothing(
    world: World, started: list[subprocess.Popen[str]]
) -> None:
    """The process outside sees its end and makes a last step by itself."""
    world.write("~/.claude.json", '{"numStartups": 1}')
    code = "put(numStartups=2); put(theme='x'); print('done', flush=True); time.sleep(600)"
    process = running(world, code, stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "done\n"
    os.kill(process.pid, signal.SIGKILL)
    wanted = {"numStartups": 2, "theme": "x"}
    assert eventually(lambda: document(world.path("~/.claude.json")) == wanted, PATIENCE)


def helper_of(pid: int) -> int:
    """The process that keeps files in step for a supervisor; 0 while there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text().rpartition(")")[2].split()
            line = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat[1]) == pid and b"instep_server.py" in line:
            return int(entry.name)
    return 0


def test_a_killed_helper_is_told_and_made_up_for(
    world: World, started: list[subprocess.Popen[str]]
) -> None:
    """The command runs on; the next run takes over what it has changed."""
    world.write("~/.claude.json", '{"numStartups": 1}')
    code = "print('up', flush=True); sys.stdin.readline(); put(numStartups=2)"
    process = running(
        world, code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    started.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.kill(helper_of(process.pid), signal.SIGKILL)
    _, err = process.communicate("go\n", timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "was killed" in err
    assert document(world.path("~/.claude.json")) == {"numStartups": 1}
    assert inside(world, "").returncode == 0
    assert document(world.path("~/.claude.json")) == {"numStartups": 2}


def test_what_nobody_could_take_over_is_taken_over_by_the_next_run(world: World) -> None:
    """Supervisor and helper were killed at once: the file inside is still there."""
    world.write("~/.claude.json", '{"numStartups": 1}')
    assert inside(world, "").returncode == 0
    home = world.state / "homes/claude" / str(world.project)[1:]
    kept = home / "+state/.claude/.claude.json"
    assert document(kept) == {"numStartups": 1}
    kept.write_text(json.dumps({"numStartups": 3, "mcpServers": EVIL}))
    world.write("~/.claude.json", '{"numStartups": 1, "theme": "light"}')
    assert inside(world, "").returncode == 0
    assert document(world.path("~/.claude.json")) == {"numStartups": 3, "theme": "light"}


def test_cannot_reach_a_file_of_the_host_by_a_link(world: World) -> None:
    """Neither read nor written through what stands for the agent's file."""
    secret = world.write("~/secret.json", '{"primaryApiKey": "theirs"}')
    world.write("~/.claude.json", '{"numStartups": 1}')
    done = inside(world, f"os.remove(path); os.symlink({str(secret)!r}, path)")
    assert done.returncode == 0, done.stderr
    assert document(secret) == {"primaryApiKey": "theirs"}
    assert document(world.path("~/.claude.json")) == {"numStartups": 1}
    # The next run replaces the link.
    assert inside(world, "print(get())").stdout == "{'numStartups': 1}\n"


LIBRARY = """
import sys
from agent_sandbox import Policy, Sandbox
done = Sandbox(Policy(profile="claude", project=sys.argv[1])).run(["python3", "-c", sys.argv[2]])
sys.exit(done.code)
"""


def test_the_library_keeps_files_in_step_too(world: World) -> None:
    """Whoever starts the sandbox."""
    done = world.python(LIBRARY, str(world.project), UPDATE + "put(numStartups=5)")
    assert done.returncode == 0, done.stderr
    assert document(world.path("~/.claude.json")) == {"numStartups": 5}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda p: p.name)
def test_an_agent_s_login_is_there_inside(world: World, profile: Profile) -> None:
    """Each merged file shows what the host has."""
    merged = [s for s in profile.state if s.mode == MERGE]
    logins = {s.path: {next(iter(TABLES[s.keys].top)).replace("*", "x"): "mine"} for s in merged}
    for state in merged:
        world.write(state.outside or state.path, json.dumps(logins[state.path]))
    for state in merged:
        seen = world.sh(f"cat {state.path}", "--profile", profile.name).stdout
        assert json.loads(seen) == logins[state.path]


# --- profiles of the user


OWN = """
[profiles.mine]
commands = ["agent.sh"]
private = ["~/.mine"]
copy = ["~/.mine/config"]
ro = ["~/.mine/rules"]
rw = ["~/.mine-data"]
protect = ["~/.mine-data/hooks", "~/.mine-data/a/b/run.json"]
env = ["MINE_KEY"]
set-env = { MINE_SANDBOX = "off" }
"""


def test_a_profile_of_the_user_is_chosen_by_the_command(world: World) -> None:
    """With every kind of state; what is protected cannot be made, at any depth."""
    world.global_config(OWN)
    world.write("~/.mine/config", "c\n")
    world.write("~/.mine/rules/r", "r\n")
    world.write(
        "~/tools/agent.sh",
        "#!/bin/sh\ncat ~/.mine/config ~/.mine/rules/r; echo $MINE_KEY $MINE_SANDBOX\n"
        "echo evil > ~/.mine/rules/r; echo evil > ~/.mine/config; echo evil > ~/.mine/x\n"
        "echo s > ~/.mine-data/s; mkdir -p ~/.mine-data/hooks/x ~/.mine-data/a/b\n"
        "echo evil > ~/.mine-data/a/b/run.json; true\n",
        mode=0o755,
    )
    env: dict[str, str | None] = {"MINE_KEY": "k", "PATH": f"{world.home}/tools:/usr/bin:/bin"}
    done = world.sandbox("agent.sh", env=env)
    assert done.stdout == "c\nr\nk off\n", done.stderr
    assert world.path("~/.mine-data/s").read_text() == "s\n"
    assert os.listdir(world.path("~/.mine-data")) == ["s"]
    assert sorted(os.listdir(world.path("~/.mine"))) == ["config", "rules"]
    assert world.path("~/.mine/config").read_text() == "c\n"
    assert world.path("~/.mine/rules/r").read_text() == "r\n"
    # The control: without `protect` the same names can be made.
    world.global_config(OWN.replace("protect", "# protect"))
    world.sandbox("agent.sh", env=env)
    assert sorted(os.listdir(world.path("~/.mine-data"))) == ["a", "hooks", "s"]


def test_cannot_define_a_profile_in_a_project(world: World) -> None:
    """It would choose what of the home is shown."""
    world.project_config(OWN)
    done = world.sh("true")
    assert done.returncode == 125
    assert "your own policy file" in done.stderr
