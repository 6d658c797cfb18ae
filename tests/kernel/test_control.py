"""Names that the host acts on cannot be created from inside, and nothing of ours stays behind."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from .conftest import World, end_group, eventually

NAMES = [
    ".envrc", ".mcp.json", ".vscode/tasks.json", ".idea/workspace.xml", ".devcontainer/x.json",
    ".claude/settings.json", ".claude/settings.local.json", ".claude/hooks/x", ".codex/config.toml",
    ".agents/x.md", ".opencode/plugin/x.js", "opencode.json", "opencode.jsonc", ".cursor/mcp.json",
    ".husky/pre-commit", ".githooks/pre-commit", ".agent-sandbox.toml", ".agent-sandbox.json",
    ".agent-sandbox.jsonc", ".git/hooks/pre-commit", ".git/info/attributes",
]  # fmt: skip
PLANT = """
for name in {names}; do
    mkdir -p "$(dirname "$name")" && echo planted > "$name"
    mv "$(dirname "$name")" x-moved && mkdir -p "$(dirname "$name")" && echo planted > "$name"
    ln -s /etc/passwd "$name"
    rm -rf x-moved
done 2>/dev/null
echo tried
"""


@pytest.fixture
def repository(world: World) -> World:
    """A repository with one commit, and no control files."""
    for line in ("init -q", "commit -q --allow-empty -m first"):
        done = world.outside("git", "-c", "user.name=t", "-c", "user.email=t@t", *line.split())
        assert done.returncode == 0, done.stderr
    hooks = world.path(".git/hooks")
    for sample in hooks.iterdir():
        sample.unlink()
    hooks.rmdir()
    world.path(".git/info/attributes").unlink(missing_ok=True)
    return world


def tree(world: World) -> list[str]:
    """Everything in the project but git's own data."""
    return sorted(
        os.path.relpath(os.path.join(at, name), world.project)
        for at, directories, files in os.walk(world.project)
        for name in directories + files
        if ".git/" not in at + "/" or "hooks" in at or "info" in at
    )


def _planted(path: Path) -> bool:
    return path.is_file() and path.read_text() == "planted\n"


def plant(names: list[str]) -> str:
    return PLANT.format(names=" ".join(names))


def test_cannot_create_what_the_host_acts_on(repository: World) -> None:
    """Neither in the first run nor in the second; the control switches the presets off."""
    before = tree(repository)
    for _ in range(2):
        done = repository.sh(plant(NAMES))
        assert done.stdout.endswith("tried\n")
        assert tree(repository) == before
    off = repository.project_config('[filesystem]\npresets = ["!@control", "!@git"]\n')
    repository.ctl("trust")
    repository.sh(f'for n in {" ".join(NAMES)}; do mkdir -p "${{n%/*}}"; echo planted > $n; done')
    off.unlink()
    planted = [n for n in NAMES if os.path.exists(repository.path(n))]
    assert set(NAMES) - set(planted) <= {".agent-sandbox.toml", ".git/hooks/pre-commit"}


def test_git_shows_nothing_of_ours(repository: World) -> None:
    """Neither outside, while a sandbox runs, nor inside; and nothing of it can be committed."""
    repository.mkdir(".claude/plans")
    process = repository.start("sh", "-c", "touch started; sleep 30")
    try:
        assert eventually(repository.path("started").exists)
        outside = repository.outside("git", "status", "--short", "--ignored").stdout
        assert outside == "?? started\n"
        for name in (".mcp.json", ".claude/settings.json"):
            assert stat.S_ISSOCK(os.lstat(repository.path(name)).st_mode)
        inside = repository.sh("git add -A && git status --short").stdout
        assert inside == "A  started\n"
    finally:
        end_group(process)


def test_an_agent_reads_empty_settings(world: World) -> None:
    """A name that is held is an empty document: programs that expect JSON do not stumble."""
    done = world.sh("cat .mcp.json opencode.json; wc -c < .envrc; ls -A .vscode | wc -l")
    assert done.stdout == '{"mcpServers": {}}\n{}\n1\n0\n'


def test_nothing_stays_behind(repository: World) -> None:
    """After a normal end."""
    before = tree(repository)
    assert repository.sh("test -d .vscode").returncode == 0
    assert tree(repository) == before


def test_nothing_stays_behind_after_kill_9(repository: World) -> None:
    """The next start, wherever, takes it away."""
    before = tree(repository)
    process = repository.start("sleep", "30")
    assert eventually(lambda: tree(repository) != before)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    other = repository.mkdir("~/elsewhere")
    assert repository.sandbox("true", cwd=other).returncode == 0
    assert tree(repository) == before


def test_two_sandboxes_hold_a_name_together(repository: World) -> None:
    """It stays held until the last one ends, whichever came first."""
    before = tree(repository)
    first = repository.start("sh", "-c", "touch one; sleep 30")
    assert eventually(repository.path("one").exists)
    second = repository.start("sh", "-c", "touch two; until [ -e go ]; do sleep 0.01; done; "
                              + plant(NAMES) + "touch done; sleep 30")  # fmt: skip
    try:
        assert eventually(repository.path("two").exists)
        os.kill(first.pid, signal.SIGTERM)
        first.wait()
        repository.write("go")
        assert eventually(repository.path("done").exists)
        assert not [n for n in NAMES if _planted(repository.path(n))]
        os.kill(second.pid, signal.SIGTERM)
        second.wait()
    finally:
        end_group(first)
        end_group(second)
    for name in ("one", "two", "go", "done"):
        repository.path(name).unlink()
    assert tree(repository) == before


def test_a_file_made_outside_meanwhile_stays(repository: World) -> None:
    """What the user saves over a placeholder is the user's, and read-only inside."""
    script = "touch up; until [ -e go ]; do sleep 0.01; done; cat .envrc > seen; echo x >> .envrc"
    process = repository.start("sh", "-c", script)
    try:
        assert eventually(repository.path("up").exists)
        repository.write(".envrc.new", "export A=1\n").rename(repository.path(".envrc"))
        assert eventually(lambda: not _writable(process.pid, repository))
        repository.write("go")
        assert process.wait(20) != 0
    finally:
        end_group(process)
    assert repository.path(".envrc").read_text() == "export A=1\n"
    assert repository.path("seen").read_text() == "export A=1\n"


def _writable(pid: int, world: World) -> bool:
    """Whether the keeper has not covered the new file yet."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    tables = [Path(f"/proc/{child}/mountinfo").read_text() for child in children]
    return not any(f" {world.path('.envrc')} " in table for table in tables)


def test_an_existing_setting_can_be_opened_by_name(world: World) -> None:
    """`--rw .vscode` means it, also when it is not there yet."""
    done = world.sh("mkdir -p .vscode && echo x > .vscode/tasks.json", "--rw", ".vscode")
    assert done.returncode == 0, done.stderr
    assert "no such path" not in done.stderr
    assert world.path(".vscode/tasks.json").read_text() == "x\n"
    assert world.sh("echo y > .vscode/tasks.json").returncode != 0


def test_cannot_create_an_agent_s_missing_settings(world: World) -> None:
    """CVE-2026-25725: the file that was not there is created from inside, with a hook in it.

    Control: with the profile off the directory is shared by hand, and the file can be made.
    """
    world.write("~/.claude/history.jsonl", "x\n")
    make = "echo '{\"hooks\": {}}' > ~/.claude/settings.json; mkdir -p ~/.claude/hooks/x"
    world.sh(make, "--profile", "claude")
    assert sorted(os.listdir(world.path("~/.claude"))) == ["history.jsonl", "projects"]
    # Opened as a whole, with the profile: what the host would act on is held.
    flags = ("--profile", "claude", "--rw", "~/.claude")
    seen = world.sh(f"{make}; cat ~/.claude/settings.json; echo y >> ~/.claude/history.jsonl",
                    *flags)  # fmt: skip
    assert seen.stdout == "{}\n"
    assert world.path("~/.claude/history.jsonl").read_text() == "x\ny\n"
    assert sorted(os.listdir(world.path("~/.claude"))) == ["history.jsonl", "projects"]
    world.sh(make, "--rw", "~/.claude")
    assert "hooks" in world.path("~/.claude/settings.json").read_text()
