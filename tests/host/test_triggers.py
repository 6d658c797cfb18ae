"""Control files before and after, on real directories."""

from __future__ import annotations

import marshal
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_sandbox.errors import HostError
from agent_sandbox.host import scan, triggers
from agent_sandbox.policy.model import Limits, Mount, Plan
from agent_sandbox.policy.triggers import FORBIDDEN, LISTED, MAX_MODULES, NOTABLE, Finding
from conftest import must_work

IDENTITY = {
    "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null", "PATH": os.environ["PATH"],
}  # fmt: skip
EVIL = "[core]\n\tfsmonitor = ./evil\n"


def git(directory: Path, *arguments: str) -> str:
    """Real git."""
    must_work(shutil.which("git"), "needs git")
    return subprocess.run(
        ["git", "-c", "init.defaultBranch=main", "-c", "protocol.file.allow=always", *arguments],
        cwd=directory, env=IDENTITY, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


def repository(path: Path) -> Path:
    """A repository with one commit."""
    path.mkdir(parents=True, exist_ok=True)
    git(path, "init", "-q")
    (path / "f").write_text("x")
    git(path, "add", "f")
    git(path, "commit", "-qm", "one")
    return path


def plan_of(project: Path, *more: Mount) -> Plan:
    """As much of a plan as the scan looks at."""
    mount = Mount(kind="rw", dest=str(project), source=str(project), rule="preset @base")
    values: dict[str, object] = dict.fromkeys(Plan.__fields__, "")
    values.update(mounts=(mount, *more), project=str(project), limits=Limits())
    return Plan(**values)  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An empty project with a state directory beside it."""
    real = Path(os.path.realpath(tmp_path))
    (real / "state").mkdir()
    (real / "project").mkdir()
    return real / "project"


_runs = iter(range(1, 1_000_000))


def watching(project: Path, *more: Mount) -> triggers.Watch:
    """A watch that has seen the project."""
    state = project.parent / "state"
    if not state.exists():
        state = project.parent.parent / "state"
    watch = triggers.Watch(plan_of(project, *more), str(state), f"run{next(_runs)}")
    watch.before()
    return watch


def end(watch: triggers.Watch) -> dict[str, Finding]:
    """Findings by path relative to the project."""
    found = watch.after()
    watch.close()
    return {os.path.relpath(f.path, watch.project) if f.path else "": f for f in found}


def grave(found: dict[str, Finding]) -> set[str]:
    return {path for path, f in found.items() if f.severity == FORBIDDEN}


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh files count as old, so that no test has to wait for two seconds."""
    monkeypatch.setattr(scan, "SETTLED", -(10**18))
    monkeypatch.setattr(scan, "SMALL", 1)


# --- what is found --------------------------------------------------------------------------------


def test_nothing_is_found_when_nothing_has_changed(project: Path) -> None:
    repository(project / "sub")
    (project / "Makefile").write_text("x")
    watch = watching(project)
    (project / "src.c").write_text("x")
    assert end(watch) == {}


def test_a_touched_or_rewritten_file_is_nothing(project: Path) -> None:
    repository(project / "sub")
    for name in ("Makefile", ".envrc"):
        (project / name).write_text("x")
    watch = watching(project)
    os.utime(project / "Makefile")
    (project / ".envrc").unlink()
    (project / ".envrc").write_text("x")
    config = project / "sub" / ".git" / "config"
    config.write_text(config.read_text())
    assert end(watch) == {}


def test_control_files_are_found_wherever_they_lie(project: Path) -> None:
    repository(project / "a" / "sub")
    watch = watching(project)
    deep = project / "a" / "b" / "c"
    for name in (
        ".vscode/tasks.json", ".github/workflows/ci.yml", ".envrc", "Makefile", ".claude/hooks/x/y",
        "x.code-workspace", "node_modules/p/Makefile", "node_modules/p/.git/hooks/pre-commit",
    ):  # fmt: skip
        (deep / name).parent.mkdir(parents=True, exist_ok=True)
        (deep / name).write_text("x")
    (project / "a" / "sub" / ".git" / "hooks" / "pre-commit").write_text("x")
    (project / "a" / "sub" / ".git" / "commondir").write_text("x")
    found = end(watch)
    assert grave(found) == {
        "a/sub/.git/hooks/pre-commit", "a/sub/.git/commondir",
        "a/b/c/node_modules/p/.git/hooks/pre-commit",
    }  # fmt: skip
    assert {p for p, f in found.items() if f.severity == NOTABLE} == {
        "a/b/c/.vscode/tasks.json", "a/b/c/.github/workflows/ci.yml", "a/b/c/.envrc",
        "a/b/c/.claude/hooks/x/y", "a/b/c/x.code-workspace",
    }  # fmt: skip
    assert {p for p, f in found.items() if f.severity == LISTED} == {
        "a/b/c/Makefile", "a/b/c/node_modules/p/.git",
    }  # fmt: skip


def test_what_git_makes_by_itself_is_not_forbidden(project: Path) -> None:
    """init, clone, worktree add, submodule add, bare clones, config of harmless keys."""
    repository(project / "own")
    watch = watching(project)
    repository(project)
    git(project, "clone", "-q", "own", "cloned")
    git(project, "clone", "-q", "--bare", "own", "bare.git")
    git(project / "cloned", "worktree", "add", "-q", "-b", "side", "../side")
    git(project / "cloned", "submodule", "--quiet", "add", str(project / "own"), "lib/deep")
    git(project / "bare.git", "worktree", "add", "-q", "-b", "other", "../other")
    git(project / "own", "config", "user.name", "x")
    git(project / "own", "remote", "add", "o", "https://example.org/x")
    git(project / "own", "worktree", "add", "-q", "-b", "gone", "../gone")
    shutil.rmtree(project / "gone")
    found = end(watch)
    assert grave(found) == set()
    assert {".git", "cloned/.git", "bare.git"} <= set(found)


def test_samples_are_nothing_but_other_hooks_count(project: Path) -> None:
    repository(project / "sub")
    hooks = project / "sub" / ".git" / "hooks"
    (hooks / "mine").write_text("mine")
    watch = watching(project)
    (hooks / "pre-push.sample").write_text("x")
    (hooks / "lib").mkdir()
    (hooks / "lib" / "x").write_text("x")
    (hooks / "mine").chmod(0o755)
    assert grave(end(watch)) == {"sub/.git/hooks/lib/x", "sub/.git/hooks/mine"}


def test_an_embedded_bare_repository_is_found(project: Path) -> None:
    watch = watching(project)
    for name, parts in (("a", ("objects", "refs")), ("b", ("commondir",))):
        (project / name).mkdir()
        (project / name / "HEAD").write_text("ref: refs/heads/main\n")
        (project / name / "config").write_text(EVIL)
        for part in parts:
            (project / name / part).mkdir()
    (project / "c").mkdir()
    (project / "c" / "config").write_text(EVIL)
    assert grave(end(watch)) == {"a/config", "b/config"}


def test_a_repository_that_hides_in_a_watched_directory_is_found(project: Path) -> None:
    """A HEAD must not make the watched files around it disappear."""
    (project / ".husky").mkdir()
    watch = watching(project)
    for name in ("objects", "refs"):
        (project / ".husky" / name).mkdir()
    (project / ".husky" / "HEAD").write_text("ref: refs/heads/main\n")
    (project / ".husky" / "config").write_text(EVIL)
    (project / ".husky" / "pre-commit").write_text("x")
    found = end(watch)
    assert found[".husky/config"].severity == FORBIDDEN
    assert found[".husky/pre-commit"].severity == NOTABLE


def test_objects_are_not_looked_at(project: Path) -> None:
    repository(project)
    walk = scan.Walk(scan.Area([str(project)], ()), {})
    inside = {os.path.relpath(p, project) for p in walk.dirs}
    assert ".git/hooks" in inside
    assert not any(p.startswith((".git/objects", ".git/refs")) for p in inside)


def test_links_are_not_followed(project: Path, tmp_path: Path) -> None:
    (project.parent / "outside").mkdir()
    watch = watching(project)
    (project / "link").symlink_to(project.parent / "outside")
    (project.parent / "outside" / "Makefile").write_text("x")
    (project / ".vscode").symlink_to(project.parent / "outside")
    assert set(end(watch)) == {".vscode"}


def test_files_that_a_configuration_includes_are_watched(project: Path) -> None:
    own = repository(project / "own")
    git(own, "config", "include.path", "../extra")
    git(own, "config", "core.hooksPath", "scripts/hooks")
    (own / "extra").write_text("[include]\n\tpath = more\n")
    (own / "scripts" / "hooks").mkdir(parents=True)
    (own / "scripts" / "hooks" / "pre-push").write_text("mine")
    watch = watching(project)
    (own / "more").write_text(EVIL)
    (own / "scripts" / "hooks" / "pre-commit").write_text("x")
    (own / "scripts" / "other").write_text("x")
    assert grave(end(watch)) == {"own/more", "own/scripts/hooks/pre-commit"}


def test_a_second_name_of_a_configuration_is_found(project: Path) -> None:
    own = repository(project / "own")
    watch = watching(project)
    os.link(own / ".git" / "config", project / "innocent")
    assert grave(end(watch)) == {"own/.git/config"}


def test_a_moved_repository_keeps_its_users_hooks(project: Path) -> None:
    own = repository(project / "own")
    (own / ".git" / "hooks" / "pre-commit").write_text("mine")
    watch = watching(project)
    own.rename(project / "renamed")
    assert grave(end(watch)) == set()


# --- the area -------------------------------------------------------------------------------------


def test_only_what_is_writable_is_looked_at(project: Path) -> None:
    """Read-only and hidden parts cannot change; writable ones in them can."""
    for name in ("ro/rw", "hidden", "home"):
        (project / name).mkdir(parents=True)
    watch = watching(
        project,
        Mount(kind="ro", dest=f"{project}/ro", source=f"{project}/ro"),
        Mount(kind="mask-dir", dest=f"{project}/hidden", source="@mask/dir"),
        Mount(kind="rw", dest=f"{project}/home", source="@home", level="private"),
        Mount(kind="rw", dest=f"{project}/ro/rw", source=f"{project}/ro/rw"),
        Mount(kind="pin", dest=f"{project}/pinned", source=f"{project}/pinned"),
        Mount(kind="ro", dest=f"{project}/Makefile", source=f"{project}/Makefile", file=True),
    )
    for name in ("ro", "ro/rw", "hidden", "home", "pinned", "."):
        (project / name).mkdir(exist_ok=True)
        (project / name / "Makefile").write_text("x")
    assert set(end(watch)) == {"Makefile", "ro/rw/Makefile", "pinned/Makefile"}


def test_other_writable_repositories_count_but_no_store_and_no_agents_state(project: Path) -> None:
    other, store, state, later = (project.parent / n for n in ("other", "store", "agent", "later"))
    for path in (store, state, later):
        path.mkdir()
    repository(other)
    watch = watching(
        project,
        *(
            Mount(kind="rw", dest=str(path), source=str(path), rule="flag --rw")
            for path in (other, store, later)
        ),
        Mount(kind="rw", dest=str(state), source=str(state), rule="profile claude"),
    )
    repository(later)
    (later / ".git" / "hooks" / "pre-commit").write_text("x")
    for path in (other, store, state):
        (path / "Makefile").write_text("x")
    found = end(watch)
    assert set(found) == {"../other/Makefile", "../later/.git", "../later/.git/hooks/pre-commit"}
    assert grave(found) == {"../later/.git/hooks/pre-commit"}


def test_a_project_in_a_writable_directory_is_looked_at_alone(project: Path) -> None:
    """The mount of the project itself is left out when one above it shows the same."""
    values = {**{f: getattr(plan_of(project), f) for f in Plan.__fields__}}
    above = str(project.parent)
    values["mounts"] = (Mount(kind="rw", dest=above, source=above, rule="flag --rw"),)
    assert triggers.area_of(Plan(**values)).roots == [str(project)]
    values["mounts"] = (*values["mounts"], Mount(kind="ro", dest=str(project)))
    assert triggers.area_of(Plan(**values)).roots == []


# --- speed ----------------------------------------------------------------------------------------


def tree(project: Path) -> None:
    for top in range(20):
        for sub in range(10):
            (project / f"d{top}" / f"s{sub}").mkdir(parents=True)


@pytest.mark.usefixtures("settled")
def test_only_changed_directories_are_read_again(project: Path) -> None:
    tree(project)
    first = watching(project)
    assert first._first is not None
    assert first._first.read == 221
    end(first)
    second = watching(project)
    assert second._first is not None
    assert second._first.read == 0
    (project / "d3" / "s3" / "Makefile").write_text("x")
    known = scan.reusable(second._first.dirs)
    again = scan.Walk(second.area, known, same_area=True)
    assert again.read == 1
    assert set(end(second)) == {"d3/s3/Makefile"}


@pytest.mark.usefixtures("settled")
def test_a_moved_or_swapped_directory_is_seen_through_the_memory(project: Path) -> None:
    """A link to where a directory now lies has the same times behind it."""
    tree(project)
    (project / "d1" / "s1" / "Makefile").write_text("x")
    end(watching(project))
    watch = watching(project)
    assert watch._first is not None
    assert watch._first.read == 0
    (project / "d1").rename(project / "moved")
    (project / "d1").symlink_to("moved")
    assert set(end(watch)) == {"moved/s1/Makefile"}


@pytest.mark.usefixtures("settled")
def test_a_directory_that_becomes_a_repository_is_read_with_other_eyes(project: Path) -> None:
    """Its `hooks` has not changed, but counts from now on."""
    tree(project)
    (project / "d1" / "hooks").mkdir()
    (project / "d1" / "hooks" / "pre-commit").write_text("x")
    end(watching(project))
    watch = watching(project)
    (project / "d1" / "HEAD").write_text("ref: refs/heads/main\n")
    (project / "d1" / "objects").mkdir()
    (project / "d1" / "refs").mkdir()
    assert grave(end(watch)) == {"d1/hooks/pre-commit"}


def test_a_directory_that_has_just_changed_is_not_trusted(project: Path) -> None:
    """A second change in the same tick would leave the same time."""
    area = scan.Area([str(project)], ())
    (entry,) = scan.Walk(area, {}).dirs.values()
    assert entry[:4] == (0, 0, 0, 0)
    old = os.stat("/usr/bin")
    entry = scan.Walk(scan.Area(["/usr/bin"], ()), {}).dirs["/usr/bin"]
    assert entry[:2] == (old.st_dev, old.st_ino)


@pytest.mark.usefixtures("settled")
def test_times_of_other_file_systems_are_not_trusted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(project)
    walk = scan.Walk(scan.Area([str(project)], ()), {})
    assert all(e[0] for e in scan.reusable(walk.dirs).values())
    monkeypatch.setattr(scan, "KEEP_TIMES", frozenset({"ext9"}))
    known = scan.reusable(walk.dirs)
    assert set(known) == set(walk.dirs)
    assert not any(e[0] for e in known.values())


def test_the_file_system_of_a_path_is_the_nearest_and_the_topmost() -> None:
    mounted = [("", "ext4"), ("/a", "nfs"), ("/a/b", "btrfs"), ("/a", "fuse.sshfs"), ("/ab", "x")]
    for path, kind in (
        ("/", "ext4"), ("/x", "ext4"), ("/a/x", "fuse.sshfs"), ("/a/b/c", "btrfs"), ("/ab/c", "x"),
    ):  # fmt: skip
        assert scan.file_system(path, mounted) == kind, path


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:0],
        lambda data: data[: len(data) // 2],
        lambda data: b"\0" * len(data),
        lambda data: marshal.dumps((marshal.loads(data)[0], {"/x": (1, 2)})),
        lambda data: marshal.dumps((marshal.loads(data)[0], dict.fromkeys(marshal.loads(data)[1]))),
        lambda data: marshal.dumps(("other", marshal.loads(data)[1])),
    ],
)
def test_a_damaged_memory_counts_as_none(project: Path, damage: Callable[[bytes], bytes]) -> None:
    tree(project)
    first = watching(project)
    end(first)
    file = Path(first._cache)
    file.write_bytes(damage(file.read_bytes()))
    watch = watching(project)
    (project / "d3" / "s3" / "Makefile").write_text("x")
    assert set(end(watch)) == {"d3/s3/Makefile"}


@pytest.mark.usefixtures("settled")
def test_the_memory_of_another_area_hides_nothing(project: Path) -> None:
    """A run in which a part was read-only has not looked at that part."""
    tree(project)
    end(watching(project, Mount(kind="ro", dest=f"{project}/d1", source=f"{project}/d1")))
    watch = watching(project)
    (project / "d1" / "s1" / "Makefile").write_text("x")
    assert set(end(watch)) == {"d1/s1/Makefile"}


def test_a_small_project_keeps_no_memory(project: Path) -> None:
    watch = watching(project)
    end(watch)
    assert not os.path.exists(watch._cache)


# --- bounds ---------------------------------------------------------------------------------------


def test_a_deep_tree_is_walked_as_far_as_a_path_can_name_it(project: Path) -> None:
    watch = watching(project)
    here = os.open(project, os.O_RDONLY)
    for _ in range(2500):
        os.mkdir("d" * 10, dir_fd=here)
        deeper = os.open("d" * 10, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    found = end(watch)
    subprocess.run(["rm", "-rf", str(project)], check=True)
    assert [f.what for f in found.values()] == ["cannot be looked into"]


@pytest.mark.parametrize("limit", ["MAX_DIRECTORIES", "MAX_ITEMS"])
def test_too_much_is_said(project: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(scan, limit, 10)
    watch = watching(project)
    for number in range(30):
        (project / f"d{number}").mkdir()
        (project / f"d{number}" / "Makefile").write_text("x")
    found = end(watch)
    assert "not all were compared" in found[""].what


def test_a_directory_that_cannot_be_listed_is_entered_by_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As git does. Root can list everything, so the refusal is made up here."""
    own = repository(project / "own")
    watch = watching(project)
    listing = os.scandir

    def refuse(path: str) -> object:
        if str(path) == str(own):
            raise PermissionError(13, "Permission denied", path)
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)
    (own / ".git" / "hooks" / "pre-commit").write_text("x")
    found = end(watch)
    assert found["own"].what == "cannot be looked into"
    assert grave(found) == {"own/.git/hooks/pre-commit"}


def test_a_file_that_is_too_large_to_keep_counts_by_its_identity(project: Path) -> None:
    own = repository(project / "own")
    hook = own / ".git" / "hooks" / "big"
    hook.write_bytes(b"x" * (triggers.MAX_CRITICAL + 1))
    (project / ".envrc").write_bytes(b"x" * (triggers.MAX_TEXT + 1))
    end(watching(project))
    watch = watching(project)
    hook.write_bytes(b"y" * (triggers.MAX_CRITICAL + 1))
    found = end(watch)
    assert found["own/.git/hooks/big"].remedy == "quarantined"
    assert set(found) == {"own/.git/hooks/big"}


def test_special_files_do_not_block(project: Path) -> None:
    own = repository(project / "own")
    watch = watching(project)
    os.mkfifo(project / ".envrc")
    (own / ".git" / "config").unlink()
    os.mkfifo(own / ".git" / "config")
    assert grave(end(watch)) == {"own/.git/config"}


def test_a_state_directory_that_cannot_be_written_stops_the_start(project: Path) -> None:
    (project.parent / "state" / "scans").write_text("")
    with pytest.raises(HostError) as caught:
        watching(project)
    assert caught.value.code == "scan-failed"


# --- several runs ---------------------------------------------------------------------------------


def crash(watch: triggers.Watch) -> None:
    """The supervisor dies: the kernel drops its lock."""
    os.close(watch._lock)


def test_cannot_pass_for_the_users_own_while_another_run_starts(project: Path) -> None:
    """What the first sandbox plants is there when the second one looks."""
    own = repository(project / "own")
    hook = own / ".git" / "hooks" / "pre-commit"
    first = watching(project)
    hook.write_text("evil")
    second = watching(project)
    assert grave(end(first)) == {"own/.git/hooks/pre-commit"}
    hook.unlink()  # as it is put away
    hook.write_text("evil")
    assert grave(end(second)) == {"own/.git/hooks/pre-commit"}
    # The control: a run that starts when the first has ended takes it for the user's own.
    assert grave(end(watching(project))) == set()


def test_a_configuration_comes_back_as_it_was_before_the_first_of_two_runs(project: Path) -> None:
    own = repository(project / "own")
    config = own / ".git" / "config"
    clean = config.read_bytes()
    first = watching(project)
    config.write_text(EVIL)
    second = watching(project)
    end(first)
    assert end(second)["own/.git/config"].instead == clean


def test_a_crash_does_not_hide_what_was_planted(project: Path) -> None:
    own = repository(project / "own")
    dead = watching(project)
    (own / ".git" / "hooks" / "pre-commit").write_text("evil")
    crash(dead)
    later = watching(project)
    assert not os.path.exists(f"{dead._base}/open/{dead.run}")
    assert grave(end(later)) == {"own/.git/hooks/pre-commit"}
    assert os.listdir(f"{dead._base}/open") == []


def test_a_crash_is_made_up_for_by_a_run_in_a_part_of_the_project(project: Path) -> None:
    own = repository(project / "own")
    (project / "sub").mkdir()
    dead = watching(project)
    (own / ".git" / "hooks" / "pre-commit").write_text("evil")
    crash(dead)
    later = watching(project / "sub")
    assert grave(end(later)) == {"../own/.git/hooks/pre-commit"}


def test_a_run_elsewhere_has_nothing_to_do_with_a_crash(project: Path) -> None:
    other = project.parent / "other"
    other.mkdir()
    dead = watching(project)
    repository(project / "own")
    crash(dead)
    assert end(watching(other)) == {}
    assert os.listdir(f"{dead._base}/open") == [dead.run]


def test_a_damaged_record_counts_as_none(project: Path) -> None:
    dead = watching(project)
    crash(dead)
    Path(f"{dead._base}/open/{dead.run}").write_bytes(b"\0")
    assert end(watching(project)) == {}
    assert os.listdir(f"{dead._base}/open") == []


def test_a_record_stays_while_somebody_looks(project: Path) -> None:
    """Else what it knows could get lost between two looks."""
    import fcntl

    watch = watching(project)
    with open(f"{watch._base}/lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        watch.close()
        assert os.listdir(f"{watch._base}/open") == [watch.run]
    end(watching(project))
    assert os.listdir(f"{watch._base}/open") == []


def test_a_half_written_record_of_a_killed_start_goes_with_the_next_run(project: Path) -> None:
    watch = watching(project)
    left = Path(f"{watch._base}/open/.killed")
    left.write_bytes(b"half")
    watch.close()
    assert not left.exists()


def test_a_half_written_record_stays_while_somebody_looks(project: Path) -> None:
    """It may be about to get its name."""
    import fcntl

    watch = watching(project)
    fresh = Path(f"{watch._base}/open/.fresh")
    fresh.write_bytes(b"half")
    with open(f"{watch._base}/lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        watch.close()
    assert fresh.exists()


@pytest.mark.usefixtures("settled")
def test_a_half_written_memory_of_a_killed_run_does_not_stay(project: Path) -> None:
    """One that is young may be another run's: then this run writes none."""
    (project / "a").mkdir()
    end(watching(project))
    (kept,) = (project.parent / "state" / "scans" / "projects").rglob("+dirs")
    kept.unlink()
    half = kept.with_name("+dirs.new")
    half.write_bytes(b"half")
    end(watching(project))
    assert sorted(os.listdir(kept.parent)) == ["+dirs.new"]
    os.utime(half, (1, 1))
    end(watching(project))
    assert sorted(os.listdir(kept.parent)) == ["+dirs"]


def test_hooks_of_the_main_repository_are_looked_at_though_they_are_read_only(
    project: Path,
) -> None:
    """A mount can be lost; a read-only directory of the user's own is still left alone."""
    repository(project)
    hooks, own = (
        Mount(kind="ro", dest=str(path), source=str(path), rule=rule)
        for path, rule in (
            (project / ".git" / "hooks", "preset @git: control file"),
            (project / "own", "flag --ro"),
        )
    )
    (project / "own").mkdir()
    watch = watching(project, hooks, own)
    (project / ".git" / "hooks" / "post-commit").write_text("evil")
    (project / "own" / ".envrc").write_text("x")
    assert set(end(watch)) == {".git/hooks/post-commit"}


@pytest.mark.parametrize("kind", ["modules", "worktrees"])
@pytest.mark.parametrize("name", ["", "HEAD"])
def test_many_modules_are_seen_though_no_control_file_has_changed(
    project: Path, kind: str, name: str
) -> None:
    """Empty directories count: the next start has to look into each of them."""
    repository(project)
    found: dict[str, Finding] = {}
    for count in (MAX_MODULES, 2):
        watch = watching(project)
        for number in range(count):
            place = project / f".git/{kind}/{count}-{number}"
            place.mkdir(parents=True)
            if name:
                (place / name).write_text("")
        found = end(watch)
        assert set(found) == (set() if count == MAX_MODULES else {f".git/{kind}"})
    assert f"{MAX_MODULES + 2} directories" in found[f".git/{kind}"].what


# --- other sandboxes that are at work -------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "link"])
def test_cannot_have_a_file_elsewhere_read_by_a_swapped_directory(
    project: Path, tmp_path: Path, kind: str
) -> None:
    """What is read may be put back into the project: it must be what was looked at."""
    own, secret = project / "own", tmp_path / "secret"
    for place, text in ((own, "mine"), (secret, "secret")):
        place.mkdir()
        if kind == "file":
            (place / "config").write_text(text)
        else:
            (place / "config").symlink_to(text)
    path = f"{own}/config"
    identity = scan.identify(path)
    assert identity is not None
    assert triggers.read(path, ("@git", identity)) in (b"mine", b"\0link\0mine")  # the control
    own.rename(project / "aside")
    own.symlink_to(secret)
    assert triggers.read(path, ("@git", identity)) is None


def test_cannot_hide_a_hook_behind_heaps_of_other_files(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Git's own are looked at in any case; and what could not be is not forgotten."""
    own = repository(project / "zz")
    watch = watching(project)
    for number in range(60):
        (project / f"{number}").mkdir()
        (project / f"{number}" / ".envrc").write_text("x")
    (own / ".git" / "hooks" / "pre-commit").write_text("evil")
    monkeypatch.setattr(scan, "MAX_ITEMS", 20)
    found = end(watch)
    assert grave(found) == {"zz/.git/hooks/pre-commit"}
    assert "not all were compared" in found[""].what
    assert watch.overrun


# --- directories that do not tell capitals from small letters -------------------------------------


@pytest.fixture
def folded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project behaves like a directory of ext4 with `chattr +F`. Few kernels can have one."""

    def found(path: str) -> str:
        here = str(project)
        if not path.startswith(f"{here}/"):
            return path
        for part in path[len(here) + 1 :].split("/"):
            names = listdir(here) if os.path.isdir(here) else []
            like = [n for n in names if n.casefold() == part.casefold()]
            here = f"{here}/{(like or [part])[0]}"
        return here

    listdir = os.listdir
    for name in ("lstat", "open", "scandir"):
        old = getattr(os, name)

        def folding(path: Any, *args: Any, old: Callable[..., Any] = old, **more: Any) -> Any:
            return old(found(path) if isinstance(path, str) else path, *args, **more)

        monkeypatch.setattr(os, name, folding)


FOLDED = {
    "a new repository": ("sub/.GIT/head", "sub/.GIT/OBJECTS/", "sub/.GIT/Refs/", "sub/.GIT/CONFIG"),
    "hooks of a repository": ("own/.git/HOOKS/Pre-Commit",),
    "the common directory": ("own/.git/CommonDir",),
    "other letters": ("own/.git/hook\u017f/pre-commit",),
}


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("folds", [True, False], ids=["folded", "plain"])
def test_cannot_hide_in_capitals(
    project: Path, request: pytest.FixtureRequest, name: str, folds: bool
) -> None:
    """Git asks for `.git`, and such a directory answers with `.GIT`. Elsewhere git does not."""
    own = repository(project / "own")
    shutil.rmtree(own / ".git" / "hooks")
    if folds:
        request.getfixturevalue("folded")
    watch = watching(project)
    for path in FOLDED[name]:
        place = project / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith("/"):
            place.mkdir()
        else:
            place.write_text(EVIL)
    assert bool(grave(end(watch))) is folds
