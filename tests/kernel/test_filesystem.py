"""What the command can read and write: levels, specificity, layers, globs, links, the empty root.

Every test looks at the host from outside as well.
"""

# ruff: noqa: E501 - a script for the inside reads better in one piece
from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING

import pytest

from kernel.conftest import World, end_group, toml

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.kernel


def report(world: World, checks: dict[str, str], *flags: str, **options: object) -> dict[str, bool]:
    """Run several shell conditions in one sandbox: name → did it succeed."""
    script = "\n".join(
        f"if ( {check} ) >/dev/null 2>&1; then echo '{name}=1'; else echo '{name}=0'; fi"
        for name, check in checks.items()
    )
    done = world.sh(script, *flags, **options)
    assert done.returncode == 0, done.stderr
    return {k: v == "1" for k, v in (line.split("=") for line in done.stdout.splitlines())}


def tree(world: World) -> Path:
    """A directory beside the project with a file and a sub-directory."""
    world.write("~/data/file", "old")
    world.write("~/data/sub/inner", "old")
    return world.path("~/data")


def contents(top: Path) -> dict[str, str]:
    return {str(p.relative_to(top)): p.read_text() for p in sorted(top.rglob("*")) if p.is_file()}


# --- read-only and read-write ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["flag", "toml", "json", "jsonc"])
def test_can_read_but_cannot_change_a_ro_directory(world: World, how: str) -> None:
    """`ro` shows a directory and refuses create, modify, delete and rename."""
    data = tree(world)
    flags = ["--ro", str(data)] if how == "flag" else []
    if how == "toml":
        world.global_config(toml({"filesystem": {"ro": [str(data)]}}))
    elif how == "json":
        world.global_config(json.dumps({"filesystem": {"ro": [str(data)]}}), "json")
    elif how == "jsonc":
        text = '{ // a comment\n "filesystem": { /* two */ "ro": ["~/data",], },\n}'
        world.global_config(text, "jsonc")
    got = report(
        world,
        {
            "read": f"[ $(cat {data}/file) = old ] && ls {data}/sub/inner",
            "create": f"touch {data}/new",
            "modify": f"echo x > {data}/file",
            "delete": f"rm -f {data}/file",
            "rename": f"mv {data}/file {data}/moved",
            "mkdir": f"mkdir {data}/d",
        },
        *flags,
    )
    assert got.pop("read")
    assert not any(got.values()), got
    assert contents(data) == {"file": "old", "sub/inner": "old"}


def test_can_change_a_rw_directory_on_the_host(world: World) -> None:
    """`rw` outside of the project reaches the host: the control of the test above."""
    data = tree(world)
    done = world.sh(f"cd {data} && touch new && echo x > file && rm sub/inner", "--rw", data)
    assert done.returncode == 0, done.stderr
    assert contents(data) == {"new": "", "file": "x\n"}
    assert (data / "new").stat().st_uid == world.runner.uid


def test_can_write_the_project_and_cannot_see_what_nobody_named(world: World) -> None:
    """The project is writable by default; a directory beside it is not there at all."""
    data = tree(world)
    done = world.sh(f"echo made > f; pwd; ls -d {data} {world.home}/work/*")
    assert world.path("f").read_text() == "made\n"
    assert done.stdout.split() == [str(world.project), str(world.project)]
    assert str(data) in done.stderr


def test_missing_paths_are_skipped_aloud(world: World) -> None:
    """A missing path does not stop the start, and is named on stderr with its source."""
    done = world.sh("echo ran", "--ro", "~/none", "--rw", "nil", "--exclude", "gone*")
    assert done.stdout == "ran\n"
    assert "ro '~/none' (flag --ro) skipped: no such path" in done.stderr
    assert "rw 'nil'" in done.stderr
    assert "exclude 'gone*' (flag --exclude) matches nothing" in done.stderr
    assert sorted(os.listdir(world.project)) == []


def test_success_is_silent(world: World) -> None:
    """Nothing of our own on either stream when all is well."""
    done = world.sh("true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_two_ro_directories_are_both_enforced(world: World) -> None:
    """Repeated flags add up."""
    for name in ("a", "b"):
        world.write(f"{name}/f", "old")
    got = report(
        world,
        {"a": "echo x > a/f", "b": "echo x > b/f", "c": "echo x > c"},
        "--ro",
        "a",
        "--ro",
        "b",
    )
    assert got == {"a": False, "b": False, "c": True}


def test_single_files_can_differ_from_their_directory(world: World) -> None:
    """A ro file in a rw directory, and a rw file in a ro directory."""
    world.write("open/fixed", "old")
    world.write("open/free", "old")
    world.write("shut/fixed", "old")
    world.write("shut/free", "old")
    got = report(
        world,
        {
            "read": "cat open/fixed",
            "1": "echo x > open/fixed",
            "2": "echo x > open/free",
            "3": "echo x > shut/fixed",
            "4": "echo x > shut/free",
            "5": "rm -f open/fixed",
            "6": "mv open/free open/fixed",
        },
        *("--ro", "open/fixed", "--ro", "shut", "--rw", "shut/free"),
    )
    assert got == {
        "read": True,
        "1": False,
        "2": True,
        "3": False,
        "4": True,
        "5": False,
        "6": False,
    }
    assert world.path("open/fixed").read_text() == "old"
    assert world.path("shut/free").read_text() == "x\n"


def test_cannot_write_the_system_trees(world: World) -> None:
    """Nothing of the system is writable, not even for root (who could outside)."""
    places = (
        "/",
        "/usr",
        "/usr/bin",
        "/usr/local",
        "/etc",
        "/var",
        "/var/lib",
        "/run",
        "/opt",
        "/sys",
    )
    got = report(world, {p: f"[ -w {p} ] || touch {p}/agsbx-probe" for p in places})
    assert not any(got.values()), got
    if world.runner.uid == 0:
        assert world.outside("test", "-w", "/usr").returncode == 0
    assert not any(os.path.lexists(f"{p}/agsbx-probe") for p in places)


# --- specificity and precedence -------------------------------------------------------------------


def test_the_deeper_path_wins(world: World) -> None:
    """ro in rw, rw in ro, rw in an excluded directory, excluded in rw."""
    for name in ("a/ro/rw", "b/hidden/rw", "b/shown"):
        world.write(f"{name}/f", "old")
    got = report(
        world,
        {
            "parent": "touch a/new",
            "ro": "touch a/ro/new",
            "rw": "touch a/ro/rw/new",
            "gone": '[ -e b/hidden/f ] || [ "$(ls b/hidden)" != rw ]',
            "deep": "echo x > b/hidden/rw/f",
            "sibling": "touch b/shown/new",
            "seal": "touch b/hidden/new",
        },
        *("--ro", "a/ro", "--rw", "a/ro/rw", "--exclude", "b/hidden", "--rw", "b/hidden/rw"),
    )
    wanted = {
        "parent": True, "ro": False, "rw": True, "gone": False, "deep": True, "sibling": True,
        "seal": False,
    }  # fmt: skip
    assert got == wanted
    assert world.path("b/hidden/rw/f").read_text() == "x\n"
    assert not world.path("b/hidden/new").exists()


LEVELS = {"rw": (True, True), "ro": (True, False), "exclude": (False, False)}


@pytest.mark.parametrize(
    ("layers", "winner"),
    [
        ({"global": "rw", "project": "ro"}, "ro"),
        ({"global": "exclude", "explicit": "ro"}, "ro"),
        ({"global": "ro", "explicit": "rw"}, "rw"),
        ({"project": "ro", "flag": "rw"}, "rw"),
        ({"explicit": "rw", "flag": "ro"}, "ro"),
        ({"project": "ro", "flag": "exclude"}, "exclude"),
        ({"global": "exclude", "project": "exclude", "flag": "rw"}, "rw"),
        ({"global": "rw", "flag": "exclude"}, "exclude"),
    ],
    ids=lambda v: "-".join(f"{a}.{b}" for a, b in v.items()) if isinstance(v, dict) else v,
)
def test_the_later_layer_wins(world: World, layers: dict[str, str], winner: str) -> None:
    """Global < project or -c < flags, for one and the same path."""
    target = world.write("target", "old")
    flags: list[str] = []
    for place, level in layers.items():
        text = toml({"filesystem": {level: ["target"]}})
        if place == "global":
            world.global_config(text)
        elif place == "project":
            world.project_config(text)
        elif place == "explicit":
            flags += ["-c", str(world.write("~/policy.toml", text))]
        else:
            flags += [f"--{level}", "target"]
    got = report(world, {"read": "cat target", "write": "echo x > target"}, *flags)
    assert (got["read"], got["write"]) == LEVELS[winner]
    assert target.read_text() == ("x\n" if winner == "rw" else "old")


@pytest.mark.parametrize(
    ("levels", "winner"),
    [(("rw", "ro"), "ro"), (("ro", "exclude"), "exclude"), (("rw", "ro", "exclude"), "exclude")],
)
@pytest.mark.parametrize("where", ["flags", "file"])
def test_within_a_layer_the_stricter_wins(
    world: World, levels: tuple[str, ...], winner: str, where: str
) -> None:
    """exclude > ro > rw, in whatever order they are written."""
    world.write("target", "old")
    flags = [word for level in levels for word in (f"--{level}", "target")]
    if where == "file":
        world.global_config(toml({"filesystem": {level: ["target"] for level in levels}}))
        flags = []
    got = report(world, {"read": "cat target", "write": "echo x > target"}, *flags)
    assert (got["read"], got["write"]) == LEVELS[winner]


@pytest.mark.parametrize(
    "flags",
    [
        ("--exclude", "t*", "--rw", "target"),
        ("--rw", "target", "--exclude", "t*"),
        ("--ro", "[t]arget", "--rw", "target"),
    ],
)
def test_exact_beats_glob(world: World, flags: tuple[str, ...]) -> None:
    """An exact path wins over a glob of any strength and order."""
    world.write("target", "old")
    assert world.sh("echo x > target", *flags).returncode == 0
    assert world.path("target").read_text() == "x\n"


def test_exact_in_a_lower_layer_beats_a_glob_in_a_higher(world: World) -> None:
    """The form of the rule counts before its layer."""
    world.write("target", "old")
    world.global_config(toml({"filesystem": {"ro": ["target"]}}))
    got = report(world, {"read": "cat target", "write": "echo x > target"}, "--exclude", "tar*")
    assert got == {"read": True, "write": False}


@pytest.mark.parametrize(
    "spelling",
    [
        "~/data",
        "~/data/",
        "~//data",
        "../../data",
        "x/../../../data",
        "{home}/./data",
        "{home}/work/../data",
    ],
)
def test_spellings_of_one_path(world: World, spelling: str) -> None:
    """`~`, `..`, `.`, doubled and trailing slashes name the same directory."""
    data = tree(world)
    done = world.sh(f"cat {data}/file", "--ro", spelling.format(home=world.home))
    assert done.stdout == "old", done.stderr


def test_other_users_and_variables_stay_literal(world: World) -> None:
    """`~bob` and `$HOME` are names like any other."""
    world.write("~bob", "old")
    world.write("$HOME", "old")
    got = report(
        world, {"1": "cat '~bob'", "2": "cat '$HOME'"}, "--exclude", "~bob", "--exclude", "$HOME"
    )
    assert got == {"1": False, "2": False}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ro", ""), "empty"),
        (("--ro", "[x"), "unclosed '['"),
        (("--rw", "/run"), "reserved"),
        (("--ro", "/proc/1"), "reserved"),
        (("--exclude", "a\nb"), "control character"),
    ],
)
def test_bad_paths_are_errors(world: World, flags: tuple[str, ...], words: str) -> None:
    """A path that means nothing stops the start with 125."""
    done = world.sh("touch ran", *flags)
    assert done.returncode == 125
    assert words in done.stderr
    assert not world.path("ran").exists()


# --- globs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "hidden"),
    [
        (".env*", {".env", ".env.local"}),
        ("*.pem", {"a.pem", ".b.pem"}),
        ("?.pem", {"a.pem"}),
        ("v[12]", {"v1", "v2"}),
        ("v[!12]", {"v3"}),
        ("packages/*/config.json", {"packages/p/config.json", "packages/q/config.json"}),
        ("**/config.json", {"packages/p/config.json", "packages/q/config.json", "config.json"}),
        ("packages/**/deep", {"packages/p/x/y/deep"}),
    ],
)
def test_globs_hide_exactly_what_they_match(world: World, pattern: str, hidden: set[str]) -> None:
    """`*`, `?`, classes and `**`, leading dots included."""
    names = {
        ".env", ".env.local", "env", "a.pem", ".b.pem", "v1", "v2", "v3", "config.json",
        "packages/p/config.json", "packages/q/config.json", "packages/config.yaml",
        "packages/p/x/y/deep",
    }  # fmt: skip
    for name in names:
        world.write(name, "old")
    got = report(world, {name: f"cat '{name}'" for name in names}, "--exclude", pattern)
    assert {name for name, readable in got.items() if not readable} == hidden
    assert all(world.path(name).read_text() == "old" for name in names)


def test_globs_hide_directories_and_links_targets(world: World) -> None:
    """A glob hit that is a directory is empty; one that is a link hides its target too."""
    world.write("secret-d/f", "s")
    world.write("kept/real", "s")
    world.link("secret-l", "kept/real")
    world.link("secret-dangling", "nowhere")
    got = report(
        world,
        {"d": '[ -n "$(ls -A secret-d)" ]', "l": "cat secret-l", "t": "cat kept/real"},
        "--exclude", "secret-*",
    )  # fmt: skip
    assert got == {"d": False, "l": False, "t": False}


def test_can_hide_thousands_of_files(world: World) -> None:
    """No limit of an argument list: each of 2,500 files is hidden."""
    many = world.mkdir("many")
    for number in range(2500):
        (many / f"{number}.key").write_text("s")
    world.runner.own(many)
    done = world.sh(
        "cat many/*.key | wc -c; ls many | wc -l", "--exclude", "many/*.key", timeout=120
    )
    assert done.stdout.split() == ["0", "2500"], done.stderr


# --- exclude --------------------------------------------------------------------------------------


def test_cannot_read_write_or_delete_what_is_excluded(world: World) -> None:
    """A directory is empty and read-only; a file is there, regular, and closed."""
    world.write("dir/sub/f", "secret")
    world.write("file", "secret")
    world.write("file.example", "open")
    got = report(
        world,
        {
            "dir": '[ -d dir ] && [ -z "$(ls -A dir)" ]',
            "file": "[ -f file ]",
            "sibling": "cat file.example && echo x > file.example",
            "enoent": "[ -e dir/sub ]",
            "create": "touch dir/new",
            "read": "cat file",
            "write": "echo x > file",
            "chmod": "chmod 600 file && cat file",
            "delete": "rm -f file",
            "rmdir": "rmdir dir",
            "rename": "mv dir dir2",
            "rename_file": "mv file file2",
            "replace": "mv file.example file",
            "link": "ln file file3 && cat file3",
        },
        *("--exclude", "dir", "--exclude", "file"),
    )
    assert [name for name, yes in got.items() if yes] == ["dir", "file", "sibling"]
    assert world.path("file").read_text() == world.path("dir/sub/f").read_text() == "secret"


def test_programs_see_an_excluded_file_as_closed(world: World) -> None:
    """Python gets PermissionError and an empty listing, so programs fail in the way they know."""
    world.write("file", "secret")
    world.write("dir/f", "secret")
    code = (
        "import os\n"
        "print(os.path.exists('file'), os.listdir('dir'), oct(os.stat('file').st_mode & 0o777))\n"
        "try: open('file')\n"
        "except PermissionError: print('closed')\n"
    )
    flags = ("--exclude", "file", "--exclude", "dir")
    done = world.sandbox(*flags, "/usr/bin/python3", "-c", code)
    assert done.stdout.splitlines() == ["True [] 0o0", "closed"], done.stderr


@pytest.mark.parametrize("where", ["{project}", "{home}/work", "{link}"])
def test_cannot_run_in_an_excluded_directory(world: World, where: str) -> None:
    """The working directory, a parent of it, or a link to it: an error, not lost work."""
    world.link("~/shortcut", world.project)
    path = where.format(project=world.project, home=world.home, link=world.home / "shortcut")
    done = world.sh("touch lost", "--exclude", path)
    assert done.returncode == 125
    assert "is excluded by flag --exclude" in done.stderr
    assert os.listdir(world.project) == []


def test_can_run_beside_and_above_an_excluded_directory(world: World) -> None:
    """A sibling, a similar name and a child do not concern the working directory."""
    world.mkdir("~/work/project2")
    world.mkdir("child")
    done = world.sh("touch ok", "--exclude", "../project2", "--exclude", "child")
    assert done.returncode == 0, done.stderr
    assert world.path("ok").exists()


# --- links ----------------------------------------------------------------------------------------


def test_links_show_and_protect_their_target(world: World) -> None:
    """ro on a link to a directory: readable through the link, writable through neither name."""
    data = tree(world)
    world.link("~/alias", data)
    got = report(
        world,
        {
            "read": f"cat {world.home}/alias/file && cat {data}/file",
            "link": f"touch {world.home}/alias/new",
            "target": f"touch {data}/new",
        },
        *("--ro", "~/alias"),
    )
    assert got == {"read": True, "link": False, "target": False}


def test_rw_on_a_link_mounts_the_target(world: World) -> None:
    """Writing through a named link reaches the real directory."""
    data = tree(world)
    world.link("~/alias", "data")
    assert world.sh(f"echo x > {world.home}/alias/file", "--rw", "~/alias").returncode == 0
    assert (data / "file").read_text() == "x\n"
    assert world.path("~/alias").is_symlink()


@pytest.mark.parametrize("kind", ["absolute", "relative", "chain"])
def test_cannot_read_an_excluded_target_under_either_name(world: World, kind: str) -> None:
    """Excluding a link hides what it leads to."""
    world.write("real/f", "secret")
    world.write("realfile", "secret")
    if kind == "chain":
        world.link("one", "two")
        world.link("two", world.project / "three")
        world.link("three", "real")
        world.link("f1", "f2")
        world.link("f2", "realfile")
        names = ("one", "f1")
    else:
        prefix = f"{world.project}/" if kind == "absolute" else ""
        world.link("one", f"{prefix}real")
        world.link("f1", f"{prefix}realfile")
        names = ("one", "f1")
    got = report(
        world,
        {n: f"cat {n}" for n in ("real/f", "one/f", "realfile", "f1")},
        *(word for name in names for word in ("--exclude", name)),
    )
    assert not any(got.values()), got


def test_can_follow_a_chain_of_three_links(world: World) -> None:
    """Each link of a chain is there inside, not only its end."""
    data = tree(world)
    world.link("~/c", data)
    world.link("~/b", "c")
    world.link("~/a", world.home / "b")
    done = world.sh("cat ~/a/file ~/b/file", "--ro", "~/a")
    assert done.stdout == "oldold", done.stderr


def test_a_dangling_link_is_missing(world: World) -> None:
    """It is skipped with a notice."""
    world.link("~/dangling", "nowhere")
    done = world.sh("echo ran", "--ro", "~/dangling")
    assert done.stdout == "ran\n"
    assert "skipped: no such path" in done.stderr


def test_can_work_in_a_symlinked_directory(world: World) -> None:
    """The working directory keeps the name that the user typed, and works under both."""
    world.link("~/shortcut", world.project)
    shortcut = world.home / "shortcut"
    done = world.sh("pwd; touch made; ls -d $PWD/made", cwd=shortcut, env={"PWD": str(shortcut)})
    assert done.stdout.split() == [str(shortcut), f"{shortcut}/made"], done.stderr
    assert world.path("made").exists()


def test_can_work_with_a_symlinked_home(world: World) -> None:
    """HOME through a link is usable under that name and stays private."""
    world.link(world.base / "linked", world.home)
    world.write("~/secret", "s")
    env = {"HOME": str(world.base / "linked")}
    done = world.sh('echo "$HOME"; echo x > ~/note; cat ~/note; ls ~/secret', env=env)
    assert done.stdout.split() == [env["HOME"], "x"], done.stderr
    assert not world.path("~/note").exists()


def test_cannot_widen_a_second_run_with_a_planted_link(world: World) -> None:
    """A configured rw directory that the sandbox replaces by a link is refused at the next start."""
    world.write("~/private/key", "s")
    world.global_config(toml({"filesystem": {"rw": ["dist"]}}))
    world.mkdir("dist")
    planted = world.sh(f"rmdir dist; rm -rf dist; ln -s {world.home}/private dist; ls -ld dist")
    if not world.path("dist").is_symlink():
        # Its mount point cannot be replaced while it is one; from another sandbox it can.
        world.global_config("")
        planted = world.sh(f"rm -r dist; ln -s {world.home}/private dist")
        world.global_config(toml({"filesystem": {"rw": ["dist"]}}))
    assert world.path("dist").is_symlink(), planted.stderr
    done = world.sh("cat dist/key; echo x > dist/key")
    assert done.returncode == 125
    assert "leads out to" in done.stderr
    assert world.path("~/private/key").read_text() == "s"


def test_cannot_move_a_parent_of_something_protected(world: World) -> None:
    """Every directory above a hidden or ro path is pinned: a rename fails, so a copy cannot pose."""
    world.write("a/b/c/secret", "s")
    world.write("x/y/fixed", "old")
    control = world.sh("mv a a2 && mv a2 a")
    assert control.returncode == 0, control.stderr
    got = report(
        world,
        {
            "a": "mv a a2",
            "b": "mv a/b a/b2",
            "c": "mv a/b/c a/b/c2",
            "x": "mv x x2",
            "y": "mv x/y x/y2",
            "rmdir": "rm -rf x",
            "work": "touch a/b/new x/y/new a/new",
        },
        *("--exclude", "a/b/c", "--ro", "x/y/fixed"),
    )
    assert [name for name, yes in got.items() if yes] == ["work"]
    assert contents(world.project) == {
        "a/b/c/secret": "s", "a/b/new": "", "a/new": "", "x/y/fixed": "old", "x/y/new": "",
    }  # fmt: skip


# --- presets --------------------------------------------------------------------------------------


def presets(world: World, *names: str) -> None:
    world.global_config(toml({"filesystem": {"presets": list(names)}}))


def test_lint_settings_are_read_only_and_cannot_is_lifted_by_name(world: World) -> None:
    """@lint is on by default; `!@lint/python` frees only Python's files."""
    for name in ("pyproject.toml", "tsconfig.json", ".golangci.yml", ".editorconfig", "main.py"):
        world.write(name, "old")
    checks = {
        n: f"echo x > {n}" for n in ("pyproject.toml", "tsconfig.json", ".golangci.yml", "main.py")
    }
    assert report(world, checks) == {
        "pyproject.toml": False, "tsconfig.json": False, ".golangci.yml": False, "main.py": True,
    }  # fmt: skip
    presets(world, "!@lint/python")
    got = report(world, {**checks, ".editorconfig": "echo x > .editorconfig"})
    assert got["pyproject.toml"]
    assert not got["tsconfig.json"]
    assert not got[".editorconfig"]
    presets(world, "!@lint/all", "@lint/go")
    got = report(world, checks)
    assert got["tsconfig.json"]
    assert not got[".golangci.yml"]


def test_without_the_git_preset_hooks_are_writable(world: World) -> None:
    """`!@git` lifts the protection: the control for test_git.py."""
    world.outside("git", "init", "-q")
    presets(world, "!@git")
    assert world.sh("echo x > .git/hooks/post-commit").returncode == 0
    assert world.path(".git/hooks/post-commit").exists()


def test_without_caches_the_cache_is_forgotten(world: World) -> None:
    """`!@caches` makes ~/.cache fresh in each run, while the rest of the private home stays."""
    script = (
        "cat ~/.cache/c ~/note 2>/dev/null; mkdir -p ~/.cache; echo c > ~/.cache/c; echo n > ~/note"
    )
    world.sh(script)
    assert world.sh(script).stdout == "c\nn\n"
    presets(world, "!@caches")
    world.sh(script)
    assert world.sh(script).stdout == "n\n"


def test_host_preset_shows_the_host_without_secrets(world: World) -> None:
    """@host: other trees of the host are readable, nothing more is writable, secrets are hidden."""
    world.write("~/.ssh/id_ed25519", "secret")
    world.write("~/.netrc", "secret")
    world.write("~/notes", "note")
    neighbour = world.write(world.base / "shared" / "doc", "doc")
    assert world.sh(f"cat {neighbour}").returncode != 0
    presets(world, "@host")
    got = report(
        world,
        {
            "neighbour": f"cat {neighbour}",
            "write": f"touch {neighbour.parent}/new",
            "home": f"[ -e {world.home}/notes ]",
            "ssh": f'[ -n "$(ls -A {world.home}/.ssh)" ]',
            "netrc": f"cat {world.home}/.netrc",
            "state": f'[ -n "$(ls -A {world.state})" ]',
            "docker": "ls /run/docker.sock",
            "project": "touch made",
        },
    )
    assert [name for name, yes in got.items() if yes] == ["neighbour", "project"]


@pytest.mark.parametrize("name", ["@nope", "!@nope", "lint", ""])
def test_unknown_presets_are_errors(world: World, name: str) -> None:
    """Also when negated; the file and the name are in the message."""
    presets(world, name)
    done = world.sh("touch ran")
    assert done.returncode == 125
    assert "config.toml" in done.stderr
    assert not world.path("ran").exists()


# --- what is there by default ---------------------------------------------------------------------


def test_cannot_see_other_homes_and_projects(world: World) -> None:
    """An empty root: no other user's home, no sibling project, no file of the own home."""
    world.write("~/work/other/f", "s")
    world.write("~/document", "s")
    world.write(world.base / "home" / "you" / "f", "s")
    hidden = [
        "~/work/other",
        "~/document",
        str(world.base / "home" / "you"),
        "/boot",
        "/mnt",
        "/media",
    ]
    got = report(world, {name: f"ls -d {name}" for name in hidden})
    assert not any(got.values()), got
    assert world.outside("cat", world.base / "home" / "you" / "f").returncode == 0
    listed = world.sh(f"ls -A {world.base}/home {world.base} / /var").stdout.split()
    assert "etc" in listed
    assert not {"you", "boot", "root", "mnt", "log"} & set(listed)


def test_can_use_ordinary_tools(world: World) -> None:
    """Shell tools, the interpreter, /proc, /dev and the user database are usable."""
    script = """
        for tool in ls cat grep sed awk find sort tar git; do command -v $tool >/dev/null || echo no $tool; done
        grep -q '^State' /proc/self/status || echo no proc
        echo x > /dev/null; head -c 4 /dev/urandom | wc -c
        id -un; ls /etc/passwd; /usr/bin/python3 -c 'import ssl, sqlite3'
    """
    done = world.sh(script)
    assert done.stdout.split() == ["4", world.runner.name, "/etc/passwd"], done.stderr


def test_cannot_see_other_processes(world: World) -> None:
    """/proc shows the sandbox's own processes only; the control sees us."""
    script = "for d in /proc/[0-9]*; do echo $d; done | wc -l"
    assert int(world.sh(script).stdout) < 8
    assert int(world.outside("sh", "-c", script).stdout) > 8


def test_a_hidden_command_is_named(world: World) -> None:
    """A program that the sandbox would not show ends with 126 and says which path to add."""
    tool = world.write("~/private-tools/tool", "#!/bin/sh\necho ran\n", 0o755)
    done = world.sandbox(tool)
    assert done.returncode == 126
    assert str(tool) in done.stderr
    assert f"--ro '{tool}'" in done.stderr
    assert world.sandbox("--ro", tool, tool).stdout == "ran\n"


def test_a_hidden_interpreter_is_named(world: World) -> None:
    """So is the interpreter of a script, and the end of a chain of links."""
    interpreter = world.write("~/hidden/sh", "#!/bin/sh\necho ran\n", 0o755)
    world.write("script", f"#!{interpreter}\n", 0o755)
    done = world.sandbox("./script")
    assert done.returncode == 126
    assert str(interpreter) in done.stderr
    world.link("link", interpreter)
    done = world.sandbox("./link")
    assert done.returncode == 126
    assert str(interpreter) in done.stderr


def test_tools_on_path_and_toolchains_of_the_home_are_there(world: World) -> None:
    """~/.local/bin and any directory on PATH run inside, read-only."""
    for place in ("~/.local/bin", "~/odd/bin"):
        world.write(f"{place}/tool-{place[-7:-4]}", "#!/bin/sh\necho ran\n", 0o755)
    odd = world.path("~/odd/bin")
    env = {"PATH": f"{odd}:/usr/bin:/bin"}
    assert world.sandbox(odd / "tool-odd", env=env).stdout == "ran\n"
    assert world.sandbox("tool-odd", env=env).stdout == "ran\n"
    assert world.sandbox(world.path("~/.local/bin") / "tool-cal").stdout == "ran\n"
    assert world.sh(f"touch {odd}/new", env=env).returncode != 0
    assert sorted(os.listdir(odd)) == ["tool-odd"]


def test_only_listed_variables_are_passed(world: World) -> None:
    """Tokens, keys and agent sockets stay out; locale, terminal and tool settings come in."""
    secret = {
        "GITHUB_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "t", "SSH_AUTH_SOCK": "/tmp/s", "FOO": "t",
        "DBUS_SESSION_BUS_ADDRESS": "t", "ANTHROPIC_API_KEY": "t", "LD_PRELOAD": "",
        "http_proxy": "http://u:p@h:1", "DOCKER_HOST": "unix:///x", "BASH_ENV": "x",
    }  # fmt: skip
    passed = {"LANG": "C.UTF-8", "LC_ALL": "C", "TERM": "dumb", "EDITOR_X": "e", "PYTHONUTF8": "1"}
    done = world.sandbox("--env", "EDITOR_X", "--env", "SET=a b=c", "env", env={**secret, **passed})
    got = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert not secret.keys() & got.keys()
    assert {k: got[k] for k in passed} == passed
    assert got["SET"] == "a b=c"
    assert got["IN_AGENT_SANDBOX"] == "1"
    assert got["HOME"] == str(world.home)
    assert got["TMPDIR"] == "/tmp"


def test_a_profile_passes_its_own_key_only(world: World) -> None:
    """ANTHROPIC_API_KEY reaches claude, not codex."""
    env = {"ANTHROPIC_API_KEY": "k"}
    show = ("sh", "-c", "echo ${ANTHROPIC_API_KEY-none}")
    assert world.sandbox("--profile", "claude", *show, env=env).stdout == "k\n"
    assert world.sandbox("--profile", "codex", *show, env=env).stdout == "none\n"


# --- the private home -----------------------------------------------------------------------------


def test_the_private_home_persists(world: World) -> None:
    """What a run leaves in $HOME is there in the next one, and not in the real home."""
    world.sh("echo kept > ~/note; mkdir -p ~/.cache/x")
    assert world.sh("cat ~/note; ls ~/.cache").stdout.split() == ["kept", "x"]
    assert not world.path("~/note").exists()
    assert not world.path("~/.cache").exists()


def test_private_homes_are_separate(world: World) -> None:
    """Another project, and another profile, has another home."""
    world.sh("echo kept > ~/note")
    other = world.mkdir("~/work/other")
    assert world.sh("cat ~/note", cwd=other).returncode != 0
    assert world.sandbox("--profile", "codex", "cat", f"{world.home}/note").returncode != 0
    assert world.sh("cat ~/note").stdout == "kept\n"


def test_an_ephemeral_home_forgets(world: World) -> None:
    """--home=ephemeral starts empty, is writable, and is gone at the end."""
    world.sh("echo kept > ~/note")
    done = world.sh("ls -A ~; echo x > ~/fresh && cat ~/fresh", "--home=ephemeral")
    assert done.stdout.split() == [".profile", ".zprofile", "work", "x"], done.stderr
    assert world.sh("ls ~/fresh", "--home=ephemeral").returncode != 0
    assert world.sh("cat ~/note").stdout == "kept\n"
    assert world.workspaces() == []


SECRETS = (
    "~/.ssh/id_rsa", "~/.gnupg/key", "~/.aws/credentials", "~/.netrc", "~/.git-credentials",
    "~/.config/gh/hosts.yml", "~/.docker/config.json", "~/.kube/config", "~/.npmrc",
    "~/.bash_history", "~/.claude/.credentials.json", "~/.local/share/keyrings/login.keyring",
)  # fmt: skip


def test_a_host_home_is_read_only_and_without_secrets(world: World) -> None:
    """--home=host shows the real home; keys, tokens and histories are not readable in it."""
    for name in SECRETS:
        world.write(name, "secret")
    world.write("~/notes", "note")
    world.sh("true")
    checks = {name: f"grep -q secret {name}" for name in SECRETS}
    got = report(
        world,
        {**checks, "read": "cat ~/notes", "write": "echo x > ~/notes", "new": "touch ~/new",
         "state": f'[ -n "$(ls -A {world.state})" ]', "project": "touch made"},
        "--home=host",
    )  # fmt: skip
    assert [name for name, yes in got.items() if yes] == ["read", "project"]
    assert world.path("~/notes").read_text() == "note"


def test_cannot_read_secrets_of_the_home_by_default(world: World) -> None:
    """With a private home they are simply not there; the control reads them outside."""
    for name in SECRETS:
        world.write(name, "secret")
    got = report(world, {name: f"[ -s {name} ]" for name in SECRETS})
    assert not any(got.values()), got
    assert world.outside("cat", world.path(SECRETS[0])).stdout == "secret"


def test_cannot_reach_our_own_state(world: World) -> None:
    """Private homes, trust and workspaces of all projects stay out of reach, also by name."""
    world.sh("true")
    assert (world.state / "homes").exists()
    for flags in ([], ["--home=host"], ["--exclude", str(world.home / ".local")]):
        done = world.sh(f"ls -A {world.state} || true", *flags)
        assert done.stdout == "", done.stdout
    for level in ("--ro", "--rw"):
        done = world.sh("touch ran", level, str(world.state))
        assert done.returncode == 125
        assert "reserved" in done.stderr
    done = world.sh(f"ls {world.state}/homes", "--rw", str(world.home / ".local"))
    assert done.returncode != 0


def test_policy_files_in_use_cannot_be_written(world: World) -> None:
    """The project's file, the one given with -c and the global one stay as they are."""
    mine = world.project_config('network = "off"\n')
    given = world.write("given.toml", "")
    world.global_config("")
    script = (
        "echo x >> .agent-sandbox.toml; echo x >> given.toml; rm -f .agent-sandbox.toml given.toml"
    )
    world.sh(script)
    assert mine.read_text() == 'network = "off"\n'
    world.write("given.toml", "")
    world.sh(script, "-c", "given.toml")
    assert given.read_text() == ""
    shown = world.sh("echo x > ~/.config/agent-sandbox/config.toml", "--rw", "~/.config")
    assert shown.returncode != 0
    assert world.path("~/.config/agent-sandbox/config.toml").read_text() == ""


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("toml", "network = ", ".agent-sandbox.toml"),
        ("json", "{", ".agent-sandbox.json"),
        ("toml", "netwrok = true", "netwrok"),
        ("toml", "[filesystem]\nroo = []", "filesystem.roo"),
        ("toml", "[filesystem]\nro = 'x'", "filesystem.ro"),
        ("json", '{"network": 7}', "network"),
        ("toml", 'network = "some"', "network"),
        ("json", '{"docker": "filter"}', "docker"),
    ],
)
def test_a_bad_policy_file_stops_the_start(world: World, name: str, text: str, words: str) -> None:
    """The error names the file and the key, with 125; --help still works."""
    world.project_config(text, name)
    done = world.sh("touch ran")
    assert done.returncode == 125
    assert words in done.stderr
    assert done.stderr.startswith("agent-sandbox: error: cannot ")
    assert not world.path("ran").exists()
    assert world.sandbox("--help").returncode == 0


def test_two_policy_files_in_one_place_are_an_error(world: World) -> None:
    """One of them would be ignored."""
    world.project_config("")
    world.project_config("{}", "json")
    done = world.sh("true")
    assert done.returncode == 125
    assert "both exist" in done.stderr


def test_the_global_file_follows_xdg(world: World) -> None:
    """XDG_CONFIG_HOME moves the user's file."""
    world.write("f", "old")
    world.write("~/xdg/agent-sandbox/config.json", '{"filesystem": {"exclude": ["f"]}}')
    env = {"XDG_CONFIG_HOME": str(world.path("~/xdg"))}
    assert world.sh("cat f", env=env).returncode != 0
    assert world.sh("cat f").stdout == "old"


def test_explicit_config_replaces_the_projects(world: World) -> None:
    """-c takes the place of the project's file only; a missing one is an error."""
    world.write("a", "old")
    world.write("b", "old")
    world.project_config(toml({"filesystem": {"exclude": ["a"]}}))
    world.global_config(toml({"filesystem": {"exclude": ["b"]}}))
    given = world.write("~/given.jsonc", "{} // nothing")
    got = report(world, {"a": "cat a", "b": "cat b"}, "-c", str(given))
    assert got == {"a": True, "b": False}
    done = world.sh("true", "-c", "absent.toml")
    assert done.returncode == 125
    assert "absent.toml" in done.stderr


def test_can_run_in_another_directory(world: World) -> None:
    """-C makes another directory the project."""
    other = world.mkdir("~/work/other")
    done = world.sh("pwd; touch here", "-C", "../other")
    assert done.stdout.strip() == str(other), done.stderr
    assert (other / "here").exists()
    assert os.listdir(world.project) == []


@pytest.mark.parametrize("place", ["home", "/", "/etc", "/tmp", "above"])
def test_cannot_use_a_shared_directory_as_project(world: World, place: str) -> None:
    """The home, its parents and system directories would open too much."""
    path = {"home": world.home, "above": world.home.parent}.get(place, place)
    done = world.sh("true", "-C", str(path))
    assert done.returncode == 125
    assert "as the project" in done.stderr


def test_file_modes_and_owners_are_kept(world: World) -> None:
    """A file made inside belongs to the caller and has the caller's umask."""
    world.sh("touch f; mkdir d; chmod 4755 f || true")
    info = world.path("f").stat()
    assert info.st_uid == world.runner.uid
    assert stat.S_IMODE(world.path("d").stat().st_mode) == 0o755


@pytest.mark.parametrize("rule", ["config/.env", "**/.env"])
def test_cannot_drop_an_exclude_by_closing_its_directory(world: World, rule: str) -> None:
    """`chmod 0` in one run would make the next take the file for missing; root is not stopped."""
    world.write("config/.env", "SECRET")
    world.runner.own(world.project)
    world.sh("chmod 0 config", "--exclude", rule)
    done = world.sh("chmod 755 config; cat config/.env", "--exclude", rule)
    assert "SECRET" not in done.stdout
    if world.runner.uid:
        assert done.returncode == 125
        assert "chmod u+rwx" in done.stderr
    world.path("config").chmod(0o755)


def test_cannot_swap_a_directory_while_another_sandbox_starts(world: World) -> None:
    """A link that appears between plan and mounts never shows the home: the start fails."""
    secret = world.write("~/.ssh/id", "SECRET")
    world.runner.own(secret.parent)
    world.write("a/b/c/keep", "x")
    world.runner.own(world.project)
    swap = (
        "import ctypes,os,time\nlibc=ctypes.CDLL(None)\nos.makedirs('a2/b');"
        "os.path.lexists('l') or os.symlink('../../../..','l')\nend=time.time()+6\n"
        "while time.time()<end:\n libc.renameat2(-100,b'a',-100,b'l',2); time.sleep(0.0007)\n"
        " libc.renameat2(-100,b'a',-100,b'l',2); time.sleep(0.0007)\n"
    )
    attacker = world.start("python3", "-c", swap)
    try:
        for _ in range(12):
            done = world.sh("cat ~/.ssh/id; echo x > ~/PWNED; true", "--ro=a/b/c")
            assert "SECRET" not in done.stdout
    finally:
        end_group(attacker)
    assert not (world.home / "PWNED").exists()
