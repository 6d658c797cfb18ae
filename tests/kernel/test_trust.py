"""A project's own policy file may only tighten, unless the user has trusted exactly that content."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import pytest

from kernel.conftest import World, toml

pytestmark = pytest.mark.kernel

WIDENING = {
    "network": 'network = "on"',
    "docker": "docker = true",
    "home": 'home = "host"',
    "profile": 'profile = "claude"',
    "rw": '[filesystem]\nrw = ["~/data"]',
    "ro": '[filesystem]\nro = ["~/data"]',
    "rw over a global ro": '[filesystem]\nrw = ["fixed"]',
    "rw over a global exclude": '[filesystem]\nrw = ["hidden"]',
    "ro over a global exclude": '[filesystem]\nro = ["hidden"]',
    "ro below a global exclude": '[filesystem]\nro = ["hidden/f"]',
    "glob": '[filesystem]\nrw = ["fix*", "~/da*"]',
    "preset that grants": '[filesystem]\npresets = ["@host"]',
    "preset that protects": '[filesystem]\npresets = ["!@git"]',
    "lint": '[filesystem]\npresets = ["!@lint/all"]',
    "all": '[filesystem]\npresets = ["!@all", "@base"]',
    "env.keep": '[env]\nkeep = ["SECRET_TOKEN"]',
    "env.set": '[env]\nset = { NODE_OPTIONS = "--require ./x.js" }',
    "timeout": "[limits]\ntimeout = 900",
}
GLOBAL = toml(
    {
        "network": "off",
        "filesystem": {"ro": ["fixed"], "exclude": ["hidden"]},
        "limits": {"timeout": "1m"},
    }
)


def prepare(world: World) -> None:
    world.write("~/data/f", "s")
    world.write("fixed", "old")
    world.write("hidden/f", "s")
    world.global_config(GLOBAL)


@pytest.mark.parametrize("key", WIDENING)
def test_cannot_widen_from_a_project_file(world: World, key: str) -> None:
    """Each key that asks for more than the user's own settings is refused by name, with 125."""
    prepare(world)
    world.project_config(WIDENING[key])
    done = world.sh("touch ran")
    assert done.returncode == 125, done.stdout
    assert "asks for more than your own settings grant" in done.stderr
    assert "sandboxctl trust" in done.stderr
    assert not world.path("ran").exists()


TIGHTENING = {
    "network": ('network = "off"', "[ $(grep -c : /proc/net/dev) = 1 ]"),
    "home": ('home = "ephemeral"', "[ ! -e ~/note ]"),
    "exclude": ('[filesystem]\nexclude = ["f"]', "! cat f"),
    "ro": ('[filesystem]\nro = ["f"]', "cat f && ! touch f"),
    "rw": ('[filesystem]\nrw = ["f"]', "touch f"),
    "strict": ('[filesystem]\npresets = ["@git-strict", "!@toolchains"]', "true"),
    "limits": ("[limits]\ntimeout = 30", "true"),
    "profile none": ('docker = "off"', "true"),
}


@pytest.mark.parametrize("key", TIGHTENING)
def test_can_tighten_from_a_project_file(world: World, key: str) -> None:
    """What takes rights away needs nobody's trust: the control of the refusals above."""
    text, check = TIGHTENING[key]
    world.write("f", "old")
    world.sh("touch ~/note")
    world.project_config(text)
    done = world.sh(check)
    assert done.returncode == 0, done.stderr
    assert "agent-sandbox:" not in done.stderr


@pytest.mark.parametrize("suffix", ["toml", "json", "jsonc"])
def test_can_trust_exactly_one_content(world: World, suffix: str) -> None:
    """`sandboxctl trust` admits a file; any change of it takes the trust back."""
    data = world.write("~/data/f", "s")
    text = {
        "toml": '[filesystem]\nrw = ["~/data"]\n',
        "json": '{"filesystem": {"rw": ["~/data"]}}',
        "jsonc": '{"filesystem": {"rw": ["~/data"],}} // yes',
    }[suffix]
    world.project_config(text, suffix)
    assert world.sh("true").returncode == 125
    assert world.ctl("trust").returncode == 0
    assert world.sh("echo x > ~/data/f").returncode == 0
    assert data.read_text() == "x\n"
    world.project_config(text + "\n", suffix)
    assert world.sh("true").returncode == 125
    world.project_config(text, suffix)
    assert world.sh("true").returncode == 0


def test_trust_is_bound_to_the_place(world: World) -> None:
    """The same content in another project is not trusted."""
    text = '[filesystem]\nro = ["~/data"]\n'
    world.write("~/data/f", "s")
    world.project_config(text)
    assert world.ctl("trust").returncode == 0
    other = world.mkdir("~/work/other")
    world.write(other / ".agent-sandbox.toml", text)
    assert world.sh("true", cwd=other).returncode == 125
    assert world.sh("true").returncode == 0


def test_can_list_and_remove_trust(world: World) -> None:
    """--list says what is trusted and whether it still is; --remove takes it back."""
    path = world.project_config('docker = "on"\n')
    assert world.ctl("trust").stdout == f"trusted as it is now: {path}\n"
    listed = world.ctl("trust", "--list").stdout
    assert str(path) in listed
    assert "current" in listed
    world.project_config('docker = "on"\n# more\n')
    assert "changed since" in world.ctl("trust", "--list").stdout
    assert world.ctl("trust", "--remove").returncode == 0
    assert world.ctl("trust", "--list").stdout == ""
    again = world.ctl("trust", "--remove")
    assert again.returncode == 125
    assert "not trusted" in again.stderr


def test_cannot_trust_nothing_or_nonsense(world: World) -> None:
    """No file, a missing file and a file with errors are refused."""
    assert world.ctl("trust").returncode == 125
    assert world.ctl("trust", "absent.toml").returncode == 125
    world.project_config("network = 7\n")
    done = world.ctl("trust")
    assert done.returncode == 125
    assert "network" in done.stderr
    assert world.ctl("trust", "--list").stdout == ""


def test_cannot_widen_the_next_run_with_a_new_file(world: World) -> None:
    """A policy file that a sandbox creates is read by the next start and refused."""
    world.write("~/data/f", "s")
    made = world.sh("printf '[filesystem]\\nrw = [\"~/data\"]\\n' > .agent-sandbox.toml")
    if world.path(".agent-sandbox.toml").exists():
        done = world.sh("cat ~/data/f")
        assert done.returncode == 125
        assert "asks for more" in done.stderr
    else:
        assert made.returncode != 0


@pytest.mark.parametrize("suffix", ["json", "jsonc"])
def test_a_second_file_beside_the_first_cannot_widen(world: World, suffix: str) -> None:
    """Planting another format next to the user's file is an error at the next start, not a choice."""
    world.write("~/data/f", "s")
    world.project_config('network = "off"\n')
    world.sh(f'echo \'{{"network": "on"}}\' > .agent-sandbox.{suffix}')
    done = world.sh("[ $(grep -c : /proc/net/dev) -gt 1 ]")
    assert done.returncode != 0
    assert not world.path(f".agent-sandbox.{suffix}").exists() or "both exist" in done.stderr


def test_cannot_trust_from_inside(world: World) -> None:
    """The records lie where no sandbox can write; what is written in the private home counts not."""
    world.write("~/data/f", "s")
    world.project_config('[filesystem]\nexclude = ["none"]\n')
    source = world.runner.source
    entry = source / "agent_sandbox" / "cli" / "entry.py"
    inner = f"{world.runner.python} -I -S {entry} ctl trust {world.project}/wide.toml"
    world.write("wide.toml", '[filesystem]\nrw = ["~/data"]\n')
    done = world.sh(inner, "--ro", str(source))
    world.path(".agent-sandbox.toml").write_text(world.path("wide.toml").read_text())
    assert world.sh("cat ~/data/f").returncode == 125, done.stdout
    assert not (world.state / "trust").exists()


def test_cannot_read_or_follow_a_file_that_is_a_link(world: World) -> None:
    """A project file that is a link to the user's own trusted file gains nothing by it."""
    world.write("~/data/f", "s")
    mine = world.write("~/mine.toml", '[filesystem]\nro = ["~/data"]\n')
    assert world.ctl("trust", str(mine)).returncode == 0
    world.link(".agent-sandbox.toml", mine)
    assert world.sh("cat ~/data/f").returncode == 125


def test_explicit_config_is_the_users_own_word(world: World) -> None:
    """A file named with -c on the command line needs no trust; the same text found does."""
    world.write("~/data/f", "s")
    text = '[filesystem]\nro = ["~/data"]\n'
    given = world.write("~/given.toml", text)
    assert world.sh("cat ~/data/f", "-c", str(given)).stdout == "s"
    world.project_config(text)
    assert world.sh("cat ~/data/f").returncode == 125


def test_flags_are_not_bound_by_an_untrusted_file(world: World) -> None:
    """What the user says on the command line wins over a project's tightening."""
    world.project_config('network = "off"\n[filesystem]\nexclude = ["f"]\n')
    world.write("f", "old")
    done = world.sh("cat f; grep -c : /proc/net/dev", "--rw", "f", "--network=on")
    assert done.stdout.startswith("old"), done.stderr
    assert int(done.stdout[3:]) > 1


@pytest.mark.parametrize(
    ("flag", "rule"),
    [
        (("--exclude", "**/.env*"), 'rw = [".env", "config/.env"]'),
        (("--exclude", "config"), 'rw = ["config/.env"]'),
        (("--ro", "config"), 'rw = ["config/.env"]'),
    ],
)
def test_cannot_lift_the_users_flags_from_a_project_file(
    world: World, flag: tuple[str, str], rule: str
) -> None:
    """An exact or a deeper rule of a planted file beats a flag by precedence, but needs trust."""
    world.write(".env", "SECRET")
    world.write("config/.env", "SECRET")
    world.runner.own(world.project)
    world.project_config(f"[filesystem]\n{rule}\n")
    done = world.sh("cat .env config/.env; echo x > config/.env", *flag)
    assert done.returncode == 125
    assert "asks for more" in done.stderr
    assert world.path("config/.env").read_text() == "SECRET"
