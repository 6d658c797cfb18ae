"""Which database is meant: by whom, with what secrets, and how safe on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent_sandbox.errors import HostError, SandboxError, UsageError
from agent_sandbox.service import store_address
from agent_sandbox.service.store_address import FILE_VARIABLE, VARIABLE

LOCAL = "postgresql://u@/name?host=/run/postgresql"
SECRET = "hunter2-hunter2"
WITH_SECRET = f"postgresql://u:{SECRET}@db.example/name?sslmode=verify-full"


def test_without_a_word_it_is_sqlite() -> None:
    assert store_address.of("", {}) is None


def test_the_flag_beats_the_file_beats_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "address"
    path.write_text("postgresql:///file\n")
    path.chmod(0o600)
    environ = {FILE_VARIABLE: str(path), VARIABLE: "postgresql:///variable"}

    def name(flag: str, given: dict[str, str]) -> str:
        found = store_address.of(flag, given)
        assert found is not None
        return found.parameters["dbname"]

    assert name("postgresql:///flag", environ) == "flag"
    assert name("", environ) == "file"
    assert name("", {VARIABLE: environ[VARIABLE]}) == "variable"


@pytest.mark.parametrize("text", [
    WITH_SECRET, f"postgresql://u@h/x?sslmode=verify-full&password={SECRET}",
    # Of the client's key.
    f"postgresql://u@h/x?sslmode=verify-full&sslkey=k&sslpassword={SECRET}",
])  # fmt: skip
def test_a_password_on_the_command_line_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        store_address.of(text, {})
    assert caught.value.code == "database-password"
    assert SECRET not in str(caught.value) + caught.value.hint
    found = store_address.of("", {VARIABLE: text})
    assert found is not None
    assert SECRET not in repr(found) + str(found) + found.shown


def test_a_password_elsewhere_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "address"
    path.write_text(WITH_SECRET)
    path.chmod(0o600)
    for environ in ({VARIABLE: WITH_SECRET}, {FILE_VARIABLE: str(path)}):
        found = store_address.of("", environ)
        assert found is not None
        assert found.parameters["password"] == SECRET
        assert SECRET not in repr(found) + str(found) + found.shown


@pytest.mark.parametrize(
    "text",
    ["", "sqlite:///x", "host=db dbname=x", "postgresql://u:%ZZ@h/x", f"postgresql://{SECRET}@[",
     f"postgresql://h/x?pass={SECRET}", f"postgresql://h/x?{SECRET}",
     # A name that libpq would read as an address of its own.
     f"postgresql:///postgresql%3A%2F%2Fu%3A{SECRET}%40h%2Fx",
     f"postgresql:///x?dbname=postgres%3A%2F%2Fu%3A{SECRET}%40h%2Fx",
     f"postgresql:///password%3D{SECRET}"],
)  # fmt: skip
def test_what_is_no_address_is_said_without_repeating_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        store_address.read(text, "--database")
    assert caught.value.code == "bad-database"
    assert SECRET not in str(caught.value) + caught.value.hint
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("text", "open_door"),
    [
        (LOCAL, False), ("postgresql:///name", False), ("postgresql://localhost/x", False),
        ("postgresql://127.0.0.1/x", False), ("postgresql://[::1]/x", False),
        ("postgresql://db.example/x", True), ("postgresql://10.0.0.1/x", True),
        ("postgresql://localhost,db.example/x", True),
        ("postgresql://localhost/x?hostaddr=10.0.0.1", True),
        ("postgresql://localhost/x?service=other", True),
        ("postgresql://db.example/x?sslmode=verify-full", False),
        ("postgresql://db.example/x?sslmode=disable", False),
    ],
)  # fmt: skip
def test_a_server_elsewhere_needs_a_word_about_tls(text: str, open_door: bool) -> None:
    if not open_door:
        assert store_address.of(text, {}) is not None
        return
    with pytest.raises(UsageError) as caught:
        store_address.of(text, {})
    assert caught.value.code == "database-no-tls"
    assert store_address.of(text, {"PGSSLMODE": "verify-full"}) is not None


@pytest.mark.parametrize("name", ["PGHOST", "PGHOSTADDR", "PGSERVICE"])
def test_a_server_elsewhere_that_the_environment_names_is_no_exception(name: str) -> None:
    assert store_address.of("postgresql:///x", {}) is not None
    with pytest.raises(UsageError):
        store_address.of("postgresql:///x", {name: "10.0.0.1"})


def test_a_file_that_others_can_change_is_refused(tmp_path: Path) -> None:
    """They could make the service use a database of theirs, with tokens of theirs."""
    path = tmp_path / "address"
    path.write_text(LOCAL)
    for mode in (0o622, 0o660, 0o666):
        path.chmod(mode)
        with pytest.raises(HostError, match="others can change it"):
            store_address.of("", {FILE_VARIABLE: str(path)})
    # Secrets of Kubernetes and compose are readable files behind links.
    path.chmod(0o644)
    (tmp_path / "link").symlink_to(path)
    assert store_address.of("", {FILE_VARIABLE: str(tmp_path / "link")}) is not None


@pytest.mark.parametrize("what", ["missing", "directory", "empty"])
def test_a_file_without_an_address_is_an_error(tmp_path: Path, what: str) -> None:
    path = tmp_path / "address"
    if what == "directory":
        path.mkdir(mode=0o700)
    elif what == "empty":
        path.write_text("")
    with pytest.raises(SandboxError):
        store_address.of("", {FILE_VARIABLE: str(path)})


def test_without_the_driver_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(HostError) as caught:
        store_address.of(LOCAL, {})
    assert caught.value.code == "database-driver"
    assert "agent-sandbox[postgres]" in caught.value.hint


def test_a_database_that_is_not_there_is_said(tmp_path: Path) -> None:
    from agent_sandbox.service.store_postgres import PgStore

    given = store_address.read(f"postgresql://u:{SECRET}@/x?host={tmp_path}", "test")
    with pytest.raises(HostError) as caught:
        PgStore(given)
    assert caught.value.code == "database-away"
    assert SECRET not in str(caught.value)
