"""Whoever is inside can read where they are; and the shims, from inside and from outside."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from conftest import must_work

from .conftest import World

pytestmark = pytest.mark.kernel
README = "/run/agent-sandbox/README.md"


def test_a_page_says_what_is_allowed(world: World) -> None:
    """The project, what flags have opened and hidden, the network, and flags to ask for."""
    world.write("~/shared/a")
    world.write(".env", "SECRET")
    shared = str(world.home / "shared")
    done = world.sh(f"cat {README}", "--rw", shared, "--exclude", ".env", "--network=off")
    assert done.returncode == 0, done.stderr
    for said in (
        str(world.project),
        shared,
        "`.env`",
        "There is none",
        "--allow HOST",
        "--rw PATH",
    ):
        assert said.replace("`.env`", f"`{world.project}/.env`") in done.stdout
    assert "SECRET" not in done.stdout
    assert "The host's network is shared" in world.sh(f"cat {README}").stdout


def test_the_page_is_there_with_every_root(world: World) -> None:
    """Also with the host's own tree as the root."""
    world.global_config('[filesystem]\npresets = ["@host"]\n')
    assert world.sh(f"head -n 1 {README}").stdout == "# You are in a sandbox\n"


def test_cannot_change_the_page(world: World) -> None:
    """It would tell the next command, or a model's next turn, something else.

    Control: the same words change a file of one's own.
    """
    script = """
        change() { rm -f $1; mv $1 $1.x; echo planted > $1; chmod 777 $1; ln -sf /tmp/x $1; }
        echo plain > own; change own; cat own.x 2>/dev/null; cat own
        change %s; head -n 1 %s
    """
    done = world.sh(script % (README, README))
    assert done.stdout.splitlines()[-1] == "# You are in a sandbox"
    assert "planted" not in done.stdout.splitlines()[-1]
    assert not (world.project / "own").is_file()  # it was removed, and is a link now


def test_check_prints_the_page_when_asked(world: World) -> None:
    """-v adds it; outside there is none."""
    source = str(world.runner.source)
    line = shlex.join(world.argv("--check", "-v"))
    done = world.sh(line, "--ro", source)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("inside sandbox\n\n# You are in a sandbox\n")
    done = world.sandbox("--check", "-v")
    assert (done.stdout, done.returncode) == ("outside sandbox\n", 1)
    assert world.sandbox("-v").stdout.startswith("agent-sandbox ")


def test_a_nested_start_points_to_the_page(world: World) -> None:
    source = str(world.runner.source)
    done = world.sh(shlex.join(world.argv("true")), "--ro", source)
    assert done.returncode == 125
    assert README in done.stderr


def test_a_refused_request_points_to_the_page(world: World) -> None:
    """What the proxy says, in HTTP; the hint with the flag stays."""
    must_work(Path("/usr/bin/python3").exists(), "needs the system's python3")
    world.write(
        "ask.py",
        "import urllib.request as r, urllib.error as e\n"
        "try: print(r.urlopen('http://refused.example/', timeout=30).status)\n"
        "except e.HTTPError as error: print(error.code, error.read().decode())\n",
    )
    done = world.sandbox("--network=allow", "--allow", "other.example", "python3", "ask.py")
    assert done.stdout.startswith("403 "), done.stderr
    assert "--allow 'refused.example" in done.stdout
    assert done.stdout.rstrip().endswith(f"see {README}")


# --- shims


@pytest.fixture
def shimmed(world: World) -> dict[str, str | None]:
    """A home with a shim for `agentx`; the environment in which its name can be typed."""
    text = f'#!/bin/sh\nexec {shlex.join(world.argv())} "$@"\n'
    world.write("~/.local/bin/agent-sandbox", text, 0o755)
    world.write("~/.local/bin/agentx", '#!/bin/sh\necho "real $#"; [ $# = 0 ] || "$@"\n', 0o755)
    shims = world.home / ".local/share/agent-sandbox/shims"
    env: dict[str, str | None] = {"PATH": f"{shims}:{world.home}/.local/bin:/usr/bin:/bin"}
    done = world.ctl("shim", "install", "agentx", env=env)
    assert done.returncode == 0, done.stderr
    return env


def test_a_shim_starts_a_sandbox_and_in_it_the_program(
    world: World, shimmed: dict[str, str | None]
) -> None:
    """Typed inside again, it is the program: no loop, no sandbox in a sandbox."""
    done = world.outside("agentx", "test", "-e", "/run/agent-sandbox/marker", env=shimmed)
    assert (done.returncode, done.stdout) == (0, "real 3\n"), done.stderr
    done = world.outside("agentx", "agentx", "agentx", env=shimmed)
    assert (done.returncode, done.stdout) == (0, "real 2\nreal 1\nreal 0\n"), done.stderr
    plain = {**shimmed, "AGENT_SANDBOX": "false"}
    done = world.outside("agentx", "test", "-e", "/run/agent-sandbox/marker", env=plain)
    assert (done.returncode, done.stdout) == (1, "real 3\n")


def test_status_asks_the_program_in_a_sandbox(world: World, shimmed: dict[str, str | None]) -> None:
    """A program that PATH leads to may be a stranger's."""
    spy = "#!/bin/sh\necho 1.2.3\ntouch ~/spied\n[ -e /run/agent-sandbox/marker ] || echo x >&2\n"
    world.write("~/.local/bin/agentx", spy, 0o755)
    done = world.ctl("shim", "status", env=shimmed)
    assert done.returncode == 0, done.stderr
    assert "1.2.3" in done.stdout
    assert not (world.home / "spied").exists()


@pytest.mark.parametrize("opened", ["~/.local/share", "~/.local"])
def test_cannot_change_a_shim(world: World, shimmed: dict[str, str | None], opened: str) -> None:
    """The host would run it, whatever the user opened around it.

    Control: a file beside it can be written, so it is the rule that holds.
    """
    share = world.home / ".local/share"
    before = (share / "agent-sandbox/shims/agentx").read_text()
    script = f"""
        cd {share} || exit
        echo planted > agent-sandbox/shims/agentx
        echo planted > agent-sandbox/shims/git
        rm -rf agent-sandbox/shims/agentx
        mv agent-sandbox away && cp -r away agent-sandbox && echo planted > agent-sandbox/shims/git
        echo written > beside
    """
    world.sh(script, "--rw", opened, env=shimmed)
    assert (share / "beside").read_text() == "written\n"
    assert (share / "agent-sandbox/shims/agentx").read_text() == before
    assert not (share / "agent-sandbox/shims/git").exists()


def test_cannot_wait_for_the_first_shim(world: World) -> None:
    """A program beside it would come first on PATH with it.

    Control: another name can be made there.
    """
    share = world.mkdir("~/.local/share")
    script = f"""
        cd {share} || exit
        for name in agent-sandbox other; do
            mkdir -p $name/shims && echo '#!/bin/sh' > $name/shims/git
        done
    """
    world.sh(script, "--rw", str(share))
    assert (share / "other/shims/git").exists()
    assert not (share / "agent-sandbox").exists()


def test_cannot_make_a_later_run_show_more_in_place_of_shims(
    world: World, shimmed: dict[str, str | None]
) -> None:
    """A link where our directory is looked for shows neither secrets nor what a sandbox chose.

    Control: the user's own link to a plain directory is followed.
    """
    share = world.home / ".local/share"
    world.write("~/.ssh/id", "SECRET")
    world.write("~/other/id", "OTHER")
    (share / "agent-sandbox").rename(share / "moved")
    place = world.link("~/.local/share/agent-sandbox", world.home / "other")
    look = f"cat {place}/id"
    assert world.sh(look, env=shimmed).stdout == "OTHER"
    # Now a sandbox may have made it.
    assert world.sh(look, "--rw", str(share), env=shimmed).stdout == ""
    place.unlink()
    world.link("~/.local/share/agent-sandbox", world.home / ".ssh")
    assert world.sh(look, env=shimmed).stdout == ""
