"""Projects of several kinds, with a fingerprint of everything that must stay as it is."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel.conftest import World

GIT = ("git", "-c", "user.name=A", "-c", "user.email=a@b")
HIDES = '[filesystem]\nexclude = ["secret*", "deep/**/key", ".env*"]\n'


def plain(world: World, place: str) -> None:
    """Files and directories, and no repository."""
    for name in ("a", "secret", "deep/b/key", "deep/c", ".env"):
        world.write(f"~/{place}/{name}", name)


def repository(world: World, place: str) -> None:
    """A repository without a hooks directory: what is missing is held by placeholders."""
    plain(world, place)
    where = world.home / place
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "x")):
        done = world.outside(*GIT, *words, cwd=where)
        assert done.returncode == 0, done.stderr
    hooks = where / ".git" / "hooks"
    for file in hooks.iterdir():
        file.unlink()
    hooks.rmdir()


def hiding(world: World, place: str) -> None:
    """A repository whose policy file hides a few files."""
    repository(world, place)
    commit(world, place, ".agent-sandbox.toml", HIDES)


def hiding_many(world: World, place: str) -> None:
    """One that hides more files than bwrap takes."""
    repository(world, place)
    for number in range(400):
        world.write(f"~/{place}/keys/{number}.key", "k")
    commit(world, place, ".agent-sandbox.toml", '[filesystem]\nexclude = ["keys/*.key"]\n')


def commit(world: World, place: str, name: str, text: str) -> None:
    world.write(f"~/{place}/{name}", text)
    for words in (("add", "-A"), ("commit", "-q", "-m", "y")):
        assert world.outside(*GIT, *words, cwd=world.home / place).returncode == 0


KINDS = (plain, repository, hiding, hiding_many)
HIDDEN = ("/etc/passwd", ".git/config", "secret", "keys/7.key")


class Scene:
    """One project, and how it must look after every run."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        # What nobody inside can write.
        self.hidden = HIDDEN[number % len(KINDS)]
        self.name = KINDS[number % len(KINDS)].__name__
        self.path = world.home / f"work-{number}"
        world.runner.directory(self.path)
        KINDS[number % len(KINDS)](world, self.path.name)
        self.before = fingerprint(self.path)

    def changes(self) -> list[str]:
        """What is no longer as it was."""
        now = fingerprint(self.path)
        different = sorted(
            str(path)
            for path in self.before.keys() | now.keys()
            if self.before.get(path) != now.get(path)
        )
        return [f"changed: {path}" for path in different] + self._git_problems()

    def _git_problems(self) -> list[str]:
        if not (self.path / ".git").exists():
            return []
        found = []
        for words in (("status", "--porcelain"), ("fsck", "--no-progress")):
            quiet = {"GIT_OPTIONAL_LOCKS": "0"}
            done = self.world.outside("git", *words, cwd=self.path, env=quiet)
            if done.returncode or done.stdout or done.stderr:
                found.append(f"git {words[0]}: {done.stdout}{done.stderr}")
        return found


def fingerprint(top: Path) -> dict[Path, tuple[int, int, int, str]]:
    """Type, mode, owner and content of everything below a directory."""
    found = {}
    for directory, names, files in os.walk(top):
        for name in (*names, *files):
            path = Path(directory, name)
            info = path.lstat()
            content = ""
            if stat.S_ISREG(info.st_mode):
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(info.st_mode):
                content = str(path.readlink())
            found[path.relative_to(top)] = (info.st_mode, info.st_uid, info.st_gid, content)
    return found
