"""What is hidden or read-only in a mount stays so when the engine copies files. Real dockerd."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import IMAGE, Filtered
from .test_attacks import SECRET, admin
from .test_clients import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.kernel]


@pytest.fixture
def project(base: Path) -> Path:
    path = base / "project"
    for name in ("secrets", "hooks"):
        (path / name).mkdir(parents=True)
    (path / "secrets" / "key").write_text(SECRET)
    (path / "plain").write_text("plain")
    return path


@pytest.fixture
def client(daemon: Engine, start: Callable[..., Filtered], base: Path, project: Path) -> Client:
    binds = [
        (str(project), True, False, False, True),
        (f"{project}/secrets", False, False, True, True),
        (f"{project}/hooks", False, False, False, True),
    ]
    return Client(start(daemon.socket, binds=binds), base)


def copied(who: Client, base: Path, *words: str) -> str:
    """What `docker cp` gets of a mount that is masked by the words, or nothing."""
    made = who.run("create", "--network=none", *words, IMAGE, "true", check=False)
    if made.returncode:
        return made.stderr
    target = base / f"copy-{made.stdout[:12]}"
    who.run("cp", f"{made.stdout.strip()}:/x", str(target))
    who.run("rm", "-f", made.stdout.strip())
    return "".join(file.read_text() for file in target.rglob("*") if file.is_file())


def test_cannot_copy_a_hidden_directory(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    plain = ("-v", f"{project}:/x")
    for words in (plain, (*plain, "--tmpfs", "/x/secrets")):
        assert SECRET in copied(admin(daemon, base), base, *words), "control"
        assert SECRET not in copied(client, base, *words)
    assert "plain" in copied(client, base, *plain)


def test_cannot_copy_one_that_another_container_masks(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    for who in (admin(daemon, base), client):
        run = ("create", "--network=none", "--name", "masked", "-v", f"{project}:/x")
        # The control makes the mask itself.
        mask = ("-v", "/x/secrets") if who is not client else ()
        who.run(*run, *mask, IMAGE, "true")
        got = copied(who, base, "--volumes-from", "masked", "--tmpfs", "/x/secrets")
        assert (SECRET in got) == (who is not client)
        assert SECRET not in copied(who, base, "--volumes-from", "masked")
        who.run("rm", "-f", "-v", "masked")


def test_cannot_copy_into_a_read_only_directory(
    daemon: Engine, client: Client, base: Path, project: Path
) -> None:
    (base / "pre-commit").write_text("#!/bin/sh")
    for who in (admin(daemon, base), client):
        run = ("create", "--network=none", "-v", f"{project}:/x", IMAGE, "true")
        made = who.run(*run).stdout.strip()
        # The engine looks at one of the mounts that hold a path, and not always at the same.
        for _ in range(8):
            who.run("cp", str(base / "pre-commit"), f"{made}:/x/hooks/", check=False)
        assert (project / "hooks" / "pre-commit").exists() == (who is not client)
        (project / "hooks" / "pre-commit").unlink(missing_ok=True)
        who.run("rm", "-f", made)
