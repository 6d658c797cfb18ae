"""`sandboxctl why` and --debug tell the truth: their answers are compared with what happens."""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import socket

import pytest

from kernel.conftest import World, toml

pytestmark = pytest.mark.kernel

EXPECT = {
    "rw": (True, True),
    "ro": (True, False),
    # Private to the sandbox: the host's file of that name is not there.
    **dict.fromkeys(("exclude", "absent", "private"), (False, False)),
}


def ask(world: World, target: str, *flags: str) -> dict[str, str]:
    done = world.ctl("why", *flags, "--json", target)
    assert done.returncode == 0, done.stderr
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def test_why_agrees_with_reality(world: World) -> None:
    """For each path: what `why` says is what a process inside finds."""
    for name in (
        "plain",
        "fixed/f",
        "hidden/f",
        "hidden/open/f",
        "pyproject.toml",
        "~/data/f",
        "~/none/f",
    ):
        world.write(name, "x")
    world.link("alias", "fixed/f")
    world.global_config(
        toml(
            {
                "filesystem": {
                    "ro": ["fixed", "~/data"],
                    "exclude": ["hidden"],
                    "rw": ["hidden/open"],
                }
            }
        )
    )
    paths = [
        "plain", "fixed/f", "hidden/f", "hidden/open/f", "pyproject.toml", "alias", "~/data/f",
        "~/none/f", "/usr/bin/env", "/etc/passwd", "/boot",
        *(["/etc/shadow"] if world.runner.uid == 0 else []),
    ]  # fmt: skip
    expanded = [p.replace("~", str(world.home)) for p in paths]
    script = 'for p in "$@"; do r=0; w=0; head -c0 "$p" 2>/dev/null && r=1; [ -d "$p" ] && ls "$p" >/dev/null && r=1; [ -w "$p" ] && w=1; echo $r$w; done'
    real = world.sandbox("sh", "-c", script, "-", *expanded).stdout.split()
    for path, seen in zip(paths, real, strict=True):
        verdict = ask(world, path)["verdict"]
        assert EXPECT[verdict] == (seen[0] == "1", seen[1] == "1"), (path, verdict, seen)


def test_why_names_the_rule_and_its_file(world: World) -> None:
    """The answer says which line of which file decided, for people and for programs."""
    world.write("secret", "s")
    config = world.global_config(toml({"filesystem": {"exclude": ["secret"]}}))
    answer = ask(world, "secret")
    assert answer["verdict"] == "exclude"
    assert str(config) in answer["rule"]
    assert answer["target"] == str(world.project / "secret")
    text = world.ctl("why", "secret").stdout
    assert "hidden" in text
    assert f"rule: {config}: filesystem.exclude" in text
    assert ask(world, "secret", "--rw", "secret")["verdict"] == "rw"
    assert "flag --ro" in ask(world, "secret", "--ro", "secret")["rule"]
    assert "preset @base" in ask(world, "/usr")["rule"]


def test_why_knows_hosts_and_sockets(world: World) -> None:
    """A host follows the network, an abstract socket Landlock, and an engine's socket is never open."""
    assert ask(world, "example.com:443")["verdict"] == "allowed"
    answer = ask(world, "example.com:443", "--network=off")
    assert answer["verdict"] == "refused"
    assert "flag --network" in answer["rule"]
    assert ask(world, "@/tmp/.X11-unix/X0", "--network=off")["verdict"] == "refused"
    assert ask(world, "/var/run/docker.sock")["verdict"] in ("absent", "exclude", "private")


def test_why_says_that_a_socket_can_be_connected_to(world: World) -> None:
    """A read-only socket is still an open door, and the answer says so."""
    here = os.open(world.project, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/s")
        os.close(here)
        assert ask(world, "s")["detail"] == "hidden"
        assert "can be connected to" in ask(world, "s", "--rw", "s")["detail"]


def test_why_without_a_target_is_an_error(world: World) -> None:
    """Usage errors are 125 and name the form."""
    for args in ((), ("a", "b"), ("--nope", "a")):
        done = world.ctl("why", *args)
        assert done.returncode == 125
        assert done.stderr.startswith("sandboxctl: error:")


def test_why_changes_nothing(world: World) -> None:
    """No state directory, no file in the project."""
    ask(world, "x/y")
    ask(world, "~/z")
    assert os.listdir(world.project) == []
    assert not world.state.exists()


def test_debug_says_where_values_and_mounts_come_from(world: World) -> None:
    """--debug names files, presets, mounts and variables on stderr; stdout is the command's own."""
    config = world.global_config(toml({"network": "off", "filesystem": {"ro": ["fixed"]}}))
    world.mkdir("fixed")
    done = world.sandbox("--debug", "--env", "A=b", "echo", "out")
    assert done.stdout == "out\n"
    for words in (
        f"network = off  [{config}: network]", f"[{config}: filesystem.ro]", "@base", "A  [",
        str(world.project / "fixed"), "Landlock",
    ):  # fmt: skip
        assert words in done.stderr, words


def test_values_of_variables_are_not_printed(world: World) -> None:
    """--debug and --report name variables, never what is in them."""
    done = world.sandbox("--debug", "--env", "TOKEN=verysecret", "true")
    assert "TOKEN" in done.stderr
    assert "verysecret" not in done.stderr
