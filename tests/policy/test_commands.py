"""Command rules: what may be written, who may write it, and what stands where."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from agent_sandbox.cli import options
from agent_sandbox.errors import PolicyError
from agent_sandbox.host import commands as host
from agent_sandbox.host.locate import Locator
from agent_sandbox.policy import commands, merge
from agent_sandbox.policy.commands import DIRECTORY, REAL, Place, Program, Programs
from agent_sandbox.policy.model import FLAGS, PROJECT, Mount, Plan, Setting, Source

from .facts import CWD, facts, layer, layers, policy_of
from .facts import a_match as match

if TYPE_CHECKING:
    from pathlib import Path

SHELL = Place(covered=("/usr/bin/sh",), file="/usr/bin/dash")
STARTER = Place(covered=("/usr/bin/env",), file="/usr/bin/env")
GIT = Place(covered=("/usr/bin/git",), file="/usr/bin/git")
RM = Place(covered=("/usr/bin/rm",), file="/usr/bin/rm")
LS = Place(covered=("/usr/bin/ls",), file="/usr/bin/busybox")


@pytest.mark.parametrize(
    ("written", "rules"),
    [
        (["rm=false"], {"rm": False}),
        (["rm=false", "git=@git"], {"rm": False, "git": "@git"}),
        (["rm=false,git=@git,ls=true"], {"rm": False, "git": "@git", "ls": True}),
        (["npm=~/wrap.sh", "x=./a=b"], {"npm": "~/wrap.sh", "x": "./a=b"}),
        (["rm=true", "rm=false"], {"rm": False}),
    ],
)
def test_flags_are_pairs(written: list[str], rules: dict[str, object]) -> None:
    """Repeatable, and several in one with commas."""
    words = [word for text in written for word in ("--cmd", text)]
    assert options.parse([*words, "x"]).values["commands"].value == rules


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("rm", "invalid --cmd format"),
        ("rm=", "invalid --cmd format"),
        ("rm=false,", "invalid --cmd format"),
        ("=false", "empty key"),
        ("a/b=false", "not the name of a command"),
        ("..=false", "not the name of a command"),
        ("a\nb=false", "not the name of a command"),
        ("rm=@git", "is for 'git'"),
        ("rm=@rm", "unknown command preset"),
        ("git=@svn", "unknown command preset"),
    ],
)
def test_a_malformed_flag_is_named(written: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said) as caught:
        options.parse(["--cmd", written, "x"])
    assert caught.value.code == "bad-command-rule"


@pytest.mark.parametrize("rule", [1, 1.5, [], ["@git"], {}, None, ""])
def test_a_rule_in_a_file_is_boolean_or_string(rule: object) -> None:
    with pytest.raises(PolicyError, match="must be boolean or string"):
        layer(PROJECT, {"commands": {"git": rule}})
    with pytest.raises(PolicyError, match="must be a table of rules"):
        layer(PROJECT, {"commands": rule if not isinstance(rule, (dict, list)) else "git"})


def test_layers_override_one_rule_at_a_time() -> None:
    policy = policy_of(
        user={"commands": {"rm": False, "git": "@git", "ls": False}},
        project={"commands": {"rm": "wrap.sh", "dd": False}},
        flags={"commands": {"ls": True}},
    )
    held = {name: (s.value, str(s.source)) for name, s in policy.commands.items()}
    assert held == {
        "rm": ("wrap.sh", "project.toml: commands"),
        "git": ("@git", "global.toml: commands"),
        "dd": (False, "project.toml: commands"),
    }
    assert policy_of(user={"commands": {}}).commands == {}


@pytest.mark.parametrize(
    ("project", "user", "asked"),
    [
        # To read a file outside, for the sandbox, is to widen: it may be a key.
        ({"npm": "wrap.sh"}, {}, ["commands.npm = 'wrap.sh'"]),
        ({"npm": "~/.ssh/id_rsa"}, {}, ["commands.npm = '~/.ssh/id_rsa'"]),
        ({"git": "wrap.sh"}, {"git": "@git"}, ["commands.git = 'wrap.sh'"]),
        ({"git": True}, {"git": "@git"}, ["commands.git = true"]),
        ({"git": True}, {"git": False}, ["commands.git = true"]),
        ({"git": "@git"}, {"git": False}, ["commands.git = '@git'"]),
        ({"git": "@git"}, {"git": "~/mine.sh"}, ["commands.git = '@git'"]),
        ({"git": False}, {"git": "@git"}, []),
        ({"git": False, "rm": False}, {}, []),
        ({"git": "@git"}, {}, []),
        ({"git": "@git"}, {"git": "@git"}, []),
        ({"git": True}, {}, []),
    ],
)
def test_cannot_take_a_rule_back_from_a_project_file(
    project: dict[str, object], user: dict[str, object], asked: list[str]
) -> None:
    """A project's file may block, and may ask for `@git`; no more (invariant 4)."""
    mine = layer(PROJECT, {"commands": project})
    assert merge.widenings(mine, layers(user={"commands": user})) == asked


def plan(
    rules: dict[str, object], *named: Program, **changes: Any
) -> Plan:  # fmt: skip
    """A plan for rules on a machine on paper."""
    from agent_sandbox.policy.resolve import resolve

    policy = policy_of(flags={"commands": rules})
    programs = Programs(named=named, shell=SHELL, starter=STARTER)
    return resolve(policy, facts(policy, commands=programs, **changes))


def covers(made: Plan) -> dict[str, str]:
    return {m.dest: m.source for m in made.mounts if m.kind == "cover"}


def at(made: Plan, dest: str) -> Mount:
    return next(m for m in made.mounts if m.dest == dest)


def test_without_rules_there_is_nothing() -> None:
    policy = policy_of()
    from agent_sandbox.policy.resolve import resolve

    made = resolve(policy, facts(policy))
    assert not [m for m in made.mounts if m.kind in ("cover", "program")]
    assert DIRECTORY not in made.env["PATH"]


def test_a_blocked_command_is_covered_and_first_on_path() -> None:
    made = plan({"rm": False}, Program(name="rm", places=(RM,)))
    assert covers(made) == {"/usr/bin/rm": f"{DIRECTORY}/rm"}
    assert made.env["PATH"] == f"{DIRECTORY}:/usr/bin"
    assert made.env["AGENT_SANDBOX_PATH"] == f"{DIRECTORY}:/usr/bin"
    assert made.moved == {}


def test_the_real_one_is_kept_before_its_place_is_covered() -> None:
    """Mounts are made in this order."""
    made = plan({"git": "@git"}, Program(name="git", places=(GIT,)))
    assert list(covers(made).items()) == [
        (f"{REAL}/git", "/usr/bin/git"), ("/usr/bin/git", f"{DIRECTORY}/git"),
    ]  # fmt: skip
    assert made.moved == {"/usr/bin/git": f"{REAL}/git"}


def test_a_link_is_covered_and_what_it_leads_to_is_not() -> None:
    """`ls` is busybox here: `rm` must go on working."""
    script = Program(name="ls", places=(LS,), script=match(f"{CWD}/w", "file"), text="#!/bin/sh\n")
    made = plan({"ls": "w"}, script)
    assert covers(made) == {"/usr/bin/ls": f"{DIRECTORY}/ls"}
    real = at(made, f"{REAL}/ls")
    assert (real.kind, real.source) == ("symlink", "/usr/bin/busybox")


def test_the_shell_and_the_starter_work_under_their_own_rules() -> None:
    programs = [Program(name="sh", places=(SHELL,)), Program(name="env", places=(STARTER,))]
    made = plan({"sh": False, "env": False}, *programs)
    assert at(made, f"{DIRECTORY}/env").source.startswith(f"#!{REAL}/sh\n")
    assert at(made, f"{REAL}/sh").source == "/usr/bin/dash"
    assert made.moved["/usr/bin/env"] == f"{REAL}/env"


def test_only_places_that_are_shown_read_only_are_covered() -> None:
    """In a writable one a mount would be in the way; in a private home the host's is not there."""
    ways = [
        Place(covered=(path,), file=path)
        for path in (f"{CWD}/bin/rm", "/home/u/bin/rm", "/usr/bin/rm")
    ]
    made = plan({"rm": False}, Program(name="rm", places=tuple(ways)))
    assert list(covers(made)) == ["/usr/bin/rm"]


def test_git_that_is_not_shown_cannot_be_guarded() -> None:
    hidden = Place(covered=("/home/u/git",), file="/home/u/git")
    with pytest.raises(PolicyError, match="not visible") as caught:
        plan({"git": "@git"}, Program(name="git", places=(hidden,)))
    assert caught.value.code == "command-rule-missing"


def test_names_are_quoted_for_the_shell(tmp_path: Path) -> None:
    name = "it's $HOME `id`"
    program = tmp_path / "x"
    program.write_text(commands.stand_in(name, rule=False, shell="/bin/sh", real=""))
    done = subprocess.run(["sh", program], capture_output=True, text=True, check=False)
    assert done.returncode == 126
    assert f"command '{name}' is blocked" in done.stderr


def executable(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def find(rules: dict[str, object], path: str, cwd: Path) -> Programs:
    source = Source(layer=FLAGS, where="flag --cmd")
    settings = {name: Setting(value=rule, source=source) for name, rule in rules.items()}
    return host.find(settings, path, cwd=str(cwd), home=str(cwd / "home"), locator=Locator())


def test_every_hit_on_path_is_found_once_and_in_order(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    one, two = executable(base / "one/x"), executable(base / "two/x")
    (base / "same").symlink_to("one")
    (base / "link").mkdir()
    (base / "link/x").symlink_to("../two/x")
    (base / "dangling").mkdir()
    (base / "dangling/x").symlink_to("nowhere")
    (base / "dir/x").mkdir(parents=True)
    executable(base / "plain/x").chmod(0o644)
    order = ["dangling", "dir", "plain", "one", "one", "same", "", "link", "two"]
    path = ":".join(f"{base}/{part}" if part else "" for part in order) + ":relative"
    relative = executable(base / "relative/x")
    (found,) = find({"x": False}, path, base).named
    assert [p.file for p in found.places] == [str(one), str(two), str(two), str(relative)]
    assert found.places[1].covered == (f"{base}/link/x", str(two))


def test_a_chain_of_links_is_followed_by_name(tmp_path: Path) -> None:
    """As with Debian's alternatives: editor → /etc/alternatives/editor → /usr/bin/vim.basic."""
    base = tmp_path.resolve()
    executable(base / "bin/vim.basic")
    (base / "alternatives").mkdir()
    (base / "alternatives/vi").symlink_to(base / "bin/vim.basic")
    (base / "bin/vi").symlink_to("../alternatives/vi")
    (base / "loop").mkdir()
    (base / "loop/vi").symlink_to("vi")
    (found,) = find({"vi": False}, f"{base}/loop:{base}/bin", base).named
    (place,) = found.places
    assert place.covered == (f"{base}/bin/vi", f"{base}/alternatives/vi")
    assert place.file == f"{base}/bin/vim.basic"


@pytest.mark.parametrize(
    ("rules", "path", "said"),
    [
        ({"nope": False}, "/usr/bin", "command not found in PATH"),
        ({"nope": "@git"}, "/usr/bin", "command not found in PATH"),
        ({"sh": False}, "", "PATH is empty"),
        ({"sh": "missing.sh"}, "/usr/bin", "no such script"),
        ({"sh": "/usr"}, "/usr/bin", "not a regular file"),
        ({"sh": "/dev/zero"}, "/usr/bin", "not a regular file"),
    ],
)
def test_what_is_missing_is_said(
    rules: dict[str, object], path: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=said):
        find(rules, path, tmp_path)


def test_a_script_is_read_as_it_is(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    (base / "w").write_bytes(b"#!/bin/sh\n\xff\xfe\n")
    (found,) = find({"sh": "w"}, "/usr/bin", base).named
    assert found.text.encode("utf-8", "surrogateescape") == b"#!/bin/sh\n\xff\xfe\n"
    os.truncate(base / "w", host.MAX_SCRIPT + 1)
    with pytest.raises(PolicyError, match="larger than 16 MiB"):
        find({"sh": "w"}, "/usr/bin", base)


def test_git_has_a_directory_of_its_own(tmp_path: Path) -> None:
    base = tmp_path.resolve()
    executable(base / "bin/git")
    own = executable(base / "libexec/git-core/git")
    (found,) = find({"git": "@git"}, f"{base}/bin", base).named
    assert [p.file for p in found.own] == [str(own)]
    (found,) = find({"git": False}, f"{base}/bin", base).named
    assert found.own == ()
