"""A plan becomes bwrap's arguments, exactly."""

from __future__ import annotations

from typing import Any

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.launch import bwrap
from agent_sandbox.policy.model import MARKER, Limits, Mount, Plan

PLACES = bwrap.Places(work="/w", home="/h", masks="/m")


def plan(*mounts: Mount, **changes: Any) -> Plan:
    """A small plan."""
    values: dict[str, Any] = {
        "mounts": mounts, "env": {}, "env_sources": {}, "cwd": "/p", "network": True,
        "docker": False, "limits": Limits(), "profile": "none", "project": "/p", "home": "/home/u",
        "home_mode": "private", "home_key": "k", "home_points": (), "placeholders": (),
        "notices": (),
    }  # fmt: skip
    return Plan(**{**values, **changes})


def built(made: Plan, *argv: str, **changes: Any) -> bwrap.Command:
    """The command of a plan."""
    keywords = {"program": "/usr/bin/bwrap", "filter_bytes": b"filter", **changes}
    return bwrap.command(made, PLACES, argv or ("true",), **keywords)


HEAD = ["--unshare-all", "--share-net", "--unshare-user", "--disable-userns", "--die-with-parent",
        "--cap-drop", "ALL"]  # fmt: skip


def test_a_small_plan_is_exactly_these_arguments() -> None:
    """Golden: every kind of mount, in the plan's order, then the directory, then the variables."""
    made = plan(
        Mount(kind="dev", dest="/dev"),
        Mount(kind="ro", dest="/etc", source="/etc", level="ro"),
        Mount(kind="proc", dest="/proc"),
        Mount(kind="rw", dest="/tmp", source="@work/tmp", level="private"),
        Mount(kind="rw", dest="/home/u", source="@home", level="private"),
        Mount(kind="symlink", dest="/var/run", source="../run"),
        Mount(kind="symlink", dest="/home/u/l", source="x", rule="in the private home"),
        Mount(kind="rw", dest="/p", source="/p", level="rw"),
        Mount(kind="pin", dest="/p/.git", source="/p/.git", level="rw"),
        Mount(kind="ro", dest="/p/.git/hooks", source="/p/.git/hooks", level="ro"),
        Mount(kind="ro", dest="/home/u/.gitconfig", source="@work/git/0", level="ro"),
        Mount(kind="mask-dir", dest="/p/d", source="@mask/dir", level="exclude"),
        Mount(kind="mask-file", dest="/p/f", source="@mask/file", level="exclude"),
        Mount(kind="tmpfs", dest="/p/s", level="exclude"),
        Mount(kind="tmpfs", dest="/run/user/1000"),
        Mount(kind="seal", dest="/p/s"),
        Mount(kind="text", dest="/run/agent-sandbox/marker", source="marker"),
        Mount(kind="seal", dest="/"),
        env={"B": "2", "A": "1"},
    )
    command = built(made, "echo", "a b", "--flag")
    assert list(command.options) == [
        *HEAD,
        "--dev", "/dev",
        "--ro-bind", "/etc", "/etc",
        "--proc", "/proc",
        "--bind", "/w/tmp", "/tmp",
        "--bind", "/h", "/home/u",
        "--symlink", "../run", "/var/run",
        "--bind", "/p", "/p",
        "--ro-bind", "/w/git/0", "/home/u/.gitconfig",
        "--ro-bind", "/m/dir", "/p/d",
        "--ro-bind", "/m/file", "/p/f",
        "--perms", "0755", "--tmpfs", "/p/s",
        "--perms", "0700", "--tmpfs", "/run/user/1000",
        "--perms", "0444", "--file", "\x000", "/run/agent-sandbox/marker",
        "--chdir", "/p",
        "--setenv", "A", "1",
        "--setenv", "B", "2",
    ]  # fmt: skip
    assert command.command == ("echo", "a b", "--flag")
    assert command.texts == (
        ("--file", "/run/agent-sandbox/marker", b"marker\n"), ("--seccomp", "", b"filter"),
    )  # fmt: skip
    assert command.program == "/usr/bin/bwrap"
    # Without bwrap, which reads the whole mount table for each.
    assert command.bulk == (
        ("pin", "/p/.git", "/p/.git"), ("ro", "/p/.git/hooks", "/p/.git/hooks"),
        ("seal", "/p/s", "/p/s"), ("seal", "/", "/"),
    )  # fmt: skip
    assert "--remount-ro / -- echo" in " ".join(bwrap.printable(command))


@pytest.mark.parametrize("network", [True, False])
@pytest.mark.parametrize("docker", [True, False])
def test_namespaces_and_capabilities_are_always_taken(network: bool, docker: bool) -> None:
    """Whatever the plan; only the network may be shared (invariants 1, 6, 7)."""
    options = list(built(plan(network=network, docker=docker)).options)
    for option in ("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"):
        assert options.count(option) == 1
    assert options[options.index("--cap-drop") + 1] == "ALL"
    assert "--cap-add" not in options
    assert ("--share-net" in options) is network
    assert "--new-session" not in options  # it would cost job control; seccomp stands in


def test_the_filter_always_goes_along() -> None:
    """By descriptor."""
    assert built(plan()).texts[-1] == ("--seccomp", "", b"filter")


def test_variables_are_set_one_by_one_and_sorted() -> None:
    """bwrap itself is started with an empty environment, so nothing else can pass."""
    options = list(built(plan(env={"Z": "", "A": "x=y", "M": "a\nb"})).options)
    assert options[-9:] == [
        "--setenv", "A", "x=y", "--setenv", "M", "a\nb", "--setenv", "Z", "",
    ]  # fmt: skip
    assert "--clearenv" not in options
    assert "--unsetenv" not in options


@pytest.mark.parametrize("value", ["@0", "@1"])
def test_a_value_that_looks_like_a_descriptor_stays_what_it_is(value: str) -> None:
    """Only the places of descriptors are filled in."""
    marker = Mount(kind="text", dest="/run/m", source="x")
    shown = bwrap.printable(built(plan(marker, env={"A": value}), "echo", value))
    assert shown[shown.index("A") + 1] == value
    assert shown[-1] == value


@pytest.mark.parametrize(
    ("token", "path"),
    [
        ("/plain", "/plain"),
        ("@work/tmp", "/w/tmp"),
        ("@work/home", "/w/home"),
        ("@work/caches/3", "/w/caches/3"),
        ("@work/git/12", "/w/git/12"),
        ("@home", "/h"),
        ("@mask/dir", "/m/dir"),
        ("@mask/file", "/m/file"),
    ],
)
def test_tokens_become_paths_of_the_run(token: str, path: str) -> None:
    """Each has one place."""
    assert bwrap.source_path(token, PLACES) == path


@pytest.mark.parametrize("token", ["@nope", "@work", "@work/other", "@home/x"])
def test_an_unknown_token_is_an_error(token: str) -> None:
    """Never a bind of something else."""
    with pytest.raises(HostError):
        bwrap.source_path(token, PLACES)


def test_signals_are_reset_by_env_where_it_can() -> None:
    """The command starts with default handlers, though bwrap ignores what would end it."""
    command = built(plan(), "prog", "x", reset_signals="/usr/bin/env").command
    assert command == (
        "/usr/bin/env", "--default-signal=INT,QUIT,HUP,TERM", "--", "prog", "x",
    )  # fmt: skip


@pytest.mark.parametrize(("name", "reset"), [("A=B", "/usr/bin/env"), ("prog", "")])
def test_without_a_trampoline_the_command_is_untouched(name: str, reset: str) -> None:
    """env would take a name with `=` for an assignment."""
    assert built(plan(), name, "x", reset_signals=reset).command == (name, "x")


def test_printable_is_one_argument_list() -> None:
    """What --dry-run quotes: program, options, `--`, the command."""
    marker = Mount(kind="text", dest="/run/m", source="x")
    shown = bwrap.printable(built(plan(marker), "npm", "install"))
    assert shown[0] == "/usr/bin/bwrap"
    assert shown[-3:] == ["--", "npm", "install"]
    assert "--seccomp" in shown
    assert not any(option.startswith("@") for option in shown)


def test_too_many_arguments_are_an_error_before_the_start() -> None:
    """bwrap would refuse them with a message that names no cause."""
    many = [Mount(kind="rw", dest=f"/d{i}", source=f"/d{i}", level="rw") for i in range(3100)]
    with pytest.raises(HostError) as caught:
        built(plan(*many))
    assert caught.value.code == "too-many-mounts"


def test_many_masks_do_not_count_against_the_limit() -> None:
    """10,000 excluded files start: all but the first are made after bwrap's own mounts."""
    many = [
        Mount(kind="mask-file", dest=f"/p/{i}", source="@mask/file", level="exclude")
        for i in range(10_000)
    ]
    command = built(plan(*many))
    covered = {dest for _, _, dest in command.bulk} | set(command.options)
    assert all(m.dest in covered for m in many)
    assert len(command.options) < 1000


def test_a_copy_is_a_file_of_the_sandbox_s_own() -> None:
    """Made before the marker, which is the last step; and only if the plan shows it."""
    texts = {"@work/git/0": "[user]\n\tname = \udcff\n", "@work/git/1": "not to be read"}
    command = built(
        plan(
            Mount(kind="ro", dest="/h/.gitconfig", source="@work/git/0", level="ro", file=True),
            Mount(kind="text", dest=MARKER, source="marker"),
        ),
        copies=texts,
    )
    place = "/run/agent-sandbox/git/0"
    assert command.bulk == (("ro", place, "/h/.gitconfig"),)
    assert command.planned == (("/h/.gitconfig", ""),)
    assert command.texts[0] == ("--file", place, b"[user]\n\tname = \xff\n")
    assert [dest for _, dest, _ in command.texts] == [place, MARKER, ""]
    assert command.options.index(place) < command.options.index(MARKER)


@pytest.mark.parametrize("inside", [True, False])
def test_a_read_only_directory_is_bwrap_s_only_where_more_is_mounted_in_it(inside: bool) -> None:
    """The keeper comes after bwrap: it would cover, or seal, what bwrap has mounted inside."""
    deeper = [Mount(kind="rw", dest="/p/ro/rw", source="/p/ro/rw", level="rw")] if inside else []
    command = built(
        plan(
            Mount(kind="rw", dest="/p", source="/p", level="rw"),
            Mount(kind="ro", dest="/p/ro", source="/p/ro", level="ro"),
            *deeper,
        )
    )
    assert ("/p/ro" in command.options) is inside
    assert (("ro", "/p/ro", "/p/ro") in command.bulk) is not inside


def test_pins_and_held_names_are_the_keeper_s() -> None:
    """bwrap is slow at many mounts, and must not create what is missing."""
    command = built(
        plan(
            Mount(kind="pin", dest="/p/a", source="/p/a", level="rw"),
            Mount(kind="hold", dest="/p/d", level="ro"),
            Mount(kind="hold", dest="/p/f.json", source="/n.json", level="ro", file=True),
        )
    )
    assert command.bulk == (
        ("pin", "/p/a", "/p/a"),
        ("ro", "/p/d", "/p/d"),
        ("ro", "/n.json", "/p/f.json"),
    )
    assert not {"/p/a", "/p/d", "/p/f.json"} & set(command.options)
    assert {dest for dest, _ in command.planned} == {"/p/a", "/p/d", "/p/f.json"}
