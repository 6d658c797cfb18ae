"""Where `token` and `audit` look: where they were told to. Who reads leaves nothing there."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_sandbox.cli import ctl
from agent_sandbox.service.store_address import FILE_VARIABLE, VARIABLE, Database

from .postgres import Cluster
from .test_audit_postgres import url_of

READING = (
    ("token", "list"), ("token", "revoke", "worker"), ("token", "rotate", "worker"),
    ("audit", "tail"), ("audit", "verify"), ("audit", "export"),
    ("audit", "prune", "--keep-days", "1"),
)  # fmt: skip
TABLES = "SELECT count(*) FROM pg_tables WHERE schemaname = 'agent_sandbox'"


def run(capfd: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = ctl.main([*map(str, words)])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_who_reads_leaves_no_tables_in_a_database(
    capfd: pytest.CaptureFixture[str], postgres: Cluster, database: Database, words: tuple[str, ...]
) -> None:
    """A wrong address is somebody else's database."""
    name = database.parameters["dbname"]
    code, out, err = run(capfd, *words, "--database", url_of(database))
    assert code != 0
    assert "no service has its state" in err
    assert out == ""
    assert postgres.admin(TABLES, name) == [(0,)]
    # The control: the first token makes them, and then there is something to read.
    assert run(capfd, "token", "new", "worker", "--database", url_of(database))[0] == 0
    assert postgres.admin(TABLES, name) != [(0,)]
    code, _, err = run(capfd, *words, "--database", url_of(database))
    assert code == 0, err


@pytest.mark.parametrize("words", [*READING, ("token", "new", "other")], ids=" ".join)
def test_only_the_service_changes_tables_of_an_earlier_version(
    capfd: pytest.CaptureFixture[str], postgres: Cluster, database: Database, words: tuple[str, ...]
) -> None:
    """Replicas of that version may run on them."""
    name = database.parameters["dbname"]
    assert run(capfd, "token", "new", "worker", "--database", url_of(database))[0] == 0
    postgres.admin("UPDATE agent_sandbox.version SET number = 1", name)
    code, _, err = run(capfd, *words, "--database", url_of(database))
    assert code != 0
    assert "an earlier version" in err
    assert postgres.admin("SELECT number FROM agent_sandbox.version", name) == [(1,)]
    postgres.admin("UPDATE agent_sandbox.version SET number = 99", name)
    code, _, err = run(capfd, *words, "--database", url_of(database))
    assert code != 0
    assert "a later version" in err


@pytest.mark.parametrize("words", [*READING, ("token", "new", "other")], ids=" ".join)
@pytest.mark.parametrize("variable", [VARIABLE, FILE_VARIABLE])
def test_a_directory_and_a_database_are_not_taken_for_each_other(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    words: tuple[str, ...], variable: str,
) -> None:  # fmt: skip
    """A trail that nobody has looked at must not be called whole."""
    data = tmp_path / "data"
    assert run(capfd, "token", "new", "worker", "--data", data)[0] == 0
    before = sorted(path.name for path in data.rglob("*"))
    monkeypatch.setenv(variable, "postgresql:///nowhere?host=/nonexistent")
    code, out, err = run(capfd, *words, "--data", data)
    assert code != 0
    assert out == ""
    assert variable in err
    assert "--data" in err
    assert sorted(path.name for path in data.rglob("*")) == before
    monkeypatch.delenv(variable)
    assert run(capfd, *words, "--data", data)[0] == 0


def test_both_flags_are_as_for_the_service(
    capfd: pytest.CaptureFixture[str], postgres: Cluster, database: Database, tmp_path: Path
) -> None:
    """`serve` takes both, so its words may be copied: the state is in the database."""
    words = ("--data", tmp_path / "data", "--database", url_of(database))
    assert run(capfd, "token", "new", "worker", *words)[0] == 0
    assert not (tmp_path / "data").exists()
    tokens = "SELECT name FROM agent_sandbox.tokens"
    assert postgres.admin(tokens, database.parameters["dbname"]) == [("worker",)]
