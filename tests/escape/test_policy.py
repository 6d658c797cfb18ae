"""Policy: what a sandbox writes is not believed when it asks for more, and stays as it was."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from conftest import closed_sockets
from escape.attack import Attack, Scene, Trial, guard, hide, prints, steps, trials

if TYPE_CHECKING:
    from escape.attack import Step

pytestmark = pytest.mark.kernel

TCP = """
import socket
from contextlib import nullcontext
try: socket.create_connection(("127.0.0.1", int(port)), 3).send(b"x")
except OSError as error: print(error)
"""
CALL = f"/usr/bin/python3 -c 'port='$port'\n{TCP}'"


def port(scene: Scene) -> None:
    """A host service on loopback."""
    scene.facts["port"] = str(scene.listen(("127.0.0.1", 0), family=socket.AF_INET).port)


def engine(scene: Scene) -> None:
    """A container engine."""
    scene.listen("~/d.sock")
    scene.caller["DOCKER_HOST"] = f"unix://{scene.home}/d.sock"


def settings(text: str) -> Step:
    """The user's own policy file."""
    return lambda s: s.global_config(text)


def login(scene: Scene) -> None:
    """The user is logged in with Claude Code; its profile hands that in, if it is a login."""
    token = {"accessToken": scene.secret, "refreshToken": "r", "expiresAt": 1}
    text = json.dumps({"claudeAiOauth": token})
    scene.keep_hidden(scene.guard("~/.claude/.credentials.json", text, 0o600))


def trusted(scene: Scene) -> None:
    """The user has read the project's file and agreed to it."""
    scene.hide("~/private/key")
    scene.write("~/data/file")
    scene.write("~/other.toml")
    scene.project_config('[filesystem]\nro = ["~/data"]\n')
    assert scene.ctl("trust").returncode == 0


def plant(text: str, suffix: str = "toml") -> str:
    """A script that leaves a policy file for the next run."""
    return f"cat > .agent-sandbox.{suffix} <<'END'\n{text}\nEND"


def config_home_in_the_project(scene: Scene) -> None:
    """The user's own policy file is looked for in the project."""
    scene.caller.update(XDG_CONFIG_HOME=f"{scene.project}/.config")


# Needs no trust, where it is believed.
OWN_SETTINGS = """
mkdir -p .config/agent-sandbox
printf '[filesystem]\\nrw = ["~/private"]\\n' > .config/agent-sandbox/config.toml
"""

WIDENING = (
    Attack(
        name="new-policy-file", invariant=4, what="rw on a private directory",
        setup=hide("~/private/key"), script=plant('[filesystem]\nrw = ["~/private"]'),
        then="cat $home/private/key", may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="new-policy-file-json", invariant=4, what="the same in JSON",
        setup=hide("~/private/key"),
        script=plant('{"filesystem": {"ro": ["~/priv*"]}}', "json"),
        then="cat $home/private/key", may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="new-policy-file-jsonc", invariant=4, what="the same in JSON with comments",
        setup=hide("~/private/key"),
        script=plant('{"filesystem": {"ro": ["~/private",],},} // please', "jsonc"),
        then="cat $home/private/key", may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="host-home-from-a-file", invariant=4, what='home = "host"',
        setup=hide("~/notes"), script=plant('home = "host"'), then="cat $home/notes",
        may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="whole-host-from-a-file", invariant=4, what="preset @host",
        setup=hide("{base}/elsewhere/file"), script=plant('[filesystem]\npresets = ["@host"]'),
        then="cat $base/elsewhere/file", may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="variables-from-a-file", invariant=7, what="env.keep of a token",
        setup=lambda s: s.caller.update(API_TOKEN=s.secret),
        script=plant('[env]\nkeep = ["API_TOKEN"]'), then="echo $API_TOKEN", may_stop=(2,),
        without="trust + held names",
    ),
    Attack(
        name="profile-from-a-file", invariant=4, what="another agent's login",
        setup=login, script=plant('profile = "claude"'),
        then="cat $home/.claude/.credentials.json", may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="engine-from-a-file", invariant=5, what="docker = true", setup=engine,
        script=plant("docker = true"),
        then="/usr/bin/python3 -c 'import socket as s; s.socket(1).connect(\"/run/docker.sock\")'",
        may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="filter-from-a-file", invariant=7, what='seccomp = "off"', python=True,
        script="""
try: open(".agent-sandbox.toml", "w").write('seccomp = "off"\\n')
except OSError as error: print(error)
""",
        then="""
import ctypes
print("came through" if ctypes.CDLL(None).syscall(425, 4, (ctypes.c_uint32 * 30)()) >= 0 else "no")
""", may_stop=(2,), escaped=prints("came through"), without="trust + held names",
    ),
    Attack(
        name="network-from-a-file", invariant=10, what="over the user's own off",
        setup=steps(port, settings('network = "off"\n')), script=plant('network = "on"'),
        then=CALL, may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="unprotect-git-from-a-file", invariant=9, what="preset !@git",
        setup=lambda s: [s.outside("git", "init", "-q"), s.watch(s.project / ".git/hooks/x")],
        script=plant('[filesystem]\npresets = ["!@git"]'), then="echo evil > .git/hooks/x",
        may_stop=(2,), without="trust + held names",
    ),
    Attack(
        name="exact-rule-against-a-glob", invariant=3, what="lift the user's own flag",
        setup=hide(".env"), flags=("--exclude", "**/.env*"),
        script=plant('[filesystem]\nrw = [".env"]'), then="cat .env", may_stop=(2,),
        without="trust + held names",
    ),
    Attack(
        name="deeper-rule-against-a-directory", invariant=3, what="show a part of it again",
        setup=hide("secrets/key"), flags=("--exclude", "secrets"),
        script=plant('[filesystem]\nro = ["secrets/key"]'), then="cat secrets/key", may_stop=(2,),
        without="trust + held names",
    ),
    Attack(
        name="second-policy-file", invariant=10, what="another format beside the user's own",
        setup=steps(port, lambda s: s.project_config('network = "off"\n')),
        script=plant("{}", "json"), then=CALL, may_stop=(2,),
        without="one policy file in a place + held names",
    ),
    Attack(
        name="change-what-is-trusted", invariant=4, what="in a run that uses another file",
        setup=trusted, first_flags=("-c", "{home}/other.toml"),
        script=plant('[filesystem]\nro = ["~/private"]'), then="cat $home/private/key",
        may_stop=(2,), without="trust in a content + read-only mounts",
    ),
    Attack(
        name="own-settings-in-the-project", invariant=4, what="the project is ~/.config",
        setup=steps(hide("~/private/key"), lambda s: s.enter(s.mkdir("~/.config"))),
        host=lambda s: s.enter(s.project),
        script="mkdir -p agent-sandbox;"
        " printf '[filesystem]\\nrw = [\"~/private\"]\\n' > agent-sandbox/config.toml",
        then="cat $home/private/key", without="own settings hidden",
    ),
    Attack(
        name="own-settings-in-a-writable-directory", invariant=4, what="a run with rw ~/.config",
        setup=lambda s: [s.hide("~/private/key"), s.mkdir("~/.config")],
        first_flags=("--rw", "~/.config"),
        script="cd $home/.config; mkdir -p agent-sandbox;"
        " printf '[filesystem]\\nrw = [\"~/private\"]\\n' > agent-sandbox/config.toml",
        then="cat $home/private/key", without="own settings hidden",
    ),
    Attack(
        name="own-settings-by-variable", invariant=4, what="XDG_CONFIG_HOME lies in the project",
        setup=steps(hide("~/private/key"), config_home_in_the_project), script=OWN_SETTINGS,
        then="cat $home/private/key", may_stop=(1, 2),
        without="own settings hidden + own settings outside of the project",
    ),
    Attack(
        name="own-settings-by-a-later-variable", invariant=4, what="set after the first run",
        setup=hide("~/private/key"), script=OWN_SETTINGS, host=config_home_in_the_project,
        then="cat $home/private/key", may_stop=(2,), without="own settings outside of the project",
    ),
    Attack(
        name="named-file-of-the-project", invariant=4, what="-c names what a sandbox has changed",
        setup=lambda s: [s.hide("~/private/key"), s.write("ci/policy.toml")],
        script="printf '[filesystem]\\nro = [\"~/private\"]\\n' > ci/policy.toml",
        then="cat $home/private/key", then_flags=("-c", "ci/policy.toml"), may_stop=(2,),
        without="trust",
    ),
    Attack(
        name="named-directory-is-a-link", invariant=4, what="-C names what a sandbox has replaced",
        setup=lambda s: [s.hide("~/private/key"), s.mkdir("front")],
        script="rmdir front; ln -s $home/private front",
        then="cat key; echo evil > key", then_flags=("-C", "front"), may_stop=(2,),
        without="no link out for -C",
    ),
    Attack(
        name="repository-around-a-part", invariant=4, what="git init shows what lies above",
        setup=lambda s: [s.hide(".env"), s.mkdir("part")],
        first_flags=("--exclude", ".env"), script="git init -q .",
        host=lambda s: s.enter(s.project / "part"), then="cat ../.env",
        without="excludes of runs above",
    ),
    Attack(
        name="submodule-of-a-forged-repository", invariant=4, what="core.worktree in a file",
        setup=lambda s: [s.hide(".env"), s.mkdir("part")],
        first_flags=("--exclude", ".env"),
        script="printf '[core]\\n\\tworktree = part\\n' > config; echo 'gitdir: ..' > part/.git",
        host=lambda s: s.enter(s.project / "part"), then="cat ../.env; echo evil > ../x",
        without="quarantine",
    ),
)  # fmt: skip

TAMPERING = (
    Attack(
        name="policy-file-in-use", invariant=4, what="append, replace, remove",
        setup=lambda s: s.watch(s.project_config('network = "off"\n')),
        script="echo x >> .agent-sandbox.toml; echo > y; mv -f y .agent-sandbox.toml;"
        " rm -f .agent-sandbox.toml",
        without="policy files in use stay",
    ),
    Attack(
        name="named-policy-file-in-use", invariant=4, what="the file of -c in the project",
        setup=guard("ci/policy.toml"), flags=("-c", "ci/policy.toml"),
        script="echo x >> ci/policy.toml; rm -f ci/policy.toml; rm -rf ci",
        without="policy files in use stay",
    ),
    Attack(
        name="own-settings-in-use", invariant=4, what="with ~/.config writable",
        setup=lambda s: s.watch(s.global_config('network = "off"\n')),
        flags=("--rw", "~/.config"),
        script="echo x >> $home/.config/agent-sandbox/config.toml;"
        " mv $home/.config/agent-sandbox $home/.config/x",
        without="own settings hidden",
    ),
    Attack(
        name="trust-from-inside", invariant=4, what="write a record, with ~/.local writable",
        setup=lambda s: [s.mkdir("~/.local/state"), s.watch(s.state / "trust" / "record")],
        flags=("--rw", "~/.local"),
        script="mkdir -p $state/trust; echo evil > $state/trust/record",
        without="own state hidden",
    ),
    Attack(
        name="state-of-other-projects", invariant=3, what="with the real home shown",
        setup=steps(
            lambda s: s.hide(s.state / "homes/none/other/+home/note"),
            lambda s: s.state.chmod(0o700),
        ),
        flags=("--home=host",), script="cat $state/homes/none/other/+home/note",
        without="own state hidden",
    ),
    Attack(
        name="policy-file-not-in-use", invariant=4, what="remove it while -c names another",
        setup=lambda s: [s.watch(s.project_config('network = "off"\n')), s.write("~/other.toml")],
        flags=("-c", "{home}/other.toml"), script="rm -f .agent-sandbox.toml",
        without="mounts on files",
    ),
)  # fmt: skip

ATTACKS = WIDENING + TAMPERING


@trials(WIDENING)
def test_cannot_open_the_cage_of_a_later_run(trial: Trial) -> None:
    with closed_sockets(absent=True) if "@host" in trial.attack.what else nullcontext():
        trial.run()


@trials(TAMPERING)
def test_cannot_change_what_decides_about_later_runs(trial: Trial) -> None:
    trial.run()
