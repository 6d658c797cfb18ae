"""Policy and facts become ordered mounts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from agent_sandbox.errors import PolicyError
from agent_sandbox.policy import paths
from agent_sandbox.policy.explain import ABSENT, PRIVATE, link_target, look_up, rule_of
from agent_sandbox.policy.model import (
    DIR,
    EXCLUDE,
    FILE,
    FLAGS,
    RO,
    RW,
    SOCKET,
    ConfigFile,
    GitLayout,
    Link,
    Match,
    Mount,
    Plan,
    Setting,
    Source,
)
from agent_sandbox.policy.resolve import resolve, widened_paths

from .facts import (
    CWD,
    HOME,
    STATE,
    Tree,
    a_match,
    facts,
    files,
    layers,
    plan_of,
    policy_of,
    rules,
    steps,
)

GIT = f"{CWD}/.git"


def at(plan: Plan, dest: str) -> Mount:
    """The last mount on a path."""
    return [m for m in plan.mounts if m.dest == dest and m.kind != "seal"][-1]


def level(plan: Plan, path: str) -> str:
    """What the plan says about a path."""
    return look_up(plan, path).level


# --- The default plan ---------------------------------------------------------------------------


def test_the_default_plan_is_exactly_this() -> None:
    """An empty root with system trees, a private home, the project, and nothing else."""
    assert steps(plan_of()) == [
        "dev /dev",
        "ro /etc",
        "proc /proc",
        "rw /tmp",
        "ro /usr",
        "rw /home/u",
        "symlink /var/run",
        "symlink /var/tmp",
        "rw /home/u/p",
        "tmpfs /run/user/1000",
        "mask-dir /proc/1",
        "seal /proc",
        "text /run/agent-sandbox/README.md",
        "text /run/agent-sandbox/marker",
        "seal /",
    ]


def test_the_default_plan_s_sources_are_private_where_they_should_be() -> None:
    """Only the system and the project come from the host."""
    sources = {m.dest: m.source for m in plan_of().mounts if m.source}
    assert sources.pop("/run/agent-sandbox/README.md") == "@page"
    assert sources == {
        "/etc": "/etc", "/usr": "/usr", "/tmp": "@work/tmp", "/var/tmp": "../tmp",
        HOME: "@home", CWD: CWD, "/var/run": "../run", "/run/agent-sandbox/marker": "marker",
        "/proc/1": "@mask/dir",
    }  # fmt: skip


def test_mounts_are_ordered_by_depth_then_name_and_stable() -> None:
    """The same policy gives the same plan."""
    tree = files("b/x", "a/x", "a/y", "c")
    written = rules(ro=["c", "a/y", "b/x", "a/x"])
    first = plan_of(tree, flags=written)
    assert all(plan_of(dict(tree), flags=written).mounts == first.mounts for _ in range(3))
    made = [m.dest for m in first.mounts if paths.within(m.dest, CWD)]
    assert made == sorted(made, key=lambda p: (p.count("/"), p))


def test_every_mount_can_describe_itself_with_its_rule() -> None:
    """--debug prints what runs."""
    plan = plan_of(files("x"), flags=rules(ro=["x"]))
    assert all(m.describe() for m in plan.mounts)
    assert "flags: filesystem.ro" in at(plan, f"{CWD}/x").describe()


# --- Precedence ---------------------------------------------------------------------------------

PRECEDENCE = [
    ("rw-is-redundant", None, None, rules(rw=["x"]), RW),
    ("ro", None, None, rules(ro=["x"]), RO),
    ("exclude", None, None, rules(exclude=["x"]), EXCLUDE),
    ("same-layer-ro-rw", None, None, rules(ro=["x"], rw=["x"]), RO),
    ("same-layer-ro-exclude", None, None, rules(ro=["x"], exclude=["x"]), EXCLUDE),
    ("same-layer-all", None, None, rules(rw=["x"], ro=["x"], exclude=["x"]), EXCLUDE),
    ("flag-rw-project-ro", None, rules(ro=["x"]), rules(rw=["x"]), RW),
    ("flag-ro-project-rw", None, rules(rw=["x"]), rules(ro=["x"]), RO),
    ("flag-exclude-project-ro", None, rules(ro=["x"]), rules(exclude=["x"]), EXCLUDE),
    ("flag-rw-project-exclude", None, rules(exclude=["x"]), rules(rw=["x"]), RW),
    ("project-ro-user-rw", rules(rw=["x"]), rules(ro=["x"]), None, RO),
    ("project-ro-user-exclude", rules(exclude=["x"]), rules(ro=["x"]), None, RO),
    ("project-rw-user-ro", rules(ro=["x"]), rules(rw=["x"]), None, RW),
    ("exact-beats-glob", None, None, rules(ro=["x"], exclude=["?"]), RO),
    ("exact-beats-glob-weaker", None, None, rules(rw=["x"], ro=["?"]), RW),
    ("exact-beats-later-glob", rules(ro=["x"]), None, rules(exclude=["?"]), RO),
    ("later-glob-beats-glob", rules(exclude=["?"]), None, rules(ro=["[x]"]), RO),
    ("glob-strength-in-layer", None, None, rules(ro=["?"], exclude=["[x]"]), EXCLUDE),
    ("glob-twice", None, None, rules(ro=["?", "?"]), RO),
]


@pytest.mark.parametrize(
    ("user", "project", "flags", "expected"),
    [p[1:] for p in PRECEDENCE],
    ids=[p[0] for p in PRECEDENCE],
)
def test_one_path_has_one_winner(
    user: dict[str, object] | None,
    project: dict[str, object] | None,
    flags: dict[str, object] | None,
    expected: str,
) -> None:
    """Exact beats glob; then the later layer; within a layer exclude > ro > rw."""
    plan = plan_of(files("x"), user=user, project=project, flags=flags)
    assert level(plan, f"{CWD}/x") == expected
    assert len([m for m in plan.mounts if m.dest == f"{CWD}/x"]) <= 1


@pytest.mark.parametrize("outer", [RO, RW, EXCLUDE])
@pytest.mark.parametrize("inner", [RO, RW, EXCLUDE])
def test_the_deeper_path_wins(outer: str, inner: str) -> None:
    """Whatever stands above it, in the same layer or another."""
    tree: Tree = {f"{CWD}/d/x": FILE, f"{CWD}/d/y": FILE}
    both = {outer: ["d"], inner: ["d/x"]} if outer != inner else {outer: ["d", "d/x"]}
    same = plan_of(tree, flags=rules(**both))
    other = plan_of(tree, user=rules(**{inner: ["d/x"]}), flags=rules(**{outer: ["d"]}))
    for plan in (same, other):
        assert level(plan, f"{CWD}/d/x") == inner
        assert level(plan, f"{CWD}/d/y") == outer
        assert level(plan, f"{CWD}/z") == RW


def test_mandatory_protections_beat_flags() -> None:
    """Our state stays hidden although its parent is opened."""
    tree: Tree = {STATE: DIR}
    plan = plan_of(tree, flags=rules(rw=["~/.local/state"]))
    assert level(plan, f"{HOME}/.local/state/other") == RW
    assert level(plan, f"{STATE}/trust") == EXCLUDE


# --- Redundant mounts, pins, masks --------------------------------------------------------------


def test_redundant_mounts_are_dropped() -> None:
    """What the parent already shows in the same way costs no mount."""
    tree: Tree = {f"{CWD}/a/b": FILE, "/usr/share/x": FILE, "/etc/hosts": FILE}
    plan = plan_of(tree, flags=rules(rw=["a/b"], ro=["/usr/share/x", "/etc/hosts"]))
    assert steps(plan) == steps(plan_of())


def test_ancestors_of_a_protected_path_are_pinned() -> None:
    """A mount protects a name, not its parents: each directory between is bound onto itself."""
    plan = plan_of(files("a/b/c/secret"), flags=rules(exclude=["a/b/c/secret"]))
    assert steps(plan, f"{CWD}/a") == [
        f"pin {CWD}/a",
        f"pin {CWD}/a/b",
        f"pin {CWD}/a/b/c",
        f"mask-file {CWD}/a/b/c/secret",
    ]
    pin = at(plan, f"{CWD}/a")
    assert (pin.source, pin.level) == (f"{CWD}/a", RW)


def test_a_protected_path_directly_in_the_project_needs_no_pin() -> None:
    """The project itself is a mount."""
    plan = plan_of(files("x"), flags=rules(ro=["x"]))
    assert steps(plan, CWD) == [f"rw {CWD}", f"ro {CWD}/x"]


def test_pins_stop_at_the_nearest_mount() -> None:
    """Nothing is pinned below a read-only tree, and nothing twice."""
    tree = files("a/b/x", "a/b/y", "r/s/t")
    plan = plan_of(tree, flags=rules(ro=["a/b/x", "a/b/y", "r"], exclude=["r/s/t"]))
    assert steps(plan, f"{CWD}/a") == [
        f"pin {CWD}/a", f"pin {CWD}/a/b", f"ro {CWD}/a/b/x", f"ro {CWD}/a/b/y",
    ]  # fmt: skip
    assert steps(plan, f"{CWD}/r") == [f"ro {CWD}/r", f"mask-file {CWD}/r/s/t"]


def test_pins_hold_in_a_writable_tree_inside_a_read_only_one() -> None:
    """Each writable root is its own."""
    tree = files("r/w/a/x")
    plan = plan_of(tree, flags=rules(ro=["r", "r/w/a/x"], rw=["r/w"]))
    assert steps(plan, f"{CWD}/r") == [
        f"ro {CWD}/r", f"rw {CWD}/r/w", f"pin {CWD}/r/w/a", f"ro {CWD}/r/w/a/x",
    ]  # fmt: skip


def test_every_protected_path_below_a_writable_root_has_all_its_parents_mounted() -> None:
    """The property behind the pins, over many shapes."""
    tree = files("a/b/c/d", "a/x", "e/f/g", "e/f/h/i")
    plan = plan_of(
        tree, flags=rules(ro=["a/b/c/d", "e/f"], exclude=["a/x", "e/f/h/i"], rw=["e/f/h"])
    )
    made = {m.dest for m in plan.mounts}
    for mount in plan.mounts:
        if mount.level in (RO, EXCLUDE) and paths.below(mount.dest, CWD):
            for ancestor in paths.parents(mount.dest):
                if ancestor == CWD:
                    break
                assert ancestor in made or level(plan, ancestor) != RW


def test_an_excluded_directory_and_file_are_masked_read_only() -> None:
    """An empty directory, an unreadable file."""
    tree: Tree = {f"{CWD}/d": DIR, f"{CWD}/f": FILE, f"{CWD}/s": SOCKET}
    plan = plan_of(tree, flags=rules(exclude=["d", "f", "s"]))
    assert steps(plan, CWD)[1:] == [f"mask-dir {CWD}/d", f"mask-file {CWD}/f", f"mask-file {CWD}/s"]
    assert at(plan, f"{CWD}/d").source == "@mask/dir"
    assert at(plan, f"{CWD}/f").source == "@mask/file"


def test_a_writable_child_of_an_excluded_parent_sits_in_a_sealed_tmpfs() -> None:
    """Its mount point needs a place; afterwards nothing can be created beside it."""
    plan = plan_of(files("s/pub/x", "s/key"), flags=rules(exclude=["s"], rw=["s/pub"]))
    assert steps(plan, f"{CWD}/s") == [f"tmpfs {CWD}/s", f"rw {CWD}/s/pub", f"seal {CWD}/s"]
    assert level(plan, f"{CWD}/s/key") == EXCLUDE
    assert level(plan, f"{CWD}/s/pub/x") == RW


def test_an_exclude_where_nothing_is_shown_makes_no_mount() -> None:
    """What is not there needs no mask."""
    plan = plan_of({f"{HOME}/.ssh": DIR}, flags=rules(exclude=["~/.ssh"]))
    assert steps(plan) == steps(plan_of())
    assert level(plan, f"{HOME}/.ssh") == PRIVATE


def test_globs_hide_every_match() -> None:
    """Files and directories alike."""
    tree: Tree = {**files(".env", ".env.local", "env"), f"{CWD}/.envdir": DIR}
    plan = plan_of(tree, flags=rules(exclude=[".env*"]))
    assert steps(plan, CWD)[1:] == [
        f"mask-file {CWD}/.env", f"mask-file {CWD}/.env.local", f"mask-dir {CWD}/.envdir",
    ]  # fmt: skip


# --- Missing and reserved paths, the project ----------------------------------------------------


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (rules(ro=["gone"]), ["ro 'gone'", "skipped"]),
        (rules(rw=["gone*"]), ["rw 'gone*'", "skipped"]),
        (rules(exclude=["gone"]), ["exclude 'gone'", "matches nothing"]),
    ],
)
def test_missing_paths_are_skipped_with_a_notice(
    written: dict[str, object], words: list[str]
) -> None:
    """A person sees that a rule did nothing, and where it is written."""
    (notice,) = plan_of(flags=written).notices
    assert all(word in notice for word in [*words, "flags: filesystem."])


def test_missing_paths_of_presets_say_nothing() -> None:
    """Most machines lack most toolchains."""
    assert plan_of(command="claude").notices == ()


@pytest.mark.parametrize(
    "path",
    ["/", "/dev", "/dev/null", "/proc", "/proc/1", "/run", "/run/agent-sandbox",
     "/run/agent-sandbox/marker", "/sys", STATE, f"{STATE}/homes"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["ro", "rw"])
def test_cannot_show_a_reserved_path(path: str, kind: str) -> None:
    """What the sandbox makes itself is not for a rule; the error names the rule."""
    with pytest.raises(PolicyError) as caught:
        plan_of({path: DIR}, flags=rules(**{kind: [path]}))
    assert caught.value.code == "reserved-path"
    assert path in caught.value.message
    assert "flags" in caught.value.message


def test_cannot_reach_a_reserved_path_through_a_link() -> None:
    """What counts is where a path leads."""
    with pytest.raises(PolicyError) as caught:
        plan_of({"/data/l": "-> /run", "/run": DIR}, flags=rules(rw=["/data/l"]))
    assert caught.value.code == "reserved-path"


@pytest.mark.parametrize("excluded", [CWD, HOME, "/home"])
def test_cannot_run_in_an_excluded_directory(excluded: str) -> None:
    """Work would be lost silently."""
    with pytest.raises(PolicyError) as caught:
        plan_of({CWD: DIR}, flags=rules(exclude=[excluded]))
    assert caught.value.code == "cwd-excluded"
    assert excluded in caught.value.message


@pytest.mark.parametrize("excluded", ["sub", f"{CWD}2", "/home/u/q"])
def test_can_run_beside_and_above_excluded_directories(excluded: str) -> None:
    """Children, siblings and names with the same start are no obstacle."""
    tree: Tree = {f"{CWD}/sub": DIR, f"{CWD}2": DIR, "/home/u/q": DIR}
    assert plan_of(tree, flags=rules(exclude=[excluded])).cwd == CWD


@pytest.mark.parametrize(
    "project",
    ["/", "/home", HOME, "/tmp", "/etc", "/etc/x", "/usr", "/var", "/var/lib", "/dev/shm",
     "/proc/1", "/boot/x", "/opt", "/root", "/srv", "/run/agent-sandbox/x", STATE,
     f"{STATE}/homes/x", f"{HOME}/.local/state"],
)  # fmt: skip
def test_cannot_take_a_shared_directory_as_the_project(project: str) -> None:
    """The home, the system and our own state are never made writable by a wrong `cd`."""
    with pytest.raises(PolicyError) as caught:
        plan_of(cwd=a_match(project))
    assert caught.value.code == "project-too-wide"
    assert caught.value.hint


@pytest.mark.parametrize("project", ["/tmp/x", "/srv/app", "/opt/app", "/var/lib/app", "/data"])
def test_can_take_a_directory_below_shared_ones(project: str) -> None:
    """Many projects live there."""
    assert level(plan_of(cwd=a_match(project)), project) == RW


# --- Links --------------------------------------------------------------------------------------


def test_a_rule_on_a_link_mounts_the_target() -> None:
    """Every path in a plan is real."""
    tree: Tree = {"/data/l": "-> /data/real", "/data/real/x": FILE}
    plan = plan_of(tree, flags=rules(rw=["/data/l"]))
    assert at(plan, "/data/real").kind == "rw"
    assert (at(plan, "/data/l").kind, at(plan, "/data/l").source) == ("symlink", "/data/real")


def test_links_are_recreated_only_where_the_host_s_tree_is_not_shown() -> None:
    """In /usr the link is there already; in an empty root it is not."""
    tree: Tree = {"/usr/l": "-> /data/real", "/a/l": "-> ../data/real", "/data/real": DIR}
    plan = plan_of(tree, flags=rules(ro=["/usr/l", "/a/l"]))
    links = {m.dest: m.source for m in plan.mounts if m.kind == "symlink"}
    assert links["/a/l"] == "../data/real"
    assert "/usr/l" not in links


def test_a_chain_of_links_is_recreated_link_by_link() -> None:
    """Each hop works inside."""
    tree: Tree = {"/a/1": "-> /b/2", "/b/2": "-> 3", "/b/3": "-> /c/real", "/c/real": FILE}
    plan = plan_of(tree, flags=rules(ro=["/a/1"]))
    links = {m.dest: m.source for m in plan.mounts if m.kind == "symlink"}
    assert {"/a/1": "/b/2", "/b/2": "3", "/b/3": "/c/real"}.items() <= links.items()
    assert level(plan, "/c/real") == RO


def test_excluding_a_link_hides_its_target_and_makes_no_link() -> None:
    """Both names are closed."""
    tree: Tree = {f"{CWD}/l": "-> real", f"{CWD}/real": FILE}
    plan = plan_of(tree, flags=rules(exclude=["l"]))
    assert steps(plan, CWD)[1:] == [f"mask-file {CWD}/real"]


def test_a_linked_working_directory_keeps_its_name() -> None:
    """PWD is what the user typed; the mount is at the real place; the link is there."""
    cwd = a_match("/home/u/l", real="/data/p", links=[Link(at="/home/u/l", text="/data/p")])
    plan = plan_of(cwd=cwd)
    assert plan.cwd == "/data/p"
    assert plan.env["PWD"] == "/home/u/l"
    assert [(p.kind, p.dest, p.source) for p in plan.home_points] == [("symlink", "l", "/data/p")]


@pytest.mark.parametrize("where", ["/tmp/l", "/tmp/sub/l"])
def test_a_link_in_a_temporary_directory_is_recreated_too(where: str) -> None:
    """The private /tmp is fresh, so bwrap makes the link; it is not left to the private home."""
    from agent_sandbox.launch.bwrap import Places, command

    cwd = a_match(where, real="/data/p", links=[Link(at=where, text="/data/p")])
    built = command(
        plan_of(cwd=cwd), Places(work="/w", home="/h", masks="/m"), ["true"],
        program="bwrap", filter_bytes=b"",
    )  # fmt: skip
    assert f"--symlink /data/p {where}" in " ".join(built.options)


PLANTED: list[tuple[str, Tree, dict[str, object]]] = [
    ("out-of-project", {f"{CWD}/dist": f"-> {HOME}", HOME: DIR}, rules(rw=["dist"])),
    ("relative", {f"{CWD}/dist": "-> ../.ssh", f"{HOME}/.ssh": DIR}, rules(ro=["dist"])),
    ("in-the-middle", {f"{CWD}/a": "-> /data", "/data/x": FILE}, rules(ro=["a/x"])),
    ("glob", {f"{CWD}/a.txt": "-> /data/x", "/data/x": FILE}, rules(ro=["*.txt"])),
    (
        "in-another-rw-tree",
        {"/data/w/l": f"-> {HOME}/.ssh", f"{HOME}/.ssh": DIR, "/data/w/z": FILE},
        rules(rw=["/data/w"], ro=["/data/w/l"]),
    ),
    (
        "in-an-rw-tree-behind-a-link",
        {
            "/data/w": "-> /disk/w", "/disk/w/l": f"-> {HOME}/.ssh", f"{HOME}/.ssh": DIR,
            "/disk/w/z": FILE,
        },
        rules(rw=["/data/w"], ro=["/data/w/l"]),
    ),
    ("chain", {f"{CWD}/a": "-> b", f"{CWD}/b": "-> /data", "/data/x": FILE}, rules(rw=["a"])),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "written"), [p[1:] for p in PLANTED], ids=[p[0] for p in PLANTED])
def test_cannot_widen_through_a_planted_link(tree: Tree, written: dict[str, object]) -> None:
    """A link in a tree that a sandbox can write leads nowhere else (invariant 4)."""
    with pytest.raises(PolicyError) as caught:
        plan_of(tree, flags=written)
    assert caught.value.code == "planted-link"
    assert "flags: filesystem." in caught.value.message


def test_can_follow_links_that_stay_inside_and_links_of_the_user() -> None:
    """Only a link out of a writable tree proves nothing."""
    tree: Tree = {
        f"{CWD}/l": "-> src", f"{CWD}/src/x": FILE,
        f"{HOME}/l": "-> /data", "/data/x": FILE,
    }  # fmt: skip
    plan = plan_of(tree, flags=rules(ro=["l", "~/l"]))
    assert level(plan, f"{CWD}/src/x") == RO
    assert level(plan, "/data/x") == RO


def test_cannot_show_more_through_a_preset_s_planted_link() -> None:
    """A preset's rule is skipped and said, so that a planted link does not stop later runs."""
    plan = plan_of({f"{CWD}/pyproject.toml": "-> /data/x", "/data/x": FILE})
    assert level(plan, "/data/x") == ABSENT
    (notice,) = plan.notices
    assert "pyproject.toml" in notice


def test_can_hide_through_a_planted_link() -> None:
    """Hiding more is never refused."""
    tree: Tree = {f"{CWD}/l": "-> /usr/secret", "/usr/secret": FILE}
    assert level(plan_of(tree, flags=rules(exclude=["l"])), "/usr/secret") == EXCLUDE


def test_cannot_show_more_through_a_link_on_path() -> None:
    """A PATH directory in the project, or reached through a link there, is not followed."""
    tree = (
        a_match(f"{CWD}/bin", real=f"{HOME}/.ssh", links=[Link(at=f"{CWD}/bin", text="../.ssh")]),
        a_match(f"{CWD}/node_modules/.bin"),
        a_match(HOME), a_match("/home"), a_match("/"),
    )  # fmt: skip
    assert steps(plan_of(path_dirs=tree)) == steps(plan_of())


def test_cannot_show_more_through_a_path_directory_in_another_writable_tree() -> None:
    """The same for every tree that a rule makes writable."""
    link = Link(at="/data/w/bin", text=f"{HOME}/.ssh")
    plan = plan_of(
        {"/data/w/z": FILE}, flags=rules(rw=["/data/w"]),
        path_dirs=(a_match("/data/w/bin", real=f"{HOME}/.ssh", links=[link]),),
    )  # fmt: skip
    assert level(plan, f"{HOME}/.ssh") == PRIVATE


def test_a_path_directory_of_the_project_stays_writable_under_any_name() -> None:
    """PATH often has the real name of a project that was entered through a link."""
    cwd = a_match("/l/p", real=CWD, links=[Link(at="/l/p", text=CWD)])
    plan = plan_of(cwd=cwd, path_dirs=(a_match(f"{CWD}/node_modules/.bin"),))
    assert level(plan, f"{CWD}/node_modules/.bin") == RW


@pytest.mark.parametrize("path", ["/tmp", "/var/tmp", "/run", "/run/user/1000", "/dev", "/proc"])
def test_cannot_uncover_a_private_directory_by_path(path: str) -> None:
    """A careless PATH must not show the host's sockets (invariant 5)."""
    plan = plan_of(path_dirs=(a_match(path),))
    assert level(plan, path) not in (RO, RW)
    assert steps(plan) == steps(plan_of())


def test_other_path_directories_are_read_only() -> None:
    """Tools outside the system trees work."""
    assert level(plan_of(path_dirs=(a_match("/data/tools/bin"),)), "/data/tools/bin/x") == RO
    off: dict[str, object] = {"filesystem": {"presets": ["!@toolchains"]}}
    plan = plan_of(path_dirs=(a_match("/data/tools/bin"),), flags=off)
    assert level(plan, "/data/tools/bin/x") == ABSENT


# --- Docker, network, home ----------------------------------------------------------------------


def test_cannot_reach_an_engine_socket_that_a_wider_view_shows() -> None:
    """Masked wherever the host is visible, under its real path, after every rule."""
    sock = a_match("/var/run/docker.sock", SOCKET, real=f"{CWD}/d/docker.sock")
    plan = plan_of(engine_sockets=(sock,))
    mount = at(plan, f"{CWD}/d/docker.sock")
    assert (mount.kind, mount.level) == ("mask-file", EXCLUDE)


def test_an_engine_socket_that_is_not_visible_needs_no_mask() -> None:
    """So that a missing directory cannot stop a start."""
    sock = a_match("/run/docker.sock", SOCKET)
    assert steps(plan_of(engine_sockets=(sock,))) == steps(plan_of())


def test_cannot_expose_an_engine_socket_by_a_rule() -> None:
    """`--rw` names it, the mask comes later, and a notice says what to use."""
    sock = a_match("/data/docker.sock", SOCKET)
    plan = plan_of(
        {"/data/docker.sock": SOCKET}, flags=rules(rw=["/data/docker.sock"]), engine_sockets=(sock,)
    )
    assert [m.kind for m in plan.mounts if m.dest == "/data/docker.sock"] == ["rw", "mask-file"]
    assert level(plan, "/data/docker.sock") == EXCLUDE
    assert any("--docker" in notice for notice in plan.notices)


def test_docker_on_binds_the_real_socket_at_the_standard_place() -> None:
    """Links are resolved before."""
    sock = a_match("/var/run/docker.sock", SOCKET, real=f"{HOME}/.docker/desktop/docker.sock")
    plan = plan_of(flags={"docker": "on"}, docker_socket=sock, engine_sockets=(sock,))
    mount = at(plan, "/run/docker.sock")
    assert (mount.kind, mount.source) == ("rw", f"{HOME}/.docker/desktop/docker.sock")
    assert plan.docker is True
    assert link_target(plan, "/var/run/docker.sock") == "/run/docker.sock"


def test_docker_on_without_a_socket_is_an_error_that_names_it() -> None:
    """Never a start without what was asked for."""
    with pytest.raises(PolicyError) as caught:
        plan_of(flags={"docker": "on"}, docker_wanted="/var/run/docker.sock")
    assert caught.value.code == "docker-socket-missing"
    assert "/var/run/docker.sock" in caught.value.message


def resolver(*chain: str) -> Match:
    """/etc/resolv.conf through a chain of links to the last name."""
    names = ["/etc/resolv.conf", *chain]
    links = [Link(at=one, text=two) for one, two in pairwise(names)]
    return a_match(names[0], FILE, real=names[-1], links=links)


STUB = "/run/systemd/resolve/stub-resolv.conf"


def test_the_resolver_is_shown_exactly_with_the_network() -> None:
    """The one file of /run that DNS needs."""
    plan = plan_of(resolver=resolver(STUB))
    assert at(plan, STUB).kind == "ro"
    assert plan.network is True
    off = plan_of(resolver=resolver(STUB), flags={"network": "off"})
    assert level(off, STUB) == ABSENT
    assert off.network is False


@pytest.mark.parametrize("mode", ["allow", "public", "learn"])
def test_a_plan_says_what_may_leave(mode: str) -> None:
    """The host's network is not shared; rules keep their text and source."""
    plan = plan_of(
        resolver=resolver(STUB),
        flags={"network": mode, "allow": ["a.example:81"], "deny": ["localhost"]},
    )
    assert plan.network is False
    assert level(plan, STUB) == ABSENT
    assert plan.egress is not None
    assert plan.egress.mode == mode
    assert [(r.text, r.source, r.ports) for r in plan.egress.allow] == [
        ("a.example:81", "flags: allow", (81,))
    ]
    assert [(r.text, r.source) for r in plan.egress.deny] == [("localhost", "flags: deny")]


@pytest.mark.parametrize("flags", [{}, {"network": "on"}, {"network": "off"}])
def test_without_a_proxy_nothing_is_judged(flags: dict[str, object]) -> None:
    """On and off are as they were, whatever an earlier layer allows."""
    plan = plan_of(flags=flags)
    assert (plan.egress, plan.publish) == (None, ())
    assert plan_of(user={"allow": ["a.example"]}, flags={"network": "off"}).egress is None


@pytest.mark.parametrize(
    ("user", "project", "flags"),
    [
        (None, None, {"deny": ["a.example"]}),
        (None, None, {"network": "on", "deny": ["a.example"]}),
        ({"deny": ["a.example"]}, None, None),
        ({"deny": ["a.example"], "network": "on"}, None, None),
        (None, {"deny": ["a.example"]}, None),
        # A project's file lifts nothing, though `on` is what it would be anyway.
        ({"deny": ["a.example"]}, {"network": "on"}, None),
        ({"deny": ["a.example"]}, None, {"network": "on", "deny": ["b.example"]}),
    ],
)
def test_cannot_deny_a_host_without_a_proxy(
    user: dict[str, object] | None,
    project: dict[str, object] | None,
    flags: dict[str, object] | None,
) -> None:
    """A protection that would not hold stops the start (invariant 1)."""
    with pytest.raises(PolicyError) as caught:
        plan_of(user=user, project=project, flags=flags)
    assert caught.value.code == "deny-without-proxy"
    assert "--network=public" in caught.value.hint


def test_a_flag_lifts_what_a_file_denies() -> None:
    """Said aloud."""
    plan = plan_of(user={"deny": ["a.example"]}, flags={"network": "on"})
    assert plan.network is True
    assert any("the deny-list does not hold" in n for n in plan.notices)


@pytest.mark.parametrize("mode", ["off", "allow", "public", "learn"])
def test_ports_lead_inside_whatever_may_leave(mode: str) -> None:
    """Other addresses than the loopback are said aloud."""
    plan = plan_of(flags={"network": mode, "publish": ["8080:3000", "0.0.0.0:9000"]})
    found = [(p.address, p.port, p.inner_port) for p in plan.publish]
    assert found == [("127.0.0.1", 8080, 3000), ("0.0.0.0", 9000, 9000)]
    said = [n for n in plan.notices if "publish" in n]
    assert len(said) == 1
    assert "0.0.0.0:9000" in said[0]


def test_nothing_is_published_on_a_shared_network() -> None:
    """The server inside is on this machine already."""
    plan = plan_of(flags={"network": "on", "publish": ["8080"]})
    assert plan.publish == ()
    assert any("publish '8080' (flags: publish) does nothing" in n for n in plan.notices)


@pytest.mark.parametrize(
    "chain",
    [
        ["/run/resolv.conf"],
        ["/run/a", "/run/b/c"],
        ["/etc/resolvconf/run/resolv.conf", "/run/resolvconf/resolv.conf"],
        ["/mnt/wsl/resolv.conf"],
        ["/var/lib/x/1", "/var/lib/x/2", "/run/3"],
    ],
    ids=["directly-in-run", "chain-in-run", "resolvconf", "wsl", "three-hops"],
)
def test_every_hop_to_the_resolver_is_there(chain: list[str]) -> None:
    """Links outside the visible trees are made, the file behind them is shown."""
    plan = plan_of(resolver=resolver(*chain))
    assert level(plan, chain[-1]) == RO
    for hop, text in pairwise(chain):
        if not hop.startswith("/etc/"):
            assert (at(plan, hop).kind, at(plan, hop).source) == ("symlink", text)


def test_a_resolver_in_a_visible_tree_needs_no_mount() -> None:
    """A plain file in /etc is there already."""
    assert steps(plan_of(resolver=resolver("/etc/r.conf"))) == steps(plan_of())


@pytest.mark.parametrize(
    ("mode", "source", "shown"),
    [("private", "@home", PRIVATE), ("ephemeral", "@work/home", PRIVATE), ("host", HOME, RO)],
)
def test_home_modes(mode: str, source: str, shown: str) -> None:
    """Persistent and private, forgotten, or the real one read-only."""
    plan = plan_of(flags={"home": mode})
    assert at(plan, HOME).source == source
    assert level(plan, f"{HOME}/x") == shown
    assert level(plan, CWD) == RW
    assert plan.home_mode == mode


def test_with_the_host_s_home_our_state_is_hidden() -> None:
    """Whoever can read it learns what other projects do."""
    assert level(plan_of(flags={"home": "host"}), f"{STATE}/homes/x") == EXCLUDE


@pytest.mark.parametrize(
    "secret", [".ssh/id_ed25519", ".aws/credentials", ".netrc", ".claude.json"]
)
@pytest.mark.parametrize("switch", ["home-host", "ro-home"])
def test_cannot_read_secrets_in_the_host_s_home(secret: str, switch: str, tmp_path: Path) -> None:
    """`--home=host` is the real home read-only *minus secrets* (DESIGN 5); a rule for `~` too."""
    from agent_sandbox.sandbox import prepare

    home, project = tmp_path / "home", tmp_path / "project"
    for path in (home / secret, home / "notes", project / "x"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    source = Source(layer=FLAGS, where="test")
    values = {
        "home-host": {"home": Setting(value="host", source=source)},
        "ro-home": {"filesystem.ro": Setting(value=("~",), source=source)},
    }[switch]
    env = {"HOME": str(home), "PATH": "/usr/bin", "XDG_STATE_HOME": str(tmp_path / "state")}
    made = prepare.plan(
        prepare.Request(argv=("true",), values=values, env=env, cwd=str(project), read_files=False)
    ).plan
    assert level(made, str(home / "notes")) == RO  # a control: the home is shown
    assert level(made, str(home / secret)) not in (RO, RW)


def test_without_caches_they_are_forgotten() -> None:
    """Each cache of the private home gets a directory of the run."""
    off: dict[str, object] = {"filesystem": {"presets": ["!@caches"]}}
    plan = plan_of(flags=off)
    assert at(plan, f"{HOME}/.cache").source.startswith("@work/caches/")
    assert at(plan, f"{HOME}/.npm").source != at(plan, f"{HOME}/.cache").source
    assert level(plan_of(), f"{HOME}/.cache") == PRIVATE
    assert at(plan_of(), HOME).source == "@home"


def test_mount_points_in_the_private_home_are_prepared_by_us() -> None:
    """bwrap must not create them: a planted link would lead it elsewhere."""
    tree: Tree = {
        f"{HOME}/.pyenv": DIR,
        f"{HOME}/.claude/settings.json": FILE,
        f"{HOME}/.claude.json": FILE,
    }
    plan = plan_of(tree, command="claude")
    assert {(p.kind, p.dest, p.level) for p in plan.home_points} == {
        ("dir", "p", "@home"), ("dir", ".pyenv", "@home"), ("dir", ".claude", "@home"),
        ("file", "settings.json", "@state/.claude"),
        ("dir", "projects/-home-u-p", "@state/.claude"),
    }  # fmt: skip


def test_host_preset_shows_everything_read_only_but_what_is_made() -> None:
    """The whole host minus secrets; the private parts stay private."""
    secrets = (a_match("/etc/shadow", FILE),)
    on: dict[str, object] = {"filesystem": {"presets": ["@host"]}}
    plan = plan_of(flags=on, root_secrets=secrets)
    assert at(plan, "/").kind == "ro"
    assert level(plan, "/srv/x") == RO
    assert level(plan, "/etc/shadow") == EXCLUDE
    assert level(plan, "/tmp/x") == PRIVATE
    assert level(plan, "/run/x") not in (RO, RW)
    assert level(plan, f"{HOME}/x") == PRIVATE
    assert level(plan, CWD) == RW
    assert "seal /" not in steps(plan)


def test_root_secrets_are_masked_in_the_system_trees() -> None:
    """Also when root runs it."""
    plan = plan_of(root_secrets=(a_match("/etc/shadow", FILE), a_match("/etc/ssl/private")))
    assert steps(plan, "/etc") == ["ro /etc", "mask-file /etc/shadow", "mask-dir /etc/ssl/private"]


# --- Git ----------------------------------------------------------------------------------------


def plain_git(**changes: object) -> GitLayout:
    """A plain repository at the project."""
    values: dict[str, object] = {
        "top": CWD, "git_dir": GIT, "common_dir": GIT, "linked": False,
        "control": (f"{GIT}/config", f"{GIT}/hooks/", f"{GIT}/info/attributes"),
    }  # fmt: skip
    return GitLayout(**{**values, **changes})  # type: ignore[arg-type]


def test_git_control_files_are_read_only_and_their_parents_pinned() -> None:
    """`mv .git x; cp -r x .git` must not make hooks writable."""
    assert steps(plan_of(git=plain_git()), GIT) == [
        f"pin {GIT}", f"ro {GIT}/config", f"ro {GIT}/hooks", f"pin {GIT}/info",
        f"ro {GIT}/info/attributes",
    ]  # fmt: skip


def test_absent_hooks_get_a_placeholder_and_a_mount() -> None:
    """A directory that git would execute from cannot be created inside."""
    plan = plan_of(git=plain_git(control=(f"{GIT}/config",), absent=(f"{GIT}/hooks",)))
    assert [(p.path, p.node) for p in plan.placeholders] == [(f"{GIT}/hooks", "dir")]
    assert level(plan, f"{GIT}/hooks/pre-commit") == RO


def test_without_git_preset_nothing_is_protected_or_made() -> None:
    """`!@git` means it."""
    off: dict[str, object] = {"filesystem": {"presets": ["!@git"]}}
    layout = plain_git(absent=(f"{GIT}/hooks",))
    plan = plan_of(git=layout, flags=off)
    assert steps(plan, GIT) == []
    assert plan.placeholders == ()


def test_a_worktree_s_repository_elsewhere_is_writable_but_for_its_control_files() -> None:
    """So that add and commit work."""
    main = "/data/main/.git"
    layout = GitLayout(
        top=CWD, git_dir=f"{main}/worktrees/p", common_dir=main, linked=True,
        control=(
            f"{main}/config", f"{main}/hooks/", f"{main}/worktrees/p/commondir", f"{CWD}/.git",
        ),
    )  # fmt: skip
    plan = plan_of(git=layout)
    assert level(plan, f"{main}/objects") == RW
    assert level(plan, f"{main}/worktrees/p/index") == RW
    assert level(plan, f"{main}/config") == RO
    assert level(plan, f"{main}/worktrees/p/commondir") == RO
    assert level(plan, f"{CWD}/.git") == RO
    assert level(plan, "/data/main/src") == ABSENT
    assert {f"pin {main}/worktrees", f"pin {main}/worktrees/p"} <= set(steps(plan))


def test_in_a_subdirectory_the_rest_of_the_repository_is_read_only() -> None:
    """The project is where the command runs."""
    layout = plain_git(
        top="/home/u/r", git_dir="/home/u/r/.git", common_dir="/home/u/r/.git", control=()
    )
    plan = plan_of(git=layout, cwd=a_match("/home/u/r/sub"))
    assert level(plan, "/home/u/r/other") == RO
    assert level(plan, "/home/u/r/sub/x") == RW
    assert level(plan, "/home/u/r/.git/index") == RW


def test_a_layer_can_open_a_control_file() -> None:
    """Flags win over presets."""
    plan = plan_of({f"{GIT}/config": FILE}, git=plain_git(), flags=rules(rw=[".git/config"]))
    assert level(plan, f"{GIT}/config") == RW


def test_git_configuration_is_read_only_and_cleaned_where_needed() -> None:
    """The copy without credentials replaces the file."""
    configs = (
        ConfigFile(path=f"{HOME}/.gitconfig", real="/data/dot/gitconfig"),
        ConfigFile(path=f"{HOME}/.work", real=f"{HOME}/.work", cleaned="[user]\n"),
    )
    plan = plan_of(git_config=configs)
    assert (at(plan, f"{HOME}/.gitconfig").kind, at(plan, f"{HOME}/.gitconfig").source) == (
        "ro", "/data/dot/gitconfig",
    )  # fmt: skip
    assert at(plan, f"{HOME}/.work").source == "@work/git/1"


def test_cannot_read_a_file_through_a_git_include_in_the_project() -> None:
    """A user's config may include a file of the project; a planted link there leads nowhere."""
    config = ConfigFile(path=f"{CWD}/team.gitconfig", real=f"{HOME}/.ssh/id_rsa")
    plan = plan_of(git_config=(config,))
    assert not any(m.source.startswith(f"{HOME}/.ssh") for m in plan.mounts)


# --- Widening, explaining -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        (rules(rw=["/data"]), ["rw '/data'"]),
        (rules(ro=["/data"]), ["ro '/data'"]),
        (rules(ro=["~/.ssh"]), ["ro '~/.ssh'"]),
        (rules(rw=[".git/config"]), ["rw '.git/config'"]),
        (rules(ro=["secret"]), ["ro 'secret'"]),
        (rules(ro=["sub"], rw=["sub"], exclude=["/usr"]), []),
        (rules(ro=["/usr/share"]), []),
        (rules(rw=["/usr/share"]), ["rw '/usr/share'"]),
        (rules(rw=["gone"]), []),
    ],
)
def test_project_path_rules_are_judged_against_the_plan_without_them(
    written: dict[str, object], asked: list[str]
) -> None:
    """What the layers below show already needs no trust; everything else does."""
    tree: Tree = {
        "/data/x": FILE, f"{HOME}/.ssh/k": FILE, f"{GIT}/config": FILE, f"{CWD}/sub/x": FILE,
        "/usr/share/x": FILE, f"{CWD}/secret": FILE,
    }  # fmt: skip
    user = rules(exclude=["secret"])
    policy = policy_of(user=user, project=written)
    below = plan_of(tree, user=user, git=plain_git())
    known = facts(policy, tree, git=plain_git())
    assert widened_paths(policy, known, below, resolve(policy, known)) == asked


def test_look_up_finds_the_deepest_mount_and_the_later_one() -> None:
    """`why` answers with the rule that decides."""
    plan = plan_of(files("a/x"), flags=rules(ro=["a"], rw=["a/x"]))
    view = look_up(plan, f"{CWD}/a/x")
    assert view.level == RW
    assert view.mount is not None
    assert view.mount.dest == f"{CWD}/a/x"
    assert "flags: filesystem.rw" in rule_of(plan, view)
    assert "nothing shows it" in rule_of(plan, look_up(plan, "/nowhere"))


def test_a_rule_is_named_also_where_it_changes_nothing() -> None:
    """`--rw` over an exclude of a lower layer leaves the project as it was, and is the rule."""
    plan = plan_of(files("a/x"), user=rules(exclude=["a"]), flags=rules(rw=["a"]))
    view = look_up(plan, f"{CWD}/a/x")
    assert view.level == RW
    assert rule_of(plan, view) == "flags: filesystem.rw"


def test_look_up_knows_private_and_absent_places() -> None:
    """What is made is not the host's."""
    plan = plan_of()
    expected = {
        "/tmp/x": PRIVATE, "/dev/null": PRIVATE, "/proc/2": PRIVATE, "/run/user/1000/x": PRIVATE,
        HOME: PRIVATE, "/usr/bin": RO, CWD: RW, "/srv": ABSENT, "/": ABSENT, "/var/lib": ABSENT,
    }  # fmt: skip
    assert {path: level(plan, path) for path in expected} == expected


def test_limits_and_switches_reach_the_plan() -> None:
    """Numbers in base units."""
    plan = plan_of(flags={"limits": {"memory": "1K", "pids": 3, "timeout": "1m"}})
    assert (plan.limits.memory, plan.limits.pids, plan.limits.timeout) == (1024, 3, 60.0)
    assert plan.limits.cpu_time is None


def test_the_filter_s_level_reaches_the_plan_and_off_is_said_aloud() -> None:
    """On every run, with the layer that asked for it."""
    assert plan_of().seccomp == "default"
    strict = plan_of(project={"seccomp": "strict"})
    assert (strict.seccomp, strict.notices) == ("strict", ())
    off = plan_of(user={"seccomp": "off"})
    assert off.seccomp == "off"
    (notice,) = off.notices
    assert notice.startswith("seccomp is off (global.toml: seccomp)")


def test_the_private_home_is_keyed_by_project_and_profile() -> None:
    """Agents and projects do not share one."""
    keys = {plan_of(command=c).home_key for c in ("sh", "claude")}
    keys |= {plan_of(cwd=a_match("/data/q")).home_key}
    assert len(keys) == 3


def test_resolving_is_pure() -> None:
    """The same input twice, nothing changed in between."""
    policy = policy_of(flags=rules(ro=["x"]))
    given = facts(policy, files("x"))
    assert resolve(policy, given) == resolve(policy, given)
    assert layers(flags=rules(ro=["x"])) == layers(flags=rules(ro=["x"]))
