"""Command rules in real sandboxes: blocked, wrapped and guarded commands, under every name."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from conftest import must_work

from .conftest import end_group

if TYPE_CHECKING:
    from .conftest import World

pytestmark = pytest.mark.kernel

BLOCKED = "is blocked in this sandbox"
PATH = "/usr/local/bin:/usr/bin:/bin"


def tools(world: World) -> dict[str, str | None]:
    """A directory on PATH with a program of many names, and with programs of their own."""
    world.write("~/tools/multi", '#!/bin/sh\necho "$(basename "$0")" "$@"\n', 0o755)
    for name in ("one", "two"):
        world.link(f"~/tools/{name}", "multi")
    world.link("~/alternatives/three", world.home / "tools/multi")
    world.link("~/tools/three", "../alternatives/three")
    return {"PATH": f"{world.home}/tools:{PATH}"}


def test_can_remove_without_a_rule_and_cannot_with_it(world: World) -> None:
    """By name, by either path, from another program, and as the command of the run itself."""
    world.write("victim")
    ways = "rm victim; /usr/bin/rm victim; /bin/rm victim; env rm victim; find victim -exec rm {} +"
    done = world.sh(f"{ways}; command -v rm", "--cmd", "rm=false")
    assert done.stderr.count(f"command 'rm' {BLOCKED}") == 5
    assert done.stdout == "/run/agent-sandbox/commands/rm\n"
    assert "/run/agent-sandbox/README.md" in done.stderr
    done = world.sandbox("--cmd", "rm=false", "rm", "victim")
    assert done.returncode == 126
    assert (world.project / "victim").exists()
    assert world.sandbox("rm", "victim").returncode == 0
    assert not (world.project / "victim").exists()


def test_one_name_of_a_program_is_blocked_and_the_others_work(world: World) -> None:
    env = tools(world)
    script = "one a; two b; three c; multi d; ~/tools/one e; ls -d ../../tools"
    done = world.sh(script, "--cmd", "one=false,three=false", env=env)
    assert done.stdout.splitlines()[:2] == ["two b", "multi d"]
    assert done.stderr.count(BLOCKED) == 3
    done = world.sh("one a; two b; multi d", "--cmd", "multi=false", env=env)
    assert done.stdout == ""
    assert done.stderr.count(f"command 'multi' {BLOCKED}") == 3


def test_a_script_gets_what_the_command_would_get(world: World) -> None:
    """Arguments, input, variables; and its exit code counts. It need not be executable."""
    env = tools(world)
    world.write("wrap.sh", 'echo "$AGENT_SANDBOX_CMD|$AGENT_SANDBOX_REAL|$#|$2"; cat; exit 42\n')
    done = world.sandbox(
        "--cmd", "multi=wrap.sh", "multi", "a", "b  'c", "", env=env, input="from outside\n"
    )  # fmt: skip
    expected = "multi|/run/agent-sandbox/real/multi|3|b  'c\nfrom outside\n"
    assert (done.returncode, done.stdout) == (42, expected)


def test_a_script_can_call_the_real_one_under_its_name(world: World) -> None:
    env = tools(world)
    wrap = '#!/bin/sh\necho wrapped\nexec "$AGENT_SANDBOX_REAL" --more "$@"\n'
    world.write("~/wrap.sh", wrap, 0o644)
    done = world.sh(
        "one a; two b; multi c", "--cmd", "one=~/wrap.sh", "--cmd", "multi=~/wrap.sh", env=env
    )
    # A program of many names that has a rule itself is called by its own.
    assert done.stdout.splitlines() == [
        "wrapped", "one --more a", "wrapped", "multi --more b", "wrapped", "multi --more c",
    ]  # fmt: skip
    done = world.sh("one a; two b", "--cmd", "one=~/wrap.sh", env=env)
    assert done.stdout.splitlines() == ["wrapped", "one --more a", "two b"]


def test_signals_reach_the_real_command(world: World) -> None:
    env = tools(world)
    loop = "#!/bin/sh\ntrap 'echo caught; exit 7' TERM\necho ready\nwhile :; do sleep 0.05; done\n"
    world.write("~/tools/waits", loop, 0o755)
    world.write("~/wrap.sh", '#!/bin/sh\nexec "$AGENT_SANDBOX_REAL" "$@"\n')
    process = world.start(
        "--cmd", "waits=~/wrap.sh", "waits", env=env, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "caught\n"
        assert process.wait(30) == 7
    finally:
        end_group(process)


def test_large_and_binary_scripts_work(world: World) -> None:
    text = "#!/bin/sh\necho large\nexit\n" + "# \udcff\n" * (1 << 18)
    path = world.write("~/large.sh")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    world.runner.own(path)
    done = world.sandbox("--cmd", "ls=~/large.sh,rm=false,git=@git", "ls")
    assert done.stdout == "large\n", done.stderr


def test_a_later_program_of_that_name_is_behind_the_rule(world: World) -> None:
    """Installed inside, in a directory that is on PATH and writable."""
    env: dict[str, str | None] = {"PATH": f"{world.project}/bin:{PATH}"}
    script = "mkdir -p bin; printf '#!/bin/sh\\necho mine\\n' >bin/rm; chmod +x bin/rm; rm x"
    assert world.sh(script, env=env).stdout == "mine\n"
    done = world.sh(script, "--cmd", "rm=false", env=env)
    assert done.stdout == ""
    assert BLOCKED in done.stderr


def test_cannot_change_a_stand_in(world: World) -> None:
    script = """
        for f in /usr/bin/rm /run/agent-sandbox/commands/rm /run/agent-sandbox/real/git; do
            mv "$f" /tmp/x && echo moved; unlink "$f" && echo unlinked
            ( : >"$f" ) && echo truncated; ( echo x >>"$f" ) && echo written
            chmod 777 "$f" && echo changed
        done; rm; git --version"""
    done = world.sh(script, "--cmd", "rm=false,git=@git")
    assert done.stdout.startswith("git version")
    assert f"command 'rm' {BLOCKED}" in done.stderr


@pytest.mark.parametrize("rules", ["sh=false", "env=false", "dash=false", "sh=false,env=false"])
def test_the_shell_itself_can_be_blocked(world: World, rules: str) -> None:
    """The stand-ins are shell scripts, and env starts every command."""
    must_work(
        "dash" not in rules or world.outside("sh", "-c", "command -v dash").stdout, "no dash here"
    )
    name = rules.partition("=")[0]
    done = world.sandbox("--cmd", f"{rules},rm=false", "cat", "/dev/null")
    assert (done.returncode, done.stderr) == (0, "")
    for command in (name, "rm"):
        done = world.sandbox("--cmd", f"{rules},rm=false", command, "-c", "true")
        assert (done.returncode, BLOCKED in done.stderr) == (126, True)


def test_rules_of_files_and_flags_meet(world: World) -> None:
    world.global_config('[commands]\nrm = false\ngit = "@git"\n')
    world.project_config("[commands]\nls = false\n")
    done = world.sh("rm; ls; git stash drop")
    assert done.stderr.count(BLOCKED) == 3
    done = world.sh("rm --version; git stash drop", "--cmd", "rm=true")
    assert done.stdout.startswith("rm (GNU")
    assert done.stderr.count(BLOCKED) == 1


def test_cannot_read_a_secret_through_a_project_s_rule(world: World) -> None:
    """The file that a rule names is read outside (invariant 4)."""
    world.write("~/.ssh/id_rsa", "TOP-SECRET\n", 0o600)
    world.project_config('[commands]\nls = "~/.ssh/id_rsa"\n')
    read = "cat /run/agent-sandbox/scripts/ls"
    done = world.sh(read)
    assert done.returncode == 125
    assert "it asks for more than your own settings grant: commands.ls" in done.stderr
    assert "TOP-SECRET" not in done.stdout
    # The control: once trusted, it would be there.
    assert world.ctl("trust").returncode == 0
    assert world.sh(read).stdout == "TOP-SECRET\n"


def test_cannot_lift_a_rule_from_the_project(world: World) -> None:
    world.global_config("[commands]\nrm = false\n")
    world.project_config("[commands]\nrm = true\n")
    done = world.sandbox("rm", "--version")
    assert done.returncode == 125
    assert "commands.rm = true" in done.stderr
    assert world.ctl("trust").returncode == 0
    assert world.sandbox("rm", "--version").returncode == 0


def test_cannot_plant_a_link_in_place_of_a_script(world: World) -> None:
    """An earlier run swaps the user's wrapper in the project for a link to a key."""
    world.write("~/.ssh/id_rsa", "TOP-SECRET\n", 0o600)
    world.write("wrap.sh", "echo fine\n")
    assert world.sandbox("--cmd", "ls=./wrap.sh", "ls").stdout == "fine\n"
    world.sh("rm wrap.sh; ln -s ~/.ssh/id_rsa wrap.sh")
    done = world.sh("cat /run/agent-sandbox/scripts/ls", "--cmd", "ls=./wrap.sh")
    assert done.returncode == 125
    assert "a sandbox can write there" in done.stderr
    # The control: nothing but that check is in the way.
    link = world.link("~/mine.sh", world.home / ".ssh/id_rsa")
    done = world.sh("cat /run/agent-sandbox/scripts/ls", "--cmd", f"ls={link}")
    assert done.stdout == "TOP-SECRET\n"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("nope=false", "command not found in PATH"),
        ("ls=missing.sh", "no such script"),
        ("ls=.", "not a regular file"),
        ("rm=@git", "is for 'git'"),
        ("rm", "invalid --cmd format"),
    ],
)
def test_what_cannot_be_done_stops_the_start(world: World, rule: str, said: str) -> None:
    done = world.sandbox("--cmd", rule, "echo", "started")
    assert (done.returncode, done.stdout) == (125, "")
    assert said in done.stderr


REPOSITORY = """
git init -q . && git config user.name A && git config user.email a@example.org
echo one >f && git add f && git commit -qm first && echo mine >>f
"""


def test_work_in_git_goes_on_and_none_is_lost(world: World) -> None:
    """Under each path that git has; git's own calls of itself pass."""
    world.outside("sh", "-c", REPOSITORY)
    losing = (
        "git reset --hard", "/usr/bin/git checkout .", "env git restore f",
        "$(git --exec-path)/git checkout -- f", "$(git --exec-path)/git-checkout -- f",
        "git -c alias.x='!git checkout' x .", "/bin/git -C . reset --hard",
        "cd /tmp && git -C $OLDPWD reset --hard", "GIT_DIR=$PWD/.git git checkout -f",
    )  # fmt: skip
    script = "; ".join(f"({line}) && echo LOST" for line in losing)
    done = world.sh(script, "--cmd", "git=@git")
    assert done.stdout == ""
    assert done.stderr.count(BLOCKED) == len(losing), done.stderr
    assert "mine" in (world.project / "f").read_text()
    # Each of them loses it without the rule.
    for line in losing:
        world.sh(line)
        assert "mine" not in (world.project / "f").read_text(), line
        with (world.project / "f").open("a") as file:
            file.write("mine\n")
    work = """set -e
        git stash -q; ! grep mine f; git stash apply -q; grep mine f
        git switch -q -c topic; git commit -qam second; git switch -q -; git merge -q topic
        git rebase -q HEAD~1; git clone -q . /tmp/copy; git -C /tmp/copy log --format=%s -1
        git worktree add -q /tmp/tree -b other; git worktree remove /tmp/tree; git gc -q"""
    done = world.sh(work, "--cmd", "git=@git")
    assert (done.returncode, done.stdout) == (0, "mine\nsecond\n"), done.stderr


def test_the_plan_tells_of_rules(world: World) -> None:
    done = world.sandbox("--cmd", "rm=false,git=@git", "--debug", "true")
    assert "command git = @git  [flag --cmd]" in done.stderr
    assert "covered    /usr/bin/rm" in done.stderr
    done = world.sandbox("--cmd", "rm=false", "--dry-run", "rm")
    assert "--ro-bind /run/agent-sandbox/commands/rm /usr/bin/rm" in done.stdout
    done = world.ctl("why", "--cmd", "rm=false", "/usr/bin/rm")
    assert "commands.rm (flag --cmd)" in done.stdout


def test_a_program_uses_rules(world: World) -> None:
    code = (
        "from agent_sandbox import Policy, Sandbox\n"
        "box = Sandbox(Policy(project='.', commands={'rm': False, 'git': '@git'}))\n"
        "for argv in (['rm', 'x'], ['git', 'stash', 'drop'], ['git', '--version']):\n"
        "    print(box.run(argv, capture=True).code)\n"
    )
    done = world.python(code)
    assert done.stdout.split() == ["126", "126", "0"], done.stderr
